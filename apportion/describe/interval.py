"""Index arithmetic: affine forms over axes, their exact range over a box, and boxes of atoms.

The arithmetic that describe/ and split/ stand on.

A range is half open, in elements. The range of an affine form over a box of axis ranges is exact,
negative coefficients and differences included: each coefficient takes the end of its axis that
makes it smallest (largest).

A dimension of extent E is a row-major product of **atoms**, its factors: E = f1 * f2 * ... A region
of it is one range per atom. Ranges of the flat dimension and regions of its atoms are translated by
`flatten` and `unflatten`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

Range = tuple[int, int]
Box = tuple[Range, ...]
Factors = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Affine:
    """sum of coefficient * axis + constant; the terms are sorted by name and have no zeros."""

    terms: tuple[tuple[str, int], ...]
    constant: int = 0

    def __add__(self, other: Affine | int) -> Affine:
        if isinstance(other, int):
            return Affine(self.terms, self.constant + other)
        if not isinstance(other, Affine):
            return NotImplemented
        merged = dict(self.terms)
        for name, coefficient in other.terms:
            merged[name] = merged.get(name, 0) + coefficient
        terms = tuple(sorted((n, c) for n, c in merged.items() if c))
        return Affine(terms, self.constant + other.constant)

    __radd__ = __add__

    def __mul__(self, factor: int) -> Affine:
        if not isinstance(factor, int):
            return NotImplemented
        terms = tuple((n, c * factor) for n, c in self.terms if factor)
        return Affine(terms, self.constant * factor)

    __rmul__ = __mul__

    def __neg__(self) -> Affine:
        return self * -1

    def __sub__(self, other: Affine | int) -> Affine:
        return self + (-other)

    def __rsub__(self, other: int) -> Affine:
        return -self + other

    @property
    def axis(self) -> str | None:
        """The name of the axis this form *is*, if it is exactly one axis and nothing else."""
        if self.constant or len(self.terms) != 1:
            return None
        name, coefficient = self.terms[0]
        return name if coefficient == 1 else None


def bounds(form: Affine, ranges: Mapping[str, Range]) -> Range:
    """Exact half-open range of `form` when each axis runs over its (non-empty) range."""
    low = high = form.constant
    for name, coefficient in form.terms:
        first, end = ranges[name]
        ends = (coefficient * first, coefficient * (end - 1))
        low += min(ends)
        high += max(ends)
    return low, high + 1


def part_range(extent: int, parts: int, index: int) -> Range:
    """The index-th of `parts` ranges of an axis; extents differ by at most one."""
    return index * extent // parts, (index + 1) * extent // parts


def full(factors: Sequence[int]) -> Box:
    """The region that is the whole of the atoms."""
    return tuple([(0, factor) for factor in factors])


def lengths(box: Box) -> tuple[int, ...]:
    """Extent of each range."""
    return tuple([high - low for low, high in box])


def volume(box: Box) -> int:
    """Number of elements."""
    return math.prod([high - low for low, high in box])


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, or None when it is empty."""
    common = []
    for (a_low, a_high), (b_low, b_high) in zip(a, b, strict=True):
        low = a_low if a_low > b_low else b_low
        high = a_high if a_high < b_high else b_high
        if low >= high:
            return None
        common.append((low, high))
    return tuple(common)


def subtract(a: Box, b: Box) -> list[Box]:
    """`a` without `b` (which lies inside it), as disjoint boxes."""
    rest = []
    inner = list(a)
    for dim, ((low, high), (b_low, b_high)) in enumerate(zip(a, b, strict=True)):
        if low < b_low:
            rest.append((*inner[:dim], (low, b_low), *a[dim + 1 :]))
        if b_high < high:
            rest.append((*inner[:dim], (b_high, high), *a[dim + 1 :]))
        inner[dim] = (b_low, b_high)
    return rest


def relative(box: Box, origin: Box) -> Box:
    """`box` in coordinates that count from the low corner of `origin`."""
    return tuple(
        (low - base, high - base) for (low, high), (base, _) in zip(box, origin, strict=True)
    )


def flatten(box: Box, factors: Factors) -> Range | None:
    """The range of the flat dimension that a region of its atoms is; None if not contiguous."""
    low, size, inside = 0, 1, True
    for (first, end), factor in zip(reversed(box), reversed(factors), strict=True):
        if inside:
            low += first * size
            length = (end - first) * size
            inside = first == 0 and end == factor
        elif end - first == 1:
            low += first * size
        else:
            return None
        size *= factor
    if not factors:
        return 0, 1
    return low, low + length


def unflatten(span: Range, factors: Factors) -> Box | None:
    """The region of the atoms that a range of the flat dimension is, or None if it is not a box."""
    low, high = span
    if not factors:
        return () if span == (0, 1) else None
    if len(factors) == 1:
        return (span,)
    inner = math.prod(factors[1:])
    if low % inner == 0 and high % inner == 0:
        return ((low // inner, high // inner), *full(factors[1:]))
    block = low // inner
    if (high - 1) // inner != block:
        return None
    rest = unflatten((low - block * inner, high - block * inner), factors[1:])
    return None if rest is None else ((block, block + 1), *rest)


def runs(box: Box, factors: Factors) -> list[tuple[int, Range]]:
    """Atoms in a row, each with its range, neighbours that are whole joined to one."""
    found: list[tuple[int, Range]] = []
    for span, factor in zip(box, factors, strict=True):
        last = found[-1][0] if found else 0
        if found and found[-1][1] == (0, last) and span == (0, factor):
            found[-1] = (last * factor, (0, last * factor))
        else:
            found.append((factor, span))
    return found


@lru_cache(maxsize=4096)
def refine(a: Factors, b: Factors) -> Factors | None:
    """The coarsest common refinement of two factorings of one extent, or None if there is none."""
    if a == b:
        return a
    cuts = sorted(
        {math.prod(a[i:]) for i in range(len(a))} | {math.prod(b[i:]) for i in range(len(b))}
    )
    factors = []
    below = 1
    for cut in cuts:
        if cut % below:
            return None
        factors.append(cut // below)
        below = cut
    return tuple(reversed([f for f in factors if f != 1]))
