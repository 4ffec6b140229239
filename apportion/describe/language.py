"""The description language: what an operator computes, as a Python lambda over its axes.

The expressions of describe/; descriptions.py has the decorator and the table of descriptions.

    @describe("aten.mm")
    def mm(a, b):
        return lambda i, j: Sum(lambda k: a[i, k] * b[k, j])

A description is a function of the operator's arguments in schema order (it may take only the first
few): tensors come as `Operand`s, everything else as it is. It returns one lambda per output (a
tuple for several; None for an output that is absent), whose parameters are the output's axes; a
`Sum` (`Max`, `Min`, `Prod`) adds axes that are reduced. Axes of equal name in several outputs are
one axis. Inside:

    x[i, j + 2]          element; an index is an axis, an affine form of axes, or a number
    x[i, :]              the whole of a dimension, the same for every part
    x[idx[n], d]         data-dependent index: the whole dimension, and idx at n
    x[i, (ALL(3), j)]    a dimension that is a row-major product: all of an outer factor 3, then j
    x.at(i)              element under right-aligned broadcasting, i a tuple of axes
    x.padded(0)[2*i - 1] an index may lie outside, where the element is 0: a convolution's padding
    x.padded(0)[over(y + 1, 2)]  the index (y + 1)/2; where that is not whole the element is 0
    x.padded(0)[floor(y, 2)]     the index y/2, rounded down
    a * b, f("gelu", a)  arithmetic, and any pointwise function
    x.shape[0]           an extent as a value: Sum(...) / x.shape[0]
    i (as an operand)    the position itself: f("mask", i, x[i])
    opaque(x[i, :])[j]   a result that may depend on the whole of the slices, indexed by axes that
                         cannot be cut

An output dimension that is a product of axes is written with `Output.of(((p, j), k), expression)`.
Nothing here says how an operator may be split; split/derive.py finds that out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from apportion.describe.interval import Affine
from apportion.describe.watched_extents import single


@dataclass(frozen=True, slots=True)
class All:
    """The whole of an outer factor of a dimension, `extent` long."""

    extent: int


@dataclass(frozen=True, slots=True)
class Gather:
    """A data-dependent index."""

    source: Expr


@dataclass(frozen=True, slots=True)
class Quotient:
    """An affine form divided by a number: rounded down, or there is an element only where that
    leaves no rest."""

    form: Affine
    divisor: int
    rounded: bool = False

    @property
    def terms(self) -> tuple[tuple[str, int], ...]:
        return self.form.terms

    def whole(self, low: int, high: int) -> tuple[int, int]:
        """The range of quotients that a range of the form can give."""
        first = low // self.divisor if self.rounded else -(-low // self.divisor)
        return first, (high - 1) // self.divisor + 1


WHOLE = "whole"
Index = Affine | Quotient | All | Gather | str
"""Affine, a quotient, the whole of a factor, data-dependent, or WHOLE."""


class Expr:
    """A scalar expression. Arithmetic makes `Apply`s."""

    __slots__ = ()

    def __add__(self, other: Any) -> Expr:
        return f("+", self, other)

    def __radd__(self, other: Any) -> Expr:
        return f("+", other, self)

    def __sub__(self, other: Any) -> Expr:
        return f("+", self, f("*", -1, other))

    def __rsub__(self, other: Any) -> Expr:
        return f("+", other, f("*", -1, self))

    def __mul__(self, other: Any) -> Expr:
        return f("*", self, other)

    def __rmul__(self, other: Any) -> Expr:
        return f("*", other, self)

    def __truediv__(self, other: Any) -> Expr:
        return f("/", self, other)

    def __rtruediv__(self, other: Any) -> Expr:
        return f("/", other, self)

    def __neg__(self) -> Expr:
        return f("*", -1, self)


@dataclass(frozen=True, slots=True)
class Access(Expr):
    """One element of input `tensor`. Each dimension has a tuple of indices, one per factor.

    `fill` is the element outside of the tensor; None: no index may lie there.
    """

    tensor: int
    index: tuple[tuple[Index, ...], ...]
    fill: float | None = None


@dataclass(frozen=True, slots=True)
class Const(Expr):
    """A number (or any argument that is the same for every part)."""

    value: Any


@dataclass(frozen=True, slots=True)
class Position(Expr):
    """The position along axes, used as a value."""

    form: Affine


@dataclass(frozen=True, slots=True)
class Apply(Expr):
    """A pointwise function."""

    name: str
    args: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Reduce(Expr):
    """`reducer` over `axes` of `body`."""

    reducer: str
    axes: tuple[str, ...]
    body: Expr


@dataclass(frozen=True, slots=True)
class Opaque(Expr):
    """An unknown function of whole slices; `axes` index its result and cannot be cut."""

    args: tuple[Expr, ...]
    axes: tuple[str, ...] = ()

    def __getitem__(self, index: Any) -> Opaque:
        items = index if isinstance(index, tuple) else (index,)
        names = tuple(name for item in items for name, _ in _affine(item).terms)
        return Opaque(self.args, names)


@dataclass(frozen=True, slots=True)
class Output:
    """One output: per dimension the axes whose row-major product it is, and the element there."""

    dims: tuple[tuple[str, ...], ...]
    body: Expr
    extents: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def of(dims: Sequence[Any], body: Any, **extents: int) -> Output:
        """From axes, or tuples of axes, per dimension, and extents of axes that no shape tells."""
        named = tuple(
            tuple(_axis_name(a) for a in (d if isinstance(d, tuple) else (d,))) for d in dims
        )
        return Output(named, as_expr(body), tuple(extents.items()))


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument, as a description sees it."""

    index: int
    shape: tuple[int, ...]
    fill: float | None = None

    def padded(self, value: float) -> Operand:
        """The same tensor in the middle of an endless one that is `value` everywhere else."""
        return Operand(self.index, self.shape, value)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, index: Any) -> Access:
        items = index if isinstance(index, tuple) else (index,)
        if len(items) != len(self.shape):
            raise TypeError(
                f"input {self.index} has {len(self.shape)} dims, indexed with {len(items)}"
            )
        return Access(self.index, tuple(_index(item) for item in items), self.fill)

    def at(self, axes: Sequence[Affine]) -> Access:
        """The element at the given axes under right-aligned broadcasting."""
        skip = len(axes) - len(self.shape)
        items = [0 if single(n) else axes[skip + d] for d, n in enumerate(self.shape)]
        return Access(self.index, tuple(_index(item) for item in items), self.fill)


def axis(name: str) -> Affine:
    """An axis by name; lambdas make their own."""
    return Affine(((name, 1),))


def axes(prefix: str, count: int) -> tuple[Affine, ...]:
    """`count` axes named prefix0, prefix1, ..."""
    return tuple(axis(f"{prefix}{n}") for n in range(count))


def ALL(extent: int) -> All:
    """The whole of an outer factor of a dimension."""
    return All(extent)


def over(form: Affine, divisor: int) -> Affine | Quotient:
    """An index form / divisor, for an operand that is padded: a stride read backwards."""
    return form if divisor == 1 else Quotient(form, divisor)


def floor(form: Affine, divisor: int) -> Affine | Quotient:
    """An index form / divisor, rounded down, for an operand that is padded: repetition."""
    return form if divisor == 1 else Quotient(form, divisor, rounded=True)


def f(name: str, *args: Any) -> Expr:
    """A pointwise function of its arguments; None stands for an absent one."""
    return Apply(name, tuple(as_expr(a) for a in args))


def opaque(*args: Any) -> Opaque:
    """A function of whole slices that does not know where they are."""
    return Opaque(tuple(as_expr(a) for a in args if a is not None))


def reduce(reducer: str, over: Sequence[Affine], body: Any) -> Reduce:
    """`body` reduced over the given axes."""
    return Reduce(reducer, tuple(_axis_name(a) for a in over), as_expr(body))


def Sum(body: Callable[..., Any], rank: int = 0) -> Reduce:
    """Sum over the lambda's parameters; `rank` says how many a starred parameter stands for."""
    return _reduction("sum", body, rank)


def Max(body: Callable[..., Any], rank: int = 0) -> Reduce:
    """Maximum over the lambda's parameters."""
    return _reduction("max", body, rank)


def Min(body: Callable[..., Any], rank: int = 0) -> Reduce:
    """Minimum over the lambda's parameters."""
    return _reduction("min", body, rank)


def Prod(body: Callable[..., Any], rank: int = 0) -> Reduce:
    """Product over the lambda's parameters."""
    return _reduction("prod", body, rank)


def as_expr(item: Any) -> Expr:
    """Numbers become constants, axes positions."""
    if isinstance(item, Expr):
        return item
    if isinstance(item, Affine):
        return Position(item)
    return Const(item)


def evaluate(result: Any, ranks: Sequence[int]) -> tuple[Output | None, ...]:
    """The outputs that a description returned, its lambdas applied to fresh axes. `ranks` are the
    outputs' dims."""
    items = result if isinstance(result, tuple) else (result,)
    while len(items) > len(ranks) and items[-1] is None:
        items = items[:-1]
    if len(items) != len(ranks):
        raise TypeError(f"it gives {len(items)} outputs, and the operator has {len(ranks)}")
    return tuple(
        item if item is None or isinstance(item, Output) else _apply_lambda(item, rank)
        for item, rank in zip(items, ranks, strict=True)
    )


def _apply_lambda(function: Callable[..., Any], rank: int) -> Output:
    names = parameter_axes(function, rank)
    return Output(tuple((name,) for name in names), as_expr(function(*map(axis, names))))


def parameter_axes(function: Callable[..., Any], rank: int) -> list[str]:
    """Axis names from a lambda's parameters; `*i` becomes i0, i1, ... up to `rank` in all."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_kwonlyargcount:
        raise TypeError(f"a lambda over axes is needed, not this {type(function).__name__}")
    plain = list(code.co_varnames[: code.co_argcount])
    if code.co_flags & inspect.CO_VARARGS:
        starred = code.co_varnames[code.co_argcount]
        plain += [f"{starred}{n}" for n in range(rank - len(plain))]
    return plain


def _reduction(reducer: str, body: Callable[..., Any], rank: int) -> Reduce:
    names = parameter_axes(body, rank)
    return Reduce(reducer, tuple(names), as_expr(body(*map(axis, names))))


def _axis_name(item: Any) -> str:
    name = item if isinstance(item, str) else _affine(item).axis
    if name is None:
        raise TypeError(f"{item} is not a plain axis")
    return name


def _affine(item: Any) -> Affine:
    if isinstance(item, Affine):
        return item
    if isinstance(item, int):
        return Affine((), item)
    raise TypeError(f"{item!r} is not an affine form of axes")


def _index(item: Any) -> tuple[Index, ...]:
    if isinstance(item, tuple):
        return tuple(piece for part in item for piece in _index(part))
    if isinstance(item, slice):
        if item != slice(None):
            raise TypeError("a slice in a description is ':', the whole dimension")
        return (WHOLE,)
    if isinstance(item, All | Quotient):
        return (item,)
    if isinstance(item, Expr):
        return (Gather(item),)
    return (_affine(item),)
