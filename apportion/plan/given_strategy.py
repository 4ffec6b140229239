"""A Plan of a Strategy that somebody has, and that no search has to find.

Part of the room plan. A step, a Cluster and a rule that gives the Strategy come in; out goes the
Plan, lowered, simulated and judged as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from apportion import graph as graphs
from apportion.machine import Cluster
from apportion.memory import MemoryPlan, recompute
from apportion.plan.candidates import CostSource, scored
from apportion.plan.make_plan import made_plan, plan_request, warn_unsplit
from apportion.plan.plan import Plan
from apportion.plan.planned_memory import with_memory
from apportion.search import Problem, SearchResult
from apportion.work_clock import work_seconds

if TYPE_CHECKING:
    from apportion.capture import Program


def plan_strategy(
    program: Program | graphs.Graph,
    cluster: Cluster,
    method: str,
    strategy: Callable[[Problem], SearchResult],
    recomputed: Collection[int] = (),
    memory_limit: float | None = None,
    costs: CostSource | None = None,
) -> Plan:
    """The Plan of the Strategy that a function gives for the Problem, under the name `method`.
    The backward computes the Ops in `recomputed` again, as far as it reads them."""
    request = plan_request(program, cluster, memory_limit, 0, costs, None, None)
    warn_unsplit(request.space)
    began = work_seconds()
    problem = Problem(request.space, cluster, request.costs.known(), request.memory_limit)
    found = strategy(problem)
    candidate = scored(request, method, found, work_seconds() - began)
    if recomputed:
        memory = MemoryPlan(recomputed=repeated_ops(request.space.source, recomputed))
        if memory:
            candidate = with_memory(request, candidate, memory)
    return made_plan(request, candidate, 0.0)


def repeated_ops(graph: graphs.Graph, ops: Collection[int]) -> tuple[int, ...]:
    """Those of these Ops whose results the backward reads, so that it really does them again."""
    made = recompute(graph, ops)
    return tuple(sorted({made.origins[op] for op in made.repeats}))
