"""place: which device runs which operator, if nothing is cut.

In: a graph from elsewhere with its own costs, or a captured step, a Cluster and its costs. Out: a
PlacementProblem, and a placement: a device for every unit. No torch.
Read placement_problem.py, then the objectives (step_time.py, max_load.py, latency.py), then
placers.py, which has one row for each placer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apportion.faces import lazy_face

if TYPE_CHECKING:
    from apportion.place.objective import (
        Evaluation as Evaluation,
    )
    from apportion.place.objective import (
        Objective as Objective,
    )
    from apportion.place.objective import (
        PlacementResult as PlacementResult,
    )
    from apportion.place.objective import (
        PlacerProgress as PlacerProgress,
    )
    from apportion.place.objective import (
        Report as Report,
    )
    from apportion.place.objective import (
        StepObjective as StepObjective,
    )
    from apportion.place.placement_problem import (
        NEVER as NEVER,
    )
    from apportion.place.placement_problem import (
        PlacementColumns as PlacementColumns,
    )
    from apportion.place.placement_problem import (
        PlacementDevice as PlacementDevice,
    )
    from apportion.place.placement_problem import (
        PlacementLinks as PlacementLinks,
    )
    from apportion.place.placement_problem import (
        PlacementProblem as PlacementProblem,
    )

lazy_face(__name__)
