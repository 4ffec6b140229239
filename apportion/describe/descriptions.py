"""Description: what is written down of one operator, and the table of all of them.

The decorator `describe` of describe/ registers a function in the language of language.py;
`find_description` finds it by the kind of an Op. ops/ has the descriptions of torch's operators,
users add their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class PartLocation:
    """Where a part of an Op is: what a local rule may ask for."""

    inputs: tuple[tuple[int, ...], ...]
    """Shapes of the part's inputs."""
    outputs: tuple[tuple[int, ...], ...]
    """Shapes of the part's outputs."""
    positions: tuple[tuple[tuple[tuple[int, int, int], ...], ...], ...]
    """Per output and dimension the atoms of the part: (factor, low, high)."""
    padded: frozenset[tuple[int, int]] = frozenset()
    """Dimensions (input, dim) whose padding the part gets as elements, so that its arguments must
    ask for none: a part has its own before and after, which a symmetric argument cannot say."""
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """The part's range of every axis, where it is one."""
    extents: Mapping[str, int] = field(default_factory=dict)
    """The whole's extent of every axis."""

    def first(self, name: str) -> int:
        """Where the part begins along an axis: the offset of a kernel that must know its place."""
        return self.ranges[name][0] if name in self.ranges else 0


LocalRule = Callable[[tuple[Any, ...], PartLocation], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Description:
    """What is written down of one operator.

    formula   the description proper
    local     how the arguments of a part differ from the whole's (sizes, offsets), if they do
    alias     the output shares the storage of the first input
    reshape   the operator keeps the row-major order of elements: views
    flops     floating-point operations from the shapes of inputs and outputs, where counting the
              axes is wrong
    """

    kind: str
    formula: Callable[..., Any]
    local: LocalRule | None = None
    alias: bool = False
    reshape: bool = False
    flops: Callable[[Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]], float] | None = None

    @property
    def where(self) -> str:
        """The file and line of the description."""
        code = inspect.unwrap(self.formula).__code__
        return f"described at {code.co_filename}:{code.co_firstlineno}"


DESCRIPTIONS: dict[str, Description] = {}
"""All descriptions by kind: a registry that `describe` fills, in ops/ while that is loaded, and in
the user's program whenever it describes an operator."""


def _kind(operator: Any) -> str:
    """The kind that an operator's name, or torch's object, stands for."""
    kind = str(getattr(operator, "_opoverload", operator)).replace("::", ".")
    if not all(name.isidentifier() for name in kind.split(".")) or "." not in kind:
        raise ValueError(f"operators are named like 'aten.mm' or 'mylib::op', not {kind!r}")
    return kind


def _is_same_source(before: Callable[..., Any], function: Callable[..., Any]) -> bool:
    """Whether a description is the same one, its file or cell run again."""
    if (before.__module__, before.__qualname__) != (function.__module__, function.__qualname__):
        return False
    lines = before.__code__.co_firstlineno, function.__code__.co_firstlineno
    return "<lambda>" not in function.__qualname__ or lines[0] == lines[1]


def describe(
    *operators: Any,
    local: LocalRule | None = None,
    alias: bool = False,
    reshape: bool = False,
    flops: Callable[[Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]], float] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the decorated function as the description of operators.

    An operator is named `aten.mm` (all overloads), `aten.mm.default`, `mylib::op`, or given as
    torch's object. Raises ValueError if it is described already, by another function.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        if not hasattr(function, "__code__"):
            raise ValueError(f"a description is a function, not {function!r}")
        for operator in operators:
            kind = _kind(operator)
            if kind in DESCRIPTIONS and not _is_same_source(DESCRIPTIONS[kind].formula, function):
                raise ValueError(f"{kind} is {DESCRIPTIONS[kind].where} already")
            DESCRIPTIONS[kind] = Description(kind, function, local, alias, reshape, flops)
        return function

    return register


REASONS: dict[str, str] = {}
"""Operators that run unsplit, and why: a registry that `unsplit` fills while ops/ is loaded."""


def unsplit(*operators: Any, why: str) -> None:
    """Says that operators cannot be split, and why; a blind search checks it."""
    for operator in operators:
        REASONS[_kind(operator)] = why


def reason_unsplit(kind: str) -> str | None:
    """Why an operator runs unsplit, if that is its nature."""
    return REASONS.get(kind) or REASONS.get(kind.rpartition(".")[0])


def find_description(kind: str) -> Description | None:
    """The description of an operator: of the overload, else of all overloads, else None."""
    return DESCRIPTIONS.get(kind) or DESCRIPTIONS.get(kind.rpartition(".")[0])
