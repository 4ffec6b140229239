"""planned_program: the Program with the Graph that a Plan runs.

Part of the room run. A Program and a Plan come in; out goes the Program in which the backward
recomputes what the Plan says, and what is to lie on the host does, so that everything that was
bound to the captured Graph is bound to that one. It is refused if the Plan was made for another
step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from apportion.capture import Binding, Program
from apportion.describe import HOST_KINDS
from apportion.memory import RewrittenGraph, planned_graph
from apportion.plan import Plan


def planned_program(program: Program, plan: Plan) -> Program:
    """The Program as the Plan runs it; raises ValueError unless the Plan was made for its step."""
    made = program
    if plan.memory:
        try:
            found = planned_graph(program.graph, plan.memory)
        except ValueError:
            raise _other_step(program, plan) from None
        bound = planned_bindings(program.bindings, found)
        made = replace(program, graph=found.graph, bindings=bound)
    if made.graph.fingerprint != plan.graph.fingerprint:
        raise _other_step(program, plan)
    return made


def planned_bindings(bindings: Mapping[int, Binding], made: RewrittenGraph) -> dict[int, Binding]:
    """What the Values that the step begins with are bound to: a shadow of a parameter to it too."""
    graph, bound = made.graph, dict(bindings)
    for value, equal in enumerate(made.values):
        if value != equal and graph.producer[value] is None and equal in bound:
            bound[value] = bound[equal]
    return bound


def _other_step(program: Program, plan: Plan) -> ValueError:
    what = f" (it is for {plan.model})" if plan.model else ""
    return ValueError(
        f"the plan was made for another step{what}: it has {_captured(plan)} operators, "
        f"this one {len(program.graph.ops)}, or their shapes differ; plan this step again"
    )


def _captured(plan: Plan) -> str:
    """How many operators the step has that a plan was made for, as far as that can be told."""
    if plan.memory.order:
        return str(len(plan.memory.order))
    copies = sum(op.kind in HOST_KINDS for op in plan.graph.ops)
    count = len(plan.graph.ops) - len(plan.recomputed) - copies
    return f"about {count}" if plan.host_state else str(count)
