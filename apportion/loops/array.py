"""Arrays of loops: dense ones that bodies read and write, and sparse ones that loops go over.

Part of the room loops, and public as `loops.array`. An array is described here and made where it is
used: with processes each of them makes and keeps its own parts, and nobody has the whole, until
`numpy()` asks for it.

    ratings = loops.array.from_coordinates(rows, cols, values)
    W = loops.array.normal((rank, users), 0.1)

Random numbers are a function of the seed and an element's place, so that an array is the same
however many processes make it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from apportion.checked import brief
from apportion.loops.loop_body import HelperSource, LoopError, plain_function, read_helper

Numbers = npt.NDArray[Any]
_COUNT = itertools.count(1)

RANDOM_AT_ONCE = 1 << 20  # elements: making them takes several times their memory
FILL, NORMAL, UNIFORM, GIVEN, SAVED = "fill", "normal", "uniform", "given", "saved"


@dataclass(frozen=True)
class SavedParts:
    """Parts of an array in safetensors files: (file, name there, range of indices in each dim)."""

    parts: tuple[tuple[str, str, tuple[tuple[int, int], ...]], ...]

    def read(self, box: Sequence[tuple[int, int]], into: Numbers) -> None:
        """Reads a box of the array; ValueError, naming the file, if it cannot be read."""
        for path, name, part in self.parts:
            shared = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, part, strict=True)]
            if any(low >= high for low, high in shared):
                continue
            there = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(shared, part, strict=True))
            here = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(shared, box, strict=True))
            try:
                with safe_open(path, "numpy") as file:
                    stored = file.get_slice(name)
                    if list(stored.get_shape()) != [high - low for low, high in part]:
                        raise LoopError(f"{path} is damaged: {brief(name)} has another shape")
                    into[here] = stored[there]
            except (OSError, SafetensorError) as error:
                raise LoopError(f"{path} cannot be read: {brief(str(error), 200)}") from None


@dataclass(frozen=True)
class Beginning:
    """What an array holds at first: all elements `number`, random ones of that scale, those of the
    file `path`, in NumPy's own format, or of `values`, or those of a checkpoint."""

    kind: str
    number: float = 0.0
    seed: int = 0
    path: str = ""
    values: Numbers | None = field(default=None, compare=False)
    parts: SavedParts | None = None


@dataclass(eq=False)
class DenseArray:
    """An array that bodies of loops read and write.

    `contents` are its elements where they are in this process; `holder` is the session whose
    processes have them instead; `lost` says why nobody has them any more.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    beginning: Beginning
    number: int = field(default_factory=lambda: next(_COUNT))
    contents: Numbers | None = None
    holder: Any = None
    lost: str = ""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def numpy(self) -> Numbers:
        """A copy of all elements, in this process."""
        self.check()
        if self.holder is not None:
            found: Numbers = self.holder.collect(self)
            return found
        return self.local().copy()

    def local(self) -> Numbers:
        """The elements themselves, in this process."""
        self.check()
        if self.contents is None:
            everything = tuple((0, extent) for extent in self.shape)
            self.contents = beginning_of(self, everything)
        return self.contents

    def assign(self, values: npt.ArrayLike) -> None:
        """Gives the array other elements."""
        made = np.asarray(values, self.dtype)
        if made.shape != self.shape:
            raise LoopError(f"an array of shape {self.shape} cannot hold one of {made.shape}")
        if self.holder is not None:
            self.holder.forget(self)
        self.contents, self.holder, self.lost = made.copy(), None, ""

    def check(self) -> None:
        """Raises RuntimeError if the elements are lost."""
        if self.lost:
            raise RuntimeError(self.lost)

    def __repr__(self) -> str:
        return f"loops array of shape {self.shape}, {self.dtype}"


@dataclass(eq=False)
class SparseArray:
    """Elements with keys: what a loop goes over. `keys` has a column for each dim; `fields` are the
    columns of the values, all of one length, or with `starts` those that have many entries for each
    element: element e has those from starts[e] to starts[e + 1].

    With `shards` the processes read them instead: shard k is `read(items[k])`. `is_changed`: a loop
    has put other values into elements that processes have.
    """

    shape: tuple[int, ...]
    keys: tuple[Numbers, ...] = ()
    fields: tuple[Numbers, ...] = ()
    starts: Numbers | None = None
    ragged: tuple[Numbers, ...] = ()
    shards: Shards | None = None
    number: int = field(default_factory=lambda: next(_COUNT))
    holder: Any = None
    lost: str = ""
    is_changed: bool = False

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def single_values(self) -> int:
        """How many single values an element has."""
        return 1 if self.shards is not None else len(self.fields)

    def __len__(self) -> int:
        if self.shards is not None:
            raise LoopError("how many elements shards have is known to the processes only")
        return len(self.keys[0])

    def numpy(self) -> Numbers:
        """A copy of the values of all elements, in the order in which they were given."""
        if self.lost:
            raise RuntimeError(self.lost)
        if len(self.fields) != 1:
            raise LoopError("only elements with one value each can be asked for it")
        if self.holder is not None:
            found: Numbers = self.holder.collect_values(self)
            return found
        return self.fields[0].copy()

    def __repr__(self) -> str:
        many = f"{len(self.shards.items)} shards" if self.shards else f"{len(self)} elements"
        return f"loops array of shape {self.shape} with {many}"


@dataclass(frozen=True)
class Shards:
    """How processes read elements: the source of a function, and what it is called with."""

    source: HelperSource
    items: tuple[Any, ...]

    @property
    def read(self) -> Callable[..., Any]:
        """The function, made of its source."""
        return plain_function(self.source)


# Dense arrays


def full(shape: Sequence[int], number: float, dtype: npt.DTypeLike = np.float32) -> DenseArray:
    """An array of equal elements."""
    return DenseArray(_shape(shape), np.dtype(dtype), Beginning(FILL, number))


def zeros(shape: Sequence[int], dtype: npt.DTypeLike = np.float32) -> DenseArray:
    """An array of zeros."""
    return full(shape, 0, dtype)


def normal(
    shape: Sequence[int], scale: float = 1.0, seed: int = 0, dtype: npt.DTypeLike = np.float32
) -> DenseArray:
    """Normally distributed elements around 0 with the standard deviation `scale`."""
    return DenseArray(_shape(shape), _floating(dtype), Beginning(NORMAL, scale, seed))


def uniform(
    shape: Sequence[int], scale: float = 1.0, seed: int = 0, dtype: npt.DTypeLike = np.float32
) -> DenseArray:
    """Elements from 0 to `scale`, all equally likely."""
    return DenseArray(_shape(shape), _floating(dtype), Beginning(UNIFORM, scale, seed))


def from_numpy(values: npt.ArrayLike) -> DenseArray:
    """An array with given elements, which are copied."""
    made = np.array(values)
    if not (np.issubdtype(made.dtype, np.number) or made.dtype == np.bool_):
        raise LoopError(f"elements of {made.dtype} cannot be in an array of loops: numbers can")
    return DenseArray(_shape(made.shape), made.dtype, Beginning(GIVEN), contents=made)


def _shape(shape: Sequence[int]) -> tuple[int, ...]:
    found = tuple(int(extent) for extent in shape)
    if not found or min(found) < 1:
        raise LoopError(f"an array of shape {found} has no elements; give at least one in each dim")
    return found


def _floating(dtype: npt.DTypeLike) -> np.dtype[Any]:
    found = np.dtype(dtype)
    if not np.issubdtype(found, np.floating):
        raise LoopError(f"random elements are float32 or float64, not {found}")
    return found


# Sparse arrays


def from_coordinates(*columns: npt.ArrayLike, shape: Sequence[int] | None = None) -> SparseArray:
    """Elements by their keys: one column of indices for each dim, then the column of values.
    Without `shape` every dim is as long as its largest index needs. An ordered loop takes them by
    their keys; one whose order is free in the order in which they are given, or, where arrays are
    too large for a cache, so block by block of their indices."""
    if len(columns) < 2:
        raise LoopError("from_coordinates takes columns of indices and then one of values")
    values = np.asarray(columns[-1])
    keys = tuple(_index_column(each, len(values)) for each in columns[:-1])
    return SparseArray(_extents(keys, shape), keys, (values,))


def from_rows(
    starts: npt.ArrayLike, *columns: npt.ArrayLike, labels: npt.ArrayLike | None = None
) -> SparseArray:
    """Rows of different lengths, by their number: row r has the entries starts[r] to starts[r + 1]
    of each column. A body gets them as arrays, after the label of the row if there are labels:
    `label, ids, weights = row`."""
    begins: Numbers = np.asarray(starts)
    ragged = tuple(np.asarray(each) for each in columns)
    count = len(begins) - 1
    wrong = count < 1 or begins[0] != 0 or (np.diff(begins) < 0).any()
    if wrong or not ragged or any(len(each) != begins[-1] for each in ragged):
        raise LoopError("starts has to rise from 0 to the length of all columns")
    fields: tuple[Numbers, ...] = () if labels is None else (np.asarray(labels),)
    if any(len(each) != count for each in fields):
        raise LoopError(f"there are {count} rows and {len(fields[0])} labels")
    keys = (np.arange(count, dtype=_index_type(count)),)
    return SparseArray((count,), keys, fields, begins.astype(np.int64), ragged)


def indices(*extents: int) -> SparseArray:
    """All keys of a grid, in their order, without values: `for i in range(n): for j in
    range(m)`."""
    shape = _shape(extents)
    grid = np.indices(shape).reshape(len(shape), -1)
    keys = tuple(column.astype(_index_type(n)) for column, n in zip(grid, shape, strict=True))
    return SparseArray(shape, keys, ())


def from_shards(
    read: Callable[..., Any], items: Sequence[Any], shape: Sequence[int]
) -> SparseArray:
    """Elements that the processes read: each calls `read(item)` for some of the items (names of
    files, numbers of shards), which returns the columns of `from_coordinates`. Nobody has them all.
    `read` may use numpy, numbers and functions like itself."""
    if not items:
        raise LoopError("there are no shards to read")
    plain = all(isinstance(each, str | int | float | Path) for each in items)
    if not plain:
        raise LoopError("shards are read by a number or a text each")
    return SparseArray(_shape(shape), shards=Shards(read_helper(read), tuple(items)))


def _index_type(extent: int) -> type[np.signedinteger[Any]]:
    return np.int32 if extent < 2**31 else np.int64


def _index_column(column: npt.ArrayLike, count: int) -> Numbers:
    found = np.asarray(column)
    if found.ndim != 1 or len(found) != count:
        raise LoopError(
            f"indices and values are columns of one length; there are {count} values and a column "
            f"of shape {found.shape}"
        )
    if not np.issubdtype(found.dtype, np.integer):
        raise LoopError(f"indices are whole numbers, not {found.dtype}")
    if count and int(found.min()) < 0:
        raise LoopError(f"the index {int(found.min())} is negative; indices count from 0")
    return found


def _extents(keys: tuple[Numbers, ...], shape: Sequence[int] | None) -> tuple[int, ...]:
    largest = [int(column.max()) if len(column) else 0 for column in keys]
    found = _shape(shape) if shape is not None else tuple(each + 1 for each in largest)
    if len(found) != len(keys):
        raise LoopError(f"the shape {found} does not have {len(keys)} dims")
    for dim, (extent, index) in enumerate(zip(found, largest, strict=True)):
        if index >= extent:
            raise LoopError(f"the index {index} is outside of dim {dim} of the shape {found}")
    return found


# Contents


def beginning_of(array: DenseArray, box: Sequence[tuple[int, int]]) -> Numbers:
    """What a box of an array holds at first."""
    start = array.beginning
    shape = tuple(high - low for low, high in box)
    if start.kind == FILL:
        return np.full(shape, start.number, array.dtype)
    if start.kind == GIVEN:
        whole = np.load(start.path, mmap_mode="r") if start.path else start.values
        assert whole is not None, "an array with given elements has none"
        return np.array(whole[tuple(slice(low, high) for low, high in box)])
    found = np.empty(shape, array.dtype)
    if start.kind == SAVED:
        assert start.parts is not None
        start.parts.read(box, found)
        return found
    some = max(1, RANDOM_AT_ONCE * shape[0] // max(found.size, 1))
    for row in range(0, shape[0], some):
        low, high = box[0][0] + row, min(box[0][0] + row + some, box[0][1])
        found[row : row + some] = _random(start, _places(array.shape, ((low, high), *box[1:])))
    return found


def _places(shape: tuple[int, ...], box: Sequence[tuple[int, int]]) -> npt.NDArray[np.uint64]:
    """The number of every element of a box, in the order of the whole array."""
    ranges = [np.arange(low, high, dtype=np.uint64) for low, high in box]
    found = np.zeros((), np.uint64)
    for extent, each in zip(shape, ranges, strict=True):
        found = found[..., None] * np.uint64(extent) + each
    return found


def _random(start: Beginning, places: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    first = _unit(places, 2 * start.seed)
    if start.kind == UNIFORM:
        return first * start.number
    angle = 2 * np.pi * _unit(places, 2 * start.seed + 1)
    found: npt.NDArray[np.float64] = np.sqrt(-2 * np.log1p(-first)) * np.cos(angle) * start.number
    return found


def _unit(places: npt.NDArray[np.uint64], stream: int) -> npt.NDArray[np.float64]:
    """A number from 0 to 1 for each place: splitmix64 of the place in a stream."""
    with np.errstate(over="ignore"):
        bits = (places + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        bits += np.uint64((stream + 1) * 0xD1342543DE82EF95 % 2**64)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits ^= bits >> np.uint64(31)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
