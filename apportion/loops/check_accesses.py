"""Does a body touch what its analysis says? It is run on a sample, and watched.

Part of the room loops. The body's function runs as plain Python on some elements, with arrays that
note every access. Each access has to be one that a reference expects, and two iterations that meet
in an element have to be as far apart as some dependence says. What is checked is the analysis, not
the user: a contradiction is a defect of this package, and then the loop does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from apportion.loops.dependence import LoopDependences
from apportion.loops.elements import Elements
from apportion.loops.loop_body import LoopBody, LoopError
from apportion.loops.plain_mode import plain_mode
from apportion.loops.references import ArrayReference
from apportion.loops.subscripts import Fixed, Index

Numbers = npt.NDArray[Any]
Place = tuple[str, int]
ARITHMETIC = (ZeroDivisionError, OverflowError, FloatingPointError)


@dataclass
class TouchedPlaces:
    """What one iteration has read and written: arrays with the number of an element. `parts` are in
    parts of arrays that it has asked for, whether it read them or not."""

    reads: set[Place] = field(default_factory=set)
    writes: set[Place] = field(default_factory=set)
    parts: set[Place] = field(default_factory=set)

    def add(self, other: TouchedPlaces) -> None:
        """Adds what was touched of another array."""
        self.reads |= other.reads
        self.writes |= other.writes
        self.parts |= other.parts


class WatchedArray:
    """Looks like an array to a body, and notes what it does. A part that is handed out is compared,
    when the iteration ends, with what it was."""

    def __init__(self, name: str, values: Numbers) -> None:
        self.name, self.values = name, values
        self.shape, self.ndim, self.size = values.shape, values.ndim, values.size
        self.seen = TouchedPlaces()
        self.handed: list[tuple[Numbers, Numbers, Numbers]] = []

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, where: Any) -> Any:
        found = self.values[where]
        if isinstance(found, np.ndarray) and found.base is not None:
            self.seen.parts.update(self._places(where))
            self.handed.append((found, found.copy(), self._numbers(where)))
        else:
            self.seen.reads.update(self._places(where))
        return found

    def __setitem__(self, where: Any, value: Any) -> None:
        self.seen.writes.update(self._places(where))
        self.values[where] = value
        for part, before, _ in self.handed:  # what is set here has been noted
            before[...] = part

    def _places(self, where: Any) -> Iterator[Place]:
        return ((self.name, int(each)) for each in self._numbers(where).ravel())

    def _numbers(self, where: Any) -> Numbers:
        """The numbers of the elements that a subscript selects."""
        listed = where if isinstance(where, tuple) else (where,)
        if any(isinstance(each, np.ndarray | list) or each is Ellipsis for each in listed):
            return np.arange(self.size)  # anything
        listed += (slice(None),) * (self.ndim - len(listed))
        ranges = [
            np.arange(*each.indices(extent)) if isinstance(each, slice) else np.asarray(each)
            for extent, each in zip(self.shape, listed, strict=True)
        ]
        found = np.zeros((), np.int64)
        for extent, each in zip(self.shape, ranges, strict=True):
            found = found[..., None] * extent + np.atleast_1d(each)
        return found

    def end_iteration(self) -> TouchedPlaces:
        """What the iteration has touched; the next one begins."""
        for part, before, numbers in self.handed:
            if not np.array_equal(part, before, equal_nan=part.dtype.kind == "f"):
                changed = (part != before).ravel()
                self.seen.writes.update((self.name, int(e)) for e in numbers.ravel()[changed])
        self.handed.clear()
        seen, self.seen = self.seen, TouchedPlaces()
        return seen


def check_accesses(
    body: LoopBody,
    function: Callable[..., Any],
    sample: Elements,
    arrays: Mapping[str, Numbers],
    constants: Mapping[str, Any],
    references: Sequence[ArrayReference],
    dependences: LoopDependences,
    ordered: bool,
    buffered: Sequence[str] = (),
) -> int:
    """Runs a body on some elements. Raises LoopError if it fails there, RuntimeError if the
    analysis is contradicted; returns how many iterations were watched."""
    watched = {name: WatchedArray(name, values) for name, values in arrays.items()}
    given = [watched.get(name, constants.get(name)) for name in body.parameters]
    seen: list[tuple[tuple[int, ...], TouchedPlaces]] = []
    with plain_mode(), np.errstate(all="ignore"):
        for element in range(len(sample)):
            key = tuple(int(column[element]) for column in sample.keys)
            touched = _watch(body, function, key, _value(sample, element), given, watched)
            if touched is not None:
                seen.append((key, touched))
    for key, touched in seen:
        _check_expected(body, key, touched, watched, references)
        _count_read_parts(key, touched, watched, references)
    strict = [name for name in watched if name not in buffered]
    _check_distances(body, seen, dependences, ordered, strict)
    return len(seen)


def _watch(
    body: LoopBody,
    function: Callable[..., Any],
    key: tuple[int, ...],
    value: Any,
    given: list[Any],
    watched: Mapping[str, WatchedArray],
) -> TouchedPlaces | None:
    """What one iteration touches; None if its arithmetic fails, which compiled code lets pass."""
    try:
        function(key if len(key) > 1 else key[0], value, *given)
    except ARITHMETIC:
        for array in watched.values():
            array.end_iteration()
        return None
    except LoopError:
        raise
    except Exception as error:
        line = _line_of(error, body)
        raise body.error(
            line, f"the body fails in iteration {key}: {type(error).__name__}: {error}"
        ) from None
    found = TouchedPlaces()
    for array in watched.values():
        found.add(array.end_iteration())
    return found


def _line_of(error: BaseException, body: LoopBody) -> int:
    """The last line of the body that an error has passed."""
    line, trace = body.first_line, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == body.file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _value(sample: Elements, element: int) -> Any:
    parts: list[Any] = [column[element] for column in sample.fields]
    if sample.starts is not None:
        low, high = sample.starts[element], sample.starts[element + 1]
        parts += [column[low:high] for column in sample.ragged]
    return parts[0] if len(parts) == 1 else tuple(parts)


def _check_expected(
    body: LoopBody,
    key: tuple[int, ...],
    touched: TouchedPlaces,
    watched: Mapping[str, WatchedArray],
    references: Sequence[ArrayReference],
) -> None:
    seen = (("reads", touched.reads | touched.parts), ("writes", touched.writes))
    for what, places in seen:
        for name, number in places:
            place = np.unravel_index(number, watched[name].shape)
            mine = [r for r in references if r.array == name and (r.writes or what == "reads")]
            if not any(_expects(each, key, place) for each in mine):
                where = ", ".join(str(int(index)) for index in place)
                raise RuntimeError(
                    f"{body.place(body.first_line)}: iteration {key} {what} {name}[{where}], which "
                    "the analysis of the body does not expect; the loop was not run. This is a "
                    "defect of apportion"
                )


def _count_read_parts(
    key: tuple[int, ...],
    touched: TouchedPlaces,
    watched: Mapping[str, WatchedArray],
    references: Sequence[ArrayReference],
) -> None:
    """Counts parts as read where a reference reads them: to name a part is not to read it."""
    reading = [each for each in references if each.reads]
    for name, number in touched.parts:
        place = np.unravel_index(number, watched[name].shape)
        if any(each.array == name and _expects(each, key, place) for each in reading):
            touched.reads.add((name, number))


def _expects(reference: ArrayReference, key: tuple[int, ...], place: Sequence[Any]) -> bool:
    for dim, index in enumerate(place):
        subscript = reference.subscript(dim)
        if isinstance(subscript, Index) and key[subscript.dim] + subscript.offset != index:
            return False
        if isinstance(subscript, Fixed) and subscript.number != index:
            return False
    return True


def _check_distances(
    body: LoopBody,
    seen: Sequence[tuple[tuple[int, ...], TouchedPlaces]],
    dependences: LoopDependences,
    ordered: bool,
    strict: Sequence[str],
) -> None:
    """Raises RuntimeError if two iterations meet at a distance that no dependence has."""
    by_place: dict[Place, list[int]] = {}
    for number, (_, touched) in enumerate(seen):
        for place in touched.reads | touched.writes:
            if place[0] in strict:
                by_place.setdefault(place, []).append(number)
    checked = set()
    for place, numbers in by_place.items():
        for one, other in combinations(numbers, 2):
            (key, a), (key2, b) = seen[one], seen[other]
            writes = place in a.writes or place in b.writes
            reads = (place in a.writes and place in b.reads) or (
                place in b.writes and place in a.reads
            )
            first, second = sorted((key, key2))
            distance = tuple(y - x for x, y in zip(first, second, strict=True))
            known = (place[0], distance)
            if not writes or not (reads or ordered) or not any(distance) or known in checked:
                continue
            checked.add(known)
            mine = (each for each in dependences.vectors if each.array == place[0])
            if not any(each.holds(distance) for each in mine):
                raise RuntimeError(
                    f"{body.place(body.first_line)}: iterations {first} and {second} touch one "
                    f"element of {place[0]}, and no dependence is {distance} apart; the loop was "
                    "not run. This is a defect of apportion"
                )
