"""Columns of numbers, and the compiled functions that work on them.

Tables with many rows (tasks, messages, pieces of Values) are kept as NumPy columns, and the loops
over them are compiled by Numba. This module has what all of them share: the types of columns, a few
operations on them, and `compiled`, the decorator of those loops.

Compiling takes seconds, and a small step is planned in less time by the interpreter. So a compiled
function begins as plain Python. It is compiled, or its compiled form is loaded from the disk, once
it has taken longer than that pays for. Both forms give the same numbers, bit for bit.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from apportion.work_clock import WORK_CLOCK

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


SECONDS_PER_BYTE = 5e-4
"""What Numba takes to compile a function and its parts, by bytes of their bytecode: 2e-4 to 12e-4
for 16 loops of planning."""


@dataclass
class Patience:
    """How long functions run interpreted before they are compiled.

    load_seconds       after these a function's compiled form is loaded, if an earlier process has
                       left one on the disk; at first that takes as long as loading Numba does
    load_next_seconds  the same once Numba is there
    compile_share      it is compiled after this share of the seconds that compiling it and its
                       parts is expected to take; inf: never
    soon_seconds       or after these, whatever that takes
    whole_seconds      a call is interpreted as a whole for so long; then its parts count their
                       seconds as well
    elements           a call on columns with more numbers in all is not interpreted at all, if
                       anything is compiled
    kept_elements      likewise where its compiled form is on the disk
    depth, deadline    of the interpreted call that is under way: how deep it is, and when its
                       parts begin to count
    """

    load_seconds: float = 0.3
    load_next_seconds: float = 0.02
    compile_share: float = 1.0
    soon_seconds: float = math.inf
    whole_seconds: float = 0.25
    elements: int = 1_000_000
    kept_elements: int = 50_000
    depth: int = 0
    deadline: float = 0.0


# The only one: decorated functions are made on import, before anybody could hand them another.
PATIENCE = Patience()


def compile_at_once() -> None:
    """Interpret nothing from now on: for measurements of how fast compiled loops are."""
    PATIENCE.load_seconds = PATIENCE.compile_share = PATIENCE.whole_seconds = 0.0


def compile_nothing() -> None:
    """Compile nothing from now on because it would take less time then; what an earlier process
    has compiled is loaded."""
    PATIENCE.compile_share = PATIENCE.soon_seconds = math.inf


@contextmanager
def compiled_sooner(seconds: float) -> Iterator[None]:
    """Functions are compiled once they have run interpreted for so long, within the block: for work
    that is known to go on and to be shared by processes, each of which would compile them."""
    _numba()  # which makes it worth while to load what is compiled already
    before = PATIENCE.soon_seconds
    PATIENCE.soon_seconds = min(before, seconds)
    try:
        yield
    finally:
        PATIENCE.soon_seconds = before


class CompiledFunction:
    """A function on columns: plain Python at first, compiled by Numba when it is worth it.

    Other compiled functions may call it, in either form. `plain` is what is interpreted, if that is
    not the function itself: the same in NumPy's terms, say.
    """

    def __init__(
        self, function: Callable[..., Any], plain: Callable[..., Any], **options: bool
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.plain = plain
        self.options = options  # Numba's
        self.seconds = 0.0  # that it has run interpreted
        self.native: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        if self.native is not None:
            return self.native(*arguments)
        if PATIENCE.depth and time.perf_counter() < PATIENCE.deadline:
            return self.plain(*arguments)  # a part of a call that is not long yet
        outermost = PATIENCE.depth == 0
        if self._is_due() or (outermost and self._is_large(_elements(arguments))):
            self.native = self.dispatcher
            return self.native(*arguments)
        if not outermost:
            return self._interpret(arguments)
        PATIENCE.deadline = time.perf_counter() + PATIENCE.whole_seconds
        with np.errstate(all="ignore"):  # hashes overflow, as they do in compiled code
            return self._interpret(arguments)

    def _interpret(self, arguments: tuple[Any, ...]) -> Any:
        began = time.perf_counter()
        PATIENCE.depth += 1
        try:
            return self.plain(*arguments)
        finally:
            PATIENCE.depth -= 1
            self.seconds += time.perf_counter() - began

    def _is_due(self) -> bool:
        """Whether it has run interpreted for as long as its compiled form is worth."""
        if self.seconds < PATIENCE.load_seconds:
            return False
        if self.seconds >= PATIENCE.soon_seconds or self._is_kept:
            return True
        return self.seconds >= PATIENCE.compile_share * self.compile_seconds()

    def compile_seconds(self) -> float:
        """What compiling it is expected to take, with all parts that are not compiled yet."""
        return SECONDS_PER_BYTE * _bytes_of(each for each in self._parts if each.native is None)

    @property
    def is_there(self) -> bool:
        """Whether it is compiled, or an earlier process has compiled it."""
        return self.native is not None or self._is_kept

    @functools.cached_property
    def _parts(self) -> set[CompiledFunction]:
        """It and the functions that it calls, and that these call."""
        found: set[CompiledFunction] = set()
        left = [self]
        while left:
            one = left.pop()
            if one not in found:
                found.add(one)
                names = one.function.__code__.co_names
                called = (one.function.__globals__.get(name) for name in names)
                left += [each for each in called if isinstance(each, CompiledFunction)]
        return found

    def _is_large(self, elements: int) -> bool:
        """Whether to interpret a call on so many numbers would be too long."""
        if elements > PATIENCE.kept_elements and self._is_kept:
            return True
        return elements > PATIENCE.elements and PATIENCE.compile_share < math.inf

    @functools.cached_property
    def _is_kept(self) -> bool:
        """Whether an earlier process has compiled it and left the result on the disk."""
        code = self.function.__code__
        path = Path(code.co_filename)
        version = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
        name = f"{path.stem}.{self.function.__qualname__}-{code.co_firstlineno}.{version}.nbi"
        return any((folder / name).exists() for folder in _numba_folders(path.parent))

    @functools.cached_property
    def dispatcher(self) -> Any:
        """The function as Numba has it, which compiles it or loads it when it is called."""
        jit = _numba().njit
        options = {"no_cfunc_wrapper": True} | self.options  # C code calls none of them
        try:
            made = jit(cache=True, **options)(self.function)
        except RuntimeError:  # no folder can be written to: it is compiled in every process
            return jit(**options)(self.function)
        _drop_unreadable(made)
        return made


@functools.cache
def _numba_folders(source: Path) -> tuple[Path, ...]:
    """Where Numba keeps what is compiled from the files of a folder: beside them, or in the user's
    cache where that may not be written."""
    own = f"{source.name}_{hashlib.sha1(os.path.abspath(source).encode()).hexdigest()}"
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return (Path(chosen) / own,)
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return source / "__pycache__", Path(caches).expanduser() / "numba" / own


def seconds_to_compile(functions: Iterable[CompiledFunction]) -> float:
    """What compiling these is expected to take; those that an earlier process has compiled take
    nothing."""
    missing = [each for each in functions if not each.is_there]
    return SECONDS_PER_BYTE * _bytes_of(set().union(*(each._parts for each in missing)))


def _bytes_of(functions: Iterable[CompiledFunction]) -> int:
    """Of their bytecode."""
    return sum(len(each.function.__code__.co_code) for each in functions)


class CompiledPart(CompiledFunction):
    """A part of compiled loops. Interpreted code calls it as plain Python, always: it does too
    little by itself to be compiled for."""

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


class InlinedPart(CompiledPart):
    """A part whose body takes the place of every call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function, function)
        self.targetoptions = {"inline": "always"}  # this and `py_func` are what Numba looks for
        self.py_func = function


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a part of a loop into each of its callers: for parts that are given many columns,
    since handing columns over takes longer than a few operations on them."""
    return InlinedPart(function)


def compiled_part(function: Callable[..., Any]) -> Any:
    """Compile a part of other compiled functions, so that calling it costs nothing.

    It gets no call of its own, and counts no references to the columns of the structures that it is
    given; with both, a call with 30 columns takes 200 ns. It must not make arrays, nor call what
    does. Unlike what is inlined it is compiled once for all of its callers.
    """
    return CompiledPart(function, function, forceinline=True, _nrt=False, no_cpython_wrapper=True)


@overload
def compiled(function: Callable[..., Any]) -> Any: ...
@overload
def compiled(*, plain: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]: ...
def compiled(
    function: Callable[..., Any] | None = None, *, plain: Callable[..., Any] | None = None
) -> Any:
    """Compile a function on columns with Numba once its work is worth it; keep it on the disk."""
    if function is None:
        return lambda function: CompiledFunction(function, plain or function)
    return CompiledFunction(function, plain or function)


def _elements(arguments: tuple[Any, ...]) -> int:
    """How many numbers the columns among some arguments have."""
    total = 0
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            total += argument.size
        elif isinstance(argument, tuple):
            total += _elements(argument)
    return total


@functools.cache
def _numba() -> Any:
    """Numba, told what a CompiledFunction is; loading it takes half a second. Else it colours the
    messages of errors that nobody is to see, thousands of them."""
    os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")
    WORK_CLOCK.stop()
    try:
        import numba
        from numba.core import event, types
        from numba.core.datamodel.models import OpaqueModel
        from numba.extending import register_model, typeof_impl
    finally:
        WORK_CLOCK.go_on()

    class FunctionType(types.Dispatcher):
        """A compiled function within another one. An integer literal as an argument is any integer:
        Numba would compile the function again for each."""

        def get_call_type(self, context: Any, args: Any, kws: Any) -> Any:
            return super().get_call_type(context, tuple(map(types.unliteral, args)), kws)

    register_model(FunctionType)(OpaqueModel)

    @typeof_impl.register(CompiledFunction)
    def _type_of(function: CompiledFunction, context: Any) -> Any:
        return FunctionType(function.dispatcher)

    class Announcement(event.Listener):
        def on_start(self, event: Any) -> None:
            WORK_CLOCK.announce_compiling()

        def on_end(self, event: Any) -> None: ...

    class Stop(event.Listener):
        """Budgets go on when what is compiled, or loaded from the disk, is there."""

        def on_start(self, event: Any) -> None:
            WORK_CLOCK.stop()

        def on_end(self, event: Any) -> None:
            WORK_CLOCK.go_on()

    event.register("numba:compile", Announcement())  # type: ignore[no-untyped-call]
    event.register("numba:compiler_lock", Stop())  # type: ignore[no-untyped-call]
    PATIENCE.load_seconds = min(PATIENCE.load_seconds, PATIENCE.load_next_seconds)
    return numba


def _drop_unreadable(dispatcher: Any) -> None:
    """Forget what is kept on the disk if it cannot be read: an earlier version of the package may
    have left types there which are gone, and Numba would stop at them."""
    cache = dispatcher._cache
    try:
        cache._cache_file._load_index()
    except Exception:
        cache.flush()


def offsets(counts: Ints) -> Ints:
    """Where each of several stretches begins, and the end of the last."""
    found = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=found[1:])
    return found


def distinct(numbers: Ints) -> Ints:
    """The distinct numbers, rising; for many of them numpy's own way takes several times longer."""
    rising = np.sort(numbers)
    found: Ints = rising[np.append(True, rising[1:] != rising[:-1])[: len(rising)]]
    return found


def plain(column: Ints) -> Ints:
    """The column as compiled code knows it, however it was made."""
    return np.ascontiguousarray(column, np.int64)


# Hash sets. Each is an array of slots, a power of two of them, -1 where a slot is free.


def free_slots(most: int) -> Ints:
    """The slots of a hash set of at most so many numbers."""
    return np.full(1 << max(4, (2 * most - 1).bit_length()), -1, np.int64)


@compiled
def slot_of(slots: Ints, number: int) -> int:
    """The slot that holds a number which is not negative, or the free one where it belongs."""
    slot = (number * 2654435761) & (len(slots) - 1)
    while slots[slot] != -1 and slots[slot] != number:
        slot = (slot + 1) & (len(slots) - 1)
    return slot


@compiled
def with_more_slots(slots: Ints) -> Ints:
    """The same set of numbers in twice as many slots."""
    more = np.full(2 * len(slots), -1, np.int64)
    for number in slots:
        if number != -1:
            more[slot_of(more, number)] = number
    return more


@compiled
def row_hash(row: Ints, length: int) -> np.int64:
    """A number that is the same for rows whose first `length` numbers are equal (FNV-1a)."""
    code = np.int64(1469598103934665603)
    for k in range(length):
        code = (code ^ row[k]) * np.int64(1099511628211)
        code ^= code >> 29
    return code


def distinct_rows(rows: npt.NDArray[np.generic]) -> tuple[Ints, Ints]:
    """One index of each distinct row, and for each row which of these it equals."""
    data = np.ascontiguousarray(rows)
    if data.dtype == np.bool_:
        data = np.packbits(data, axis=1)
        pad = -data.shape[1] % 8
        data = np.pad(data, ((0, 0), (0, pad)))
    words = data.view(np.int64).reshape(len(data), -1)
    first, which = _distinct_rows(words, free_slots(len(words)))
    return first, which


def _distinct_rows_by_bytes(words: Ints, slots: Ints) -> tuple[Ints, Ints]:
    """What `_distinct_rows` does, by a dictionary."""
    data, size = words.tobytes(), 8 * words.shape[1]
    numbers: dict[bytes, int] = {}
    first: list[int] = []
    which = np.empty(len(words), np.int64)
    for row in range(len(words)):
        number = numbers.setdefault(data[row * size : (row + 1) * size], len(first))
        if number == len(first):
            first.append(row)
        which[row] = number
    return np.array(first, np.int64), which


@compiled(plain=_distinct_rows_by_bytes)
def _distinct_rows(words: Ints, slots: Ints) -> tuple[Ints, Ints]:
    count, width = words.shape
    first, which = np.empty(count, np.int64), np.empty(count, np.int64)
    found = 0
    for row in range(count):
        slot = row_hash(words[row], width) & (len(slots) - 1)
        while slots[slot] >= 0:
            other = first[slots[slot]]
            same = True
            for k in range(width):
                if words[other, k] != words[row, k]:
                    same = False
                    break
            if same:
                break
            slot = (slot + 1) & (len(slots) - 1)
        if slots[slot] < 0:
            slots[slot] = found
            first[found] = row
            found += 1
        which[row] = slots[slot]
    return first[:found].copy(), which


# Compiled parts that several rooms use. All numbers are int64, and no step overflows, so that they
# give the same when they are not compiled.

HALF = (1 << 31) - 1
WHOLE = (1 << 62) - 1
FACTOR = 0x9E3779B1  # odd, and below 2 ** 32: a product with half a number fits in an int64


@compiled
def mixed(found: int, number: int) -> int:
    """A hash of 62 bits, of one so far and of a further number. As the low half is multiplied by an
    odd number and the high half is then changed by the result, two hashes that differ stay
    different if the same number follows."""
    found = (found ^ number) & WHOLE
    product = (found & HALF) * FACTOR
    return ((product & HALF) << 31) | ((found >> 31) ^ ((product >> 31) & HALF))


@compiled
def hash_table(count: int) -> Ints:
    """An empty table with open addresses for so many rows; it holds rows, or -1."""
    room = 16
    while room < 2 * count:
        room *= 2
    return np.full(room, -1)


@compiled
def is_new_pair(table: Ints, one: Ints, other: Ints, row: int) -> bool:
    """Whether no row in the table is equal to this one in both columns; then it is put there."""
    last = len(table) - 1
    place = mixed(mixed(np.int64(0), one[row]), other[row]) & last
    while table[place] >= 0:
        if one[table[place]] == one[row] and other[table[place]] == other[row]:
            return False
        place = (place + 1) & last
    table[place] = row
    return True


@compiled
def push(heap: Ints, size: int, key: int, item: int) -> None:
    """Adds a row (key, item) to the heap heap[:size], which has the smallest row first."""
    hole = size
    while hole > 0:
        above = (hole - 1) >> 1
        if heap[above, 0] < key or (heap[above, 0] == key and heap[above, 1] < item):
            break
        heap[hole, 0], heap[hole, 1] = heap[above, 0], heap[above, 1]
        hole = above
    heap[hole, 0], heap[hole, 1] = key, item


@compiled
def pop(heap: Ints, size: int) -> None:
    """Removes the first row of the heap heap[:size]."""
    last = size - 1
    key, item, hole, below = heap[last, 0], heap[last, 1], 0, 1
    while below < last:
        if below + 1 < last and (
            heap[below + 1, 0] < heap[below, 0]
            or (heap[below + 1, 0] == heap[below, 0] and heap[below + 1, 1] < heap[below, 1])
        ):
            below += 1
        if key < heap[below, 0] or (key == heap[below, 0] and item < heap[below, 1]):
            break
        heap[hole, 0], heap[hole, 1] = heap[below, 0], heap[below, 1]
        hole, below = below, 2 * below + 1
    heap[hole, 0], heap[hole, 1] = key, item


@compiled
def sort(numbers: Ints) -> None:
    """Sorts numbers in place, most of which are in order: Shell's way, over falling distances."""
    far = 1
    while 3 * far < len(numbers):
        far = 3 * far + 1
    while far > 0:
        for k in range(far, len(numbers)):
            number, place = numbers[k], k
            while place >= far and numbers[place - far] > number:
                numbers[place] = numbers[place - far]
                place -= far
            numbers[place] = number
        far //= 3
