"""The whole state of a divided run: gathered from all ranks, and in the form that PyTorch has.

Part of the room checkpoint. RankStates come in, one on each rank; out go whole tensors by key, and
of these what `model.state_dict()` and `optimizer.state_dict()` would be if one device had trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from apportion.capture import (
    IN_GROUP,
    IS_FIRST,
    LiveState,
    Program,
    is_shared,
    live_tensors,
    nested_state,
    optimizer_state,
    put_state,
    put_tensor,
)
from apportion.checkpoint.agreement import rank_count
from apportion.checkpoint.rank_state import RankState
from apportion.checkpoint.state_regions import MODEL, OPTIMIZER, key_of
from apportion.execute import peer_errors

WholeState = dict[str, torch.Tensor]
"""Whole tensors on the CPU by key, as in a checkpoint."""
_TAG = 2  # messages of the plan have 0, losses 1


def gather_state(state: RankState, to: int | None) -> WholeState:
    """The whole state on rank `to`, or on all if that is None; others get nothing. All ranks have
    to call it, after a step is finished."""
    found: WholeState = {}
    mine = to is None or to == state.rank.device
    for region, slot in state.regions:
        source = state.executable.slot_device[slot]
        held = state.rank.tensors[slot] if source == state.rank.device else None
        if mine and region.of.key not in found:
            found[region.of.key] = torch.empty(region.of.shape, dtype=region.of.dtype)
        for chunk, place in region.chunks:
            part = None if held is None else held[place].detach().cpu().contiguous()
            part = _moved(part, chunk.sizes, region.of.dtype, source, to)
            if mine and part is not None:
                found[region.of.key][chunk.slices] = part
    if mine:
        found |= {key: tensor.detach().cpu().clone() for key, tensor in state.live().items()}
    return found


def _moved(
    part: torch.Tensor | None,
    sizes: Sequence[int],
    dtype: torch.dtype,
    source: int,
    to: int | None,
) -> torch.Tensor | None:
    """A tensor of rank `source` on rank `to`, or on all."""
    if rank_count() == 1 or source == to:
        return part
    here = dist.get_rank()
    if to is not None and here not in (source, to):
        return None
    room = torch.empty(tuple(sizes), dtype=dtype) if part is None else part
    raw = room.reshape(-1).view(torch.uint8) if room.numel() else room.reshape(-1)
    if not room.numel():
        return room
    with peer_errors():
        if to is None:
            dist.broadcast(raw, source)
        elif here == source:
            dist.send(raw, to, tag=_TAG)
        else:
            dist.recv(raw, source, tag=_TAG)
    return room


def put_whole(
    live: LiveState, whole: Mapping[str, torch.Tensor], numbers: Mapping[str, str]
) -> None:
    """Makes a whole state that of the live model and optimizers."""
    for key, tensor in whole.items():
        if key.startswith(MODEL):
            put_tensor(live, key.removeprefix(MODEL), tensor)
    for name, (state, kinds) in states_by_parameter(live, whole, numbers).items():
        put_state(live, name, state, kinds)


def states_by_parameter(
    live: LiveState, whole: Mapping[str, torch.Tensor], numbers: Mapping[str, str]
) -> dict[str, tuple[dict[str, torch.Tensor], dict[str, str]]]:
    """The optimizer state of each parameter, and the types of its numbers."""
    found: dict[str, tuple[dict[str, torch.Tensor], dict[str, str]]] = {}
    begins = {f"{OPTIMIZER}{name}.": name for name in live.parameters()}
    for key, tensor in whole.items():
        if not key.startswith(OPTIMIZER):
            continue
        begin = _longest(key, begins)
        if begin is not None:
            states, kinds = found.setdefault(begins[begin], ({}, {}))
            states[key.removeprefix(begin)] = tensor
            if key in numbers:
                kinds[key.removeprefix(begin)] = numbers[key]
    return found


def _longest(key: str, begins: Mapping[str, str]) -> str | None:
    places = [at + 1 for at, letter in enumerate(key) if letter == "."]
    return next((key[:at] for at in reversed(places) if key[:at] in begins), None)


def state_dicts(program: Program, whole: WholeState, numbers: Mapping[str, str]) -> dict[str, Any]:
    """`model` and `optimizer` as their own `state_dict()`s would be, in the form in which they were
    given; modules and optimizers that the step found by itself are under `found`."""
    live = program.live
    names = {id(tensor): name for name, tensor in live_tensors(live).items()}
    states = states_by_parameter(live, whole, numbers)

    def module_dict(module: torch.nn.Module) -> dict[str, Any]:
        entries = module.state_dict(keep_vars=True)
        return {
            key: whole.get(key_of(names.get(id(entry), ""), None), _detached(entry))
            for key, entry in entries.items()
        }

    def optimizer_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return _optimizer_dict(optimizer, live, states)

    given = _like(program.optimizer, optimizer_dict)
    found = {"model": _like(program.model, module_dict), "optimizer": given}
    inside = {id(m) for m in _flat(program.model)} | {id(o) for o in _flat(program.optimizer)}
    more = {b.rstrip("."): module_dict(m) for b, m in live.modules if id(m) not in inside}
    more |= {
        f"optimizer {number}": optimizer_dict(each)
        for number, each in enumerate(live.optimizers)
        if id(each) not in inside
    }
    return found | ({"found": more} if more else {})


def _detached(entry: Any) -> Any:
    return entry.detach().clone() if isinstance(entry, torch.Tensor) else entry


def _like(given: Any, made: Any) -> Any:
    if isinstance(given, Mapping):
        return {key: made(each) for key, each in given.items()}
    if isinstance(given, Sequence):
        return [made(each) for each in given]
    return made(given)


def _flat(given: Any) -> list[Any]:
    if isinstance(given, Mapping):
        return list(given.values())
    return list(given) if isinstance(given, Sequence) else [given]


def _optimizer_dict(
    optimizer: torch.optim.Optimizer,
    live: LiveState,
    states: Mapping[str, tuple[dict[str, torch.Tensor], dict[str, str]]],
) -> dict[str, Any]:
    packed = optimizer.state_dict()
    names = {id(tensor): name for name, tensor in live.parameters().items()}
    others = optimizer_state(live)
    found: dict[int, Any] = {}
    number = 0
    for group, told in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        for parameter in group["params"]:
            name = names.get(id(parameter), "")
            if name in states:
                entry = _entry(*states[name], told, others.get(name, {}))
                found |= {number: entry} if entry else {}
            number += 1
    return {"state": found, "param_groups": packed["param_groups"]}


def _entry(
    state: Mapping[str, torch.Tensor],
    numbers: Mapping[str, str],
    group: dict[str, Any],
    others: Mapping[str, Any],
) -> dict[str, Any]:
    """The state of one parameter as its optimizer keeps it; what it shares with others goes into
    its group."""
    if IS_FIRST in state and float(state[IS_FIRST]):
        return {}
    kept = {k: v for k, v in others.items() if not isinstance(v, torch.Tensor | int | float)}
    for key, tensor in state.items():
        value: Any = tensor
        if key in numbers:
            value = int(tensor) if numbers[key] == "int" else float(tensor)
        if key.startswith(IN_GROUP):
            group[key.removeprefix(IN_GROUP)] = value
        elif not is_shared(key) and key != IS_FIRST:
            kept[key] = value
    return nested_state(kept)
