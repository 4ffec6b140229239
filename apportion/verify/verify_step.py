"""Verify whole steps: every split of every operator of a captured step, on the step's own values.

What verify_call.py does for single calls, for a Program. Operators come with the atoms that the
Graph gives them, which single calls do not have. The opened Graph is verified too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from apportion.capture import Program, batch_leaves, setting_of, state_tensor
from apportion.execute import Context
from apportion.split import Space, open_composites
from apportion.verify.evaluated_call import judge
from apportion.verify.run_split import cuts, run_op
from apportion.verify.verdict import AxisCut, Verdict


def verify_step(program: Program, name: str) -> list[Verdict]:
    """A Verdict for every distinct operator of a step and of the step opened."""
    torch.set_num_threads(1)
    found = list(_verdicts(program, name))
    if open_composites(program.graph) is not program.graph:
        inner = replace(program, graph=open_composites(program.graph))
        found += _verdicts(inner, f"{name} opened")
    return list({verdict.key: verdict for verdict in found}.values())


def _verdicts(program: Program, name: str) -> Iterator[Verdict]:
    graph = program.graph
    space = Space(graph)
    context = Context(0, 0, lambda e: setting_of(program, e), graph.bodies)
    values = _initial_values(program)
    last = {v: index for index, op in enumerate(graph.ops) for v in op.inputs}
    seen: set[Any] = set()
    for index, op in enumerate(graph.ops):
        results = run_op(op, op.args, [values[v] for v in op.inputs], context)
        values.update(zip(op.outputs, results, strict=False))
        if space.calls[index] not in seen:
            seen.add(space.calls[index])
            yield _verdict(space, index, values, context, name)
        for v in op.inputs:
            if last[v] == index:
                values.pop(v, None)


def _initial_values(program: Program) -> dict[int, torch.Tensor]:
    values = dict(program.constants)
    values.update(batch_leaves(program, program.batch))
    for value, made in enumerate(program.graph.producer):
        if made is None and value not in values:
            values[value] = state_tensor(program, value)
    return values


def _verdict(
    space: Space, index: int, values: dict[int, torch.Tensor], context: Context, name: str
) -> Verdict:
    op = space.graph.ops[index]
    axes = space.axes(index)
    found = []
    for parts in cuts(space, index):
        status, _, why = judge(space, index, parts, values, context)
        label = " ".join(a.name for a, n in zip(axes, parts, strict=True) if n > 1)
        found.append(AxisCut(label, max(parts), status, why=why))
    lacking = (
        {op.kind: space.undescribed[op.kind]} if op.kind in space.undescribed and not axes else {}
    )
    key = f"{name} {op.kind} {space.calls[index]}"
    return Verdict(op.kind, key, (op.kind,), lacking, tuple(found))
