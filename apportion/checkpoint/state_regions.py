"""StateRegions: what all ranks together hold of a step's state, and which of them writes what.

Part of the room checkpoint. A Program and its Executable come in; out go the regions of every
parameter, buffer and optimizer state, each with the slots that hold it. Every rank knows all of
them, so that no rank has to ask another what to write: of a region that several have, one writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from apportion.capture import Program
from apportion.checkpoint.chunks import Chunk, first_fault, region_chunks
from apportion.describe import Box
from apportion.execute import Executable
from apportion.graph import BUFFER, OPTIMIZER_STATE, PARAMETER

MODEL, OPTIMIZER = "model.", "optimizer.state."
"""How the keys of a checkpoint begin: those of modules' tensors, and of optimizer state."""
_KEPT = (PARAMETER, BUFFER, OPTIMIZER_STATE)


def key_of(name: str, state: str | None) -> str:
    """The key of a module's tensor, or of the state of that name of a parameter."""
    return f"{MODEL}{name}" if state is None else f"{OPTIMIZER}{name}.{state}"


@dataclass(frozen=True, slots=True)
class StateValue:
    """A parameter, buffer or optimizer state as a checkpoint knows it."""

    value: int
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateRegion:
    """A region of a StateValue and the slots that hold it, at most one on a device; `chunks` with
    where each is in such a slot's tensor."""

    of: StateValue
    box: Box
    slots: tuple[int, ...]
    chunks: tuple[tuple[Chunk, tuple[slice, ...]], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return sum(chunk.volume for chunk, _ in self.chunks) * self.of.itemsize


def state_values(program: Program, executable: Executable) -> dict[int, StateValue]:
    """All state that a checkpoint has of a step, by Value."""
    found = {}
    for value, binding in program.bindings.items():
        if binding.role in _KEPT:
            shape = tuple(executable.graph.values[value].shape or ())
            kind = getattr(torch, executable.graph.values[value].dtype or "float32")
            key = key_of(binding.name, binding.state)
            found[value] = StateValue(value, key, shape, kind)
    return found


def state_regions(program: Program, executable: Executable) -> tuple[StateRegion, ...]:
    """The regions of all state that lasts from step to step, in one order on all ranks. State that
    the step does not change, and of which the devices have not all or drop some, is left out: the
    live model has it."""
    values = state_values(program, executable)
    found: dict[int, dict[Box, list[int]]] = {}
    for slot in executable.begin:
        meant = executable.slots[slot]
        if meant.value in values:
            found.setdefault(meant.value, {}).setdefault(meant.region, []).append(slot)
    carried = {executable.slots[b].value for _, b in executable.carry}
    dropped = {executable.slots[s].value for s in executable.unread} - carried
    regions: list[StateRegion] = []
    for value in sorted(found.keys() - dropped):
        own = _regions_of(values[value], executable, found[value])
        fault = first_fault(values[value].shape, [c for r in own for c, _ in r.chunks])
        assert not (fault and value in carried), f"state {values[value].key}: {fault}"
        regions += [] if fault else own
    return tuple(regions)


def _regions_of(
    state: StateValue, executable: Executable, boxes: Mapping[Box, Sequence[int]]
) -> list[StateRegion]:
    dims = executable.space.atoms.dims[state.value]
    return [
        StateRegion(state, box, tuple(slots), tuple(region_chunks(dims, box)))
        for box, slots in sorted(boxes.items())
    ]


def writers(
    regions: Sequence[StateRegion], executable: Executable
) -> tuple[tuple[StateRegion, int], ...]:
    """For each region the slot that it is written from: of those that have it, on the device that
    has least to write so far, the largest regions first."""
    load = [0] * executable.tasks.devices
    chosen: dict[int, int] = {}
    for number in sorted(range(len(regions)), key=lambda n: -regions[n].nbytes):
        devices = {executable.slot_device[slot]: slot for slot in reversed(regions[number].slots)}
        device = min(devices, key=lambda d: (load[d], d))
        load[device] += regions[number].nbytes
        chosen[number] = devices[device]
    return tuple((region, chosen[number]) for number, region in enumerate(regions))
