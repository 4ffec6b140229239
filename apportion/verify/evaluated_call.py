"""EvaluatedCall: a Sample as the Graph a captured step would contain, every Value computed.

verify_call.py asks it for cuts: each axis (with several operators: each class of axes) is cut
through all operators, into 2 and into 3 parts, and `judge` compares the parts with the whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from apportion.capture import NOT_REALLY_RANDOM, LiftedCall, lift_call
from apportion.describe import Affine, IllegalCut
from apportion.execute import Context
from apportion.graph import substitute
from apportion.split import Space, Split, open_composites
from apportion.verify.blind_search import SAME, outputs_of
from apportion.verify.draws import draw
from apportion.verify.run_split import PartError, distance, recombine, run_op
from apportion.verify.sample import Sample
from apportion.verify.verdict import RAISED, REFUSED, RIGHT, WRONG, AxisCut

_TOLERANCE = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 2e-5}
_PAIRS = 6


def judge(
    space: Space,
    index: int,
    parts: tuple[int, ...],
    values: Mapping[int, torch.Tensor],
    context: Context,
) -> tuple[str, Split | None, str]:
    """Whether a cut of an Op is right, given the whole Values that it reads and makes."""
    op = space.graph.ops[index]
    try:
        split = space.split(index, parts)
    except IllegalCut as why:
        return REFUSED, None, str(why)
    try:
        made = recombine(space, index, split, [values[v] for v in op.inputs], context)
    except PartError as why:
        return RAISED, split, f"{op.kind}: {why}"
    for v, (tensor, largest) in zip(op.outputs, made, strict=True):
        whole = values[v]
        away = distance(tensor, whole, largest)
        if away > _tolerance(whole):
            return WRONG, split, f"{op.kind}: differs by {away:.1e}"
    return RIGHT, split, ""


class EvaluatedCall:
    """A sample, lifted (and opened, if it is to be), every Value computed whole on one draw."""

    def __init__(
        self, sample: Sample, seed: int = 0, *, opening: bool = False, as_given: bool = False
    ) -> None:
        self.sample = sample
        self.tensors = sample.tensors if as_given else draw(sample, seed)
        self.lifted: LiftedCall = lift_call(
            sample.target,
            substitute(sample.args, self.tensors),
            {k: substitute(v, self.tensors) for k, v in sample.kwargs.items()},
        )
        if opening:
            self.lifted = replace(self.lifted, graph=open_composites(self.lifted.graph))
        self.space = Space(self.lifted.graph)
        self.context = Context(0, 0, lambda e: 0.0, self.lifted.graph.bodies)
        self.values = self._compute_values()

    def _compute_values(self) -> dict[int, torch.Tensor]:
        values = dict(self.lifted.constants)
        values.update(zip(self.lifted.inputs, self.tensors, strict=True))
        for op in self.lifted.graph.ops:
            results = run_op(op, op.args, [values[v] for v in op.inputs], self.context)
            values.update(zip(op.outputs, results, strict=False))
        return values

    def lifting_error(self) -> str:
        """How the lifted operators differ from the call itself; "" if they do not."""
        if is_random(self.sample):
            return ""
        if any(name in str(self.sample.target) for name in ("empty", "_ctc_loss.")):
            return ""  # unspecified values
        direct = outputs_of(self.sample.call(self.tensors))
        ours = [self.values[v] for v in self.lifted.outputs if v is not None]
        for a, b in zip(ours, direct, strict=True):
            if distance(a, b) > _tolerance(b):
                return f"the lifted operators differ from the call by {distance(a, b):.1e}"
        return ""

    # cuts

    def cuts(self) -> Iterator[AxisCut]:
        """Every axis cut alone, into 2 and 3 parts."""
        graph = self.lifted.graph
        if not graph.ops:
            yield from self._cuts_of_a_renaming()
        if len(graph.ops) == 1:
            for position, axis in enumerate(self.space.axes(0)):
                for count in (2, 3):
                    if axis.extent >= count:
                        yield self.cut(axis.name, count, {0: (position,)})
            return
        groups: dict[int, dict[int, tuple[int, ...]]] = {}
        names: dict[int, str] = {}
        for index in range(len(graph.ops)):
            for position, axis in enumerate(self.space.axes(index)):
                if axis.extent >= 2:
                    places = groups.setdefault(axis.group, {})
                    places[index] = (*places.get(index, ()), position)
                    names.setdefault(axis.group, axis.name)
        for group, places in groups.items():
            longest = max(self.space.axes(i)[p].extent for i, ps in places.items() for p in ps)
            for count in range(2, min(longest, 3) + 1):
                yield self.cut(names[group], count, places)

    def _cuts_of_a_renaming(self) -> Iterator[AxisCut]:
        """Cuts of a call that only gives its input another name: a Graph has no Op for it."""
        if len(self.lifted.inputs) == 1 and set(self.lifted.outputs) == set(self.lifted.inputs):
            for d, extent in enumerate(self.tensors[0].shape):
                for count in range(2, min(extent, 3) + 1):
                    yield AxisCut(f"i{d}", count, RIGHT, ((d,),), (str(d),))

    def pairs(self) -> dict[str, int]:
        """Two axes of one operator cut at once, by status."""
        found: dict[str, int] = {}
        if len(self.lifted.graph.ops) != 1:
            return found
        axes = self.space.axes(0)
        several = itertools.combinations(range(len(axes)), 2)
        for a, b in itertools.islice(several, _PAIRS):
            if min(axes[a].extent, axes[b].extent) >= 2:
                parts = tuple(2 if k in (a, b) else 1 for k in range(len(axes)))
                status, _, _ = self._judge(0, parts)
                found[status] = found.get(status, 0) + 1
        return found

    def cut(self, name: str, count: int, places: dict[int, tuple[int, ...]]) -> AxisCut:
        """One class of axes, at its positions in every Op, cut into parts."""
        chosen: dict[int, Split] = {}
        why, worst = "", REFUSED
        for index, positions in places.items():
            for position in positions:
                axes = self.space.axes(index)
                if axes[position].extent < count:
                    continue
                parts = tuple(count if k == position else 1 for k in range(len(axes)))
                status, split, text = self._judge(index, parts)
                if status == REFUSED:
                    why = why or text
                    continue
                assert split is not None
                chosen[index] = split
                if worst == REFUSED or status != RIGHT:
                    worst, why = status, text
                break
        if not chosen:
            return AxisCut(name, count, REFUSED, why=why)
        inputs = tuple(self._cut_dims(v, chosen) for v in self.lifted.inputs)
        outputs = tuple(
            self._output_disposition(v, chosen) for v in self.lifted.outputs if v is not None
        )
        return AxisCut(name, count, worst, inputs, outputs, why if worst != RIGHT else "")

    def _judge(self, index: int, parts: tuple[int, ...]) -> tuple[str, Split | None, str]:
        return judge(self.space, index, parts, self.values, self.context)

    def _cut_dims(self, value: int, chosen: dict[int, Split]) -> tuple[int, ...]:
        dims: set[int] = set()
        for index, split in chosen.items():
            for k, v in enumerate(self.lifted.graph.ops[index].inputs):
                if v == value:
                    dims |= self._partial_dims(value, [part.inputs[k] for part in split.parts])
        return tuple(sorted(dims))

    def _output_disposition(self, value: int, chosen: dict[int, Split]) -> str:
        made = self.lifted.graph.producer[value]
        if made is None or made[0] not in chosen:
            return SAME
        split, position = chosen[made[0]], made[1]
        reducer = split.reducers[position]
        if reducer is not None:
            return reducer
        dims = self._partial_dims(value, [part.outputs[position] for part in split.parts])
        return "x".join(map(str, sorted(dims))) or SAME

    def _partial_dims(self, value: int, regions: Sequence[Any]) -> set[int]:
        """The dimensions along which parts have different ranges."""
        dims, place = set(), 0
        for d, factors in enumerate(self.space.atoms.dims[value]):
            for _ in factors:
                if len({region[place] for region in regions}) > 1:
                    dims.add(d)
                place += 1
        return dims

    def outline(self, name: str) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]] | None:
        """What a refused cut of an axis would read and leave, by the formula alone."""
        formula = self.space.formulas[0] if len(self.lifted.graph.ops) == 1 else None
        if formula is None:
            return None
        name = name.partition(".")[0]
        op = self.lifted.graph.ops[0]
        inputs = []
        for v in self.lifted.inputs:
            dims = {
                d
                for access in formula.accesses
                if op.inputs[access.tensor] == v
                for d, index in enumerate(access.index)
                for item in index
                if isinstance(item, Affine) and any(n == name for n, _ in item.terms)
            }
            inputs.append(tuple(sorted(dims)))
        outputs = []
        for position, output in enumerate(formula.outputs):
            if op.outputs[position] in self.lifted.outputs:
                along = [
                    d for d, names in enumerate(output.dims if output else ()) if name in names
                ]
                outputs.append(str(along[0]) if along else "?")
        return tuple(inputs), tuple(outputs)


def _tolerance(whole: torch.Tensor) -> float:
    return _TOLERANCE.get(whole.dtype, 1e-2)


def is_random(sample: Sample) -> bool:
    """Whether the call draws random numbers, so that it cannot be compared with itself."""
    tagged = torch.Tag.nondeterministic_seeded in getattr(sample.target, "tags", ())
    return tagged and sample.target not in NOT_REALLY_RANDOM
