"""Writing one rank's part of a checkpoint, by torch.distributed.checkpoint.

Part of the room checkpoint. Staged Chunks come in; out go files of tensors in the folder of an
unfinished checkpoint, and a small file that says which they are. Every rank does this by itself:
who writes what was decided without a message (state_regions.py), so dcp.save is told that there is
no process group, and no object travels as a pickle.

A file has a key once. What a rank has of a tensor in several Chunks goes into as many files, which
is how torch's own writer of this format names and reads them.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import RootModel
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from apportion.checkpoint.checkpoint_record import StoredFile, StoredTensor
from apportion.checkpoint.chunks import Chunk
from apportion.checkpoint.tensor_file import SUFFIX, StoredChunk, write_tensors
from apportion.files import write_atomic

StagedChunk = tuple[StoredChunk, torch.Tensor]


class PartFiles(RootModel[dict[str, StoredFile]]):
    """The files of one rank's part, by name."""


def write_part(
    folder: Path,
    number: int,
    staged: Sequence[StagedChunk],
    tensors: dict[str, StoredTensor],
) -> None:
    """Writes the part of the rank of that number; `tensors` are the whole ones. Raises ValueError
    if it cannot."""
    writer, planner = _PartWriter(folder, number), _PartPlanner(staged, tensors)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that there is no process group
            save({}, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        (cause, _), *_ = error.failures.values()
        if isinstance(cause, OSError):
            where = cause.filename or folder
            raise ValueError(f"cannot write {where}: {cause.strerror or cause}") from None
        raise cause from None


def part_name(number: int) -> str:
    """The name of the file that says which files a rank has written."""
    return f"rank-{number:05d}.json"


def file_name(rank: int, number: int, count: int) -> str:
    """The name of one of a rank's files, as torch's writer of this format has it."""
    return f"shard-{rank + 1:05d}-model-{number:05d}-of-{count:05d}{SUFFIX}"


class _PartPlanner(SavePlanner):
    """Writes what it is given, as it is."""

    def __init__(self, staged: Sequence[StagedChunk], tensors: dict[str, StoredTensor]) -> None:
        self._staged = {_index(stored): tensor for stored, tensor in staged}
        self._stored = [stored for stored, _ in staged]
        self._tensors = tensors

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """There is nothing to set up."""

    def create_local_plan(self) -> SavePlan:
        """One item for each Chunk."""
        return SavePlan([self._item(stored) for stored in self._stored])

    def _item(self, stored: StoredChunk) -> WriteItem:
        size = torch.Size(self._tensors[stored.key].shape)
        properties = TensorProperties(dtype=stored.dtype)
        data = TensorWriteData(_dcp_chunk(stored.chunk), properties, size)
        return WriteItem(_index(stored), WriteItemType.SHARD, tensor_data=data)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plan as it is; what the other ranks have is not known here, nor needed."""
        found: dict[str, Any] = {}
        for plan in all_plans:
            for item in plan.items:
                assert item.tensor_data is not None
                known = found.setdefault(
                    item.index.fqn,
                    TensorStorageMetadata(item.tensor_data.properties, item.tensor_data.size, []),
                )
                known.chunks.append(item.tensor_data.chunk)
        return all_plans, Metadata(found)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The staged tensor of an item."""
        return self._staged[write_item.index]


class _PartWriter(StorageWriter):
    """Writes files of tensors, and which they are."""

    def __init__(self, folder: Path, number: int) -> None:
        self._folder, self._number = folder, number
        self._files: dict[str, StoredFile] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """There is nothing to reset."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder is there already."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes all items."""
        files = _apportioned(plan.items)
        written = []
        for number, items in enumerate(files, start=1):
            name = file_name(self._number, number, len(files))
            chunks = [(_stored(item), planner.resolve_data(item)) for item in items]
            facts = write_tensors(self._folder / name, chunks)  # type: ignore[arg-type]
            self._files[name] = StoredFile(bytes=facts.nbytes, crc32=facts.crc32)
            written += [WriteResult(item.index, 0, name) for item in items]
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Says which files there are, when all of them are on the disk."""
        text = PartFiles(self._files).model_dump_json()
        write_atomic(self._folder / part_name(self._number), text)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never asked: the folder is given."""
        return False


def _apportioned(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """The items of each file: in each a key once."""
    files: list[list[WriteItem]] = []
    seen: Counter[str] = Counter()
    for item in items:
        number = seen[item.index.fqn]
        seen[item.index.fqn] += 1
        if number == len(files):
            files.append([])
        files[number].append(item)
    return files


def _index(stored: StoredChunk) -> MetadataIndex:
    return MetadataIndex(stored.key, torch.Size(stored.chunk.offsets))


def _stored(item: WriteItem) -> StoredChunk:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return StoredChunk(
        item.index.fqn,
        Chunk(tuple(chunk.offsets), tuple(chunk.sizes)),
        item.tensor_data.properties.dtype,
    )


def _dcp_chunk(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
