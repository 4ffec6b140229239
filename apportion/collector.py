"""Python's collector of cycles, kept from looking again and again at what is no garbage.

A process that has loaded torch has a million objects, and one that has planned a while several
times as many. Every full collection looks at all of them, and so does whoever asks for all objects.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def uncollected() -> Iterator[None]:
    """A context in which nothing is collected: for work that makes many objects and next to no
    cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def count_as_old() -> None:
    """Let all objects that there are count as old: they are not looked at again soon, and what is
    garbage among them stays for as long. For a command that has just loaded torch; nothing changes
    where a program has set objects aside itself."""
    if not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()


@contextmanager
def older_objects_set_aside() -> Iterator[None]:
    """A context in which only objects made within it are collected, and are all that `gc` knows;
    none of the others, unless a program has set objects aside itself: those must stay so, and
    nothing is changed. Older garbage is collected first, since what has been set aside is old ever
    after, and Python seldom looks at old objects."""
    if gc.get_freeze_count():
        yield
        return
    gc.collect(1)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def set_aside() -> list[Any]:
    """The objects that are; those that were made since are set aside as well after that."""
    newer = set(map(id, gc.get_objects()))
    gc.unfreeze()
    try:
        return [each for each in gc.get_objects() if id(each) not in newer]
    finally:
        gc.freeze()
