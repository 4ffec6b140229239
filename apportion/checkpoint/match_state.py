"""match_state: which stored tensor becomes which state of a step; or why it is of another model.

Part of the room checkpoint. The keys and shapes of a checkpoint come in with those that a step, or
a plain model, has; a StateMatch goes out. What must be there is what `model.state_dict()` has.
State beside it, such as the scale of a loss, may be missing, as it depends on the precision;
optimizer state may be missing where a checkpoint has none of it, and then begins anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from apportion.capture import IS_FIRST, is_shared
from apportion.checkpoint.state_regions import MODEL, OPTIMIZER, key_of
from apportion.checkpoint.stored import StoredCheckpoint

Shape = tuple[int, ...]


@dataclass(frozen=True)
class KnownState:
    """The state that a step or a model has, by name.

    needed   the tensors of modules' state_dicts
    beside   those that are in none
    states   the optimizer state of each trained parameter; None: whatever is stored
    trained  the trained parameters
    aliases  further names of tied parameters, each with the name that it has in `needed`
    """

    needed: Mapping[str, Shape]
    beside: Mapping[str, Shape]
    states: Mapping[str, Mapping[str, Shape]] | None
    trained: Collection[str] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StateMatch:
    """The stored key of each tensor, and of each entry of optimizer state, that is there; `fresh`
    are parameters whose optimizer state begins anew."""

    tensors: dict[str, str]
    states: dict[str, dict[str, str]]
    fresh: frozenset[str]
    notes: tuple[str, ...]


def match_state(stored: StoredCheckpoint, known: KnownState, optimizer: bool = True) -> StateMatch:
    """What a checkpoint has of a step's state; raises ValueError if it is of another model or, with
    `optimizer`, of another optimizer."""
    prefix = _prefix(stored, known.needed)
    loose = frozenset(stored.record.loose if stored.record else ())
    present = _model_keys(stored, prefix, known.aliases)
    _check_names(stored, known, present, loose)
    notes = []
    tensors = {}
    for name, shape in {**known.needed, **known.beside}.items():
        if name in present:
            _check_shape(stored, present[name], name, shape)
            tensors[name] = present[name]
        else:
            notes.append(f"{stored.path} has no {name}, which stays as it is")
    dropped = sorted(present.keys() - known.needed.keys() - known.beside.keys())
    if dropped:
        notes.append(f"{stored.path} has {_some(dropped)}, which this step does not use")
    if not optimizer:
        return StateMatch(tensors, {}, frozenset(known.trained), tuple(notes))
    states, fresh, more = _match_optimizer(stored, known)
    return StateMatch(tensors, states, fresh, (*notes, *more))


def _prefix(stored: StoredCheckpoint, needed: Mapping[str, Shape]) -> str:
    """What the keys of the model begin with: ours, or nothing in a file of weights alone."""
    if stored.record is not None:
        return MODEL
    ours = sum(MODEL + name in stored.tensors for name in needed)
    bare = sum(name in stored.tensors for name in needed)
    return "" if bare > ours else MODEL


def _model_keys(
    stored: StoredCheckpoint, prefix: str, aliases: Mapping[str, str]
) -> dict[str, str]:
    """The stored keys of the model's tensors by name; a tied one may have any of its names."""
    present = {
        key.removeprefix(prefix): key
        for key in stored.tensors
        if key.startswith(prefix) and not (key.startswith(OPTIMIZER) and not prefix)
    }
    for alias, name in aliases.items():
        key = present.pop(alias, None)
        if key is not None:
            present.setdefault(name, key)
    return present


def _check_names(
    stored: StoredCheckpoint,
    known: KnownState,
    present: Mapping[str, str],
    loose: Collection[str],
) -> None:
    missing = [name for name in known.needed if name not in present]
    strange = [
        name
        for name, key in present.items()
        if name not in known.needed and name not in known.beside and key not in loose
    ]
    other = _other_model(stored.path)
    if missing:
        raise ValueError(f"{other}: it has no {_some(missing)}")
    if strange:
        raise ValueError(f"{other}: it has {_some(strange)}, which this model has not")


def _check_shape(stored: StoredCheckpoint, key: str, name: str, shape: Shape) -> None:
    there = stored.tensors[key].shape
    if there != shape:
        raise ValueError(
            f"{_other_model(stored.path)}: {name} is {list(there)} there and {list(shape)} here"
        )


def _other_model(path: Path) -> str:
    return f"{path} is of another model"


def _some(names: Iterable[str]) -> str:
    """A few of the names."""
    ordered = sorted(names)
    shown = ", ".join(name if len(name) <= 100 else name[:100] + "..." for name in ordered[:3])
    return shown if len(ordered) <= 3 else f"{shown} and {len(ordered) - 3} more"


def _match_optimizer(
    stored: StoredCheckpoint, known: KnownState
) -> tuple[dict[str, dict[str, str]], frozenset[str], list[str]]:
    there = _stored_states(stored, known.trained)
    notes = []
    if there.pop("", None):
        notes.append(f"{stored.path} has optimizer state of parameters that are not trained here")
    if known.states is None:
        return there, frozenset(p for p in known.trained if p not in there), notes
    for name, entries in there.items():
        _check_states(stored, name, entries, known.states.get(name, {}))
    fresh = frozenset(name for name in known.trained if name not in there)
    if fresh and there:
        notes.append(f"{stored.path} has no optimizer state of {_some(fresh)}, which begins anew")
    elif fresh:
        notes.append(f"{stored.path} has no optimizer state, which begins anew")
    found = {
        name: {state: key for state, key in entries.items() if state in known.states[name]}
        for name, entries in there.items()
    }
    return found, fresh, notes


def _stored_states(stored: StoredCheckpoint, trained: Collection[str]) -> dict[str, dict[str, str]]:
    """The keys of optimizer state by parameter and by name; under "" those of no parameter that is
    trained here."""
    found: dict[str, dict[str, str]] = {}
    names = frozenset(trained)
    for key in stored.tensors:
        if not key.startswith(OPTIMIZER):
            continue
        rest = key.removeprefix(OPTIMIZER)
        places = [at for at, letter in enumerate(rest) if letter == "."]
        name = next((rest[:at] for at in reversed(places) if rest[:at] in names), "")
        found.setdefault(name, {})[rest[len(name) + 1 :] if name else rest] = key
    return found


def _check_states(
    stored: StoredCheckpoint, name: str, there: Mapping[str, str], here: Mapping[str, Shape]
) -> None:
    """Raises ValueError unless the optimizer state of a parameter is what is kept of it here."""
    own = {state for state in here if state != IS_FIRST and not is_shared(state)}
    theirs = {state for state in there if state != IS_FIRST and not is_shared(state)}
    if own != theirs:
        said = ", ".join(sorted(theirs)) or "nothing"
        wanted = ", ".join(sorted(own)) or "nothing"
        raise ValueError(
            f"{stored.path} is of another optimizer: it keeps {said[:200]} of {name}, this one "
            f"{wanted}; load with optimizer=False to begin its state anew"
        )
    for state, key in there.items():
        if state in here:
            _check_shape(stored, key, key_of(name, state), here[state])
