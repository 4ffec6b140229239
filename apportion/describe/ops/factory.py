"""Operators that make tensors from sizes. Their parts are told their own size, and those whose
elements depend on their place where they lie."""

from __future__ import annotations

from typing import Any

from apportion.describe.descriptions import PartLocation, describe, unsplit
from apportion.describe.language import Operand, f


def _first_size(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    return (local.outputs[0], *args[1:])


def _second_size(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    return (args[0], local.outputs[0], *args[2:])


@describe(
    *(f"aten.{name}" for name in ("full", "zeros", "ones", "empty", "_efficientzerotensor")),
    *(f"aten.{name}" for name in ("empty_strided", "empty_permuted")),
    local=_first_size,
)
def full(size: Any, *rest: Any) -> Any:
    return lambda *i: f("constant")


@describe(
    *(f"aten.new_{name}" for name in ("full", "zeros", "ones", "empty", "empty_strided")),
    local=_second_size,
)
def new_full(x: Any, size: Any, *rest: Any) -> Any:
    """Only the dtype of x matters: a part reads one element of it, of its own row where x has as
    many rows, so that nothing moves if both are cut by rows."""
    if 0 in x.shape:
        return lambda *i: f("constant")
    rows = x.ndim > 0 and len(size) > 0 and x.shape[0] == size[0]

    def element(*i: Any) -> Any:
        return f("constant", x[(*i[:1], *[0] * (x.ndim - 1)) if rows else (0,) * x.ndim])

    return element


@describe("aten.scalar_tensor")
def scalar_tensor(value: Any) -> Any:
    return lambda: f("constant")


def _appended_place(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    given = [arg for arg in args if not _is_place(arg)]
    return (*given, local.positions[0])


def _is_place(arg: Any) -> bool:
    return isinstance(arg, tuple)


@describe(
    *(
        f"aten.{name}"
        for name in ("arange", "linspace", "logspace", "tril_indices", "triu_indices")
    ),
    local=_appended_place,
)
def sequence(*args: Any) -> Any:
    """Every part is told its place, and takes that from the whole."""
    ends = [arg[()] for arg in args if isinstance(arg, Operand)]
    return lambda *i: f("constant", *ends)


def _shifted_eye(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    given = [arg for arg in args if not _is_place(arg)]
    diagonal = _diagonal(args) + local.first("i") - local.first("j")
    return (*given, (*local.outputs[0], diagonal))


def _diagonal(args: tuple[Any, ...]) -> int:
    return int(args[-1][2]) if _is_place(args[-1]) else 0


@describe("aten.eye", local=_shifted_eye)
def eye(*args: Any) -> Any:
    return lambda i, j: f("eye", j - i - _diagonal(args))


def _shifted_diagonal(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    rank = len(local.outputs[0])
    shift = local.first(f"i{rank - 2}") - local.first(f"i{rank - 1}")
    return (args[0], args[1] + shift)


@describe("aten.tril", "aten.triu", local=_shifted_diagonal)
def triangle(x: Any, diagonal: int) -> Any:
    """An element is kept or not by which diagonal it is on."""
    return lambda *i: f("triangle", i[-1] - i[-2] - diagonal, x[i])


def _random_place(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    return (local.outputs[0], *args[1:3], local.positions[0])


@describe("apportion.random_uniform", local=_random_place)
def random_uniform() -> Any:
    """Numbers are a function of the global index, of which every part is told its own."""
    return lambda *i: f("constant")


unsplit(
    *(f"aten.{name}" for name in ("binomial", "_standard_gamma", "_sample_dirichlet")),
    why="it draws until a draw is accepted, so an element's numbers depend on the others'",
)
