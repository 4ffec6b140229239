"""PlacementProblem: nodes to place, the devices they may go to, how outputs travel.

The noun of place/. Importers and captured steps make one; objectives judge placements of it,
placers search for them. A placement is a column with a device for every unit.

    node    what runs on one device without interruption: an operator, a layer, a stage's half
    unit    nodes that move together: a colocation class of a file, or a forward operator with its
            backward operators and updates. Forward and backward of one unit are nodes of their own,
            since a unit as a whole would depend on itself.
    output  what a node makes and others read; a node may have several

Times are whole ticks, `tick` of them in one unit of the time that people see (`time_unit`: "ms" in
a file that says so, "s" for captured steps).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from apportion.columns import Bools, Floats, Ints, offsets

NEVER = 1 << 50  # ticks of a node on a device that cannot run it


class PlacementColumns(NamedTuple):  # numba takes no dataclass
    """What is placed: n nodes in an order in which they can run, m outputs in that of their nodes,
    k devices, u units."""

    unit: Ints  # n
    duration: Ints  # n x k: ticks
    backward: Ints  # n: 1 for nodes of the backward pass and for updates
    resident: Ints  # n: bytes that stay on the device of the node, such as parameters
    source: Ints  # m: the node that makes the output, rising
    nbytes: Ints  # m
    send: Floats  # m: what the paces of links are for: bytes, or the ticks of one transfer
    output_start: Ints  # n + 1: offsets into the outputs
    reader_start: Ints  # m + 1: offsets into reader
    reader: Ints  # nodes that read the output, each once, rising, all after its source
    allowed: Bools  # u x k: whether the device can run all nodes of the unit
    issue: Ints = np.zeros((0, 0), np.int64)
    """n x k: ticks of a host to issue the node, of devices that run in order behind one: a node
    starts no sooner than it and all before it on its device have been issued. Empty: no hosts."""


class PlacementLinks(NamedTuple):
    """How devices serve nodes and how outputs travel: the rules of one evaluator.

    in_order  1: a device runs its nodes in their order; 0: whatever is ready first, ties by index
    once      1: an output that is wanted elsewhere is sent once, to however many devices, over the
              route from its device to the first of them; 0: once to each device that wants it
    lag, drag what a message takes beyond the links: lag + drag * send
    live      1: outputs occupy memory on the device that makes them until their last reader ends
    """

    in_order: int
    once: int
    live: int
    device_hold: int  # ticks that a device stays busy after a node of any duration
    link_hold: int  # ticks that a link stays busy after a message
    links: int
    hop_start: Ints  # k * k + 1: the route from a to b is at a * k + b
    hop_link: Ints
    hop_pace: Floats  # ticks per unit of send
    lag: Floats  # k x k
    drag: Floats  # k x k
    grace: int  # ticks before its end at which a reader counts as done, for memory
    receive: Floats = np.zeros((0, 3))
    """k x 3, of devices that run in order: what the first reader of a message takes longer, each
    and per unit of send, and the ticks of its issue. Empty: receiving is free."""


@dataclass(frozen=True, slots=True)
class PlacementDevice:
    """Where units can go. `memory_bytes` None: no limit. `kind` tells devices of one speed apart
    from others: "acc" and "cpu" of imported graphs, a device's kind of captured steps."""

    name: str
    kind: str
    memory_bytes: int | None = None


@dataclass(frozen=True, eq=False)
class PlacementProblem:
    """What is to be placed, and where."""

    name: str
    node_names: tuple[str, ...]
    node_kinds: tuple[str, ...]  # the operator's name, or ""
    columns: PlacementColumns
    links: PlacementLinks
    devices: tuple[PlacementDevice, ...]
    tick: float = 1e9
    time_unit: str = "s"
    transfer: Floats | None = None
    """n: of an imported graph what crossing between an accelerator and the host takes, in time
    units, for the objectives throughput and latency."""
    expert: Ints | None = None
    """A device for every unit: the placement that a person who knows such networks would choose,
    where one is known."""

    @property
    def units(self) -> int:
        return len(self.columns.allowed)

    @cached_property
    def limit(self) -> Floats:
        """Bytes that each device may hold; infinity without a limit."""
        sizes = [np.inf if d.memory_bytes is None else d.memory_bytes for d in self.devices]
        return np.array(sizes, np.float64)

    @cached_property
    def nodes_of_unit(self) -> tuple[Ints, Ints]:
        """The nodes of each unit, as offsets and nodes."""
        order = np.argsort(self.columns.unit, kind="stable").astype(np.int64)
        return offsets(np.bincount(self.columns.unit, minlength=self.units)), order

    @cached_property
    def unit_seconds(self) -> Floats:
        """u x k: time units that all nodes of a unit take on each device."""
        total = np.zeros((self.units, len(self.devices)))
        np.add.at(total, self.columns.unit, self.columns.duration / self.tick)
        return total

    @cached_property
    def unit_edges(self) -> tuple[Ints, Floats]:
        """Pairs (unit, unit that reads from it), each once, and the `send` of all outputs between
        them, an output counted once for each reading unit."""
        c = self.columns
        outputs = np.repeat(np.arange(len(c.source)), np.diff(c.reader_start))
        source, target = c.unit[c.source[outputs]], c.unit[c.reader]
        rows = np.stack([source, target, outputs], axis=1)[source != target]
        if not len(rows):
            return np.zeros((0, 2), np.int64), np.zeros(0)
        rows = np.unique(rows, axis=0)
        pairs, which = np.unique(rows[:, :2], axis=0, return_inverse=True)
        send = np.bincount(which.ravel(), c.send[rows[:, 2]], len(pairs))
        return pairs, np.asarray(send, np.float64)


def check_problem(problem: PlacementProblem) -> None:
    """Raises ValueError, naming node or unit, unless the problem can be placed at all."""
    c = problem.columns
    readers = np.repeat(c.source, np.diff(c.reader_start))
    if (late := np.flatnonzero(readers >= c.reader)).size:
        raise ValueError(f"node {problem.node_names[c.reader[late[0]]]!r} stands before its input")
    for unit in np.flatnonzero(~c.allowed.any(axis=1)):
        node = problem.node_names[int(np.flatnonzero(c.unit == unit)[0])]
        raise ValueError(f"no device can run all nodes that move together with {node!r}")
    needs = np.bincount(c.unit, c.resident, problem.units)
    room = np.where(c.allowed, problem.limit[None, :], -np.inf).max(axis=1)
    if (over := np.flatnonzero(needs > room)).size:
        first = int(over[0])
        node = problem.node_names[int(np.flatnonzero(c.unit == first)[0])]
        raise ValueError(
            f"the class of node {node!r} needs {int(needs[first])} bytes, and the largest device "
            f"that can run it has {int(room[first])}"
        )


def check_placement(problem: PlacementProblem, placement: Ints) -> None:
    """Raises ValueError unless every unit has a device."""
    place = np.asarray(placement)
    if place.shape != (problem.units,) or not ((place >= 0) & (place < len(problem.devices))).all():
        raise ValueError(
            f"the placement does not give each of {problem.units} units one of "
            f"{len(problem.devices)} devices"
        )
