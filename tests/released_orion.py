"""The dependence analysis that Orion's release has, as a second opinion: it should find no scheme
where ours finds none, unless its own is wrong.

Its normalisation: the first number that is not zero, if negative, turns all numbers around; an ANY
that comes before it becomes NONNEG, and that is all. Schemes: 1D if some dim is zero in all
vectors, 2D if some pair of dims is; the unimodular ones are in the paper only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement, permutations

from apportion.loops.dependence import meeting_distance
from apportion.loops.references import ArrayReference

ANY, NONNEG = "any", "nonneg"
Vector = tuple[int | str, ...]


def released_vectors(
    references: Sequence[ArrayReference], dims: int, ordered: bool
) -> list[Vector]:
    """Its dependence vectors."""
    found = []
    for array in {each.array for each in references}:
        mine = [each for each in references if each.array == array]
        for a, b in combinations_with_replacement(mine, 2):
            if not (a.writes or b.writes):
                continue
            if not ordered and a.writes and b.writes and not (a.reads or b.reads):
                continue
            distance = meeting_distance(a, b, dims)
            if distance is not None:
                found.append(_normalised([ANY if d is None else d for d in distance]))
    return found


def _normalised(vector: list[int | str]) -> Vector:
    for place, part in enumerate(vector):
        if part == ANY:
            vector[place] = NONNEG
            break
        if isinstance(part, int) and part > 0:
            break
        if isinstance(part, int) and part < 0:
            return tuple(-each if isinstance(each, int) else each for each in vector)
    return tuple(vector)


def released_scheme(references: Sequence[ArrayReference], dims: int, ordered: bool) -> str:
    """`1d`, `2d` or ''."""
    vectors = [v for v in released_vectors(references, dims, ordered) if any(p != 0 for p in v)]
    if any(all(vector[dim] == 0 for vector in vectors) for dim in range(dims)):
        return "1d"
    pairs = permutations(range(dims), 2)
    if any(all(v[i] == 0 or v[j] == 0 for v in vectors) for i, j in pairs):
        return "2d"
    return ""
