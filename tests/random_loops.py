"""Random bodies of loops, and what they really touch: the truth that the analysis is held against.

A body is made up as text, so that everything is tried: names that stand for indices and for parts
of arrays, offsets, constants, slices, inner loops, subscripts from data, branches. `accesses` runs
the body in plain Python and notes what every iteration reads and writes. The oracle knows nothing
of subscript classes or dependence vectors.
"""

from __future__ import annotations

import itertools
import linecache
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

NUMBERS = itertools.count()
PAD = 2  # arrays are so much longer than the loop's dims, so that offsets stay inside


@dataclass(frozen=True)
class RandomLoop:
    """A body over keys of some shape, with arrays of these shapes; some elements may be missing."""

    text: str
    shape: tuple[int, ...]
    arrays: dict[str, tuple[int, ...]]
    keys: tuple[tuple[int, ...], ...]
    values: tuple[int, ...]
    ordered: bool
    function: Callable[..., None] = field(compare=False)


def random_loop(seed: int, dims: int | None = None) -> RandomLoop:
    """The random loop of a seed."""
    draw = random.Random(seed)
    dims = dims or draw.choice((1, 2, 2, 2, 3))
    shape = tuple(draw.randint(2, (9, 5, 3)[dims - 1]) for _ in range(dims))
    arrays = {
        name: tuple(max(shape) + PAD for _ in range(draw.choice((1, 2, 2, 3))))
        for name in "ABC"[: draw.choice((1, 2, 2, 3))]
    }
    writer = _Writer(draw, dims, arrays)
    text = writer.text()
    keys = list(itertools.product(*map(range, shape)))
    if draw.random() < 0.4:
        keys = [key for key in keys if draw.random() < 0.7] or keys[:1]
    draw.shuffle(keys)
    values = tuple(draw.randint(0, min(shape) - 1) for _ in keys)
    ordered = draw.random() < 0.4
    function = function_of(text)
    return RandomLoop(text, shape, arrays, tuple(keys), values, ordered, function)


def function_of(text: str, **names: Any) -> Callable[..., None]:
    """The function of a text, as if it had been read from a file."""
    file = f"<random loop {next(NUMBERS)}>"
    lines = text.splitlines(keepends=True)
    linecache.cache[file] = (len(text), None, lines, file)
    space: dict[str, Any] = {"np": np, **names}
    exec(compile(text, file, "exec"), space)
    function: Callable[..., None] = space["body"]
    return function


@dataclass
class _Writer:
    draw: random.Random
    dims: int
    arrays: dict[str, tuple[int, ...]]
    lines: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # that stand for one number
    count: int = 0
    anchors: dict[tuple[str, int], list[str]] = field(default_factory=dict)

    def text(self) -> str:
        self._indices()
        self._anchor()
        for _ in range(self.draw.randint(1, 3)):
            self._statement("    ")
        head = f"def body(key, value, {', '.join(self.arrays)}):"
        return "\n".join([head, *(f"    {line}" for line in self.lines)]) + "\n"

    def _indices(self) -> None:
        names = ["i", "j", "k"][: self.dims]
        if self.dims == 1:
            self.lines.append("i = key")
        elif self.draw.random() < 0.7:
            self.lines.append(f"{', '.join(names)} = key")
        else:
            self.lines += [f"{name} = key[{dim}]" for dim, name in enumerate(names)]
        self.names = names
        for name in list(names):
            if self.draw.random() < 0.3:
                shift = self.draw.randint(0, PAD)
                self.lines.append(f"{name}{name} = {name} + {shift}")
                self.names.append(f"{name}{name}")
                if not shift:
                    self.lines.append(f"{name}x = {name}{name}")
                    self.names.append(f"{name}x")

    def _anchor(self) -> None:
        """Lets some dims of arrays have the same few subscripts everywhere: else hardly any loop
        could be divided."""
        bases = [name for name in self.names if len(name) == 1]
        for name, shape in self.arrays.items():
            style = self.draw.random()
            for dim in range(len(shape)):
                base = self.draw.choice(bases)
                if style < 0.45 and (dim == 0 or self.draw.random() < 0.4):
                    self.anchors[name, dim] = [base]
                elif style < 0.75:
                    shifts = [f"{base} + {self.draw.randint(1, PAD)}" for _ in range(2)]
                    self.anchors[name, dim] = [base, *shifts[: self.draw.randint(0, 2)]]

    def _subscript(self, name: str, dim: int) -> str:
        known = self.anchors.get((name, dim))
        return self.draw.choice(known) if known else self._scalar()

    def _scalar(self) -> str:
        """A subscript that is one number, inside of every array."""
        kind, draw = self.draw.random(), self.draw
        base = draw.choice([name for name in self.names if len(name) == 1])
        if kind < 0.5:
            return f"{base} + {draw.randint(0, PAD)}" if draw.random() < 0.5 else base
        if kind < 0.62:
            return draw.choice(self.names)
        if kind < 0.72:
            return str(draw.randint(0, 2))
        if kind < 0.78:
            return f"{draw.randint(1, PAD)} + {base}"
        if kind < 0.86:
            return draw.choice(["value", f"(value + {base}) % 3", f"({base} * 2) % 3"])
        if kind < 0.92:
            return f"{base} + {PAD} - {draw.randint(0, PAD)}"
        return f"max(2 - {base}, 0)"

    def _reference(self, part: bool) -> str:
        """An element of an array, or a part of one."""
        name = self.draw.choice(list(self.arrays))
        dims = len(self.arrays[name])
        subscripts = [self._subscript(name, dim) for dim in range(dims)]
        if part:
            free = [dim for dim in range(dims) if (name, dim) not in self.anchors]
            subscripts[self.draw.choice(free or range(dims))] = ":"
        return f"{name}[{', '.join(subscripts)}]"

    def _expression(self, part: bool) -> str:
        terms = [f"0.5 * {self._reference(False)}" for _ in range(self.draw.randint(0, 2))]
        if part and self.draw.random() < 0.6:
            terms.append(f"0.25 * {self._reference(True)}")
        terms.append(f"{self.draw.randint(1, 9)}.0 + i")
        return " + ".join(terms)

    def _statement(self, indent: str) -> None:
        draw, part = self.draw, self.draw.random() < 0.3
        kind = draw.random()
        if kind < 0.12:
            self.lines.append(f"if value > {draw.randint(0, 2)}:")
            inner = len(self.lines)
            self._statement(indent)
            self.lines[inner:] = [f"    {line}" for line in self.lines[inner:]]
        elif kind < 0.22:
            self.count += 1
            self.lines.append(f"for t{self.count} in range(2):")
            name = draw.choice(list(self.arrays))
            where = [self._subscript(name, dim) for dim in range(len(self.arrays[name]))]
            where[draw.randrange(len(where))] = f"t{self.count}"
            self.lines.append(f"    {name}[{', '.join(where)}] = {self._expression(False)}")
        elif kind < 0.34:
            self.count += 1
            self.lines.append(f"p{self.count} = {self._reference(True)}")
            change = f"p{self.count}[1] = " if draw.random() < 0.5 else f"p{self.count} += "
            self.lines.append(change + self._expression(False))
        elif kind < 0.5:
            self.lines.append(f"{self._reference(part)} += {self._expression(part)}")
        elif kind < 0.6:
            self.count += 1
            self.lines.append(f"x{self.count} = {self._expression(False)}")
            self.lines.append(f"{self._reference(part)} = 0.5 * x{self.count}")
        else:
            self.lines.append(f"{self._reference(part)} = {self._expression(part)}")


# What a body touches


class _Part(np.ndarray[Any, Any]):
    """A part of a watched array: it is read when something is computed with it."""

    note: Callable[[], None]

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **how: Any) -> Any:
        for each in inputs:
            if isinstance(each, _Part):
                each.note()
        plain = [each.view(np.ndarray) if isinstance(each, _Part) else each for each in inputs]
        out = how.pop("out", ())
        if out:
            how["out"] = tuple(o.view(np.ndarray) if isinstance(o, _Part) else o for o in out)
        found = getattr(ufunc, method)(*plain, **how)
        return out[0] if out else found


class _Watched:
    """An array that notes the places of every subscript; parts that are handed out are compared
    with what they were when the iteration ends."""

    def __init__(self, name: str, shape: tuple[int, ...], seen: _Seen) -> None:
        self.name, self.values, self.seen = name, np.ones(shape), seen
        self.places = np.arange(self.values.size).reshape(shape)
        self.handed: list[tuple[Any, Any, Any]] = []

    def __getitem__(self, where: Any) -> Any:
        places = np.atleast_1d(self.places[where])
        found = self.values[where]
        note = lambda: self.seen.reads.update((self.name, int(each)) for each in places.ravel())  # noqa: E731
        if not isinstance(found, np.ndarray):
            note()
            return found
        self.handed.append((found, found.copy(), places))
        part = found.view(_Part)
        part.note = note
        return part

    def __setitem__(self, where: Any, value: Any) -> None:
        places = np.atleast_1d(self.places[where])
        self.seen.writes.update((self.name, int(each)) for each in places.ravel())
        self.values[where] = value
        for view, before, _ in self.handed:
            before[...] = view

    def end(self) -> None:
        for view, before, places in self.handed:
            changed = view != before
            self.seen.writes.update((self.name, int(each)) for each in places[changed].ravel())
        self.handed.clear()


@dataclass
class _Seen:
    reads: set[tuple[str, int]] = field(default_factory=set)
    writes: set[tuple[str, int]] = field(default_factory=set)


def accesses(loop: RandomLoop) -> list[_Seen]:
    """What each element's iteration reads and writes, on arrays of ones: their contents change
    nothing about that."""
    found = []
    for key, value in zip(loop.keys, loop.values, strict=True):
        seen = _Seen()
        arrays = [_Watched(name, shape, seen) for name, shape in loop.arrays.items()]
        loop.function(key[0] if len(key) == 1 else key, value, *arrays)
        for array in arrays:
            array.end()
        found.append(seen)
    return found


def conflicts(seen: list[_Seen]) -> Iterator[tuple[int, int, str, bool]]:
    """(one, other, array, whether one of them reads) of iterations that touch one element which at
    least one of them writes."""
    touching: dict[tuple[str, int], list[int]] = defaultdict(list)
    for number, each in enumerate(seen):
        for place in each.reads | each.writes:
            touching[place].append(number)
    for place, numbers in touching.items():
        for one, other in itertools.combinations(numbers, 2):
            a, b = seen[one], seen[other]
            if place in a.writes or place in b.writes:
                reads = (place in a.writes and place in b.reads) or (
                    place in b.writes and place in a.reads
                )
                yield one, other, place[0], reads
