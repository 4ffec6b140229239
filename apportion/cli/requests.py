"""What commands make of their arguments: a captured step, checked folders.

Part of the room cli. Words from the command line come in, our own types go out, or a ValueError.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from apportion.show import note

if TYPE_CHECKING:
    from apportion.capture import Program
    from apportion.machine import Cluster


def sized(model: str, batch: int | None, seq: int | None, precision: str | None = None) -> str:
    """The model's name with the sizes of its batch and the precision that were given as options."""
    if batch is None and seq is None and precision is None:
        return model
    from apportion import zoo

    return zoo.with_precision(zoo.with_sizes(model, batch, seq), precision)


def capture_without_data(model: str, seed: int) -> Program:
    """The step of a model for planning: without data, so that models of any size can be planned."""
    from apportion import zoo
    from apportion.capture import capture

    it = zoo.load(model, seed, meta=True)
    for text in it.notes:
        note(text)
    program = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm, it.fixed)
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


def check_folders(*files: Path | None) -> None:
    """Before any work: ValueError unless all these files can be put where they are to go."""
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise ValueError(
                f"There is no folder {str(file.absolute().parent)!r} to write {file.name} to."
            )
