"""Files that appear whole or not at all, whatever interrupts their writing.

Plans, reports, traces and cost tables are written by these functions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replaced_when_done(path: Path) -> Iterator[Path]:
    """Where to write a file; it takes the place of `path` when the block ends well. Raises
    ValueError, naming it, if it cannot be written."""
    whole = _target(path)
    unfinished = _unfinished(whole)
    try:
        yield unfinished
        os.replace(unfinished, whole)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """A file to write; it takes the place of `path` when the block ends well. What is no plain file
    (a pipe, /dev/null) is written to as it is. Raises ValueError, naming it, if it cannot be
    written."""
    whole = _target(path)
    if _is_stream(whole):
        with whole.open("wb") as file:
            yield file
        return
    with replaced_when_done(path) as unfinished, unfinished.open("wb") as file:
        yield file


def write_atomic(path: Path, text: str) -> None:
    """Write a text into a file, whole or not at all."""
    with open_atomic(path) as file:
        file.write(text.encode())


def check_writable(path: Path) -> None:
    """Raises ValueError, before any work, if a file cannot be put there."""
    whole = _target(path)
    if whole.is_dir():
        raise ValueError(f"cannot write {path}: it is a folder; name a file in it")
    if not whole.parent.is_dir():
        raise ValueError(f"There is no folder {str(whole.parent)!r} to write {path.name} to.")
    if _is_stream(whole):
        return
    unfinished = _unfinished(whole)
    try:
        unfinished.write_bytes(b"\0")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def _target(path: Path) -> Path:
    """Where it is put: what a link points to is replaced, not the link."""
    try:
        return Path(os.path.realpath(path))
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None


def _unfinished(whole: Path) -> Path:
    """Where a file is until it is finished; names have 255 bytes at most."""
    name = os.fsdecode(os.fsencode(whole.name)[:200])
    return whole.with_name(f".{name}.{os.getpid()}.part")


def _is_stream(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()
