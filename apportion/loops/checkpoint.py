"""Checkpoints of loops: arrays in safetensors files, a part a process, and one JSON file that names
them.

Part of the room loops.

    loops.save("run", W=W, H=H, passes=3)
    found = loops.load("run", W=W, H=H)       # found["passes"] == 3

Every process writes its own parts. The file `loops.json` is written last and all at once, and only
then the files of the checkpoint before are removed: whatever is interrupted, the folder holds a
whole one. Any number of processes can go on with it: each reads the indices that it needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from apportion.checked import LARGEST_NUMBER, brief, check_plain, parse_json, read_number
from apportion.files import write_atomic
from apportion.loops.array import SAVED, Beginning, DenseArray, SavedParts, SparseArray
from apportion.loops.loop_body import LoopError
from apportion.loops.loop_rank import LoopRank
from apportion.loops.rank_requests import CountBytes, RankRequest
from apportion.loops.session import LoopSession, current_session

INDEX, VERSION = "loops.json", 1
_PART = re.compile(r"part\d{1,18}-\d{1,9}\.safetensors")


class SavedPart(BaseModel):
    """One part of an array: its file, its name there, and its range of indices in each dim."""

    model_config = ConfigDict(extra="forbid", strict=True)
    file: str
    name: str
    box: list[tuple[int, int]]


class SavedArray(BaseModel):
    """An array's shape, type and parts; of a sparse one the values of its elements by their
    numbers, in parts that have no boxes."""

    model_config = ConfigDict(extra="forbid", strict=True)
    shape: list[int]
    dtype: str
    sparse: bool
    parts: list[SavedPart]


class SavedIndex(BaseModel):
    """What `loops.json` holds."""

    model_config = ConfigDict(extra="forbid", strict=True)
    version: int
    stamp: int
    numbers: dict[str, float | int]
    arrays: dict[str, SavedArray]


@dataclass(frozen=True)
class SaveParts(RankRequest):
    """Write this rank's parts of some arrays, by their names."""

    path: str
    dense: Mapping[str, int]
    sparse: Mapping[str, int]

    def on(self, rank: LoopRank) -> dict[str, list[list[tuple[int, int]]]]:
        tensors: dict[str, Any] = {}
        boxes: dict[str, list[list[tuple[int, int]]]] = {}
        for name, number in self.dense.items():
            boxes[name] = []
            for at, (box, block) in enumerate(rank.arrays[number].parts()):
                if block.size:
                    tensors[f"{name}.{at}"] = np.ascontiguousarray(block)
                boxes[name].append(list(box))
        for name, number in self.sparse.items():
            elements = rank.dealt[number].elements if number in rank.dealt else rank.raw[number]
            tensors[f"{name}.numbers"] = elements.numbers
            tensors[f"{name}.values"] = elements.fields[0]
        save_file(tensors, f"{self.path}-{rank.peers.rank}.safetensors")
        return boxes


def save(folder: str | Path, **what: Any) -> None:
    """Writes arrays and numbers into a folder, by their names; it takes the place of what is there.
    Raises ValueError for what cannot be saved, RuntimeError if a process cannot write."""
    root, session = Path(folder), current_session()
    dense = {name: each for name, each in what.items() if isinstance(each, DenseArray)}
    sparse = {name: each for name, each in what.items() if isinstance(each, SparseArray)}
    numbers = {name: each for name, each in what.items() if name not in (*dense, *sparse)}
    _check(numbers, sparse)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LoopError(f"cannot make the folder {root}: {error.strerror}") from None
    before = _read_index(root) if (root / INDEX).exists() else None
    stamp = before.stamp + 1 if before is not None else 1
    for array in dense.values():
        session.hold(array)
    for elements in sparse.values():
        session.hold_elements(elements)
    path = str(root / f"part{stamp}")
    held = SaveParts(
        path, {k: v.number for k, v in dense.items()}, {k: v.number for k, v in sparse.items()}
    )
    answers = session.ask(held)
    index = SavedIndex(
        version=VERSION, stamp=stamp, numbers=numbers,
        arrays={
            **{k: _dense_entry(k, v, answers, stamp) for k, v in dense.items()},
            **{k: _sparse_entry(k, v, session, stamp) for k, v in sparse.items()},
        },
    )  # fmt: skip
    if session.is_first:
        write_atomic(root / INDEX, index.model_dump_json(indent=1))
        _remove_others(root, stamp)
    session.ask(CountBytes())  # nobody goes on before the index is there
    session.checkpoint = str(root)


def _check(numbers: Mapping[str, Any], sparse: Mapping[str, SparseArray]) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise LoopError(f"{name} is a {type(value).__name__}; arrays and numbers can be saved")
    for name, array in sparse.items():
        if len(array.fields) != 1 or array.shards is not None:
            raise LoopError(f"{name} cannot be saved: its elements do not have one value each")


def _dense_entry(name: str, array: DenseArray, answers: list[Any], stamp: int) -> SavedArray:
    parts = [
        SavedPart(file=f"part{stamp}-{rank}.safetensors", name=f"{name}.{at}", box=box)
        for rank, boxes in enumerate(answers)
        for at, box in enumerate(boxes[name])
        if all(low < high for low, high in box)
    ]
    return SavedArray(shape=list(array.shape), dtype=array.dtype.name, sparse=False, parts=parts)


def _sparse_entry(name: str, array: SparseArray, session: LoopSession, stamp: int) -> SavedArray:
    parts = [
        SavedPart(file=f"part{stamp}-{rank}.safetensors", name=name, box=[])
        for rank in range(session.count)
    ]
    dtype = array.fields[0].dtype.name
    return SavedArray(shape=list(array.shape), dtype=dtype, sparse=True, parts=parts)


def _remove_others(root: Path, stamp: int) -> None:
    for path in root.glob("part*-*.safetensors"):
        if not path.name.startswith(f"part{stamp}-"):
            path.unlink(missing_ok=True)


def load(folder: str | Path, **arrays: DenseArray | SparseArray) -> dict[str, float]:
    """Gives arrays the elements that were saved under these names; returns the numbers that were
    saved with them. Raises ValueError if the folder has no checkpoint, or one of other arrays."""
    root = Path(folder)
    index = _read_index(root)
    for name, array in arrays.items():
        saved = index.arrays.get(name)
        if saved is None:
            known = brief(", ".join(index.arrays) or "nothing", 200)
            raise LoopError(f"{root} has no array {name}; it has {known}")
        if tuple(saved.shape) != array.shape:
            raise LoopError(
                f"{name} has the shape {array.shape}, and the one in {root} {tuple(saved.shape)}"
            )
        if isinstance(array, DenseArray):
            _load_dense(root, name, array, saved)
        else:
            _load_sparse(root, name, array, saved)
    return dict(index.numbers)


def _load_dense(root: Path, name: str, array: DenseArray, saved: SavedArray) -> None:
    if saved.sparse or saved.dtype != array.dtype.name:
        raise LoopError(f"{name} holds {array.dtype}, and the one in {root} {brief(saved.dtype)}")
    _check_whole(root, name, saved)
    if array.holder is not None:
        array.holder.forget(array)
    parts = tuple(
        (str(root / part.file), part.name, tuple((low, high) for low, high in part.box))
        for part in saved.parts
    )
    array.beginning = Beginning(SAVED, parts=SavedParts(parts))
    array.contents, array.holder, array.lost = None, None, ""


def _check_whole(root: Path, name: str, saved: SavedArray) -> None:
    """Raises ValueError unless the parts of an array are all of it."""
    from apportion.checkpoint import Chunk, first_fault  # it needs torch

    boxes = {tuple(part.box) for part in saved.parts}  # processes may have the same
    chunks = [
        Chunk(tuple(low for low, _ in box), tuple(high - low for low, high in box)) for box in boxes
    ]
    if fault := first_fault(saved.shape, chunks):
        raise LoopError(f"{root} is damaged: of {name}, {fault}")


def _load_sparse(root: Path, name: str, array: SparseArray, saved: SavedArray) -> None:
    if not saved.sparse or len(array.fields) != 1 or array.fields[0].dtype.name != saved.dtype:
        raise LoopError(f"the values of {name} are not those that {root} has")
    values = array.fields[0].copy()
    for part in saved.parts:
        try:
            with safe_open(root / part.file, "numpy") as file:
                numbers = file.get_tensor(f"{name}.numbers")
                values[numbers] = file.get_tensor(f"{name}.values")
        except (OSError, SafetensorError, IndexError) as error:
            said = brief(str(error), 200)
            raise LoopError(f"{root / part.file} cannot be read: {said}") from None
    if array.holder is not None:
        array.holder.forget(array)
    array.fields, array.holder, array.lost, array.is_changed = (values,), None, "", False


def _read_index(root: Path) -> SavedIndex:
    path = root / INDEX
    try:
        text = path.read_bytes()
    except OSError:
        raise LoopError(f"{root} has no checkpoint of a loop: there is no {path.name}") from None
    try:
        data = parse_json(text)
        check_plain(data, "it")
        index = SavedIndex.model_validate(data, strict=False)
        for name, number in index.numbers.items():
            read_number(number, name, -LARGEST_NUMBER)
    except ValueError as error:  # ValidationError is one
        first = brief(str(error).splitlines()[0], 200)
        raise LoopError(f"{path} is not the index of a checkpoint: {first}") from None
    if index.version != VERSION:
        raise LoopError(f"{path} is of version {index.version}, and this program reads {VERSION}")
    names = [part.file for array in index.arrays.values() for part in array.parts]
    if not all(map(_PART.fullmatch, names)):
        raise LoopError(f"{path} names a file that is not in its folder")
    return index
