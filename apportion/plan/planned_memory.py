"""A Candidate with decisions about memory: the same strategy for the Graph that they make.

Part of the room plan. A PlanRequest, a Candidate and a MemoryPlan come in; out goes the Candidate
that is carried over to the new Graph, lowered and simulated as any other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from apportion.lower import TaskGraph
from apportion.machine import CostModel
from apportion.memory import MemoryPlan, carry_strategy, planned_graph
from apportion.plan.candidate import Candidate
from apportion.plan.candidates import CostSource, PlanRequest, scored
from apportion.split import Space, Strategy


def with_memory(request: PlanRequest, start: Candidate, memory: MemoryPlan) -> Candidate:
    """A Candidate of the captured Graph with these decisions; ValueError as they raise."""
    made = planned_graph(request.space.source, memory)
    strategy = carry_strategy(start.found.strategy, request.space, made)
    found = replace(start.found, strategy=strategy, space=None, others=())
    asked = replace(request, space=Space(made.graph), costs=KnownCosts(request.costs))
    return replace(
        scored(asked, start.method, found, start.search_seconds),
        notes=start.notes,
        curve=start.curve,
        figures=start.figures,
        memory=memory,
    )


@dataclass(frozen=True, slots=True)
class KnownCosts:
    """Costs as far as they are known: a copy is the same call as the Op that it repeats, and
    nothing is measured for it."""

    source: CostSource

    @property
    def seconds(self) -> float:
        return self.source.seconds

    def known(self) -> CostModel:
        return self.source.known()

    def cost(self, strategy: Strategy, tasks: TaskGraph) -> CostModel:
        return self.source.known()
