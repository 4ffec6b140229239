"""The line of the user's program that runs now, for the Ops and the error messages of capture/.

A frame is the user's unless its code belongs to torch, to Python's own library or to this package
(whose zoo counts as the user's, though its module that changes the precision of a model only where
it is nobody else's). Lines are shown as `file.py:12`, relative to the working folder, or
to where packages are.
"""

from __future__ import annotations

import os
import sys
import traceback
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import torch

_PACKAGE = str(Path(__file__).parent.parent) + os.sep
_PRECISION = _PACKAGE + os.path.join("zoo", "precision.py")
_TORCH = str(Path(torch.__file__).parent) + os.sep
_STDLIB = str(Path(os.__file__).parent) + os.sep


def user_line(outermost: CodeType) -> str:
    """The line of the innermost frame that is the user's, looking no further out than the frame
    that runs `outermost`; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    between = ""
    while frame is not None and frame.f_code is not outermost:
        line = _line_in(frame, frame.f_lineno)
        if line and frame.f_code.co_filename != _PRECISION:
            return line
        between = between or line
        frame = frame.f_back
    return between


def user_line_of(error: BaseException) -> str:
    """The user's line that an exception passed last, or ""."""
    lines = [_line_in(f, n) for f, n in traceback.walk_tb(error.__traceback__)]
    return next((line for line in reversed(lines) if line), "")


def at_line(line: str) -> str:
    """` at file.py:12`, or nothing where no line is known."""
    return f" at {line}" if line else ""


def is_own_file(filename: str) -> bool:
    """Whether a file of code is the user's own: neither torch's, Python's or ours, nor that of an
    installed package."""
    return _shown_file(filename) is not None and "site-packages" not in filename


def is_zoo_file(filename: str) -> bool:
    """Whether a file is one of the zoo's, whose models are ours."""
    return filename.startswith(_PACKAGE + "zoo" + os.sep)


def _line_in(frame: FrameType, number: int) -> str:
    shown = _shown_file(frame.f_code.co_filename)
    return "" if shown is None else f"{shown}:{number}"


@cache
def _shown_file(filename: str) -> str | None:
    """The file as it is shown to the user; None if it is not the user's."""
    if filename.startswith(_PACKAGE):
        if not is_zoo_file(filename):
            return None
        return os.path.join("apportion", filename.removeprefix(_PACKAGE))
    elif filename.startswith((_TORCH, "<frozen", "<string", "<eval_with_key")) or (
        filename.startswith(_STDLIB) and "site-packages" not in filename
    ):
        return None
    packages = "site-packages" + os.sep
    if packages in filename:
        return filename.rpartition(packages)[2]
    here = os.getcwd() + os.sep
    return filename.removeprefix(here)
