"""axis_effects: what cutting one axis of an Op in two does to the tensors that it reads and writes.

In: a Space. Out: for an axis of an Op an AxisEffect, found from the Split into two parts, or None
where the axis cannot be cut. Searches read it to tell what a cut moves, explanations to name what
it divides; neither has to look at Splits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from apportion.describe import Affine, Box, Factors, IllegalCut, Quotient, full, part_range, volume
from apportion.graph import Arg, Op
from apportion.split.grid_choices import one_cut
from apportion.split.part import Split
from apportion.split.regions import CallSignature
from apportion.split.space import Space

WHOLE, PARTIAL, FIRST_ONLY, SEVERAL = -1, -2, -3, -4
"""What happens to a tensor of which not exactly one atom is cut: both parts have it whole; the
parts leave partial values of it; only the first part reads it (the second has zeros instead);
several of its atoms are cut."""

Place = tuple[int, int]
"""An input or output of an Op by its position, and an atom of it."""


@dataclass(frozen=True, slots=True)
class AxisEffect:
    """What a cut of one axis into two parts does to the inputs and outputs of an Op.

    inputs        for each input the atom that is cut, or WHOLE, FIRST_ONLY or SEVERAL
    outputs       for each output the atom that is cut, or WHOLE, PARTIAL or SEVERAL
    halos         for each input that is cut what both parts read of it, as a share of what the Op
                  reads; 0 for the others
    aligned       atoms of inputs of which each part reads its half
    windows       atoms of inputs that the parts read in other ranges, such as those of a window
    written       atoms of outputs that are cut
    reads_slice   whether the Op reads less than the whole of an input, whatever is cut
    divides_work  whether each part does its share of the operations; else each does all of them
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    halos: tuple[float, ...]
    aligned: tuple[Place, ...]
    windows: tuple[Place, ...]
    written: tuple[Place, ...]
    reads_slice: bool
    divides_work: bool

    @property
    def is_partial(self) -> bool:
        """Whether some output becomes partial values."""
        return PARTIAL in self.outputs

    def atoms_cut(self, op: Op) -> list[tuple[int, int]]:
        """The (Value, atom) pairs that the cut of this Op divides: first read, then written."""
        read = [(op.inputs[place], atom) for place, atom in self.aligned]
        return read + [(op.outputs[place], atom) for place, atom in self.written]


class AxisEffects:
    """The AxisEffects of all Ops of a Space, each found when it is first asked for.

    Equal Ops share one. So do Ops that differ in nothing but extents, if they read no windows or
    slices, whose ranges depend on extents. Such a shared effect does not say that the cut is legal:
    `Space.cuttable` and `Space.split` do.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self._by_call: dict[tuple[int, int], AxisEffect | None] = {}
        self._by_form: dict[tuple[object, int], AxisEffect] = {}
        self._forms: dict[int, object] = {}
        self._windows: dict[int, dict[str, list[Place]]] = {}
        self._flops: dict[int, float] = {}
        self._flops_per_point: dict[object, list[float]] = {}

    def of(self, op: int, position: int) -> AxisEffect | None:
        """The effect of cutting the axis at this position of an Op; None if it cannot be cut."""
        key = (self.space.call_ids[op], position)
        if key not in self._by_call:
            form = self._form(op)
            found = self._by_form.get((form, position))
            if found is None or self.space.axes(op)[position].extent < 2:
                found = self._find(op, position)
                if found is not None and not found.windows and not found.reads_slice:
                    self._by_form[form, position] = found
            self._by_call[key] = found
        return self._by_call[key]

    def legal(self, op: int) -> Iterator[tuple[int, AxisEffect]]:
        """The axes of an Op that can legally be cut in two, and their effects."""
        for position, able in enumerate(self.space.cuttable(op)):
            if able:
                effect = self.of(op, position)
                assert effect is not None
                yield position, effect

    def flops(self, op: int) -> float:
        """Operations of a whole Op. Where they are proportional to the size of the iteration space
        in two Ops of one form, and there are no windows, they are in all."""
        call = self.space.call_ids[op]
        if call not in self._flops:
            points = math.prod(axis.extent for axis in self.space.axes(op))
            rates = self._flops_per_point.setdefault(self._form(op), [])
            if len(rates) == 2 and math.isclose(*rates, rel_tol=1e-12):
                self._flops[call] = rates[0] * points
            else:
                self._flops[call] = self._whole(op).parts[0].flops
                if len(rates) < 2 and points and not self._atoms_in_windows(op):
                    rates.append(self._flops[call] / points)
        return self._flops[call]

    def _whole(self, op: int) -> Split:
        return self.space.split(op, (1,) * len(self.space.axes(op)))

    def _form(self, op: int) -> object:
        call = self.space.call_ids[op]
        found = self._forms.get(call)
        if found is None:
            found = self._forms[call] = _form(self.space.calls[op])
        return found

    def _find(self, op: int, position: int) -> AxisEffect | None:
        axes = self.space.axes(op)
        if axes[position].extent < 2:
            return None
        try:
            halves = self.space.split(op, one_cut(len(axes), position))
        except IllegalCut:
            return None
        first, second = halves.parts
        whole = self._whole(op).parts[0]
        regions = list(zip(first.inputs, second.inputs, whole.inputs, strict=True))
        cuts = [_atom_cut(*three) for three in regions]
        inputs = [FIRST_ONLY if k in second.zeros else atom for k, atom in enumerate(cuts)]
        outputs = [
            PARTIAL if terms > 1 else _atom_cut(*three)
            for terms, *three in zip(
                halves.terms, first.outputs, second.outputs, whole.outputs, strict=True
            )
        ]
        halos = [
            _halo(*three) if atom >= 0 else 0.0 for atom, three in zip(inputs, regions, strict=True)
        ]
        divides_work = first.flops + second.flops < 1.5 * self.flops(op)
        return AxisEffect(
            tuple(inputs), tuple(outputs), tuple(halos), *self._places(op, position, halves),
            divides_work,
        )  # fmt: skip

    def _places(
        self, op: int, position: int, halves: Split
    ) -> tuple[tuple[Place, ...], tuple[Place, ...], tuple[Place, ...], bool]:
        """The atoms that are aligned, in windows and written, and whether the Op reads a slice."""
        first, second = halves.parts
        extent, meant = self.space.axes(op)[position].extent, self.space.graph.ops[op]
        aligned: list[Place] = []
        windows: list[Place] = []
        reads_slice = False
        for place, value in enumerate(meant.inputs):
            one, other, factors = first.inputs[place], second.inputs[place], self._factors(value)
            for atom, halved in _not_whole(factors, one, other):
                if one[atom] == other[atom]:
                    reads_slice = True
                elif halved and factors[atom] == extent:
                    aligned.append((place, atom))
                else:
                    windows.append((place, atom))
        names = [name for name, factors in self.space.calls[op].axes for _ in factors]
        read = self._atoms_in_windows(op).get(names[position], ())
        windows += [end for end in dict.fromkeys(read) if end not in aligned + windows]
        written = [
            (place, atom)
            for place, value in enumerate(meant.outputs)
            for atom, _ in _not_whole(
                self._factors(value), first.outputs[place], second.outputs[place]
            )
        ]
        return tuple(aligned), tuple(windows), tuple(written), reads_slice

    def _factors(self, value: int) -> Factors:
        return self.space.factors(value)

    def _atoms_in_windows(self, op: int) -> dict[str, list[Place]]:
        """For every axis along which windows are read the atoms of inputs that they read: two
        halves may both read all of these."""
        call = self.space.call_ids[op]
        found = self._windows.get(call)
        if found is not None:
            return found
        found = self._windows[call] = {}
        formula = self.space.formulas[op]
        for access in () if formula is None else formula.accesses:
            at = 0
            dims = self.space.calls[op].inputs[access.tensor]
            for index, factors in zip(access.index, dims, strict=True):
                for item in index:
                    if isinstance(item, Affine | Quotient) and len(item.terms) > 1:
                        atoms = [(access.tensor, at + k) for k in range(len(factors))]
                        for name, _ in item.terms:
                            found.setdefault(name, []).extend(atoms)
                at += len(factors)
        return found


def _form(call: CallSignature) -> object:
    """A call but for its extents: operator, arguments, and how many atoms dims and axes have."""
    shapes: dict[tuple[Arg, ...], int] = {}
    for k, dims in enumerate(call.outputs):
        shapes[tuple([math.prod(factors) for factors in dims])] = -1 - k
    args = tuple([shapes.get(a, a) if isinstance(a, tuple) else a for a in call.args])
    ends = tuple([tuple([len(d) for d in dims]) for dims in (*call.inputs, *call.outputs)])
    axes = tuple([(name, len(factors)) for name, factors in call.axes])
    return call.kind, args, len(call.inputs), ends, axes, id(call.body)


def _atom_cut(first: Box, second: Box, whole: Box) -> int:
    """The atom of which a part has less than the whole Op, if there is exactly one."""
    if first == whole and second == whole:
        return WHOLE
    cut = [
        atom
        for atom, (one, other, both) in enumerate(zip(first, second, whole, strict=True))
        if not one == other == both
    ]
    return cut[0] if len(cut) == 1 else SEVERAL


def _halo(first: Box, second: Box, whole: Box) -> float:
    """What both parts read, as a share of what the Op reads."""
    return max(0.0, (volume(first) + volume(second)) / max(volume(whole), 1) - 1)


def _not_whole(factors: Factors, first: Box, second: Box) -> Iterator[tuple[int, bool]]:
    """The atoms that two parts do not both have whole, and whether each part has its half."""
    whole = full(factors)
    if first == whole and second == whole:
        return
    for atom, factor in enumerate(factors):
        pair = (first[atom], second[atom])
        if pair != (whole[atom], whole[atom]):
            yield atom, pair == (part_range(factor, 2, 0), part_range(factor, 2, 1))
