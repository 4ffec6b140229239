"""The place in the user's program that runs now, also where it is inside a library that it calls.

For notes and refusals about one call: `train.py:12, inside torch/distributions/normal.py:57` says
both which line of the user's is meant and which line of the library wants it. user_line.py gives
the one line that an Op is labelled with.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch

_PACKAGE = str(Path(__file__).parent.parent) + os.sep
_ZOO = _PACKAGE + "zoo" + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIBRARIES = str(Path(torch.__file__).parent.parent) + os.sep
_STDLIB = sysconfig.get_path("stdlib") + os.sep
# Parts of torch that are programs in Python; the rest of it only hands calls on.
_TORCH_PROGRAMS = tuple(
    _TORCH + name for name in ("distributions", "nn" + os.sep, "optim", "functional.py")
)


@dataclass(frozen=True, slots=True)
class CallPlace:
    """A place in a running program.

    stack    file, line and instruction of every frame outside this package, the innermost first:
             equal exactly for the same call by the same way
    text     as it is shown: the user's own line, and the library's line that it leads to
    library  the package that has that line, "" for the user's own and torch's
    """

    stack: tuple[tuple[str, int, int], ...]
    text: str
    library: str

    @property
    def at(self) -> str:
        """` at train.py:12`, or nothing where no line is known."""
        return f" at {self.text}" if self.text else ""

    def remedy(self, own: str, example: str = "") -> str:
        """What to do about the line: as `own` says, if it is the user's to change."""
        if not self.library:
            return own
        such = f" ({example})" if example else ""
        return (
            f"choose a setting of {self.library} that does without it{such}, or write that part "
            f"anew: {own}"
        )


def call_place(outermost: CodeType) -> CallPlace:
    """The place that runs now, looking no further out than the frame that runs `outermost`."""
    frame: FrameType | None = sys._getframe(1)
    stack: list[tuple[str, int, int]] = []
    while frame is not None and frame.f_code is not outermost:
        name = frame.f_code.co_filename
        if not name.startswith(_PACKAGE) or name.startswith(_ZOO):
            stack.append((name, frame.f_lineno, frame.f_lasti))
        frame = frame.f_back
    return _place(stack)


def place_of_frames(frames: Iterable[tuple[FrameType, int]]) -> CallPlace:
    """The place of frames with their lines, the outermost first, as a traceback has them."""
    stack = [
        (frame.f_code.co_filename, line, frame.f_lasti)
        for frame, line in frames
        if not frame.f_code.co_filename.startswith(_PACKAGE)
        or frame.f_code.co_filename.startswith(_ZOO)
    ]
    stack.reverse()
    return _place(stack)


def setting_of(value: float, outermost: CodeType) -> str:
    """The attribute of the module that runs now, or of its config, that has this value and sounds
    like the probability to drop a layer: `encoder_layerdrop`; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    found: list[str] = []
    while frame is not None and frame.f_code is not outermost and not found:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            for holder in (owner, getattr(owner, "config", None)):
                held = getattr(holder, "__dict__", {}).items()
                found += [name for name, x in held if type(x) is float and x == value]
        frame = frame.f_back
    dropping = [name for name in found if "drop" in name or "prob" in name]
    return next((name for name in dropping if "layer" in name or "path" in name), "") or next(
        iter(dropping), ""
    )


def attribute_of(value: float, outermost: CodeType) -> str:
    """The attribute of a module that runs now that has this value, not as a truth value; "" if
    there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not outermost:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            for name, x in vars(owner).items():
                if isinstance(x, int | float) and not isinstance(x, bool) and x == value:
                    return name
        frame = frame.f_back
    return ""


def source_line(place: CallPlace) -> str:
    """The text of the innermost line of a place."""
    inner = next((each for each in place.stack if _is_program(each[0])), None)
    return linecache.getline(*inner[:2]) if inner else ""


def _place(stack: list[tuple[str, int, int]]) -> CallPlace:
    depth = next((k for k, each in enumerate(stack) if _is_own(each[0])), len(stack))
    called = [each for each in stack[:depth] if _is_program(each[0])]
    foreign = [each for each in called if not each[0].startswith(_TORCH)]
    # a library's line says more than the line of torch that it leads to
    shown = [_shown(*each) for each in (*stack[depth : depth + 1], *(foreign or called)[:1])]
    library = _package(foreign[0][0]) if foreign else ""
    return CallPlace(tuple(stack), ", inside ".join(shown), library)


def _package(name: str) -> str:
    """The package that a file of a library belongs to."""
    inner = name.rpartition("site-packages" + os.sep)[2].removeprefix(_LIBRARIES)
    return inner.split(os.sep)[0].removesuffix(".py")


def _is_own(name: str) -> bool:
    """Whether a file is the user's own: of no library."""
    return not name.startswith((_LIBRARIES, _STDLIB, "<")) and "site-packages" not in name


def _is_program(name: str) -> bool:
    """Whether a file is a program, the user's or a library's, and not what torch runs it by."""
    if name.startswith(_TORCH):
        return name.startswith(_TORCH_PROGRAMS)
    outside = "site-packages" in name or not name.startswith(_STDLIB)
    return outside and not name.startswith("<")


def checks_shapes(name: str) -> bool:
    """Whether a file is of torch and raises where shapes do not fit, not by the user's will."""
    return name.startswith(_TORCH) and not name.startswith(_TORCH + "distributions")


def _shown(name: str, line: int, _: int) -> str:
    if "site-packages" + os.sep in name:
        name = name.rpartition("site-packages" + os.sep)[2]
    return f"{name.removeprefix(os.getcwd() + os.sep)}:{line}"
