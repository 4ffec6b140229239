"""CheckpointSaver: saves the state of a rank together with the others, while training goes on.

Part of the room checkpoint. At the end of a step every rank calls `save`. That takes as long as it
takes to copy what the rank writes; files are written by a thread. When the parts of all ranks are
on the disk, rank 0's thread writes the record, gives the folder its name and removes the oldest.

    every rank   copy -> files of tensors -> rank-N.json
    rank 0       all rank-N.json are there -> checkpoint.json -> rename -> remove the oldest

Threads do not send messages: they see each other's files. Failures are told at the next `save` or
`saved`, to all ranks, and what was written until then is removed. A rank that is killed leaves an
unfinished folder, which is never taken for a checkpoint and is removed by the next one that saves.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import ValidationError

from apportion.checkpoint.agreement import (
    first_rank_says,
    own_rank,
    rank_count,
    told_by_all,
    told_by_first,
)
from apportion.checkpoint.checkpoint_record import (
    NAME,
    CheckpointRecord,
    StoredFile,
    StoredTensor,
    record_text,
)
from apportion.checkpoint.folder import (
    begin_saving,
    check_is_ours,
    finish_saving,
    keep_last,
    last_checkpoint,
)
from apportion.checkpoint.staging import PartChunk, StagedPart

POLL_SECONDS = 0.05
ALONE_SECONDS = 30.0  # that rank 0's thread waits for other parts when its program has ended


@dataclass(frozen=True)
class SaveRequest:
    """What is saved beside the tensors, and where.

    root    the folder of the run's checkpoints
    keep    how many of them stay
    record  what rank 0 writes, without its number and files, which are not known yet
    """

    root: Path
    keep: int
    record: CheckpointRecord


class CheckpointSaver:
    """Saves the part of one rank; `live` gives the tensors that have no slot, by key."""

    def __init__(
        self,
        part: tuple[PartChunk, ...],
        tensors: dict[str, StoredTensor],
        live: Callable[[], Mapping[str, torch.Tensor]],
        pinned: bool,
    ) -> None:
        self._part, self._tensors, self._live, self._pinned = part, tensors, live, pinned
        self._staged: StagedPart | None = None
        self._under_way: _SaveUnderWay | None = None
        self._last: Path | None = None
        self._number = 0  # of the save, on rank 0

    def save(self, request: SaveRequest, tensors: Mapping[int, torch.Tensor]) -> None:
        """Begins to save what the tensors are now. Raises RuntimeError on all ranks if the save
        before could not be finished, and ValueError if this one cannot be begun."""
        self.saved()
        folder = Path(first_rank_says(lambda: self._begin(request)))
        self.stage(tensors)
        assert self._staged is not None
        numbered = request.record.model_copy(update={"number": self._number})
        request = replace(request, record=numbered)
        self._under_way = _SaveUnderWay(folder, request, self._staged, self._tensors)

    def stage(self, tensors: Mapping[int, torch.Tensor]) -> int:
        """Copies what is written; the bytes of the copy, which stays for the next time."""
        if self._staged is None:
            self._staged = StagedPart(self._part, self._pinned)
        self._staged.take(tensors, self._live())
        return self._staged.nbytes

    def _begin(self, request: SaveRequest) -> str:
        self._number = check_is_ours(request.root, request.record.run)
        nbytes = nbytes_of(self._tensors)
        return str(begin_saving(request.root, request.record.step, nbytes))

    def saved(self) -> Path | None:
        """Waits for the save that is under way; returns the checkpoint that was saved last, None if
        none was. All ranks call it. Raises RuntimeError on all of them if one could not save."""
        saving, self._under_way = self._under_way, None
        if saving is None:
            return self._last
        failures = [text for text in told_by_all(saving.wait_for_part()) if text]
        if failures:
            saving.give_up()
            raise RuntimeError(f"the checkpoint was not saved: {failures[0]}{_last_one(saving)}")
        answer = told_by_first(saving.wait_for_all() if own_rank() == 0 else "")
        path, _, failure = answer.partition("\n")
        if failure:
            raise RuntimeError(f"the checkpoint was not saved: {failure}{_last_one(saving)}")
        self._last = Path(path)
        return self._last


def _last_one(saving: _SaveUnderWay) -> str:
    """Which checkpoint is still there."""
    last = None
    with contextlib.suppress(ValueError):
        last = last_checkpoint(saving.request.root)
    return f"; the last one is {last.path}" if last else "; there is none before it"


class _SaveUnderWay:
    """A save under way: the thread of one rank."""

    def __init__(
        self,
        folder: Path,
        request: SaveRequest,
        staged: StagedPart,
        tensors: dict[str, StoredTensor],
    ) -> None:
        self.folder, self.request = folder, request
        self._staged, self._tensors = staged, tensors
        self._failure, self._commit_failure, self._path = "", "", ""
        self._given_up = threading.Event()
        self._part_done = threading.Event()
        self._rank, self._ranks = own_rank(), rank_count()
        self._thread = threading.Thread(target=self._run, name="checkpoint")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:  # told at the next save
            self._failure = f"rank {self._rank}: {error}"
        finally:
            self._part_done.set()
        if self._rank == 0 and not self._failure:
            try:
                self._commit()
            except Exception as error:
                self._commit_failure = str(error)

    def _write(self) -> None:
        from apportion.checkpoint.write_part import write_part

        part = [each.stored for each in self._staged.part]
        staged = list(zip(part, self._staged.tensors, strict=True))
        write_part(self.folder, self._rank, staged, self._tensors)

    def _commit(self) -> None:
        """Makes a checkpoint of the parts of all ranks, when they are there."""
        from apportion.checkpoint.write_part import part_name

        record = self.request.record
        if self._wait_for([part_name(number) for number in range(self._ranks)]):
            self._path = str(commit(self.folder, self._ranks, record))
            keep_last(self.request.root, record.run, self.request.keep)

    def _wait_for(self, names: list[str]) -> bool:
        """Waits until files of these names are there; False if nobody wants them any more."""
        alone_since: float | None = None
        while not all((self.folder / name).exists() for name in names):
            if self._given_up.wait(POLL_SECONDS):
                return False
            if not threading.main_thread().is_alive():
                alone_since = alone_since or time.monotonic()
                if time.monotonic() - alone_since > ALONE_SECONDS:
                    self._remove()
                    return False
        return True

    def wait_for_part(self) -> str:
        """Waits until this rank's part is written; how that failed, or ""."""
        self._part_done.wait()
        return self._failure

    def wait_for_all(self) -> str:
        """Rank 0: waits for the whole; its path and, after a newline, how it failed."""
        self._thread.join()
        if self._commit_failure:
            self._remove()
        return f"{self._path}\n{' '.join(self._commit_failure.split())}"

    def give_up(self) -> None:
        """Ends a save that another rank cannot finish; rank 0 removes what there is of it."""
        self._given_up.set()
        self._thread.join()
        told_by_all("")  # nobody writes any more
        if self._rank == 0:
            self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def commit(unfinished: Path, ranks: int, record: CheckpointRecord) -> Path:
    """Makes a checkpoint of an unfinished folder that has the parts of so many ranks; returns where
    it is. Raises OSError or RuntimeError if it cannot."""
    from apportion.checkpoint.write_part import part_name

    files: dict[str, StoredFile] = {}
    for number in range(ranks):
        path = unfinished / part_name(number)
        files |= _part_files(path)
        path.unlink()
    record = record.model_copy(update={"files": files})
    _write_synced(unfinished / NAME, record_text(record))
    return finish_saving(unfinished, record.step)


def _part_files(path: Path) -> dict[str, StoredFile]:
    from apportion.checkpoint.write_part import PartFiles

    try:
        return PartFiles.model_validate_json(path.read_bytes()).root
    except (ValidationError, OSError) as error:
        raise RuntimeError(f"cannot read {path}: {type(error).__name__}") from None


def _write_synced(path: Path, text: str) -> None:
    with path.open("wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def nbytes_of(tensors: Mapping[str, StoredTensor]) -> int:
    """Bytes of whole tensors."""
    return sum(
        math.prod(tensor.shape) * int(getattr(torch, tensor.dtype).itemsize)
        for tensor in tensors.values()
    )


def run_name() -> str:
    """A name for a training run that no other has."""
    return os.urandom(8).hex()
