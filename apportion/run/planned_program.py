"""planned_program: the Program with the Graph that a Plan runs.

Part of the room run. A Program and a Plan come in; out goes the Program in which the backward
recomputes what the Plan says, and activations are offloaded as it says, so that everything that was
bound to the captured Graph is bound to that one. It is refused if the Plan was made for another
step.
"""

from __future__ import annotations

from dataclasses import replace

from apportion.capture import Program
from apportion.describe import HOST_KINDS
from apportion.memory import planned_graph
from apportion.plan import Plan


def planned_program(program: Program, plan: Plan) -> Program:
    """The Program as the Plan runs it; raises ValueError unless the Plan was made for its step."""
    made = program
    if plan.recomputed or plan.offloaded:
        try:
            graph = planned_graph(program.graph, plan.recomputed, plan.offloaded)
            made = replace(program, graph=graph)
        except ValueError:
            raise _other_step(program, plan) from None
    if made.graph.fingerprint != plan.graph.fingerprint:
        raise _other_step(program, plan)
    return made


def _other_step(program: Program, plan: Plan) -> ValueError:
    what = f" (it is for {plan.model})" if plan.model else ""
    count = len(plan.graph.ops)
    count -= len(plan.recomputed) + sum(op.kind in HOST_KINDS for op in plan.graph.ops)
    return ValueError(
        f"the plan was made for another step{what}: it has {count} operators, "
        f"this one {len(program.graph.ops)}, or their shapes differ; plan this step again"
    )
