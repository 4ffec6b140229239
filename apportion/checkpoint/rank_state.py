"""RankState: the state of one rank as checkpoints see it: what it writes, and what it takes back.

Part of the room checkpoint. A Program and the Rank that runs it come in. Out goes the part that
this rank writes; and a StoredCheckpoint, whatever plan it was saved under, becomes the tensors of
this rank's slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from apportion.capture import (
    IN_GROUP,
    IS_FIRST,
    Program,
    live_tensors,
    other_names,
    saved_names,
)
from apportion.checkpoint.checkpoint_record import StoredTensor
from apportion.checkpoint.chunks import Chunk, region_chunks, whole_chunk
from apportion.checkpoint.match_state import KnownState, StateMatch, match_state
from apportion.checkpoint.staging import PartChunk, live_beside, part_of
from apportion.checkpoint.state_regions import (
    MODEL,
    StateRegion,
    key_of,
    state_regions,
    state_values,
    writers,
)
from apportion.checkpoint.stored import StoredCheckpoint, read_tensors
from apportion.execute import Executable, Rank
from apportion.graph import OPTIMIZER_STATE


@dataclass(frozen=True)
class LoadedState:
    """What was read for a rank, not yet in use.

    slots  the tensor of each slot, on the CPU
    live   tensors that have no slot, by name
    match  where it comes from
    """

    slots: dict[int, torch.Tensor]
    live: dict[str, torch.Tensor]
    match: StateMatch


class RankState:
    """The state of one rank of a divided step."""

    def __init__(self, program: Program, rank: Rank) -> None:
        self.program, self.rank = program, rank
        self.values = state_values(program, rank.executable)

    @property
    def executable(self) -> Executable:
        """What all ranks run."""
        return self.rank.executable

    @cached_property
    def regions(self) -> tuple[tuple[StateRegion, int], ...]:
        """All regions of the state, each with the slot that it is written from."""
        return writers(state_regions(self.program, self.executable), self.executable)

    @cached_property
    def part(self) -> tuple[PartChunk, ...]:
        """What this rank writes."""
        return part_of(self.regions, self.executable, self.rank.device, self.live())

    def live(self) -> dict[str, torch.Tensor]:
        """The tensors of the live model that have no region, by key."""
        return live_beside(self.program, [region for region, _ in self.regions])

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """All tensors of a checkpoint, by key."""
        kinds = {region.of.key: (region.of.shape, region.of.dtype) for region, _ in self.regions}
        kinds |= {key: (tuple(t.shape), t.dtype) for key, t in self.live().items()}
        return {
            key: StoredTensor(shape=shape, dtype=str(kind).removeprefix("torch."))
            for key, (shape, kind) in kinds.items()
        }

    @cached_property
    def numbers(self) -> dict[str, str]:
        """The types of the optimizer state that is kept as Python numbers, by key."""
        found = {}
        for binding in self.program.bindings.values():
            begin = binding.begin
            if binding.role == OPTIMIZER_STATE and begin is not None and begin.number is not None:
                found[key_of(binding.name, binding.state)] = begin.number
        return found

    @cached_property
    def loose(self) -> list[str]:
        """The keys of tensors that are in no module's state_dict."""
        saved = {key_of(name, None) for name in saved_names(self.program.live)}
        return sorted(key for key in self.tensors if key.startswith(MODEL) and key not in saved)

    def known(self) -> KnownState:
        """All that a checkpoint may have of this step."""
        saved = saved_names(self.program.live)
        shapes = {n: tuple(t.shape) for n, t in live_tensors(self.program.live).items()}
        states: dict[str, dict[str, tuple[int, ...]]] = {}
        beside = {}
        carried = {self.executable.slots[slot].value for _, slot in self.executable.carry}
        for value, binding in self.program.bindings.items():
            if value not in self.values:
                continue
            shape = self.values[value].shape
            if binding.state is not None:
                states.setdefault(binding.name, {})[binding.state] = shape
            elif binding.name not in saved and value in carried:
                beside[binding.name] = shape
        needed = {name: shape for name, shape in shapes.items() if name in saved}
        aliases = other_names(self.program.live)
        return KnownState(needed, beside, states, tuple(states), aliases)

    def read(self, stored: StoredCheckpoint, optimizer: bool) -> LoadedState:
        """Reads what this rank needs of a checkpoint; nothing is changed. Raises ValueError if it
        is of another model or damaged."""
        match = match_state(stored, self.known(), optimizer)
        wanted: dict[str, list[tuple[Chunk, torch.Tensor]]] = {}
        slots: dict[int, torch.Tensor] = {}
        for slot in self.executable.begin:
            meant = self.executable.slots[slot]
            if self.executable.slot_device[slot] != self.rank.device:
                continue
            if meant.value not in self.values:
                continue
            key = self._stored_key(meant.value, match)
            if key is None:
                self._begin_anew(slot, slots, match, stored)
                continue
            slots[slot] = room = torch.empty(meant.shape, dtype=meant.dtype)
            dims = self.executable.space.atoms.dims[meant.value]
            for chunk, place in region_chunks(dims, meant.region):
                wanted.setdefault(key, []).append((chunk, room[place]))
        live = {}
        for key, tensor in self.live().items():
            name = key.removeprefix(MODEL)
            if name in match.tensors:
                live[name] = room = torch.empty(tensor.shape, dtype=tensor.dtype)
                there = match.tensors[name]
                wanted.setdefault(there, []).append((whole_chunk(room.shape), room))
        read_tensors(stored, wanted)
        return LoadedState(slots, live, match)

    def _stored_key(self, value: int, match: StateMatch) -> str | None:
        binding = self.program.bindings[value]
        if binding.state is None:
            return match.tensors.get(binding.name)
        return match.states.get(binding.name, {}).get(binding.state)

    def _begin_anew(
        self,
        slot: int,
        slots: dict[int, torch.Tensor],
        match: StateMatch,
        stored: StoredCheckpoint,
    ) -> None:
        """State that the checkpoint has not: what an optimizer begins with, or has in the group of
        the parameter; others stay."""
        meant = self.executable.slots[slot]
        binding = self.program.bindings[meant.value]
        if binding.state is None:
            return
        number = 0.0 if binding.begin is None else binding.begin.value
        if stored.record is not None and binding.state.startswith(IN_GROUP):
            number = self._in_group(binding.name, binding.state, stored.record.groups, number)
        if binding.state == IS_FIRST and binding.name not in match.fresh:
            number = 0.0  # a parameter that has state has made a step
        slots[slot] = torch.full(meant.shape, number, dtype=meant.dtype)

    def _in_group(
        self, name: str, state: str, groups: Sequence[Mapping[str, Any]], begin: float
    ) -> float:
        """A number that plain PyTorch keeps in the group of a parameter."""
        parameter = self.program.live.tensor(name)
        for group, stored in zip(self.program.live.param_groups, groups, strict=False):
            if any(p is parameter for p in group["params"]):
                found = stored.get(state.removeprefix(IN_GROUP), begin)
                return float(found) if isinstance(found, int | float) else begin
        return begin

    def use(self, loaded: LoadedState) -> None:
        """Makes what was read the state of this rank."""
        rank = self.rank
        for slot, tensor in loaded.slots.items():
            present = rank.tensors.get(slot)
            if present is None:
                rank.tensors[slot] = rank.copied(tensor, slot)
            else:
                present.copy_(tensor)
        with torch.no_grad():
            for key, tensor in self.live().items():
                if key.removeprefix(MODEL) in loaded.live:
                    tensor.copy_(loaded.live[key.removeprefix(MODEL)])
