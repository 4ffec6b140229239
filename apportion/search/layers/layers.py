"""Layers: the unit that optcnn decides. A forward Op with what is done along with it.

A layer is one forward Op, the Ops after it that read nothing but what it leaves and can be cut as
it is (activations, normalisations, views, losses), the Ops before it that prepare its state or make
what nobody gives (transposed weights, dropout masks), the backward Ops of all of these, and the
updates of its parameters. It is cut along **labels**: the axes of its first Op that index an
output. Each member is cut along those of its axes that are the same as a label, and is whole along
the others, as weights are under data parallelism.

Which axis of a member is which label: an axis of the same class of atoms, or of the class that a
window of the first Op reads (rows before a convolution and rows after it), or of its gradient.
Where several axes of a member qualify (in and out features of a square weight), the one that cuts
the atoms of Values that are already labelled.

The steps of an unrolled loop share their weights and are one layer: Ops of one line and module that
are equal. Where they are asked for `apart`, each step is a layer, and axes that its first Op sums
over are labels too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from apportion.describe import Affine, Factors, Quotient, Refused, full, part_range
from apportion.graph import BACKWARD, FORWARD, INPUT, PARAMETER, UPDATE, Arg, Graph
from apportion.split import Call, Space

UNMAPPED = -1


@dataclass(frozen=True, slots=True)
class Label:
    """An axis along which a layer can be cut. `classes` are its own and those of its windows;
    `reduced` says that the layer's first Op sums over it."""

    name: str
    extent: int
    own: int
    classes: frozenset[int]
    reduced: bool = False


@dataclass(frozen=True, slots=True)
class Layer:
    """`positions` has, for every Op and label, the axis of the Op that the label is, or
    UNMAPPED. Steps of one loop have the same `loop`."""

    name: str
    ops: tuple[int, ...]
    labels: tuple[Label, ...]
    positions: tuple[tuple[int, ...], ...]
    loop: int = 0


@dataclass(frozen=True, slots=True)
class Hit:
    """What a cut of one axis does to the atoms of inputs and outputs: (place, atom) pairs.

    cut      aligned: the parts have the atom's parts
    window   read in other ranges, such as those of a window
    left     of outputs, aligned
    partial  outputs that become partial values
    partly   whether the Op reads less than the whole of an input, whatever is cut, as a slice does
    divides  whether each part has its share of the operations; else each has all
    """

    cut: tuple[tuple[int, int], ...]
    window: tuple[tuple[int, int], ...]
    left: tuple[tuple[int, int], ...]
    partial: tuple[int, ...]
    partly: bool
    divides: bool


class Hits:
    """What the axes of Ops do, each found by one Split in two.

    Equal Ops share it. So do those that differ in nothing but extents, if they read no windows or
    slices: where these are depends on extents. Whether the cuts that are chosen in the end are
    legal is asked of each Op by itself.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.known: dict[tuple[int, int], Hit | None] = {}
        self._flops: dict[int, float] = {}
        self._read: dict[int, dict[str, list[tuple[int, int]]]] = {}
        self._rates: dict[object, list[float]] = {}
        self._forms: dict[int, object] = {}
        self._alike: dict[tuple[object, int], Hit] = {}

    def of(self, op: int, position: int) -> Hit | None:
        """None if the axis cannot be cut."""
        call = self.space.call_ids[op]
        key = (call, position)
        if key not in self.known:
            form = self._form_of(op)
            found = self._alike.get((form, position))
            if found is None or self.space.axes(op)[position].extent < 2:
                found = self._find(op, position)
                if found is not None and not found.window and not found.partly:
                    self._alike[form, position] = found
            self.known[key] = found
        return self.known[key]

    def flops(self, op: int) -> float:
        """Operations of a whole Op. Where they are proportional to its extents in two Ops of one
        form, and there are no windows, they are in all."""
        call = self.space.call_ids[op]
        if call not in self._flops:
            volume = math.prod(axis.extent for axis in self.space.axes(op))
            rates = self._rates.setdefault(self._form_of(op), [])
            if len(rates) == 2 and math.isclose(*rates, rel_tol=1e-12):
                self._flops[call] = rates[0] * volume
            else:
                whole = self.space.split(op, [1] * len(self.space.axes(op)))
                self._flops[call] = whole.parts[0].flops
                if len(rates) < 2 and volume and not self._windows(op):
                    rates.append(self._flops[call] / volume)
        return self._flops[call]

    def _form_of(self, op: int) -> object:
        call = self.space.call_ids[op]
        found = self._forms.get(call)
        if found is None:
            found = self._forms[call] = _form(self.space.calls[op])
        return found

    def _find(self, op: int, position: int) -> Hit | None:
        axes = self.space.axes(op)
        if axes[position].extent < 2:
            return None
        try:
            split = self.space.split(op, [2 if k == position else 1 for k in range(len(axes))])
        except Refused:
            return None
        graph, first, second = self.space.graph, *split.parts
        cut: list[tuple[int, int]] = []
        window: list[tuple[int, int]] = []
        left: list[tuple[int, int]] = []
        partly = False
        for place, value in enumerate(graph.ops[op].inputs):
            pair = (first.inputs[place], second.inputs[place])
            factors = self.space.factors(value)
            for atom, halved in _touched(factors, *pair):
                if pair[0][atom] == pair[1][atom]:
                    partly = True
                else:
                    aligned = halved and factors[atom] == axes[position].extent
                    (cut if aligned else window).append((place, atom))
        names = [name for name, factors in self.space.calls[op].axes for _ in factors]
        read = self._windows(op).get(names[position], ())
        window += [end for end in dict.fromkeys(read) if end not in cut + window]
        for place, value in enumerate(graph.ops[op].outputs):
            pair = (first.outputs[place], second.outputs[place])
            left += [(place, atom) for atom, _ in _touched(self.space.factors(value), *pair)]
        partial = tuple(k for k, terms in enumerate(split.terms) if terms > 1)
        divides = first.flops + second.flops < 1.5 * self.flops(op)
        return Hit(tuple(cut), tuple(window), tuple(left), partial, partly, divides)

    def _windows(self, op: int) -> dict[str, list[tuple[int, int]]]:
        """For every axis along which windows are read the atoms of inputs that they read: two
        halves may both read all."""
        call = self.space.call_ids[op]
        found = self._read.get(call)
        if found is not None:
            return found
        found = self._read[call] = {}
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


def _form(call: Call) -> object:
    """A call but for its extents: operator, arguments, and how many atoms dims and axes have."""
    shapes: dict[tuple[Arg, ...], int] = {}
    for k, dims in enumerate(call.outputs):
        shapes[tuple([math.prod(factors) for factors in dims])] = -1 - k
    args = tuple([shapes.get(a, a) if isinstance(a, tuple) else a for a in call.args])
    ends = tuple([tuple([len(d) for d in dims]) for dims in (*call.inputs, *call.outputs)])
    axes = tuple([(name, len(factors)) for name, factors in call.axes])
    return call.kind, args, len(call.inputs), ends, axes, id(call.body)


def _touched(factors: Factors, first: object, second: object) -> Iterator[tuple[int, bool]]:
    """The atoms that two parts do not both have whole, and whether each has its half."""
    whole = full(factors)
    if first == whole and second == whole:
        return
    for atom, factor in enumerate(factors):
        pair = (first[atom], second[atom])  # type: ignore[index]
        if pair != (whole[atom], whole[atom]):
            yield atom, pair == (part_range(factor, 2, 0), part_range(factor, 2, 1))


def find_layers(space: Space, apart: bool = False) -> tuple[list[Layer], Hits]:
    """Every Op in one layer; layers are in the order of their first Ops."""
    finder = _Finder(space, apart)
    finder.forward()
    finder.backward()
    finder.feeders()
    return finder.layers(), finder.hits


@dataclass
class _Growing:
    """A layer in the making. `marks` has the labels of Values' atoms, {value: {atom: label}}."""

    name: str
    labels: list[Label]
    loop: int
    ops: list[int] = field(default_factory=list)
    positions: list[tuple[int, ...]] = field(default_factory=list)
    marks: dict[int, dict[int, int]] = field(default_factory=dict)


class _Finder:
    def __init__(self, space: Space, apart: bool) -> None:
        self.space = space
        self.apart = apart
        self.graph: Graph = space.graph
        self.hits = Hits(space)
        self.found: list[_Growing] = []
        self.home = [-1] * len(self.graph.ops)
        self.leaves: dict[int, frozenset[int]] = {}  # of Values that come from no layer
        self.begun: dict[tuple[object, ...], int] = {}  # layers by the line of their first Op

    # Which layer

    def forward(self) -> None:
        """The forward Ops in order: each begins a layer, joins one, or feeds one."""
        for index, op in enumerate(self.graph.ops):
            if op.phase != FORWARD:
                continue
            sources = {self._source(v) for v in op.inputs} - {-1}
            if not sources:
                leaves = frozenset[int]().union(*(self._leaves(v) for v in op.inputs))
                if len(leaves) <= 1:
                    self.leaves.update(dict.fromkeys(op.outputs, leaves))
                    continue
            if len(sources) == 1:
                (layer,) = sources
                positions = self._joining(index, self.found[layer])
                if positions is not None:
                    self._add(index, layer, positions)
                    continue
            self._begin(index)

    def backward(self) -> None:
        """Backward Ops with the forward Op that they differentiate, updates with their gradient;
        others with the largest of what they read. Sums of gradients are with what reads them."""
        sums: list[int] = []
        for index, op in enumerate(self.graph.ops):
            if op.phase == FORWARD:
                continue
            layer = -1
            if op.forward is not None:
                layer = self.home[op.forward]
                if layer < 0:
                    layer = self._feeds(op.forward)
            elif op.phase == UPDATE:
                layer = self._source(op.inputs[1])
            if layer < 0:
                sized = [(self.graph.values[v].nbytes, -k, v) for k, v in enumerate(op.inputs)]
                near = [layer for *_, v in sorted(sized, reverse=True)
                        if (layer := self._source(v)) >= 0]  # fmt: skip
                layer = near[0] if near else len(self.found) - 1
            if op.forward is not None:
                self._widen(index, self.found[layer])
            sources = {self._source(v) for v in op.inputs}
            if op.kind == "aten.add.Tensor" and len(sources) > 1:
                self.home[index] = layer
                sums.append(index)
            else:
                self._add(index, layer, self._mapped(index, self.found[layer]))
        for index in reversed(sums):
            (value,) = self.graph.ops[index].outputs
            readers = [
                r for r in self.graph.consumers[value] if self.graph.ops[r].phase == BACKWARD
            ]
            layer = self.home[(readers or [index])[0]]
            self._add(index, layer, self._mapped(index, self.found[layer]))

    def feeders(self) -> None:
        """Ops that come from no layer, each with the first that reads it, the last first."""
        for index in range(len(self.graph.ops) - 1, -1, -1):
            if self.home[index] < 0:
                layer = self._feeds(index)
                if layer < 0:
                    layer = next((h for h in self.home[index::-1] if h >= 0), 0)
                if not self.found:
                    self._begin(index)
                else:
                    self._add(index, layer, self._mapped(index, self.found[layer]))

    def layers(self) -> list[Layer]:
        """What was found, the Ops of each layer in order."""
        done = []
        for layer in self.found:
            members = sorted(zip(layer.ops, layer.positions, strict=True))
            ops, positions = zip(*members, strict=True)
            done.append(Layer(layer.name, ops, tuple(layer.labels), positions, layer.loop))
        return done

    def _source(self, value: int) -> int:
        made = self.graph.producer[value]
        return -1 if made is None else self.home[made[0]]

    def _leaves(self, value: int) -> frozenset[int]:
        known = self.leaves.get(value)
        return frozenset((value,)) if known is None else known

    def _feeds(self, index: int) -> int:
        """The first layer that reads what an Op leaves, directly or not."""
        waiting, seen = [index], {index}
        while waiting:
            here = waiting.pop(0)
            readers = [r for v in self.graph.ops[here].outputs for r in self.graph.consumers[v]]
            for reader in readers:
                if self.home[reader] >= 0:
                    return self.home[reader]
                if reader not in seen:
                    seen.add(reader)
                    waiting.append(reader)
        return -1

    def _reads_parameter(self, index: int) -> bool:
        values = {leaf for v in self.graph.ops[index].inputs for leaf in self._leaves(v)}
        return any(self.graph.values[v].role == PARAMETER for v in values)

    # Which axes

    def _begin(self, index: int) -> None:
        """A new layer, whose labels are the axes of this Op that index its outputs; those that it
        reduces only if it is a statistic or a loss, of one Value. An equal Op of the same line and
        module, such as another step of a loop, is in the layer of the first."""
        op = self.graph.ops[index]
        key = (op.module, op.line, self.space.call_ids[index])
        again = bool(op.line) and key in self.begun
        if again and not self.apart:
            layer = self.begun[key]
            self._add(index, layer, self.found[layer].positions[0])
            return
        loop = self.begun[key] if again else len(self.found)
        self.begun[key] = loop
        others = [v for v in op.inputs if self.graph.values[v].role != INPUT]
        statistic = len(others) == 1 and not self._reads_parameter(index)
        labels, positions = [], []
        for position, axis in enumerate(self.space.axes(index)):
            hit = self.hits.of(index, position)
            if hit is None:
                continue
            reduced = bool(hit.partial or not hit.left) and not statistic
            if reduced and not self.apart:
                continue
            classes = {axis.group}
            for place, atom in hit.window:
                classes.add(self.space.atoms.value_classes[op.inputs[place]][atom])
            labels.append(Label(axis.name, axis.extent, axis.group, frozenset(classes), reduced))
            positions.append(position)
        self.found.append(_Growing(op.name, labels, loop))
        self._add(index, len(self.found) - 1, tuple(positions))

    def _widen(self, index: int, layer: _Growing) -> None:
        """Labels of windows are also the axes of the gradient of what these read: it may be of
        classes of its own, since nothing ties it to the Value."""
        first = layer.ops[0]
        op = self.graph.ops[index]
        if op.forward != first:
            return
        dims, classes = self.space.atoms.dims, self.space.atoms.value_classes
        for number, label in enumerate(layer.labels):
            hit = self.hits.of(first, layer.positions[0][number])
            window = () if hit is None else hit.window
            read = [(self.graph.ops[first].inputs[place], atom) for place, atom in window]
            more = {classes[v][a] for x, a in read for v in op.outputs if dims[v] == dims[x]}
            if not more <= label.classes:
                layer.labels[number] = replace(label, classes=label.classes | more)

    def _add(self, index: int, layer: int, positions: tuple[int, ...]) -> None:
        self.home[index] = layer
        growing = self.found[layer]
        growing.ops.append(index)
        growing.positions.append(positions)
        op = self.graph.ops[index]
        for label, position in enumerate(positions):
            hit = None if position == UNMAPPED else self.hits.of(index, position)
            if hit is None:
                continue
            marked = [(op.inputs[place], atom) for place, atom in hit.cut]
            marked += [(op.outputs[place], atom) for place, atom in hit.left]
            for value, atom in marked:
                growing.marks.setdefault(value, {}).setdefault(atom, label)
        if op.phase == FORWARD:
            for value in op.inputs:
                self._mark_back(value, growing)

    def _mark_back(self, value: int, growing: _Growing) -> None:
        """Labels go back through what prepares a parameter to the parameter itself: backward Ops
        may read that, and a square one has two axes of one class."""
        made = self.graph.producer[value]
        marks = growing.marks.get(value)
        if made is None or marks is None or self.home[made[0]] >= 0 or value not in self.leaves:
            return
        index, place = made
        for position in range(len(self.space.axes(index))):
            hit = self.hits.of(index, position)
            if hit is None:
                continue
            found = {marks[atom] for k, atom in hit.left if k == place and atom in marks}
            if len(found) == 1:
                for k, atom in hit.cut:
                    before = growing.marks.setdefault(self.graph.ops[index].inputs[k], {})
                    before.setdefault(atom, min(found))
        for before_value in self.graph.ops[index].inputs:
            self._mark_back(before_value, growing)

    def _joining(self, index: int, layer: _Growing) -> tuple[int, ...] | None:
        """The axes of a forward Op that are the labels of a layer, if it can be cut as what it
        reads of the layer is: along every labelled atom. With a parameter it must neither reduce
        along these nor have other axes of its own: then it is a layer."""
        positions = self._mapped(index, layer)
        op = self.graph.ops[index]
        hits = [None if p == UNMAPPED else self.hits.of(index, p) for p in positions]
        for place, value in enumerate(op.inputs):
            for atom, label in layer.marks.get(value, {}).items():
                hit = hits[label]
                if self._source(value) >= 0 and (hit is None or (place, atom) not in hit.cut):
                    return None
        if self._reads_parameter(index):
            free = (k for k in range(len(self.space.axes(index))) if k not in positions)
            also = (self.hits.of(index, k) for k in free)
            if any(hit is not None and hit.partial for hit in hits) or any(
                h and h.left for h in also
            ):
                return None
        return positions

    def _mapped(self, index: int, layer: _Growing) -> tuple[int, ...]:
        """For every label the axis of an Op that it is, or UNMAPPED."""
        axes = self.space.axes(index)
        taken: set[int] = set()
        found = []
        for label, meant in enumerate(layer.labels):
            able = [
                k
                for k, axis in enumerate(axes)
                if axis.group in meant.classes and k not in taken and self.hits.of(index, k)
            ]
            own = [k for k in able if axes[k].group == meant.own] or able
            best = UNMAPPED
            if len(own) == 1:
                best = own[0]
            elif own:
                best = max(own, key=lambda k: (self._linked(index, k, label, layer), -k))
            taken.add(best)
            found.append(best)
        return tuple(found)

    def _linked(self, index: int, position: int, label: int, layer: _Growing) -> int:
        """How many atoms that the label has already an axis cuts, less those of other labels."""
        hit = self.hits.of(index, position)
        assert hit is not None
        op = self.graph.ops[index]
        touched = [(op.inputs[place], atom) for place, atom in hit.cut]
        touched += [(op.outputs[place], atom) for place, atom in hit.left]
        marks = [layer.marks.get(value, {}).get(atom) for value, atom in touched]
        return sum(1 if mark == label else -1 for mark in marks if mark is not None)
