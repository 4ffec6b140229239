"""memory: decisions about the Graph that trade time for memory.

In: a Graph, a Strategy, and what a step with them holds and takes. Out: which Ops are recomputed
and which Values lie on the host meanwhile, the Graph in which they do, and a Strategy for it. No
torch. Read recompute.py first (the Graph), then carry_strategy.py (a Strategy for it),
recompute_costs.py (what is kept), checkpoint_segments.py, knapsack.py and choose_recompute.py
(which Ops, by estimates), step_model.py (what any set holds and takes), refine_recompute.py and
choose_by_model.py (the planner); then offload.py, carry_offloads.py and time_offloads.py (Values on
the host) and choose_memory.py (which Ops and Values).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apportion.faces import lazy_face

if TYPE_CHECKING:
    from apportion.memory.carry_offloads import (
        carry_offloads as carry_offloads,
    )
    from apportion.memory.carry_strategy import (
        carry_strategy as carry_strategy,
    )
    from apportion.memory.choose_by_model import (
        choose_by_model as choose_by_model,
    )
    from apportion.memory.choose_memory import (
        MemoryDecision as MemoryDecision,
    )
    from apportion.memory.choose_memory import (
        choose_memory as choose_memory,
    )
    from apportion.memory.choose_memory import (
        offloadable as offloadable,
    )
    from apportion.memory.choose_memory import (
        views_of as views_of,
    )
    from apportion.memory.choose_recompute import (
        RecomputeOutcome as RecomputeOutcome,
    )
    from apportion.memory.choose_recompute import (
        full_recompute as full_recompute,
    )
    from apportion.memory.offload import (
        Offload as Offload,
    )
    from apportion.memory.offload import (
        offload as offload,
    )
    from apportion.memory.offload import (
        planned_graph as planned_graph,
    )
    from apportion.memory.recompute import (
        recompute as recompute,
    )
    from apportion.memory.step_model import (
        step_model as step_model,
    )
    from apportion.memory.time_offloads import (
        HostWay as HostWay,
    )
    from apportion.memory.time_offloads import (
        time_offloads as time_offloads,
    )

lazy_face(__name__)
