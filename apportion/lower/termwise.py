"""Ops that are computed term by term: linear ones whose inputs are partial sums.

Data parallelism leaves the gradient of a weight that is used twice as two partial sums which are
then added. Reducing both and adding the results moves twice the bytes of adding first and reducing
once. So an uncut linear Op, there on every device that holds a term of its inputs, is computed on
those terms where they are, and its result is partial like them. It is for lowering to see: the
Choice says the same either way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush

from apportion.describe import find_description, full
from apportion.graph import Graph, Op, Ref
from apportion.split import Choice, Layout, Space, Split, Strategy

LINEAR = frozenset(
    f"aten.{name}"
    for name in (
        "neg.default",
        "clone.default",
        "mul.Scalar",
        "div.Scalar",
        "add.Tensor",
        "sub.Tensor",
    )
)

Devices = tuple[int, ...]


def termwise(space: Space, strategy: Strategy, splits: Sequence[Split]) -> dict[int, Devices]:
    """The Ops to compute term by term, each with the device of every term."""
    return Terms(space, strategy.choices, strategy.layouts, splits).settled()


class Terms:
    """Which Ops could be computed term by term, as far as what they read says.

    candidates  those Ops, each with the device of every term
    at          Values that are left as whole terms, each with the device of every term
    leaving     Ops that are candidates, or leave such Values
    """

    def __init__(
        self,
        space: Space,
        choices: Sequence[Choice],
        layouts: Mapping[int, Layout],
        splits: Sequence[Split],
    ) -> None:
        self.space = space
        self.layouts = layouts
        graph = space.graph
        self.kept: set[int | None] = {after for _, after in graph.state}
        self.kept.add(graph.loss)
        self.linear = [is_linear(op) for op in graph.ops]
        self.candidates: dict[int, Devices] = {}
        self.at: dict[int, Devices] = {}
        self.leaving: set[int] = set()
        self._fed = [
            op.inputs[0] if linear and op.inputs else -1
            for op, linear in zip(graph.ops, self.linear, strict=True)
        ]
        self._orders: dict[int, tuple[Split, list[list[int] | None]]] = {}
        self._before: list[tuple[int, Devices | None, dict[int, Devices]]] = []
        for op in range(len(graph.ops)):
            self._look(op, choices[op], splits[op])

    def update(
        self, ops: Iterable[int], choices: Sequence[Choice], splits: Sequence[Split]
    ) -> bool:
        """Looks again at Ops whose Choices have changed, and at what follows from them; whether
        anything is different now."""
        graph, leaving, fed, at = self.space.graph, self.leaving, self._fed, self.at
        self._before = []
        waiting = sorted(
            {op for op in ops if op in leaving or fed[op] in at or "sum" in splits[op].reducers}
        )
        different = False
        while waiting:
            op = heappop(waiting)
            was = self.candidates.get(op)
            left = self._look(op, choices[op], splits[op])
            different = different or left or was != self.candidates.get(op)
            if left:
                for value in graph.ops[op].outputs:
                    for reader in graph.consumers[value]:
                        if reader not in waiting:
                            heappush(waiting, reader)
        return different

    def undo(self) -> None:
        """As it was before the last update."""
        for op, devices, left in reversed(self._before):
            self._leave(op, devices, left)
        self._before = []

    def settled(self) -> dict[int, Devices]:
        """The Ops that are computed term by term: all readers of a Value, or none."""
        if not self.candidates:
            return {}
        return _all_or_none(self.space.graph, dict(self.candidates), dict(self.at))

    def _look(self, index: int, choice: Choice, split: Split) -> bool:
        """Looks at one Op; whether what it leaves has changed."""
        op = self.space.graph.ops[index]
        devices = self._shared_terms(op, choice, split) if self._fed[index] in self.at else None
        left: dict[int, Devices] = {}
        if devices is not None:
            left = dict.fromkeys(op.outputs, devices)
        elif "sum" in split.reducers and self.kept.isdisjoint(op.outputs):
            left = self._left_terms(op, choice, split)
        if not left and index not in self.leaving:
            return False
        before = {v: self.at[v] for v in op.outputs if v in self.at}
        self._before.append((index, self.candidates.get(index), before))
        self._leave(index, devices, left)
        return left != before

    def _leave(self, index: int, devices: Devices | None, left: dict[int, Devices]) -> None:
        """Whether an Op is a candidate, and what it leaves as terms."""
        for value in self.space.graph.ops[index].outputs:
            self.at.pop(value, None)
        self.at.update(left)
        if devices is None:
            self.candidates.pop(index, None)
        else:
            self.candidates[index] = devices
        if left:
            self.leaving.add(index)
        else:
            self.leaving.discard(index)

    def _left_terms(self, op: Op, choice: Choice, split: Split) -> dict[int, Devices]:
        """The Values that an Op leaves as whole terms, one on each of several devices."""
        found: dict[int, Devices] = {}
        devices = choice.devices
        if not 1 < len(set(devices)) == len(devices) == len(split.parts):
            return found
        for value, order in zip(op.outputs, self._orders_of(op, split), strict=True):
            if order and value not in self.layouts:
                found[value] = tuple([devices[k] for k in order])
        return found

    def _orders_of(self, op: Op, split: Split) -> list[list[int] | None]:
        """For each output of an Op its parts by the term that they leave; none unless each leaves
        another one, of all of it."""
        known = self._orders.get(id(split))
        if known is None:
            found = [self._order(value, k, split) for k, value in enumerate(op.outputs)]
            known = self._orders[id(split)] = split, found
        return known[1]

    def _order(self, value: int, position: int, split: Split) -> list[int] | None:
        terms = [part.terms[position] for part in split.parts]
        order = sorted(range(len(terms)), key=lambda k: terms[k])
        whole = full(self.space.factors(value))
        single = split.reducers[position] == "sum" and split.terms[position] == len(terms)
        if not single or [terms[k] for k in order] != list(range(len(terms))):
            return None
        return order if all(part.outputs[position] == whole for part in split.parts) else None

    def _shared_terms(self, op: Op, choice: Choice, split: Split) -> Devices | None:
        """The devices of the terms that all inputs of a linear Op have in common; none for an Op
        that reads a piece of one only (a slice), as it would be given all of the term."""
        homes = {self.at.get(v) for v in op.inputs}
        if len(homes) != 1 or choice.count != 1:
            return None
        (devices,) = homes
        if devices is None or set(devices) != set(choice.devices):
            return None
        if any(v in self.layouts for v in op.outputs):
            return None
        read = split.parts[0].inputs
        whole = all(
            box == full(self.space.factors(v)) for v, box in zip(op.inputs, read, strict=True)
        )
        return devices if whole else None


def is_linear(op: Op) -> bool:
    """Whether an Op applied to terms leaves the terms of its result."""
    description = find_description(op.kind)
    if description is None:
        return False
    if op.kind in ("aten.add.Tensor", "aten.sub.Tensor"):
        return isinstance(op.args[0], Ref) and isinstance(op.args[1], Ref)
    return op.kind in LINEAR or description.alias


def _all_or_none(
    graph: Graph, found: dict[int, Devices], at: dict[int, Devices]
) -> dict[int, Devices]:
    """A Value is reduced at once if one of its readers needs it whole: then none reads its
    terms."""
    changed = True
    while changed:
        changed = False
        for index in list(found):
            op = graph.ops[index]
            if any(
                at.get(v) != found[index] or any(r not in found for r in graph.consumers[v])
                for v in op.inputs
            ):
                del found[index]
                for value in op.outputs:
                    at.pop(value, None)
                changed = True
    return found
