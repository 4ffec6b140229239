"""layers: the Ops of a step in layers, the units that optcnn decides.

In: a Space. Out: Layers, each with the axes along which all of its Ops can be cut.

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

from dataclasses import dataclass, field, replace

from apportion.graph import BACKWARD, FORWARD, INPUT, PARAMETER, UPDATE, Graph
from apportion.split import AxisEffects, Space

UNMAPPED = -1


@dataclass(frozen=True, slots=True)
class LayerAxis:
    """An axis along which a layer can be cut: one of its labels.

    own      the class of the axis in the layer's first Op
    classes  that class, and those of the windows that are read along it
    reduced  whether the layer's first Op sums over it
    """

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
    labels: tuple[LayerAxis, ...]
    positions: tuple[tuple[int, ...], ...]
    loop: int = 0


def find_layers(space: Space, apart: bool = False) -> tuple[list[Layer], AxisEffects]:
    """Every Op in one layer; layers are in the order of their first Ops."""
    finder = _LayerFinder(space, apart)
    finder.forward()
    finder.backward()
    finder.feeders()
    return finder.layers(), finder.effects


@dataclass
class _OpenLayer:
    """A layer in the making. `marks` has the labels of Values' atoms, {value: {atom: label}}."""

    name: str
    labels: list[LayerAxis]
    loop: int
    ops: list[int] = field(default_factory=list)
    positions: list[tuple[int, ...]] = field(default_factory=list)
    marks: dict[int, dict[int, int]] = field(default_factory=dict)


class _LayerFinder:
    def __init__(self, space: Space, apart: bool) -> None:
        self.space = space
        self.apart = apart
        self.graph: Graph = space.graph
        self.effects = AxisEffects(space)
        self.found: list[_OpenLayer] = []
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
            elif op.phase == UPDATE and op.parameter is not None:
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
            effect = self.effects.of(index, position)
            if effect is None:
                continue
            reduced = (effect.is_partial or not effect.written) and not statistic
            if reduced and not self.apart:
                continue
            classes = {axis.group}
            for place, atom in effect.windows:
                classes.add(self.space.atoms.value_classes[op.inputs[place]][atom])
            labels.append(
                LayerAxis(axis.name, axis.extent, axis.group, frozenset(classes), reduced)
            )
            positions.append(position)
        self.found.append(_OpenLayer(op.name, labels, loop))
        self._add(index, len(self.found) - 1, tuple(positions))

    def _widen(self, index: int, layer: _OpenLayer) -> None:
        """Labels of windows are also the axes of the gradient of what these read: it may be of
        classes of its own, since nothing ties it to the Value."""
        first = layer.ops[0]
        op = self.graph.ops[index]
        if op.forward != first:
            return
        dims, classes = self.space.atoms.dims, self.space.atoms.value_classes
        for number, label in enumerate(layer.labels):
            effect = self.effects.of(first, layer.positions[0][number])
            windows = () if effect is None else effect.windows
            read = [(self.graph.ops[first].inputs[place], atom) for place, atom in windows]
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
            effect = None if position == UNMAPPED else self.effects.of(index, position)
            for value, atom in [] if effect is None else effect.atoms_cut(op):
                growing.marks.setdefault(value, {}).setdefault(atom, label)
        if op.phase == FORWARD:
            for value in op.inputs:
                self._mark_back(value, growing)

    def _mark_back(self, value: int, growing: _OpenLayer) -> None:
        """Labels go back through what prepares a parameter to the parameter itself: backward Ops
        may read that, and a square one has two axes of one class."""
        made = self.graph.producer[value]
        marks = growing.marks.get(value)
        if made is None or marks is None or self.home[made[0]] >= 0 or value not in self.leaves:
            return
        index, place = made
        for position in range(len(self.space.axes(index))):
            effect = self.effects.of(index, position)
            if effect is None:
                continue
            found = {marks[atom] for k, atom in effect.written if k == place and atom in marks}
            if len(found) == 1:
                for k, atom in effect.aligned:
                    before = growing.marks.setdefault(self.graph.ops[index].inputs[k], {})
                    before.setdefault(atom, min(found))
        for before_value in self.graph.ops[index].inputs:
            self._mark_back(before_value, growing)

    def _joining(self, index: int, layer: _OpenLayer) -> tuple[int, ...] | None:
        """The axes of a forward Op that are the labels of a layer, if it can be cut as what it
        reads of the layer is: along every labelled atom. With a parameter it must neither reduce
        along these nor have other axes of its own: then it is a layer."""
        positions = self._mapped(index, layer)
        op = self.graph.ops[index]
        effects = [None if p == UNMAPPED else self.effects.of(index, p) for p in positions]
        for place, value in enumerate(op.inputs):
            for atom, label in layer.marks.get(value, {}).items():
                effect = effects[label]
                aligned = effect is not None and (place, atom) in effect.aligned
                if self._source(value) >= 0 and not aligned:
                    return None
        if self._reads_parameter(index):
            free = (k for k in range(len(self.space.axes(index))) if k not in positions)
            others = [self.effects.of(index, k) for k in free]
            if any(effect is not None and effect.is_partial for effect in effects):
                return None
            if any(effect is not None and effect.written for effect in others):
                return None
        return positions

    def _mapped(self, index: int, layer: _OpenLayer) -> tuple[int, ...]:
        """For every label the axis of an Op that it is, or UNMAPPED."""
        axes = self.space.axes(index)
        taken: set[int] = set()
        found = []
        for label, meant in enumerate(layer.labels):
            able = [
                k
                for k, axis in enumerate(axes)
                if axis.group in meant.classes and k not in taken and self.effects.of(index, k)
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

    def _linked(self, index: int, position: int, label: int, layer: _OpenLayer) -> int:
        """How many atoms that the label has already an axis cuts, less those of other labels."""
        effect = self.effects.of(index, position)
        assert effect is not None
        cut = effect.atoms_cut(self.graph.ops[index])
        marks = [layer.marks.get(value, {}).get(atom) for value, atom in cut]
        return sum(1 if mark == label else -1 for mark in marks if mark is not None)
