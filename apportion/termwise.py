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

from apportion.graph import Graph, Op, Ref
from apportion.interval import full
from apportion.splits import Space, Split
from apportion.strategy import Choice, Layout, Strategy
from apportion.tdl import lookup

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
        for op in range(len(graph.ops)):
            self._look(op, choices[op], splits[op])

    def update(
        self, ops: Iterable[int], choices: Sequence[Choice], splits: Sequence[Split]
    ) -> bool:
        """Looks again at Ops whose Choices have changed, and at what follows from them; whether
        anything is different now."""
        graph = self.space.graph
        waiting = sorted({op for op in ops if self._matters(op, splits[op])})
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

    def _matters(self, index: int, split: Split) -> bool:
        """Whether an Op can be computed term by term, or can leave terms, or did."""
        return (
            self.linear[index]
            or "sum" in split.reducers
            or index in self.candidates
            or any(value in self.at for value in self.space.graph.ops[index].outputs)
        )

    def settled(self) -> dict[int, Devices]:
        """The Ops that are computed term by term: all readers of a Value, or none."""
        if not self.candidates:
            return {}
        return _all_or_none(self.space.graph, dict(self.candidates), dict(self.at))

    def _look(self, index: int, choice: Choice, split: Split) -> bool:
        """Looks at one Op; whether what it leaves has changed."""
        op = self.space.graph.ops[index]
        devices = self._shared_terms(op, choice) if self.linear[index] else None
        left: dict[int, Devices] = {}
        if devices is not None:
            self.candidates[index] = devices
            left = dict.fromkeys(op.outputs, devices)
        else:
            self.candidates.pop(index, None)
            if not self.kept.intersection(op.outputs):
                left = self._left_terms(op, choice, split)
        before = {v: self.at[v] for v in op.outputs if v in self.at}
        for value in before:
            del self.at[value]
        self.at |= left
        return left != before

    def _left_terms(self, op: Op, choice: Choice, split: Split) -> dict[int, Devices]:
        """The Values that an Op leaves as whole terms, one on each of several devices."""
        found: dict[int, Devices] = {}
        for position, value in enumerate(op.outputs):
            if split.reducers[position] != "sum" or value in self.layouts or choice.replicas != 1:
                continue
            whole = full(self.space.factors(value))
            terms = [part.terms[position] for part in split.parts]
            if (
                sorted(terms) == list(range(split.terms[position]))
                and all(part.outputs[position] == whole for part in split.parts)
                and len(set(choice.devices)) == len(terms) > 1
            ):
                by_term = dict(zip(terms, choice.devices, strict=True))
                found[value] = tuple(by_term[t] for t in range(len(terms)))
        return found

    def _shared_terms(self, op: Op, choice: Choice) -> Devices | None:
        """The devices of the terms that all inputs of a linear Op have in common."""
        homes = {self.at.get(v) for v in op.inputs}
        if len(homes) != 1 or choice.count != 1:
            return None
        (devices,) = homes
        if devices is None or set(devices) != set(choice.devices):
            return None
        if any(v in self.layouts for v in op.outputs):
            return None
        return devices


def is_linear(op: Op) -> bool:
    """Whether an Op applied to terms leaves the terms of its result."""
    description = lookup(op.kind)
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
