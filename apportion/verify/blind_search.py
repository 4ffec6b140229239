"""Blind search: splits of a call that hold numerically, found without any description.

Every tensor argument is left whole or halved along one dimension; the operator runs on both halves;
each output must come back from the two results by concatenation, by a reducer, or be the same in
both. What holds on several independent draws of the inputs is a BlindSplit, and verify/ compares
those with the derived splits. Slices at equal positions are
all that is tried: halos, strided regions and offsets cannot be found this way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from apportion.capture import flat_results
from apportion.graph import refs
from apportion.verify.run_split import distance
from apportion.verify.sample import Sample

SAME = "same"
_LIMIT = 400  # ways to cut the inputs of one call
_TOLERANCE = {torch.float64: 1e-10, torch.complex128: 1e-10}
_REDUCERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
    "logaddexp": torch.logaddexp,
}

InputDims = tuple[int | None, ...]
"""For every input the dimension along which it is cut, or None."""


@dataclass(frozen=True, slots=True)
class BlindSplit:
    """A split that holds, as the blind search sees it.

    inputs   the dimension along which each input is cut
    outputs  the ways in which each output comes back: `same`, a reducer, a dimension to concatenate
    """

    inputs: InputDims
    outputs: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        reads = [f"input {k} dim {d}" for k, d in enumerate(self.inputs) if d is not None]
        leaves = [
            f"output {k} {'dim ' + how[0] if how[0].isdigit() else how[0]}"
            for k, how in enumerate(self.outputs)
        ]
        return f"{', '.join(reads)} cut; {', '.join(leaves)}"


def candidates(sample: Sample) -> Iterator[InputDims]:
    """Ways to cut the inputs, the tensors of one list argument alike; fewest cuts first."""
    groups = _groups(sample)
    options = [
        [None, *(d for d in range(sample.tensors[group[0]].dim()) if _halvable(sample, group, d))]
        for group in groups
    ]
    ways = itertools.islice(itertools.product(*options), 20 * _LIMIT)
    chosen = [way for way in ways if any(d is not None for d in way)]
    chosen.sort(key=lambda way: sum(d is not None for d in way))
    for way in chosen[:_LIMIT]:
        cut: list[int | None] = [None] * len(sample.tensors)
        for group, d in zip(groups, way, strict=True):
            for k in group:
                cut[k] = d
        yield tuple(cut)


def _groups(sample: Sample) -> list[list[int]]:
    groups: list[list[int]] = []
    seen: set[int] = set()
    for arg in (*sample.args, *sample.kwargs.values()):
        fresh = [k for k in dict.fromkeys(refs(arg)) if k not in seen]
        ranks = {sample.tensors[k].dim() for k in fresh}
        groups += [fresh] if len(ranks) == 1 else [[k] for k in fresh]
        seen.update(fresh)
    return [group for group in groups if group]


def _halvable(sample: Sample, group: Sequence[int], d: int) -> bool:
    return all(sample.tensors[k].shape[d] >= 2 for k in group)


def try_cut(
    sample: Sample, draws: Sequence[Sequence[torch.Tensor]], cut: InputDims
) -> list[list[str]]:
    """The dispositions of every output under a cut, on all draws; empty if it does not hold."""
    found: list[set[str]] | None = None
    shapes: set[tuple[torch.Size, ...]] = set()
    for tensors in draws:
        ways = _dispositions_on(sample, tensors, cut, shapes)
        if ways is None or len(shapes) > 1:  # a part whose shape depends on data is none
            return []
        found = ways if found is None else [a & b for a, b in zip(found, ways, strict=True)]
        if not all(found):
            return []
    if found is None or all(SAME in names for names in found):
        return []
    return [sorted(names) for names in found]


def _dispositions_on(
    sample: Sample,
    tensors: Sequence[torch.Tensor],
    cut: InputDims,
    shapes: set[tuple[torch.Size, ...]],
) -> list[set[str]] | None:
    whole = outputs_of(sample.call(tensors))
    halves = []
    for half in (0, 1):
        pieces = [_half(t, d, half) for t, d in zip(tensors, cut, strict=True)]
        try:
            halves.append(outputs_of(sample.call(pieces)))
        except Exception:
            return None
    if {len(half) for half in halves} != {len(whole)}:
        return None
    shapes.add(tuple(t.shape for half in halves for t in half))
    found = [_dispositions(*three) for three in zip(whole, *halves, strict=True)]
    return found if all(found) else None


def outputs_of(result: Any) -> list[torch.Tensor]:
    """The tensors of a result."""
    return [x for x in flat_results(result) if isinstance(x, torch.Tensor)]


def _half(tensor: torch.Tensor, dim: int | None, half: int) -> torch.Tensor:
    if dim is None:
        return tensor
    middle = tensor.shape[dim] // 2
    length = tensor.shape[dim] - middle if half else middle
    return tensor.narrow(dim, middle if half else 0, length).clone()


def _dispositions(whole: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> set[str]:
    if whole.numel() == 0 or not a.dim() == b.dim() == whole.dim():
        return {SAME} if a.shape == b.shape == whole.shape else set()
    if a.shape == whole.shape == b.shape:
        found = {SAME} if _equal(a, whole) and _equal(b, whole) else set()
        for name, reducer in _REDUCERS.items():
            try:
                if _equal(reducer(a, b).to(whole.dtype), whole):
                    found.add(name)
            except RuntimeError:  # no such reducer for this dtype
                continue
        return found
    return {
        str(d)
        for d in range(whole.dim())
        if a.shape[d] + b.shape[d] == whole.shape[d]
        and _other_extents(a, d) == _other_extents(b, d) == _other_extents(whole, d)
        and _equal(torch.cat([a, b], d), whole)
    }


def _other_extents(tensor: torch.Tensor, d: int) -> tuple[int, ...]:
    return (*tensor.shape[:d], *tensor.shape[d + 1 :])


def _equal(made: torch.Tensor, whole: torch.Tensor) -> bool:
    return distance(made, whole) <= _TOLERANCE.get(whole.dtype, 1e-5)


def ignored_inputs(sample: Sample, tensors: Sequence[torch.Tensor]) -> set[int]:
    """The inputs whose values the operator does not look at."""
    whole = outputs_of(sample.call(tensors))
    found = set()
    for k, tensor in enumerate(tensors):
        if tensor.numel() == 0:
            continue
        changed = [*tensors]
        if tensor.dtype == torch.bool:
            changed[k] = ~tensor
        elif tensor.is_floating_point() or tensor.is_complex():
            changed[k] = tensor * 0.5 + 0.25
        elif tensor.dim() and tensor.unique().numel() > 1:
            changed[k] = tensor.flip(0)
        else:
            changed[k] = tensor // 2 if tensor.any() else tensor + 1
        if torch.equal(changed[k], tensor):
            continue
        try:
            again = outputs_of(sample.call(changed))
        except Exception:
            continue
        if all(_equal(a, w) for a, w in zip(again, whole, strict=True)):
            found.add(k)
    return found
