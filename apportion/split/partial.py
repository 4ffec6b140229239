"""PartialOutput: what cut axes leave of an output, by the root of the output's expression.

A step of derive.py in split/. The root is a sum of terms, each a number times something. An axis
that is reduced there leaves partial values; a term that does not mention the axis would count once
per part, so that term's inputs are zeroed on all parts but the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from apportion.describe import (
    Access,
    Affine,
    Apply,
    Const,
    Expr,
    Gather,
    IllegalCut,
    Opaque,
    Output,
    Position,
    Quotient,
    Reduce,
    accesses_of,
)


@dataclass(frozen=True, slots=True)
class PartialOutput:
    """What the cut axes leave of one output.

    partial  cut axes that are reduced at the root
    reducer  of the partial values; None if the output is not partial
    once     inputs to be zeroed on all but the first partial value
    """

    partial: tuple[str, ...]
    reducer: str | None
    once: tuple[int, ...]


def terms_of(expr: Expr, factor: float = 1.0) -> Iterator[tuple[float, Expr]]:
    """The terms of a sum at the root, each with its numeric factor taken out."""
    if isinstance(expr, Apply) and expr.name == "+":
        for arg in expr.args:
            yield from terms_of(arg, factor)
    elif isinstance(expr, Apply) and expr.name in "*/" and len(expr.args) == 2:
        left, right = expr.args
        if _number(right):
            value = float(right.value)  # type: ignore[attr-defined]
            if expr.name == "/" and value == 0:
                yield factor, expr
            else:
                yield from terms_of(left, factor * value if expr.name == "*" else factor / value)
        elif _number(left) and expr.name == "*":
            yield from terms_of(right, factor * float(left.value))  # type: ignore[attr-defined]
        else:
            yield factor, expr
    else:
        yield factor, expr


def _number(expr: Expr) -> bool:
    return (
        isinstance(expr, Const)
        and isinstance(expr.value, int | float)
        and not isinstance(expr.value, bool)
    )


def partial_output(output: Output, cut: dict[str, int], kind: str) -> PartialOutput:
    """What the cut axes (name -> parts) leave of an output; raises Refused if one cannot be cut."""
    active = {name for name, parts in cut.items() if parts > 1}
    _check_opaque(output.body, active, kind)
    indexing = {name for dim in output.dims for name in dim}
    terms = [term for _, term in terms_of(output.body)]
    partial: list[str] = []
    for name in cut:
        if name in active - indexing and any(mentions(term, name) for term in terms):
            partial.append(name)
    if not partial:
        return PartialOutput((), None, ())
    reduced = [t for t in terms if any(mentions(t, name) for name in partial)]
    reducers = set()
    for term in reduced:
        if not isinstance(term, Reduce) or not set(partial) <= set(term.axes):
            raise IllegalCut(f"{kind}: axis {partial[0]} is reduced inside, not at the root")
        reducers.add(term.reducer)
    others = [t for t in terms if t not in reduced]
    if len(reducers) > 1 or (len(terms) > 1 and reducers != {"sum"}):
        raise IllegalCut(f"{kind}: reductions at the root do not combine")
    return PartialOutput(
        tuple(partial), reducers.pop(), _inputs_counted_once(output.body, reduced, others, kind)
    )


def _inputs_counted_once(
    body: Expr, reduced: list[Expr], others: list[Expr], kind: str
) -> tuple[int, ...]:
    elsewhere = {a.tensor for term in reduced for a in accesses_of(term)}
    found = []
    for term in others:
        factors = list(_factors(term))
        own = [a.tensor for a in factors if isinstance(a, Access) and a.tensor not in elsewhere]
        if not own:
            raise IllegalCut(f"{kind}: a term beside the reduction cannot be counted once")
        found.append(own[0])
    return tuple(found)


def _factors(expr: Expr) -> Iterator[Expr]:
    if isinstance(expr, Apply) and expr.name == "*":
        for arg in expr.args:
            yield from _factors(arg)
    else:
        yield expr


def mentions(expr: Expr, name: str) -> bool:
    """Whether an axis occurs anywhere inside an expression."""
    if isinstance(expr, Reduce):
        return name in expr.axes or mentions(expr.body, name)
    if isinstance(expr, Apply):
        return any(mentions(arg, name) for arg in expr.args)
    if isinstance(expr, Opaque):
        return name in expr.axes or any(mentions(arg, name) for arg in expr.args)
    if isinstance(expr, Position):
        return any(n == name for n, _ in expr.form.terms)
    if isinstance(expr, Access):
        return any(_index_mentions(item, name) for index in expr.index for item in index)
    return False


def _index_mentions(item: object, name: str) -> bool:
    if isinstance(item, Affine | Quotient):
        return any(n == name for n, _ in item.terms)
    return isinstance(item, Gather) and mentions(item.source, name)


def _check_opaque(expr: Expr, active: set[str], kind: str) -> None:
    if isinstance(expr, Opaque):
        for name in expr.axes:
            if name in active:
                raise IllegalCut(f"{kind}: axis {name} indexes an opaque result")
    if isinstance(expr, Opaque | Apply):
        for arg in expr.args:
            _check_opaque(arg, active, kind)
    elif isinstance(expr, Reduce):
        _check_opaque(expr.body, active, kind)
