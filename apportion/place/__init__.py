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
    from apportion.place.captured import (
        captured_problem as captured_problem,
    )
    from apportion.place.doppler_graph import (
        DOPPLER as DOPPLER,
    )
    from apportion.place.export_graph import (
        fiddle_data as fiddle_data,
    )
    from apportion.place.imported import (
        imported_problem as imported_problem,
    )
    from apportion.place.imported import (
        with_expert as with_expert,
    )
    from apportion.place.objective import (
        STEP as STEP,
    )
    from apportion.place.objective import (
        THROUGHPUT as THROUGHPUT,
    )
    from apportion.place.objective import (
        PlacerProgress as PlacerProgress,
    )
    from apportion.place.placement_problem import (
        PlacementProblem as PlacementProblem,
    )
    from apportion.place.placers import (
        placers_help as placers_help,
    )
    from apportion.place.read_graph import (
        read_graph as read_graph,
    )
    from apportion.place.read_graph import (
        read_split_file as read_split_file,
    )
    from apportion.place.run_placer import (
        PlacedProblem as PlacedProblem,
    )
    from apportion.place.run_placer import (
        place as place,
    )
    from apportion.place.run_placer import (
        with_memory_limit as with_memory_limit,
    )

lazy_face(__name__)
