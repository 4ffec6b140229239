"""The oracle of splits: run an Op whole, run its derived splits in pieces, recombine, compare.

The base of verify/. Nothing here uses what split/ knows beside the Split itself: inputs are sliced
by the regions, the kernel is called, results are placed by the output regions and combined by the
reducers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from apportion.describe import IllegalCut
from apportion.execute import Context, combine, dtype, kernel, local_shape, padded, slices
from apportion.graph import Op, substitute
from apportion.split import Part, Space, Split

TOLERANCE = 1e-10  # of the largest element, in float64


@dataclass(frozen=True, slots=True)
class SplitCheck:
    """One split of one Op, and how far its recombined result is from the whole (infinite: another
    shape)."""

    kind: str
    parts: tuple[int, ...]
    error: float
    why: str = ""

    @property
    def right(self) -> bool:
        return self.error <= TOLERANCE and not self.why

    def __str__(self) -> str:
        return f"{self.kind} cut {self.parts}: {self.why or f'differs by {self.error:.2e}'}"


def check_op(
    space: Space, index: int, tensors: Sequence[torch.Tensor], context: Context
) -> list[SplitCheck]:
    """All derived splits of an Op on the given inputs: each axis alone in 2 and 3 parts, and pairs
    of axes."""
    op = space.graph.ops[index]
    whole = run_op(op, op.args, tensors, context)
    found = []
    for parts in cuts(space, index):
        try:
            split = space.split(index, parts)
        except IllegalCut:
            continue
        found.append(_check_split(space, index, split, parts, tensors, whole, context))
    return found


def cuts(space: Space, index: int) -> Iterator[tuple[int, ...]]:
    """Cuts worth trying: one axis into 2 or 3 parts, two axes into 2, and 2 by 3."""
    axes = space.axes(index)
    plain = [1] * len(axes)
    for position, axis in enumerate(axes):
        for count in (2, 3):
            if count <= axis.extent:
                yield tuple(count if k == position else n for k, n in enumerate(plain))
    for a, b in itertools.combinations(range(len(axes)), 2):
        for count in (2, 3):
            if axes[a].extent >= 2 and axes[b].extent >= count:
                yield tuple(2 if k == a else count if k == b else 1 for k in range(len(axes)))


def run_op(
    op: Op, args: Sequence[object], tensors: Sequence[torch.Tensor], context: Context
) -> tuple[torch.Tensor, ...]:
    """An Op's kernel on given tensors; an output that it leaves out is empty, as in a Graph."""
    values = [substitute(a, tensors, dtype=dtype, setting=context.setting) for a in args]  # type: ignore[arg-type]
    if op.body is not None:
        values = [op.body, *values]
    results = kernel(op.kind)(context, values)
    return tuple(torch.empty(0) if r is None else r for r in results)


def _check_split(
    space: Space,
    index: int,
    split: Split,
    parts: tuple[int, ...],
    tensors: Sequence[torch.Tensor],
    whole: Sequence[torch.Tensor],
    context: Context,
) -> SplitCheck:
    op = space.graph.ops[index]
    try:
        made = recombine(space, index, split, tensors, context)
    except PartError as raised:
        return SplitCheck(op.kind, parts, math.inf, str(raised))
    error = max((distance(m, w, n) for (m, n), w in zip(made, whole, strict=False)), default=0.0)
    return SplitCheck(op.kind, parts, error)


class PartError(Exception):
    """A part's kernel raised, or gave a result of another shape than the part's."""


def recombine(
    space: Space,
    index: int,
    split: Split,
    tensors: Sequence[torch.Tensor],
    context: Context,
) -> tuple[tuple[torch.Tensor, float], ...]:
    """The outputs of an Op, computed part by part and recombined, each with the largest element of
    its partial values; raises PartError."""
    op = space.graph.ops[index]
    made: list[list[torch.Tensor | None]] = [[None] * n for n in split.terms]
    for part in split.parts:
        local = [_input(space, v, part, k, tensors[k]) for k, v in enumerate(op.inputs)]
        try:
            results = run_op(op, part.args, padded(local, part), context)
        except Exception as raised:
            raise PartError(f"the kernel raised: {str(raised)[:120]}") from None
        for k, value in enumerate(op.outputs):
            expected = local_shape(space, value, part.outputs[k])
            if tuple(results[k].shape) != expected:
                raise PartError(f"shape {tuple(results[k].shape)}, not {expected}")
            target = made[k][part.terms[k]]
            if target is None:
                factors = space.factors(value)
                target = made[k][part.terms[k]] = torch.zeros(factors, dtype=results[k].dtype)
            box = target[slices(part.outputs[k])]
            scale = part.scales[k]
            box.copy_(results[k].reshape(box.shape) * (scale if scale != 1 else 1))
    shapes = (space.graph.values[v].shape for v in op.outputs)
    return tuple(
        (_total(terms, reducer).reshape(shape or ()), largest)
        for terms, reducer, shape, largest in zip(
            made, split.reducers, shapes, map(_largest, made, split.reducers), strict=True
        )
    )


def run_split(
    space: Space, index: int, split: Split, tensors: Sequence[torch.Tensor], context: Context
) -> tuple[torch.Tensor, ...]:
    """The outputs of an Op, computed part by part and recombined; raises PartError."""
    return tuple(made for made, _ in recombine(space, index, split, tensors, context))


def _largest(terms: Sequence[torch.Tensor | None], reducer: str | None) -> float:
    """The largest element of partial values: what the rounding of their sum is measured by. 0 where
    they are not added."""
    if reducer != "sum" or terms[0] is None or not terms[0].is_floating_point():
        return 0.0
    finite = [t[t.isfinite()].abs() for t in terms if t is not None]
    return max((float(t.max()) for t in finite if t.numel()), default=0.0)


def _input(space: Space, value: int, part: Part, k: int, tensor: torch.Tensor) -> torch.Tensor:
    box = tensor.reshape(space.factors(value))[slices(part.inputs[k])]
    local = box.reshape(local_shape(space, value, part.inputs[k]))
    return torch.zeros_like(local) if k in part.zeros else local


def _total(terms: list[torch.Tensor | None], reducer: str | None) -> torch.Tensor:
    total = terms[0]
    assert total is not None
    for term in terms[1:]:
        assert term is not None
        combine(reducer, total, term)
    return total


def distance(made: torch.Tensor, whole: torch.Tensor, largest: float = 0.0) -> float:
    """The largest difference, as a share of the largest element, that of partial values included;
    infinite where the shapes, the dtypes, the infinities or the NaNs differ."""
    if made.shape != whole.shape or made.dtype != whole.dtype:
        return math.inf
    if made.is_complex():
        made, whole = (
            torch.view_as_real(made.resolve_conj()),
            torch.view_as_real(whole.resolve_conj()),
        )
    if not made.is_floating_point():
        return 0.0 if torch.equal(made, whole) else math.inf
    if whole.numel() == 0:
        return 0.0
    if not torch.equal(made.isnan(), whole.isnan()):
        return math.inf
    finite = whole.isfinite()
    if not torch.equal(made[~finite].nan_to_num(), whole[~finite].nan_to_num()):
        return math.inf
    if not finite.any():
        return 0.0
    scale = max(whole[finite].abs().max().item(), largest)
    return float((made[finite] - whole[finite]).abs().max().item() / (scale or 1.0))
