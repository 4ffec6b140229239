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
    pass

lazy_face(__name__)
