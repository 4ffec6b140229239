"""Space: every legal way to cut every Op of a Graph. Equal Ops are analysed once (derive.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from apportion.atoms import Atoms, Digits, divide, find_atoms
from apportion.derive import Call, Pad, Part, Split, derive
from apportion.formula import (
    BadDescription,
    Formula,
    Undescribed,
    bad,
    check_formula,
    evaluate_formula,
)
from apportion.graph import Graph, Op
from apportion.interval import Factors
from apportion.opening import opened
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
    Graph with these opened, `source` the one that was given.
    """

    def __init__(self, graph: Graph, digits: Digits = (), opening: tuple[int, ...] = ()) -> None:
        self.source = graph
        self.opening = opening
        self.graph = graph = opened(graph, opening)
        self.digits = digits
        formulas = _formulas(graph)
        self.formulas: tuple[Formula | None, ...] = tuple(f for f, _ in formulas)
        atoms = find_atoms(graph, self.formulas)
        self.atoms: Atoms = divide(atoms, digits) if digits else atoms
        self.undescribed: dict[str, str] = {
            op.kind: why for op, (_, why) in zip(graph.ops, formulas, strict=True) if why
        }
        self.calls: tuple[Call, ...] = tuple(
            _call(graph, op, self.atoms, index) for index, op in enumerate(graph.ops)
        )
        self._axes: list[tuple[Axis, ...] | None] = [None] * len(graph.ops)
        self._splits: dict[tuple[Call, tuple[int, ...]], Split | Refused] = {}
        self._legal: dict[Call, tuple[bool, ...]] = {}

    def with_digits(self, digits: Digits) -> Space:
        """The same Graph, opened alike, its atoms divided so."""
        return self if digits == self.digits else Space(self.source, digits, self.opening)

    def factors(self, value: int) -> Factors:
        """Atoms of a Value, all dimensions in a row."""
        return tuple(f for dim in self.atoms.dims[value] for f in dim)

    def axes(self, op: int) -> tuple[Axis, ...]:
        """The atoms of all axes of an Op, in the order in which a Choice gives their parts."""
        found = self._axes[op]
        if found is None:
            found = self._axes[op] = tuple(
                Axis(name if len(factors) == 1 else f"{name}.{k}", factor, group)
                for name, factors in self.calls[op].axes
                for k, (factor, group) in enumerate(
                    zip(factors, self.atoms.axis_classes[op][name], strict=True)
                )
            )
        return found

    def split(self, op: int, parts: Sequence[int]) -> Split:
        """The Split of an Op for the given parts per axis; raises Refused, with the reason, if it
        is not legal."""
        key = (self.calls[op], tuple(parts))
        found = self._splits.get(key)
        if found is None:
            try:
                found = derive(*key)
            except Refused as refusal:
                found = refusal
            self._splits[key] = found
        if isinstance(found, Refused):
            raise found
        return found

    def cuttable(self, op: int) -> tuple[bool, ...]:
        """For each axis of an Op whether it can be cut in two by itself."""
        call = self.calls[op]
        found = self._legal.get(call)
        if found is None:
            found = self._legal[call] = tuple(
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


def _formulas(graph: Graph) -> list[tuple[Formula | None, str]]:
    known: dict[tuple[Any, ...], tuple[Formula | None, str]] = {}
    found = []
    for op in graph.ops:
        shapes = tuple(graph.values[v].shape for v in (*op.inputs, *op.outputs))
        key = (op.kind, op.args, shapes, op.body)
        if key not in known:
            known[key] = _formula(graph, op)
        found.append(known[key])
    return found


def _formula(graph: Graph, op: Op) -> tuple[Formula | None, str]:
    description = lookup(op.kind)
    if description is None:
        return None, reason(op.kind) or "no description"
    inputs = [graph.values[v].shape for v in op.inputs]
    outputs = [graph.values[v].shape for v in op.outputs]
    if any(shape is None for shape in (*inputs, *outputs)):
        return None, "a shape is unknown"
    body = None if op.body is None else graph.bodies[op.body]
    try:
        formula = evaluate_formula(description, op.args, inputs, outputs, body)  # type: ignore[arg-type]
        check_formula(description, formula, inputs, outputs)  # type: ignore[arg-type]
        return formula, ""
    except Undescribed as why:
        return None, str(why)
    except BadDescription:
        raise
    except Exception as error:
        raise bad(description, f"that fails: {error}") from error


def _call(graph: Graph, op: Op, atoms: Atoms, index: int) -> Call:
    return Call(
        op.kind,
        op.args,
        tuple(atoms.dims[v] for v in op.inputs),
        tuple(atoms.dims[v] for v in op.outputs),
        tuple(atoms.axes[index].items()),
        None if op.body is None else graph.bodies[op.body],
    )
