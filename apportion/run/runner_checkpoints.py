"""RunnerCheckpoints: how a Runner saves what it has trained, and goes on from what was saved.

Part of the room run. A Runner comes in; checkpoints go out, and come in again under whatever plan
this Runner has. What is kept beside tensors is plain data: the number of steps, the seed, the
settings of optimizers, how far the loader has come, and the state of schedulers and other objects
that are given by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apportion.capture import Program, saved_names
from apportion.checkpoint import (
    MODEL,
    CheckpointRecord,
    CheckpointSaver,
    RankState,
    Resumed,
    SaveRequest,
    export_file,
    find_checkpoint,
    first_rank_says,
    gather_state,
    give_others,
    kept_others,
    last_checkpoint,
    open_checkpoint,
    own_rank,
    plain_groups,
    put_groups,
    put_whole,
    raise_on_all,
    rank_count,
    resumed_from,
    run_name,
    state_dicts,
    told_by_first,
)
from apportion.execute import Rank


@dataclass
class TrainingPosition:
    """How far training has come: steps, and of the loader whole passes and batches of the next;
    `skips`, whether the loader has yet to be brought there."""

    seed: int
    steps_done: int = 0
    passes: int = 0
    batches: int = 0
    skips: bool = False

    def skipped(self) -> int:
        """How many batches of a loader are skipped now: those of the pass that was interrupted."""
        if not self.skips:
            self.batches = 0
        self.skips = False
        return self.batches


class RunnerCheckpoints:
    """The checkpoints of one rank's Runner; every method is called by all ranks."""

    def __init__(self, program: Program, rank: Rank, position: TrainingPosition) -> None:
        self.program, self.position = program, position
        self.state = RankState(program, rank)
        self.run = run_name()
        self.model = ""
        self._saver: CheckpointSaver | None = None

    @property
    def saver(self) -> CheckpointSaver:
        """What saves, made at the first call."""
        if self._saver is None:
            state = self.state
            pinned = state.rank.place.startswith("cuda")
            self._saver = CheckpointSaver(state.part, state.tensors, state.live, pinned)
        return self._saver

    def save(self, folder: Path, keep: int, others: Mapping[str, Any]) -> None:
        """Begins to save; see Runner.save."""
        if keep < 1:
            raise ValueError(f"keep={keep} would keep no checkpoint; give at least 1")
        request = SaveRequest(folder, keep, self._record(others))
        self.saver.save(request, self.state.rank.tensors)

    def stage(self) -> int:
        """Copies what this rank writes; see Runner.stage."""
        return self.saver.stage(self.state.rank.tensors)

    def _record(self, others: Mapping[str, Any]) -> CheckpointRecord:
        position = self.position
        return CheckpointRecord(
            run=self.run,
            number=0,
            step=position.steps_done,
            seed=position.seed,
            model=self.model,
            tensors=self.state.tensors,
            files={},
            numbers=self.state.numbers,  # type: ignore[arg-type]
            loose=self.state.loose,
            groups=plain_groups(self.program.live.param_groups),
            position={"passes": position.passes, "batches": position.batches},
            others=kept_others(others),
            devices=rank_count(),
        )

    def resume(self, folder: Path, others: Mapping[str, Any]) -> Resumed | None:
        """Loads the last checkpoint of a folder, if there is one."""
        found = ""
        if own_rank() == 0:
            last = last_checkpoint(folder)
            found = "" if last is None else str(last.path)
        found = told_by_first(found)
        return self.load(Path(found), True, others) if found else None

    def load(self, path: Path, optimizer: bool, others: Mapping[str, Any]) -> Resumed:
        """Goes on from a checkpoint; see Runner.load."""
        path = Path(first_rank_says(lambda: str(_resolved(path))))
        failure = ""
        try:
            stored = open_checkpoint(path)
            stored.check_bytes(own_rank(), rank_count())
            loaded = self.state.read(stored, optimizer)
            resumed = resumed_from(stored, others, loaded.match.notes)
        except ValueError as error:
            failure = str(error)
        raise_on_all(failure)
        record = stored.record
        if record is not None and optimizer:
            put_groups(self.program, record.groups, str(path))
        give_others(resumed, others)
        self.state.use(loaded)
        if record is not None:
            self._go_on(record)
            stateful = any(hasattr(each, "__iter__") for each in others.values())
            self.position.skips = not stateful
        return resumed

    def _go_on(self, record: CheckpointRecord) -> None:
        self.run = record.run
        self.position.seed = record.seed
        self.position.steps_done = record.step
        self.position.passes = record.position.get("passes", 0)
        self.position.batches = record.position.get("batches", 0)

    def state_dict(self, rank: int | None) -> dict[str, Any]:
        """The state as plain PyTorch has it; see Runner.state_dict."""
        whole = gather_state(self.state, rank)
        if rank is not None and rank != own_rank():
            return {}
        return state_dicts(self.program, whole, self.state.numbers)

    def export(self, path: Path, optimizer: bool) -> Path:
        """Writes one file; see Runner.export."""
        whole = gather_state(self.state, 0)
        first_rank_says(lambda: str(self._export(path, whole, optimizer)))
        return path

    def _export(self, path: Path, whole: dict[str, Any], optimizer: bool) -> Path:
        if optimizer:
            return export_file(path, whole, self._record({}))
        saved = {f"{MODEL}{name}" for name in saved_names(self.program.live)}
        weights = {k.removeprefix(MODEL): tensor for k, tensor in whole.items() if k in saved}
        return export_file(path, weights, None)

    def update_model(self) -> None:
        """Brings the live model and optimizers up to date; see Runner.update_model."""
        put_whole(self.program.live, gather_state(self.state, None), self.state.numbers)


def _resolved(path: Path) -> Path:
    """The checkpoint that a path stands for, the same on all ranks."""
    if path.is_file() or any(path.glob("*.safetensors")):
        return path
    return find_checkpoint(path).path
