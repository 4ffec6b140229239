"""memory: decisions about the Graph that trade time for memory.

In: a Graph, a Strategy, and what a step with them holds and takes. Out: in which order Ops run,
which are recomputed, which Values and which state lie on the host, the Graph in which they do, and
a Strategy for it. No torch. Read rewritten_graph.py and planned_graph.py first (what a decision
makes of a Graph), then reorder.py, recompute.py, host_state.py and offload.py (each decision),
carry_strategy.py (a Strategy for the new Graph), recompute_costs.py (what is kept),
checkpoint_segments.py, knapsack.py and choose_recompute.py (which Ops, by estimates), step_model.py
(what any set holds and takes), refine_recompute.py and choose_by_model.py (the planner of
recomputation), whole_modules.py and choose_modules.py (the same by whole modules);
time_offloads.py (when copies begin) and choose_memory.py (which Ops and Values).
Methods of others, to compare with, are a file each: chen.py, rotor.py, budget_knapsack.py and
checkmate.py recompute, capuchin.py swaps, tensorflowmem.py orders, offloads and places.
order_model.py says what orders hold, such as level_order.py, least_peak_order.py, beam_order.py and
olla_order.py make.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apportion.faces import lazy_face

if TYPE_CHECKING:
    from apportion.memory.carry_strategy import (
        carry_strategy as carry_strategy,
    )
    from apportion.memory.choose_by_model import (
        choose_by_model as choose_by_model,
    )
    from apportion.memory.choose_by_model import (
        quick_by_model as quick_by_model,
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
    from apportion.memory.choose_modules import (
        choose_modules as choose_modules,
    )
    from apportion.memory.choose_on_host import (
        choose_on_host as choose_on_host,
    )
    from apportion.memory.choose_on_host import (
        lowest_on_host as lowest_on_host,
    )
    from apportion.memory.choose_recompute import (
        RecomputeOutcome as RecomputeOutcome,
    )
    from apportion.memory.choose_recompute import (
        full_recompute as full_recompute,
    )
    from apportion.memory.chunk_model import (
        OFFLOADED as OFFLOADED,
    )
    from apportion.memory.chunk_model import (
        ChunkModel as ChunkModel,
    )
    from apportion.memory.chunk_model import (
        decided as decided,
    )
    from apportion.memory.host_state import (
        DEVICE as DEVICE,
    )
    from apportion.memory.host_state import (
        HOST as HOST,
    )
    from apportion.memory.host_state import (
        HostState as HostState,
    )
    from apportion.memory.host_state import (
        derived_ops as derived_ops,
    )
    from apportion.memory.host_state import (
        host_state as host_state,
    )
    from apportion.memory.host_units import (
        HostMaterial as HostMaterial,
    )
    from apportion.memory.host_units import (
        chunk_model as chunk_model,
    )
    from apportion.memory.host_units import (
        large_parameters as large_parameters,
    )
    from apportion.memory.low_order import (
        low_order as low_order,
    )
    from apportion.memory.offload import (
        Offload as Offload,
    )
    from apportion.memory.order_model import (
        order_model as order_model,
    )
    from apportion.memory.planned_graph import (
        MemoryPlan as MemoryPlan,
    )
    from apportion.memory.planned_graph import (
        before_host as before_host,
    )
    from apportion.memory.planned_graph import (
        planned_graph as planned_graph,
    )
    from apportion.memory.recompute import (
        is_repeat as is_repeat,
    )
    from apportion.memory.recompute import (
        recompute as recompute,
    )
    from apportion.memory.reorder import (
        updates_early as updates_early,
    )
    from apportion.memory.rewritten_graph import (
        RewrittenGraph as RewrittenGraph,
    )
    from apportion.memory.step_model import (
        StepModel as StepModel,
    )
    from apportion.memory.step_model import (
        step_model as step_model,
    )
    from apportion.memory.tensorflowmem import (
        partition as partition,
    )
    from apportion.memory.tensorflowmem import (
        tensorflowmem as tensorflowmem,
    )
    from apportion.memory.time_host_state import (
        chunk_starts as chunk_starts,
    )
    from apportion.memory.time_host_state import (
        time_host_state as time_host_state,
    )
    from apportion.memory.time_offloads import (
        HostWay as HostWay,
    )
    from apportion.memory.time_offloads import (
        time_offloads as time_offloads,
    )
    from apportion.memory.whole_modules import (
        inside_modules as inside_modules,
    )
    from apportion.memory.whole_modules import (
        is_within as is_within,
    )
    from apportion.memory.whole_modules import (
        modules_of as modules_of,
    )
    from apportion.memory.whole_modules import (
        numbered_modules as numbered_modules,
    )

lazy_face(__name__)
