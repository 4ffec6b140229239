"""One part of an Op: its kernel called on the tensors of the part.

Part of the room execute. A Part of a Split and its input tensors come in, its results go out.
kernels/ says how each kind of operator computes a part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apportion.execute.executable import local_shape
from apportion.execute.kernels.base import (
    Context,
    Template,
    dtype,
    kernel,
    template,
)
from apportion.graph import Op
from apportion.split import Part, Space


def run_part(
    space: Space,
    op: Op,
    part: Part,
    ins: Sequence[torch.Tensor | None],
    context: Context,
    args: Template | None = None,
) -> list[torch.Tensor]:
    """The kernel of one part of an Op; an input that is None is a block of zeros. `args` are
    template(part.args), where they are known."""
    tensors = [_zeros(space, op, part, k, context) if x is None else x for k, x in enumerate(ins)]
    tensors = padded(tensors, part)
    given = (args or template(part.args)).fill(tensors, context)
    if op.body is not None:
        given = [op.body, *given]
    results = list(kernel(op.kind)(context, given))[: len(op.outputs)]
    for k, result in enumerate(results):
        if result is None:
            kind = dtype(space.graph.values[op.outputs[k]].dtype or "")
            results[k] = torch.empty(0, dtype=kind, device=context.device)
        elif part.scales[k] != 1.0:
            own = not any(same_storage(result, x) for x in tensors)
            results[k] = result.mul_(part.scales[k]) if own else result * part.scales[k]
    return results


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are views of the same bytes."""
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def _zeros(space: Space, op: Op, part: Part, k: int, context: Context) -> torch.Tensor:
    shape = local_shape(space, op.inputs[k], part.inputs[k])
    kind = dtype(space.graph.values[op.inputs[k]].dtype or "")
    return torch.zeros(shape, dtype=kind, device=context.device)


def padded(tensors: list[torch.Tensor], part: Part) -> list[torch.Tensor]:
    """The inputs of a part with the pads that its kernel needs around them."""
    for pad in part.pads:
        tensor = tensors[pad.input]
        widths = [0, 0] * (tensor.dim() - 1 - pad.dim) + [pad.before, pad.after]
        tensors[pad.input] = torch.nn.functional.pad(tensor, widths, value=pad.value)
    return tensors
