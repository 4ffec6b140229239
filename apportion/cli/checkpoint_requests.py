"""What `run` makes of --save, --resume and --metrics: an open checkpoint, places that are checked.

Part of the room cli. Paths from the command line come in, our own types go out, or a ValueError
before any work is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from apportion.capture import Program
from apportion.checkpoint import (
    StoredCheckpoint,
    check_is_ours,
    open_checkpoint,
    remove_unfinished,
)
from apportion.run import FREE, FREEDOM, RunOptions, SavingOrder, open_sink, resumed_program


@dataclass(frozen=True)
class CheckpointRequest:
    """What is saved, where it goes on from, and the seed of both."""

    save: Path | None
    every: int
    keep: int
    stored: StoredCheckpoint | None
    metrics: tuple[str, ...]
    seed: int

    def begin(
        self, program: Program, model: str, tell: Callable[[Iterable[str]], None]
    ) -> tuple[Program, RunOptions]:
        """The Program with the state of the checkpoint, if there is one, and how to run it. Raises
        ValueError if it is of another model."""
        saving = None
        if self.save is not None:
            saving = SavingOrder(str(self.save), self.every, self.keep, model)
        if self.stored is None:
            return program, RunOptions(saving, metrics=self.metrics)
        program, resumed = resumed_program(program, self.stored)
        tell(resumed.notes)
        freedom = resumed.others.get(FREEDOM, FREE)
        freedom = freedom if freedom in range(FREE + 1) else FREE
        path = str(self.stored.path.absolute())
        return program, RunOptions(saving, path, freedom, self.metrics)

    @contextmanager
    def without_unfinished(self) -> Iterator[None]:
        """A context that removes what a save has not finished when it fails."""
        try:
            yield
        except BaseException:
            if self.save is not None:
                remove_unfinished(self.save)
            raise


def checkpoint_request(
    save: Path | None,
    every: int | None,
    keep: int,
    resume: Path | None,
    metrics: Sequence[str] | None,
    seed: int | None,
) -> CheckpointRequest:
    """What was asked for. Raises ValueError if it cannot be done: there is no such checkpoint, it
    has another seed, the folder has those of another run, or metrics cannot be written there."""
    if every is not None and save is None:
        raise ValueError("Give --save DIR with --save-every.")
    for name in metrics or ():
        open_sink(name).close()
    stored = None if resume is None else _opened(resume, seed)
    record = None if stored is None else stored.record
    if save is not None:
        check_is_ours(save.absolute(), "" if record is None else record.run)
    known = 0 if record is None else record.seed
    folder = None if save is None else save.absolute()
    numbers = (every or 0, keep)
    own = known if seed is None else seed
    return CheckpointRequest(folder, *numbers, stored, tuple(metrics or ()), own)


def _opened(path: Path, seed: int | None) -> StoredCheckpoint:
    """The checkpoint to go on from; raises ValueError if there is none, or it has another seed."""
    stored = open_checkpoint(path)
    known = None if stored.record is None else stored.record.seed
    if seed is not None and known is not None and seed != known:
        raise ValueError(
            f"{stored.path} was trained with --seed {known}, not {seed}; leave --seed out"
        )
    stored.check_bytes(0, 1)
    return stored
