"""Space: every legal way to cut every Op of a Graph. Equal Ops are analysed once (derive.py)."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from apportion.atoms import Atoms, Digits, Rows, divide, find_rows, pattern_of
from apportion.derive import Call, Pad, Part, Split, Study, derive, study_of
from apportion.formula import (
    BadDescription,
    Formula,
    Undescribed,
    bad,
    check_formula,
    evaluate_formula,
    taken,
)
from apportion.graph import Graph, Op
from apportion.interval import Factors
from apportion.opening import open_graph
from apportion.restrict import Refused
from apportion.tdl import lookup, reason

__all__ = ["Axis", "Call", "Pad", "Part", "Space", "Split", "derive"]


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
        graph = self.graph
        self._kinds, firsts = _kinds(graph)
        known = [_formula(graph, graph.ops[first]) for first in firsts]
        self.formulas: tuple[Formula | None, ...] = tuple([known[k][0] for k in self._kinds])
        self.undescribed: dict[str, str] = {}
        if any(why for _, why in known):
            named = zip(graph.ops, self._kinds, strict=True)
            self.undescribed = {op.kind: known[k][1] for op, k in named if known[k][1]}
        patterns = [
            pattern_of(formula, *_shapes(graph, graph.ops[first]))
            for first, (formula, _) in zip(firsts, known, strict=True)
        ]
        self._rows = find_rows(graph, self._kinds, patterns)
        self._divide(digits)

    def _divide(self, digits: Digits) -> None:
        self.digits = digits
        rows = divide(self._rows, digits) if digits else self._rows
        self.atoms: Atoms = rows.atoms()
        self._distinct, self.call_ids = _calls(self.graph, self._kinds, rows, self.atoms)
        self.calls: tuple[Call, ...] = tuple([self._distinct[k] for k in self.call_ids])
        alike = _numbered([_seen(call) for call in self._distinct])
        self.alike: tuple[int, ...] = tuple([alike[k] for k in self.call_ids])
        self._axes: dict[tuple[int, int], tuple[Axis, ...]] = {}
        self._own_axes = rows.ops
        self._axis = lru_cache(maxsize=None)(Axis)
        self._names: list[tuple[list[str], list[int]] | None] = [None] * len(self._distinct)
        self._studies: list[Study | None] = [None] * len(self._distinct)
        self._legal: dict[int, tuple[bool, ...]] = {}

    @property
    def number_of_calls(self) -> int:
        """How many distinct Calls there are; `call_ids` numbers them from 0."""
        return len(self._distinct)

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
        key = self.call_ids[op], self._own_axes[op]
        found = self._axes.get(key)
        if found is None:
            names = self._names[key[0]]
            if names is None:
                names = self._names[key[0]] = _axis_names(self.calls[op])
            found = self._axes[key] = tuple(map(self._axis, *names, self.groups(op)))
        return found

    def groups(self, op: int) -> tuple[int, ...]:
        """The classes of the atoms of all axes of an Op."""
        return tuple([c for own in self.atoms.axis_classes[op].values() for c in own])

    def split(self, op: int, parts: Sequence[int]) -> Split:
        """The Split of an Op for the given parts per axis; raises Refused, with the reason, if it
        is not legal."""
        call = self.call_ids[op]
        study = self._studies[call]
        if study is None:
            study = self._studies[call] = study_of(self.calls[op])
        return study.split(tuple(parts))

    def cuttable(self, op: int) -> tuple[bool, ...]:
        """For each axis of an Op whether it can be cut in two by itself."""
        alike = self.alike[op]
        found = self._legal.get(alike)
        if found is None:
            found = self._legal[alike] = tuple(
                self._can_cut(op, position) for position in range(len(self.axes(op)))
            )
        return found

    def _can_cut(self, op: int, position: int) -> bool:
        axes = self.axes(op)
        if axes[position].extent < 2:
            return False
        try:
            self.split(op, [2 if k == position else 1 for k in range(len(axes))])
        except Refused:
            return False
        return True


def _kinds(graph: Graph) -> tuple[list[int], list[int]]:
    """Per Op a number, equal for equal operators, arguments and shapes; and the first Op of each.

    True, 1 and 1.0 are equal as keys and not as arguments, hence the types.
    """
    shapes: dict[Any, int] = {}
    shape = [shapes.setdefault(value.shape, len(shapes)) for value in graph.values]
    known: dict[tuple[Any, ...], int] = {}
    firsts: list[int] = []
    found: list[int] = []
    for index, op in enumerate(graph.ops):
        args = op.args
        sizes = (*[shape[v] for v in op.inputs], -1, *[shape[v] for v in op.outputs])
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
    description = lookup(op.kind)
    if description is None:
        return None, reason(op.kind) or "no description"
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
        raise bad(description, f"that fails: {error}") from error


def _calls(
    graph: Graph, kinds: Sequence[int], rows: Rows, atoms: Atoms
) -> tuple[tuple[Call, ...], tuple[int, ...]]:
    """The distinct Calls, and for every Op the number of its own."""
    dims = _numbered([tuple([rows.factors[r] for r in key]) for key in rows.dims])
    axes = _numbered([tuple([rows.factors[r] for r in key]) for _, key in rows.axes])
    value = [dims[k] for k in rows.values]
    known: dict[tuple[int, ...], int] = {}
    distinct: dict[tuple[Any, ...], int] = {}
    found = []
    for index, op in enumerate(graph.ops):
        own = [value[v] for v in op.inputs]
        key = (kinds[index], axes[rows.ops[index]], *own, *[value[v] for v in op.outputs])
        number = known.get(key)
        if number is None:
            call = _call(graph, op, atoms, index)
            exact = (call, *map(type, call.args))
            number = known[key] = distinct.setdefault(exact, len(distinct))
        found.append(number)
    return tuple(call for call, *_ in distinct), tuple(found)


def _seen(call: Call) -> tuple[Any, ...]:
    """What the description of a call sees of it."""
    description = lookup(call.kind)
    args = call.args if description is None else taken(description, call.args)
    return call.kind, args, call.inputs, call.outputs, call.axes, call.body


def _axis_names(call: Call) -> tuple[list[str], list[int]]:
    """Names and extents of the atoms of all axes."""
    names: list[str] = []
    for name, factors in call.axes:
        names += [name] if len(factors) == 1 else [f"{name}.{k}" for k in range(len(factors))]
    return names, [factor for _, factors in call.axes for factor in factors]


def _numbered(items: Sequence[Any]) -> list[int]:
    """Equal numbers for equal items."""
    known: dict[Any, int] = {}
    return [known.setdefault(item, len(known)) for item in items]


def _call(graph: Graph, op: Op, atoms: Atoms, index: int) -> Call:
    return Call(
        op.kind,
        op.args,
        tuple(atoms.dims[v] for v in op.inputs),
        tuple(atoms.dims[v] for v in op.outputs),
        tuple(atoms.axes[index].items()),
        None if op.body is None else graph.bodies[op.body],
    )
