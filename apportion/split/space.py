"""Space: every legal way to cut every Op of a Graph.

What split/ offers to searches: a Graph goes in, and Splits come out when they are asked for. Equal
Ops are analysed once (derive.py); atoms.py finds the atoms of the Graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any

from apportion.describe import (
    BadDescription,
    Factors,
    Formula,
    IllegalCut,
    Undescribed,
    arguments_read,
    bad_description,
    check_formula,
    evaluate_formula,
    find_description,
    reason_unsplit,
)
from apportion.describe import ops as ops  # registers the descriptions of operators
from apportion.graph import Graph, Op
from apportion.split.atoms import (
    AtomRows,
    Atoms,
    Digits,
    DimRelations,
    dim_relations,
    divide,
    find_rows,
)
from apportion.split.derive import CallSplits, call_splits
from apportion.split.open_composites import open_graph
from apportion.split.part import Split
from apportion.split.regions import CallSignature


@dataclass(frozen=True, slots=True)
class Axis:
    """One atom of an axis of an Op: what a Choice cuts. `group` is its class in the Graph."""

    name: str
    extent: int
    group: int


class Space:
    """Every way to cut every Op of a Graph. Equal Ops are analysed once.

    `digits` divides classes of atoms further than the Graph's views do, for cuts that commute.
    `opening` names composite Ops that are opened, so that they can be cut inside: `graph` is the
    Graph with these opened, `source` the one that was given, `origins` for each Op of the former
    the one of the latter that it comes from.

    `call_ids` numbers the distinct `calls` of the Ops. Numbers in `alike` are equal also for calls
    that differ only in arguments that their description does not take: their Splits differ in the
    parts' arguments alone.
    """

    def __init__(self, graph: Graph, digits: Digits = (), opening: tuple[int, ...] = ()) -> None:
        self.source = graph
        self.opening = opening
        self.graph, self.origins = open_graph(graph, opening)
        self._kinds: list[int] = []
        self._described: list[tuple[Formula | None, str]] = []
        self._relations: list[DimRelations] = []
        self._describe(range(len(self.graph.ops)))
        self._divide(digits)

    def opened(self, opening: tuple[int, ...]) -> Space:
        """The Space of the Graph with these composites opened. What is known of the other Ops
        is used again."""
        if self.opening:
            return Space(self.source, (), opening)
        if not opening:
            return self.with_digits(())
        made = copy(self)
        for name in ("kinds", "_rows"):
            made.__dict__.pop(name, None)
        made.opening = opening
        made.graph, made.origins = open_graph(self.source, opening)
        made._kinds = [self._kinds[origin] for origin in made.origins]
        made._described, made._relations = list(self._described), list(self._relations)
        several = frozenset(opening)
        made._describe([n for n, origin in enumerate(made.origins) if origin in several])
        made._divide(())
        return made

    def _describe(self, ops: Sequence[int]) -> None:
        """Finds the formulas of these Ops, beside what is known already."""
        graph = self.graph
        kinds, firsts = _kinds(graph, ops)
        known = [_formula(graph, graph.ops[first]) for first in firsts]
        more = len(self._described)
        self._described += known
        self._relations += [
            dim_relations(formula, *_shapes(graph, graph.ops[first]))
            for first, (formula, _) in zip(firsts, known, strict=True)
        ]
        if not self._kinds:
            self._kinds = kinds
        else:
            for index, kind in zip(ops, kinds, strict=True):
                self._kinds[index] = more + kind
        described = self._described
        self.formulas: tuple[Formula | None, ...] = tuple([described[k][0] for k in self._kinds])
        self.undescribed: dict[str, str] = {}
        if any(why for _, why in described):
            named = zip(graph.ops, self._kinds, strict=True)
            self.undescribed = {op.kind: described[k][1] for op, k in named if described[k][1]}

    def _divide(self, digits: Digits) -> None:
        self.digits = digits
        known = ("_divided", "atoms", "_distinct_calls", "call_ids", "calls", "alike", "classes")
        for name in known:
            self.__dict__.pop(name, None)
        self._axes: dict[tuple[int, int], tuple[Axis, ...]] = {}
        self._groups: dict[int, tuple[int, ...]] = {}
        self._axis = lru_cache(maxsize=None)(Axis)
        self._names: dict[int, tuple[list[str], list[int]]] = {}
        self._splits: dict[int, CallSplits] = {}
        self._legal: dict[int, tuple[bool, ...]] = {}
        if digits:
            self._divided = divide(self._rows, digits)

    # Found when first asked for: a search may want no more of a Graph than its opened one.

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """For every Op a number, equal for Ops of equal operators, shapes and arguments that their
        description takes."""
        known: dict[object, int] = {}
        firsts: dict[int, int] = {}
        for op, kind in enumerate(self._kinds):
            firsts.setdefault(kind, op)
        number = {
            kind: known.setdefault(_described_op(self.graph, self.graph.ops[op]), len(known))
            for kind, op in firsts.items()
        }
        return tuple([number[kind] for kind in self._kinds])

    @cached_property
    def _rows(self) -> AtomRows:
        return find_rows(self.graph, self._kinds, self._relations)

    @cached_property
    def _divided(self) -> AtomRows:
        return self._rows

    @cached_property
    def atoms(self) -> Atoms:
        return self._divided.atoms()

    @cached_property
    def _distinct_calls(self) -> tuple[tuple[CallSignature, ...], tuple[int, ...]]:
        return _calls(self.graph, self._kinds, self._divided, self.atoms)

    @cached_property
    def call_ids(self) -> tuple[int, ...]:
        return self._distinct_calls[1]

    @cached_property
    def calls(self) -> tuple[CallSignature, ...]:
        distinct, ids = self._distinct_calls
        return tuple([distinct[k] for k in ids])

    @cached_property
    def alike(self) -> tuple[int, ...]:
        distinct, ids = self._distinct_calls
        alike = _numbered([_described_call(call) for call in distinct])
        return tuple([alike[k] for k in ids])

    @cached_property
    def classes(self) -> int:
        """The number of classes of atoms."""
        return 1 + max(chain.from_iterable(self._divided.classes.values()), default=-1)

    @property
    def number_of_calls(self) -> int:
        """How many distinct CallSignatures there are; `call_ids` numbers them from 0."""
        return len(self._distinct_calls[0])

    def with_digits(self, digits: Digits) -> Space:
        """The same Graph, opened alike, its atoms divided so."""
        if digits == self.digits:
            return self
        made = copy(self)
        made._divide(digits)
        return made

    def factors(self, value: int) -> Factors:
        """Atoms of a Value, all dimensions in a row."""
        return tuple(f for dim in self.atoms.dims[value] for f in dim)

    def axes(self, op: int) -> tuple[Axis, ...]:
        """The atoms of all axes of an Op, in the order in which a Choice gives their parts."""
        key = self.call_ids[op], self._divided.ops[op]
        found = self._axes.get(key)
        if found is None:
            names = self._names.get(key[0])
            if names is None:
                names = self._names[key[0]] = _axis_names(self.calls[op])
            found = self._axes[key] = tuple(map(self._axis, *names, self.groups(op)))
        return found

    def groups(self, op: int) -> tuple[int, ...]:
        """The classes of the atoms of all axes of an Op."""
        own = self._divided.ops[op]
        found = self._groups.get(own)
        if found is None:
            classes = self.atoms.axis_classes[op].values()
            found = self._groups[own] = tuple(chain.from_iterable(classes))
        return found

    def split(self, op: int, parts: Sequence[int]) -> Split:
        """The Split of an Op for the given parts per axis; raises Refused, with the reason, if it
        is not legal."""
        call = self.call_ids[op]
        splits = self._splits.get(call)
        if splits is None:
            splits = self._splits[call] = call_splits(self.calls[op])
        return splits.split(tuple(parts))

    def cuttable(self, op: int) -> tuple[bool, ...]:
        """For each axis of an Op whether it can be cut in two by itself."""
        alike = self.alike[op]
        found = self._legal.get(alike)
        if found is None:
            found = self._legal[alike] = tuple(
                self._can_cut(op, position) for position in range(len(self.axes(op)))
            )
        return found

    def allows(self, op: int, parts: Sequence[int]) -> bool:
        """Whether `split` does not refuse."""
        try:
            self.split(op, parts)
        except IllegalCut:
            return False
        return True

    def _can_cut(self, op: int, position: int) -> bool:
        axes = self.axes(op)
        parts = [2 if k == position else 1 for k in range(len(axes))]
        return axes[position].extent >= 2 and self.allows(op, parts)


def _kinds(graph: Graph, ops: Sequence[int]) -> tuple[list[int], list[int]]:
    """Per Op a number, equal for equal operators, arguments and shapes; and the first Op of each.

    True, 1 and 1.0 are equal as keys and not as arguments, hence the types.
    """
    shapes: dict[Any, int] = {}
    of = [shapes.setdefault(value.shape, len(shapes)) for value in graph.values].__getitem__
    known: dict[tuple[Any, ...], int] = {}
    firsts: list[int] = []
    found: list[int] = []
    for index in ops:
        op = graph.ops[index]
        args = op.args
        sizes = (*map(of, op.inputs), -1, *map(of, op.outputs))
        key = (op.kind, args, (*map(type, args),), op.body, sizes)
        number = known.setdefault(key, len(firsts))
        if number == len(firsts):
            firsts.append(index)
        found.append(number)
    return found, firsts


def _shapes(graph: Graph, op: Op) -> tuple[list[Any], list[Any]]:
    inputs = [graph.values[v].shape for v in op.inputs]
    return inputs, [graph.values[v].shape for v in op.outputs]


def _formula(graph: Graph, op: Op) -> tuple[Formula | None, str]:
    description = find_description(op.kind)
    if description is None:
        return None, reason_unsplit(op.kind) or "no description"
    inputs, outputs = _shapes(graph, op)
    if any(shape is None for shape in (*inputs, *outputs)):
        return None, "a shape is unknown"
    body = None if op.body is None else graph.bodies[op.body]
    try:
        formula = evaluate_formula(description, op.args, inputs, outputs, body)
        check_formula(description, formula, inputs, outputs)
        return formula, ""
    except Undescribed as why:
        return None, str(why)
    except BadDescription:
        raise
    except Exception as error:
        raise bad_description(description, f"that fails: {error}") from error


def _calls(
    graph: Graph, kinds: Sequence[int], rows: AtomRows, atoms: Atoms
) -> tuple[tuple[CallSignature, ...], tuple[int, ...]]:
    """The distinct CallSignatures, and for every Op the number of its own."""
    dims = _numbered([tuple([rows.factors[r] for r in key]) for key in rows.dims])
    axes = _numbered([tuple([rows.factors[r] for r in key]) for _, key in rows.axes])
    of = [dims[k] for k in rows.values].__getitem__
    known: dict[tuple[int, ...], int] = {}
    distinct: dict[tuple[Any, ...], int] = {}
    found = []
    for index, op in enumerate(graph.ops):
        key = (kinds[index], axes[rows.ops[index]], *map(of, op.inputs), *map(of, op.outputs))
        number = known.get(key)
        if number is None:
            call = _call(graph, op, atoms, index)
            exact = (call, *map(type, call.args))
            number = known[key] = distinct.setdefault(exact, len(distinct))
        found.append(number)
    return tuple(call for call, *_ in distinct), tuple(found)


def _described_op(graph: Graph, op: Op) -> tuple[Any, ...]:
    """What the description of an Op sees of it, before atoms are known."""
    description = find_description(op.kind)
    args = op.args if description is None else arguments_read(description, op.args)
    inputs, outputs = _shapes(graph, op)
    return op.kind, args, (*map(type, args),), op.body, tuple(inputs), tuple(outputs)


def _described_call(call: CallSignature) -> tuple[Any, ...]:
    """What the description of a call sees of it."""
    description = find_description(call.kind)
    args = call.args if description is None else arguments_read(description, call.args)
    return call.kind, args, call.inputs, call.outputs, call.axes, call.body


def _axis_names(call: CallSignature) -> tuple[list[str], list[int]]:
    """Names and extents of the atoms of all axes."""
    names: list[str] = []
    for name, factors in call.axes:
        names += [name] if len(factors) == 1 else [f"{name}.{k}" for k in range(len(factors))]
    return names, [factor for _, factors in call.axes for factor in factors]


def _numbered(items: Sequence[Any]) -> list[int]:
    """Equal numbers for equal items."""
    known: dict[Any, int] = {}
    return [known.setdefault(item, len(known)) for item in items]


def _call(graph: Graph, op: Op, atoms: Atoms, index: int) -> CallSignature:
    return CallSignature(
        op.kind,
        op.args,
        tuple(atoms.dims[v] for v in op.inputs),
        tuple(atoms.dims[v] for v in op.outputs),
        tuple(atoms.axes[index].items()),
        None if op.body is None else graph.bodies[op.body],
    )
