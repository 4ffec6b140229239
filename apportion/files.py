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
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """A file to write; it takes the place of `path` when the block ends well. Raises ValueError,
    naming it, if it cannot be written."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with unfinished.open("wb") as file:
            yield file
        os.replace(unfinished, path)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def write_atomic(path: Path, text: str) -> None:
    """Write a text into a file, whole or not at all."""
    with open_atomic(path) as file:
        file.write(text.encode())
