"""Formula: a description evaluated for one call, with the extent of every axis.

What describe/ hands to split/: a Description, arguments and shapes go in, a Formula comes out.
The extents of an output's axes are its shape; the extent of a reduced axis is that of a dimension
it indexes alone.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from apportion.describe.descriptions import Description
from apportion.describe.errors import bad_description
from apportion.describe.interval import Affine, bounds
from apportion.describe.language import (
    Access,
    Apply,
    Expr,
    Gather,
    Opaque,
    Operand,
    Output,
    Position,
    Quotient,
    Reduce,
    evaluate,
)
from apportion.describe.watched_extents import ExtentWatch, WatchedExtent, shape_pattern
from apportion.graph import Arg, Body, substitute

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Formula:
    """The outputs of one call as expressions (None: absent), and the extent of every axis, outputs'
    axes first."""

    outputs: tuple[Output | None, ...]
    extents: dict[str, int]
    accesses: tuple[Access, ...]
    sized: bool = True
    """Whether it is for these sizes only: calls of all sizes have the same one if not."""


def evaluate_formula(
    description: Description,
    args: Sequence[Arg],
    inputs: Sequence[Shape],
    outputs: Sequence[Shape],
    body: Body | None = None,
) -> Formula:
    """The formula of a call with the given shapes; raises Undescribed if the description does not
    cover it."""
    shared = _shared_by_all_sizes(description, args, inputs, outputs, body)
    found, accesses = shared or _with_accesses(_evaluate(description, args, inputs, outputs, body))
    extents = _extents(description, found, accesses, inputs, outputs)
    return Formula(found, extents, accesses, shared is None)


def evaluate_outputs(
    description: Description,
    args: Sequence[Arg],
    inputs: Sequence[Shape],
    outputs: Sequence[Shape],
    body: Body | None = None,
) -> tuple[Output | None, ...]:
    """The expressions alone of the formula of a call."""
    shared = _shared_by_all_sizes(description, args, inputs, outputs, body)
    return shared[0] if shared else _evaluate(description, args, inputs, outputs, body)


_Evaluated = tuple[tuple[Output | None, ...], tuple[Access, ...]]


def _evaluate(
    description: Description,
    args: Sequence[Arg],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    body: Body | None,
) -> tuple[Output | None, ...]:
    takes, offers = _parameters(description.formula)
    operands = [Operand(k, shape) for k, shape in enumerate(inputs)]
    values = [substitute(arg, operands) for arg in args[:takes]]
    offered = {"body": body, "out": tuple(outputs)}
    result = description.formula(*values, **{name: offered[name] for name in offers})
    return evaluate(result, [len(shape) for shape in outputs])


def _with_accesses(found: tuple[Output | None, ...]) -> _Evaluated:
    accesses = (a for o in found if o is not None for a in accesses_of(o.body))
    return found, tuple(dict.fromkeys(accesses))


# Two caches of the process: a Graph of a thousand Ops has few different descriptions and arguments,
# and to evaluate one takes longer than all the rest of an analysis.
_SHARED: dict[tuple[Any, ...], _Evaluated] = {}
"""Expressions that hold for calls of all sizes."""
_MOST = 20_000  # entries; more empty it
_SIZED: set[Description] = set()
"""Descriptions that look at sizes, so that nothing of theirs is shared."""


def _shared_by_all_sizes(
    description: Description,
    args: Sequence[Arg],
    inputs: Sequence[Shape],
    outputs: Sequence[Shape],
    body: Body | None,
) -> _Evaluated | None:
    """The expressions of a call if they are those of such calls of all sizes; else None."""
    if description in _SIZED:
        return None
    takes, offers = _parameters(description.formula)
    forms = tuple(map(shape_pattern, inputs)), tuple(map(shape_pattern, outputs))
    key = (description, tuple(args[:takes]), *forms, body if "body" in offers else None)
    found = _SHARED.get(key)
    if found is None:
        watch = ExtentWatch()
        sizes, made = (
            [tuple(WatchedExtent(n, watch) for n in shape) for shape in side]
            for side in (inputs, outputs)
        )
        try:
            found = _with_accesses(_evaluate(description, args, sizes, made, body))
        except Exception:  # whatever it is, it comes again when evaluated for these sizes
            return None
        if watch.seen or any(_holds_extent(o) for o in found[0]):
            _SIZED.add(description)
            return None
        if len(_SHARED) >= _MOST:
            _SHARED.clear()
        _SHARED[key] = found
    return found


def _holds_extent(item: Any) -> bool:
    if isinstance(item, WatchedExtent):
        return True
    if isinstance(item, tuple | list):
        return any(map(_holds_extent, item))
    fields = getattr(item, "__dataclass_fields__", ())
    return any(_holds_extent(getattr(item, name)) for name in fields)


def check_formula(
    description: Description, formula: Formula, inputs: Sequence[Shape], outputs: Sequence[Shape]
) -> None:
    """Raises BadDescription where a formula reads outside of an input, has an output of another
    shape, or uses an axis that nothing introduces."""
    for number, (output, shape) in enumerate(zip(formula.outputs, outputs, strict=True)):
        if output is None:
            continue
        if len(output.dims) != len(shape):
            what = f"output {number} has {len(shape)} dims, not {len(output.dims)}"
            raise bad_description(description, what)
        for dim, (names, extent) in enumerate(zip(output.dims, shape, strict=True)):
            length = math.prod(formula.extents[name] for name in names)
            if length != extent:
                what = f"output {number} is {extent} long along dim {dim}, not {length}"
                raise bad_description(description, what)
        known = {name for dim in output.dims for name in dim}
        for name in _unbound_axes(output.body, known):
            what = f"axis {name} of output {number} is neither one of its axes nor reduced"
            raise bad_description(description, what)
    for access in formula.accesses:
        for dim, (index, extent) in enumerate(
            zip(access.index, inputs[access.tensor], strict=True)
        ):
            item = index[0] if len(index) == 1 else None
            if access.fill is None and isinstance(item, Affine) and _not_empty(item, formula):
                ranges = {name: (0, formula.extents[name]) for name, _ in item.terms}
                low, high = bounds(item, ranges)
                if low < 0 or high > extent:
                    where = f"along dim {dim} of input {access.tensor}, which is {extent} long"
                    raise bad_description(description, f"it reads [{low}, {high}) {where}")


def _not_empty(item: Affine, formula: Formula) -> bool:
    return all(formula.extents[name] > 0 for name, _ in item.terms)


def _unbound_axes(expr: Expr, known: set[str]) -> Iterator[str]:
    """Axes that an expression uses and nothing introduces."""
    if isinstance(expr, Reduce):
        yield from _unbound_axes(expr.body, known | set(expr.axes))
    elif isinstance(expr, Apply | Opaque):
        for arg in expr.args:
            yield from _unbound_axes(arg, known)
        if isinstance(expr, Opaque):
            yield from (name for name in expr.axes if name not in known)
    elif isinstance(expr, Position):
        yield from (name for name, _ in expr.form.terms if name not in known)
    elif isinstance(expr, Access):
        for index in expr.index:
            for item in index:
                if isinstance(item, Affine | Quotient):
                    yield from (name for name, _ in item.terms if name not in known)
                elif isinstance(item, Gather):
                    yield from _unbound_axes(item.source, known)


def arguments_read(description: Description, args: tuple[Arg, ...]) -> tuple[Arg, ...]:
    """The arguments that a description looks at."""
    return args[: _parameters(description.formula)[0]]


@cache
def _parameters(function: Callable[..., Any]) -> tuple[int | None, tuple[str, ...]]:
    """How many arguments a description takes (None: all), and which of our offers it asks for."""
    parameters = inspect.signature(function).parameters.values()
    offers = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None, offers
    return len(parameters) - len(offers), offers


def depends_on_position(formula: Formula) -> bool:
    """Whether a part's place matters to what it computes, beside which regions it reads."""
    plain = all(
        not isinstance(item, Affine | Quotient)
        or (isinstance(item, Affine) and item.axis is not None)
        or not item.terms
        for access in formula.accesses
        for index in access.index
        for item in index
    )
    return not plain or any(_has_position(o.body) for o in formula.outputs if o is not None)


def _has_position(expr: Expr) -> bool:
    if isinstance(expr, Position):
        return True
    if isinstance(expr, Access):
        return any(
            isinstance(item, Gather) and _has_position(item.source)
            for index in expr.index
            for item in index
        )
    if isinstance(expr, Reduce):
        return _has_position(expr.body)
    return isinstance(expr, Apply | Opaque) and any(map(_has_position, expr.args))


def accesses_of(expr: Expr) -> Iterator[Access]:
    """All accesses inside an expression, those inside data-dependent indices included."""
    if isinstance(expr, Access):
        for index in expr.index:
            for item in index:
                if isinstance(item, Gather):
                    yield from accesses_of(item.source)
        yield expr
    elif isinstance(expr, Apply | Opaque):
        for arg in expr.args:
            yield from accesses_of(arg)
    elif isinstance(expr, Reduce):
        yield from accesses_of(expr.body)


def _extents(
    description: Description,
    outputs: Sequence[Output | None],
    accesses: Sequence[Access],
    inputs: Sequence[Shape],
    shapes: Sequence[Shape],
) -> dict[str, int]:
    known: dict[str, int] = {}
    products: list[tuple[tuple[str, ...], int]] = []
    for output, shape in zip(outputs, shapes, strict=True):
        for name, extent in output.extents if output else ():
            known.setdefault(name, extent)
        for names, extent in zip(output.dims if output else (), shape, strict=False):
            if len(names) == 1:
                known.setdefault(names[0], extent)
            else:
                products.append((names, extent))
    for access in accesses:
        for index, extent in zip(access.index, inputs[access.tensor], strict=True):
            for item in index if len(index) == 1 else ():
                if isinstance(item, Affine) and item.axis is not None:
                    known.setdefault(item.axis, extent)
    for names, extent in products:
        missing = [n for n in names if n not in known]
        if len(missing) > 1:
            raise bad_description(description, f"the extents of axes {missing} are not known")
        rest = math.prod(known[n] for n in names if n in known)
        for name in missing:
            known[name] = extent // rest if rest else 0
    _require_extents(description, outputs, known)
    return known


def _require_extents(
    description: Description, outputs: Sequence[Output | None], known: dict[str, int]
) -> None:
    for output in outputs:
        for name in _reduced_axes(output.body) if output else ():
            if name not in known:
                raise bad_description(description, f"no dimension says how long axis {name} is")


def _reduced_axes(expr: Expr) -> Iterator[str]:
    if isinstance(expr, Reduce):
        yield from expr.axes
        yield from _reduced_axes(expr.body)
    elif isinstance(expr, Apply | Opaque):
        for arg in expr.args:
            yield from _reduced_axes(arg)
