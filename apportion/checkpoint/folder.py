"""The folder of a training run's checkpoints: what is in it, what is added, what is removed.

Part of the room checkpoint.

    run/
      step-40/              a checkpoint: checkpoint.json beside files of tensors
      step-60/
      .saving-80-1f3a.../   one that is being written, or was when its writers ended

A checkpoint is written under another name and renamed when all of it is on the disk, so that a save
that was cut off is never taken for one. Names of unfinished ones are drawn anew each time: whatever
an earlier process left, or still writes, is in another folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from apportion.checkpoint.checkpoint_record import NAME, CheckpointRecord, read_record
from apportion.quantity import format_quantity

_FINISHED = re.compile(r"step-(\d{1,18})(\.\d{1,9})?")
_UNFINISHED, _REMOVED = ".saving-", ".removed-"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in its folder."""

    path: Path
    record: CheckpointRecord


def checkpoints_in(root: Path) -> list[Checkpoint]:
    """The checkpoints of a folder, in the order in which they were saved. What cannot be read as
    one is none."""
    found = []
    for path in _entries(root):
        if _FINISHED.fullmatch(path.name):
            with contextlib.suppress(ValueError):
                found.append(Checkpoint(path, read_record(path)))
    return sorted(found, key=lambda each: (each.record.number, each.record.step, each.path.name))


def last_checkpoint(root: Path) -> Checkpoint | None:
    """The one that was saved last; None if there is none."""
    found = checkpoints_in(root)
    return found[-1] if found else None


def _entries(root: Path) -> list[Path]:
    try:
        return sorted(root.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(f"cannot read the folder {root}: {error.strerror}") from None


def check_is_ours(root: Path, run: str) -> int:
    """The number of the next save of a run into a folder. Raises ValueError if the folder has
    checkpoints of another run, which must not be mistaken for those of this one."""
    known = checkpoints_in(root)
    others = [each for each in known if each.record.run != run]
    if others:
        raise ValueError(
            f"{root} has checkpoints of another training run (the last is {others[-1].path.name}); "
            "resume from them, or save into another folder"
        )
    return max((each.record.number + 1 for each in known), default=0)


def begin_saving(root: Path, step: int, nbytes: int) -> Path:
    """A new folder for a checkpoint of so many bytes, unfinished. Removes what earlier processes
    have not finished. Raises ValueError if it cannot be made, or there is no room for it."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        remove_unfinished(root)
        free = shutil.disk_usage(root).free
        if free < nbytes:
            need, room = format_quantity(nbytes, "B"), format_quantity(free, "B")
            raise ValueError(
                f"no room for a checkpoint in {root}: it takes {need}, {room} are free; remove "
                "something, or save into another folder"
            )
        made = root / f"{_UNFINISHED}{step}-{secrets.token_hex(6)}"
        made.mkdir()
    except OSError as error:
        raise ValueError(f"cannot save into {root}: {error.strerror}") from None
    return made


def finish_saving(unfinished: Path, step: int) -> Path:
    """Makes an unfinished folder a checkpoint, by a name that no other has; raises OSError."""
    root = unfinished.parent
    sync_folder(unfinished)
    for number in range(1, 1_000_000):
        path = root / (f"step-{step}" if number == 1 else f"step-{step}.{number}")
        if not path.exists():
            os.rename(unfinished, path)
            sync_folder(root)
            return path
    raise OSError(f"{root} has too many checkpoints of step {step}")


def remove_unfinished(root: Path) -> None:
    """Removes what earlier processes have begun and not finished."""
    for path in _entries(root):
        if path.name.startswith((_UNFINISHED, _REMOVED)):
            shutil.rmtree(path, ignore_errors=True)


def keep_last(root: Path, run: str, count: int) -> None:
    """Removes all checkpoints of a run but the last `count`. What is being removed is no checkpoint
    any more."""
    own = [each for each in checkpoints_in(root) if each.record.run == run]
    for each in own[: max(0, len(own) - count)]:
        gone = root / f"{_REMOVED}{each.path.name}-{secrets.token_hex(6)}"
        with contextlib.suppress(OSError):
            os.rename(each.path, gone)
            shutil.rmtree(gone, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint that a path names: its own folder, or the last one in the folder of a run.
    Raises ValueError if there is none."""
    if (path / NAME).exists():
        return Checkpoint(path, read_record(path))
    found = last_checkpoint(path)
    if found is not None:
        return found
    broken = [p for p in _entries(path) if _FINISHED.fullmatch(p.name)]
    if broken:
        read_record(broken[-1])  # says what is wrong with it
    if not path.exists():
        raise ValueError(f"there is no checkpoint {path}")
    raise ValueError(f"there is no checkpoint in {path}")
