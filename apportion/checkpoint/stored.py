"""StoredCheckpoint: a checkpoint, or files of tensors from elsewhere, opened and checked.

Part of the room checkpoint. A path comes in: the folder of a checkpoint, that of a training run, of
which the last checkpoint is taken, a folder of safetensors files, or one such file. Out goes what
tensors there are and where their Chunks lie, after everything has been checked that can be without
reading the tensors. `read_tensors` then fills tensors by torch.distributed.checkpoint, which finds
for each Chunk that is wanted those that are there.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from apportion.checkpoint.checkpoint_record import NAME, RECORD_NOTE, CheckpointRecord, parse_record
from apportion.checkpoint.chunks import Chunk, first_fault
from apportion.checkpoint.folder import find_checkpoint
from apportion.checkpoint.tensor_file import SUFFIX, TensorFile, checksum, read_header

MOST_CHUNKS = 4096  # of a tensor
_DAMAGED = "; take another checkpoint"

Wanted = Mapping[str, Sequence[tuple[Chunk, torch.Tensor]]]
"""Tensors to be filled, each with the Chunk of the stored tensor that it is to hold, by key."""


@dataclass(frozen=True)
class WholeTensor:
    """A stored tensor: its shape and dtype, and the file of each of its Chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: dict[Chunk, Path]


@dataclass(frozen=True)
class StoredCheckpoint:
    """What is at a path; `record` is None where it comes from elsewhere."""

    path: Path
    record: CheckpointRecord | None
    tensors: dict[str, WholeTensor]

    def check_bytes(self, share: int, shares: int) -> None:
        """Compares the checksums of a share of the files; raises ValueError if one was changed."""
        if self.record is None:
            return
        for name in sorted(self.record.files)[share::shares]:
            known = self.record.files[name]
            try:
                found = checksum(self.path / name)
            except OSError as error:
                raise ValueError(f"cannot read {self.path / name}: {error.strerror}") from None
            if (found.nbytes, found.crc32) != (known.bytes, known.crc32):
                raise ValueError(f"{self.path / name} was changed since it was saved{_DAMAGED}")


def open_checkpoint(path: Path) -> StoredCheckpoint:
    """What is at a path. Raises ValueError, one sentence, if it is none or is damaged."""
    if path.is_file():
        file = read_header(path)
        told = file.notes.get(RECORD_NOTE)
        record = None if told is None else parse_record(told, path)
        return _assembled(path, record, [file])
    names = [] if (path / NAME).exists() else _tensor_files(path)
    if names:
        return _assembled(path, None, [read_header(name) for name in names])
    found = find_checkpoint(path)
    files = [_checked_file(found.path, name, found.record) for name in found.record.files]
    return _assembled(found.path, found.record, files)


def _tensor_files(path: Path) -> list[Path]:
    try:
        return sorted(each for each in path.iterdir() if each.name.endswith(SUFFIX))
    except OSError:
        return []


def _checked_file(folder: Path, name: str, record: CheckpointRecord) -> TensorFile:
    path = folder / name
    try:
        found = path.stat().st_size
    except OSError:
        raise ValueError(f"{folder} lacks {name}, a part of it{_DAMAGED}") from None
    if found != record.files[name].bytes:
        raise ValueError(
            f"{path} has {found} bytes and had {record.files[name].bytes} when it was saved"
            f"{_DAMAGED}"
        )
    return read_header(path)


def _assembled(
    path: Path,
    record: CheckpointRecord | None,
    files: Sequence[TensorFile],
) -> StoredCheckpoint:
    """Puts the Chunks of all files together; raises ValueError unless they are whole tensors."""
    found: dict[str, dict[Chunk, Path]] = {}
    kinds: dict[str, torch.dtype] = {}
    for file in files:
        for key, stored in file.stored.items():
            if kinds.setdefault(key, stored.dtype) != stored.dtype:
                raise ValueError(f"{path} has {_short(key)} in two dtypes{_DAMAGED}")
            if stored.chunk in found.setdefault(key, {}):
                raise ValueError(f"{path} has the same part of {_short(key)} twice{_DAMAGED}")
            found[key][stored.chunk] = file.path
    shapes = {key: _extent(chunks) for key, chunks in found.items()}
    if record is not None:
        shapes = _recorded_shapes(path, record, kinds)
    for key, shape in shapes.items():
        if len(found[key]) > MOST_CHUNKS:
            raise ValueError(f"{path} has {_short(key)} in more than {MOST_CHUNKS} parts")
        if fault := first_fault(shape, found[key]):
            raise ValueError(f"{path} is damaged: of {_short(key)}, {fault}{_DAMAGED}")
    tensors = {key: WholeTensor(shapes[key], kinds[key], found[key]) for key in shapes}
    return StoredCheckpoint(path, record, tensors)


def _recorded_shapes(
    path: Path, record: CheckpointRecord, kinds: Mapping[str, torch.dtype]
) -> dict[str, tuple[int, ...]]:
    for key in record.tensors.keys() ^ kinds.keys():
        where = "its files lack" if key in record.tensors else "its record does not know"
        raise ValueError(f"{path} is damaged: {where} {_short(key)}{_DAMAGED}")
    for key, tensor in record.tensors.items():
        if getattr(torch, tensor.dtype) != kinds[key]:
            raise ValueError(f"{path} is damaged: {_short(key)} has another dtype{_DAMAGED}")
    return {key: tensor.shape for key, tensor in record.tensors.items()}


def _extent(chunks: Iterable[Chunk]) -> tuple[int, ...]:
    """The shape of a tensor that nobody has noted: how far its Chunks reach."""
    ends = [[o + n for o, n in zip(c.offsets, c.sizes, strict=True)] for c in chunks]
    dims = max(map(len, ends))
    return tuple(max(end[d] for end in ends if len(end) > d) for d in range(dims))


def _short(key: str) -> str:
    return repr(key if len(key) <= 200 else key[:200] + "...")


def read_tensors(stored: StoredCheckpoint, wanted: Wanted) -> None:
    """Fills tensors on the CPU, converting to their dtypes. Raises ValueError if a file cannot be
    read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that there is no process group
            reader, planner = _Reader(stored), _Planner(wanted)
            load({}, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:
        (cause, _), *_ = error.failures.values()
        if isinstance(cause, OSError | SafetensorError):
            raise ValueError(f"cannot read {stored.path}: {cause}{_DAMAGED}") from None
        raise cause from None


class _Planner(LoadPlanner):
    """Fills the tensors that it is given."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = {
            key: [(_dcp_chunk(chunk), tensor) for chunk, tensor in parts]
            for key, parts in wanted.items()
        }
        self._metadata: Metadata | None = None

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Notes what is there."""
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """What to read for each tensor: the parts that it has in common with those stored."""
        assert self._metadata is not None
        items: list[ReadItem] = []
        for key, parts in self._wanted.items():
            known: Any = self._metadata.state_dict_metadata[key]
            items += create_read_items_for_chunk_list(key, known, [chunk for chunk, _ in parts])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Never: there are tensors only, and nothing is unpickled."""
        raise ValueError("a checkpoint has tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The part of a wanted tensor that an item fills."""
        number = read_item.dest_index.index
        assert number is not None
        tensor = self._wanted[read_item.dest_index.fqn][number][1]
        spans = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return tensor[tuple(slice(o, o + n) for o, n in spans)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """It was filled where it is."""


class _Reader(StorageReader):
    """Reads files of tensors."""

    def __init__(self, stored: StoredCheckpoint) -> None:
        self._stored = stored
        self._paths = {key: list(t.chunks.values()) for key, t in stored.tensors.items()}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """There is nothing to reset."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What was found when the checkpoint was opened."""
        return Metadata(
            {
                key: TensorStorageMetadata(
                    TensorProperties(dtype=tensor.dtype),
                    torch.Size(tensor.shape),
                    [_dcp_chunk(chunk) for chunk in tensor.chunks],
                )
                for key, tensor in self._stored.tensors.items()
            }
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """There is nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads all items, file by file."""
        by_file: dict[Path, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._file(item.storage_index), []).append(item)
        for path, items in by_file.items():
            with safe_open(str(path), framework="pt") as file:
                for item in items:
                    _read(file, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _file(self, index: MetadataIndex) -> Path:
        assert index.index is not None
        return self._paths[index.fqn][index.index]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never asked: the checkpoint is given."""
        return False


def _read(file: Any, item: ReadItem, planner: LoadPlanner) -> None:
    key, spans = item.storage_index.fqn, zip(item.storage_offsets, item.lengths, strict=True)
    box = tuple(slice(o, o + n) for o, n in spans)
    part = file.get_slice(key)[box] if box else file.get_tensor(key)
    target = planner.resolve_tensor(item)
    target.copy_(part)
    planner.commit_tensor(item, target)


def _dcp_chunk(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
