"""planned_graph: the Graph that runs, made of the captured one by all decisions about memory.

Part of the room memory. A captured Graph and a MemoryPlan come in, a RewrittenGraph goes out. The
decisions are made in one sequence, each about the Graph that the one before it has left:

    order       of the captured Ops                          reorder.py
    recomputed  Ops of the captured Graph                    recompute.py
    host_state  parameters, by Ops of the Graph so far       host_state.py
    offloaded   Values, by Ops of the Graph so far           offload.py
"""

from __future__ import annotations

from dataclasses import dataclass

from apportion.graph import Graph
from apportion.memory.host_state import HostState, host_state
from apportion.memory.offload import Offload, offload
from apportion.memory.recompute import recompute
from apportion.memory.reorder import reorder
from apportion.memory.rewritten_graph import RewrittenGraph


@dataclass(frozen=True)
class MemoryPlan:
    """All that is decided about the memory of a step.

    order       the captured Ops as they run; () if as captured
    recomputed  Ops of the captured Graph that the backward computes again
    host_state  parameters that lie on the host
    offloaded   Values that lie on the host between forward and backward
    """

    order: tuple[int, ...] = ()
    recomputed: tuple[int, ...] = ()
    host_state: tuple[HostState, ...] = ()
    offloaded: tuple[Offload, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything is decided."""
        return bool(self.order or self.recomputed or self.host_state or self.offloaded)

    @property
    def uses_host(self) -> bool:
        """Whether anything lies on the host."""
        return bool(self.host_state or self.offloaded)


def planned_graph(graph: Graph, plan: MemoryPlan) -> RewrittenGraph:
    """The Graph that runs; raises ValueError as the decisions do."""
    made = before_host(graph, plan)
    made = made.then(host_state(made.graph, plan.host_state))
    return made.then(offload(made.graph, plan.offloaded))


def before_host(graph: Graph, plan: MemoryPlan) -> RewrittenGraph:
    """The Graph in another order and with recomputed Ops."""
    made = reorder(graph, plan.order)
    place = {op: number for number, op in enumerate(made.origins)}
    missing = [op for op in plan.recomputed if op not in place]
    if missing:
        raise ValueError(
            f"there is no operator {missing[0]} to recompute; there are {len(graph.ops)}"
        )
    return made.then(recompute(made.graph, [place[op] for op in plan.recomputed]))
