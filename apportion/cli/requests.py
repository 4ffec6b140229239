"""What commands make of their arguments: a captured step, checked folders.

Part of the room cli. Words from the command line come in, our own types go out, or a ValueError.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from apportion.files import check_writable
from apportion.show import note

if TYPE_CHECKING:
    from apportion.capture import Program
    from apportion.machine import Cluster


def sized(
    model: str,
    batch: int | None,
    seq: int | None,
    precision: str | None = None,
    accumulate: int | None = None,
) -> str:
    """The model's name with the sizes of its batch, the micro-batches and the precision that were
    given as options."""
    if batch is None and seq is None and precision is None and accumulate is None:
        return model
    from apportion import zoo

    model = zoo.with_accumulation(zoo.with_sizes(model, batch, seq), accumulate)
    return zoo.with_precision(model, precision)


def capture_without_data(model: str, seed: int) -> Program:
    """The step of a model for planning: without data, so that models of any size can be planned."""
    from apportion import zoo
    from apportion.capture import capture
    from apportion.collector import count_as_old

    count_as_old()
    it = zoo.load(model, seed, meta=True)
    for text in it.notes:
        note(text)
    program = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm, it.fixed)
    count_as_old()
    for text in program.notes:
        note(text)
    return program


def note_slow_halves(program: Program, cluster: Cluster) -> None:
    """Says which devices gain nothing from a step in half precision but memory."""
    kinds = {value.dtype for value in program.graph.values}
    if kinds.isdisjoint(("bfloat16", "float16")):
        return
    for device in {each.kind: each for each in cluster.devices}.values():
        rates = dict(device.flops)
        if device.kind != "cpu" and 2 in rates and rates[2] <= rates.get(4, 0.0):
            note(
                f"{device.kind} computes in half precision no faster than in float32, by its rates"
            )


def check_outputs(*files: Path | None, inputs: Sequence[Path | None] = ()) -> None:
    """Before any work: ValueError unless all these files can be put where they are to go, each its
    own, and none in the place of one that is read."""
    taken = {os.path.realpath(file): "is read" for file in inputs if file is not None}
    for file in files:
        if file is None:
            continue
        check_writable(file)
        place = os.path.realpath(file)
        if place in taken:
            raise ValueError(f"{file} {taken[place]} by this command: write to another file.")
        taken[place] = "is written already"


def complain(sentences: Iterable[str]) -> None:
    """Says on stderr what has gone wrong; empty ones are left out."""
    for text in filter(None, sentences):
        note(f"apportion: {' '.join(text.split())}")


def keep_result(write: Callable[[Path], None], path: Path | None) -> str:
    """Writes a result where it is to go or, if that fails now though it could be written to before
    (a full disk), into the folder for temporary files. Returns what to tell of a failure, or ""."""
    if path is None:
        return ""
    try:
        write(path)
    except ValueError as error:
        other = _temporary_file(write, path.suffix)
        if other is None:
            return f"{error}; it is lost, and what is printed is all that is left of it"
        return f"{error}; it is in {other} instead"
    return ""


def _temporary_file(write: Callable[[Path], None], suffix: str) -> str | None:
    """Writes a result into the folder for temporary files; where it is, None if that fails too."""
    try:
        number, name = tempfile.mkstemp(prefix="apportion-", suffix=suffix)
        os.close(number)
    except OSError:
        return None
    try:
        write(Path(name))
    except ValueError:
        Path(name).unlink(missing_ok=True)
        return None
    return name
