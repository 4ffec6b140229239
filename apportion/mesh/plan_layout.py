"""plan_layout: what a layout that somebody has would cost here, as a Plan.

Part of the room mesh. A step, a Cluster and a MeshLayout come in; out goes a Plan as any other,
which can be compared, explained, reported, saved and run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apportion.graph import Graph
from apportion.machine import Cluster
from apportion.mesh.layout_strategy import checkpointed_ops, layout_strategy
from apportion.mesh.mesh_layout import MeshLayout
from apportion.plan import CostSource, Plan, plan_strategy

if TYPE_CHECKING:
    from apportion.capture import Program

METHOD = "layout"


def plan_layout(
    program: Program | Graph,
    cluster: Cluster,
    layout: MeshLayout,
    memory_limit: float | None = None,
    costs: CostSource | None = None,
) -> Plan:
    """The Plan of a layout; raises ValueError where it is not for this step or cluster."""
    graph = program if isinstance(program, Graph) else program.graph
    again = checkpointed_ops(graph, layout)
    return plan_strategy(
        program, cluster, METHOD, lambda problem: layout_strategy(problem, layout), again,
        memory_limit, costs,
    )  # fmt: skip
