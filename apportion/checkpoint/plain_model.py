"""Checkpoints of plain PyTorch: a model and an optimizer on one device, saved and loaded.

Part of the room checkpoint. What a divided run has saved goes into a plain model and optimizer, and
what plain PyTorch has trained is saved so that a divided run goes on from it. A path that ends in
`.safetensors` is one file with everything; any other is a folder of checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from apportion.capture import (
    LiveState,
    live_state,
    live_tensors,
    optimizer_state,
    other_names,
    saved_names,
)
from apportion.checkpoint.checkpoint_record import (
    RECORD_NOTE,
    CheckpointRecord,
    StoredTensor,
    record_text,
)
from apportion.checkpoint.chunks import whole_chunk
from apportion.checkpoint.folder import (
    begin_saving,
    check_is_ours,
    find_checkpoint,
    keep_last,
)
from apportion.checkpoint.group_settings import plain_groups, put_all_settings
from apportion.checkpoint.match_state import KnownState, match_state
from apportion.checkpoint.plain_data import from_plain, to_plain
from apportion.checkpoint.saver import commit, nbytes_of, run_name
from apportion.checkpoint.state_regions import key_of
from apportion.checkpoint.stored import StoredCheckpoint, open_checkpoint, read_tensors
from apportion.checkpoint.tensor_file import SUFFIX, StoredChunk, write_tensors
from apportion.checkpoint.whole_state import put_whole
from apportion.files import replaced_when_done


@dataclass(frozen=True)
class Resumed:
    """What a checkpoint was: its path, the number of the next step, what it kept beside the model,
    by name, and what was left out, a sentence each."""

    path: Path
    step: int
    others: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def resumed_from(stored: StoredCheckpoint, others: Mapping[str, Any], notes: Any) -> Resumed:
    """What a checkpoint was; raises ValueError if it keeps nothing under one of the names."""
    record = stored.record
    known = {} if record is None else record.others
    for name in others:
        if name not in known:
            has = ", ".join(sorted(known)) or "nothing"
            raise ValueError(f"{stored.path} keeps no {name!r} beside the model; it keeps {has}")
    kept = {name: from_plain(each) for name, each in known.items()}
    return Resumed(stored.path, 0 if record is None else record.step, kept, tuple(notes))


def kept_others(others: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of objects beside the model: their state, or themselves if they are plain
    data."""
    return {
        name: to_plain(each.state_dict() if hasattr(each, "state_dict") else each, name)
        for name, each in others.items()
    }


def give_others(resumed: Resumed, others: Mapping[str, Any]) -> None:
    """Gives objects what was kept of them."""
    for name, each in others.items():
        if hasattr(each, "load_state_dict"):
            each.load_state_dict(resumed.others[name])


def load_checkpoint(path: str | Path, model: Any, optimizer: Any = (), **others: Any) -> Resumed:
    """Loads a checkpoint of a divided run, or one by `save_checkpoint`, into a plain model and
    optimizer: a Module and an Optimizer, or sequences or dicts of such, as the step was given them.

    `path` is the folder of a checkpoint, that of a training run, whose last one is taken, or a
    safetensors file. `others` are given what was kept of them under the same names. Raises
    ValueError, and changes nothing, if it is of another model or damaged.
    """
    live = live_state(model, optimizer)
    stored = open_checkpoint(Path(path))
    stored.check_bytes(0, 1)
    return load_live(stored, live, others)


def load_live(
    stored: StoredCheckpoint, live: LiveState, others: Mapping[str, Any] | None = None
) -> Resumed:
    """Loads an open checkpoint into live objects."""
    match = match_state(stored, known_state(live), bool(live.optimizers))
    resumed = resumed_from(stored, others or {}, match.notes)
    keys = {key_of(name, None): there for name, there in match.tensors.items()}
    for name, states in match.states.items():
        keys |= {key_of(name, state): there for state, there in states.items()}
    whole, wanted = {}, {}
    for key, there in keys.items():
        known = stored.tensors[there]
        whole[key] = room = torch.empty(known.shape, dtype=known.dtype)
        wanted[there] = [(whole_chunk(known.shape), room)]
    read_tensors(stored, wanted)
    record = stored.record
    if record is not None and live.optimizers:
        put_all_settings(live.param_groups, list(record.groups), str(stored.path))
    put_whole(live, whole, {} if record is None else dict(record.numbers))
    give_others(resumed, others or {})
    return resumed


def known_state(live: LiveState) -> KnownState:
    """All that a checkpoint may have of a plain model; of its optimizer whatever is stored."""
    saved = saved_names(live)
    shapes = {name: tuple(tensor.shape) for name, tensor in live_tensors(live).items()}
    needed = {name: shape for name, shape in shapes.items() if name in saved}
    beside = {name: shape for name, shape in shapes.items() if name not in saved}
    held = {id(p) for group in live.param_groups for p in group["params"]}
    trained = [name for name, tensor in live.parameters().items() if id(tensor) in held]
    return KnownState(needed, beside, None, trained, other_names(live))


def save_checkpoint(
    path: str | Path,
    model: Any,
    optimizer: Any = (),
    step: int = 0,
    seed: int = 0,
    keep: int = 3,
    **others: Any,
) -> Path:
    """Saves a plain model and optimizer after `step` steps, so that a divided run can go on from
    them: into the folder of a training run, of whose checkpoints the last `keep` stay, or as one
    safetensors file. Returns where it is. Raises ValueError if it cannot."""
    live = live_state(model, optimizer)
    tensors, numbers = live_entries(live)
    record = CheckpointRecord(
        run=run_name(),
        number=0,
        step=step,
        seed=seed,
        tensors=stored_tensors(tensors),
        files={},
        numbers=numbers,  # type: ignore[arg-type]
        groups=plain_groups(live.param_groups),
        others=kept_others(others),
    )
    path = Path(path)
    if path.name.endswith(SUFFIX):
        return export_file(path, tensors, record)
    return _save_in_folder(path, tensors, record, keep)


def live_entries(live: LiveState) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """All tensors of live objects by key, and the types of optimizer state that is a number."""
    saved = saved_names(live)
    found = {key_of(n, None): t.detach() for n, t in live_tensors(live).items() if n in saved}
    numbers: dict[str, str] = {}
    for name, states in optimizer_state(live).items():
        for state, value in states.items():
            key = key_of(name, state)
            if isinstance(value, torch.Tensor):
                found[key] = value.detach()
            elif isinstance(value, int | float) and not isinstance(value, bool):
                numbers[key] = type(value).__name__
                found[key] = torch.tensor(float(value), dtype=torch.float64)
    return found, numbers


def stored_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, StoredTensor]:
    """The shapes and dtypes of tensors."""
    return {
        key: StoredTensor(shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
        for key, t in tensors.items()
    }


def export_file(
    path: Path, tensors: Mapping[str, torch.Tensor], record: CheckpointRecord | None
) -> Path:
    """Writes whole tensors to one file, with what else a checkpoint has in its header; without a
    record it is a file of weights as transformers has them."""
    notes = {"format": "pt"} if record is None else {RECORD_NOTE: record_text(record)}
    with replaced_when_done(path) as unfinished:
        write_tensors(unfinished, _whole_chunks(tensors), notes, sharded=False)
    return path


def _whole_chunks(tensors: Mapping[str, torch.Tensor]) -> list[tuple[StoredChunk, torch.Tensor]]:
    return [
        (StoredChunk(key, whole_chunk(t.shape), t.dtype), t.detach().cpu().contiguous())
        for key, t in tensors.items()
    ]


def _save_in_folder(
    root: Path, tensors: Mapping[str, torch.Tensor], record: CheckpointRecord, keep: int
) -> Path:
    from apportion.checkpoint.write_part import write_part

    found = find_run(root)
    run = record.run if found is None else found
    number = check_is_ours(root, run)
    record = record.model_copy(update={"run": run, "number": number})
    unfinished = begin_saving(root, record.step, nbytes_of(record.tensors))
    write_part(unfinished, 0, _whole_chunks(tensors), record.tensors)
    made = commit(unfinished, 1, record)
    keep_last(root, run, keep)
    return made


def find_run(root: Path) -> str | None:
    """The run whose checkpoints a folder has."""
    try:
        return find_checkpoint(root).record.run
    except ValueError:
        return None
