"""How long a pass of a loop takes on a cluster, and what it waits for: the schedule, simulated.

Part of the room loops. The tiles of a schedule with their elements, and the messages of a pass
(traffic.py), become items of simulate/'s Network: tiles follow each other on their process, a
message leaves after the tile that makes its contents and occupies the links of its route, and a
tile waits for its messages. Out goes a LoopPrediction with a Timeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from apportion.columns import offsets
from apportion.loops.array_layout import box_size
from apportion.loops.elements import DealFacts
from apportion.loops.loop_plan import ROTATING, ArrayUse
from apportion.loops.schemes import Scheme
from apportion.loops.tile_schedule import TileSchedule
from apportion.loops.traffic import FETCH, PUT_BACK, LoopMessage, itemsize, pass_messages
from apportion.machine import Cluster, usable_cores
from apportion.quantity import format_quantity
from apportion.simulate import Network, Timeline, schedule_compiled


@dataclass(frozen=True)
class LoopPrediction:
    """A pass on a cluster: its Timeline (of tiles, then of messages), the bytes of arrays that each
    process has, by how much the largest tile of a step is above the mean, and where the seconds of
    an element are from."""

    cluster: str
    scheme: Scheme
    timeline: Timeline
    elements: int
    array_bytes: tuple[int, ...]
    imbalance: float
    provenance: str

    @property
    def seconds(self) -> float:
        return self.timeline.step_seconds

    @property
    def idle(self) -> float:
        """The share of the processes' time in which they wait."""
        return 1 - sum(self.timeline.busy) / len(self.timeline.busy)

    def __str__(self) -> str:
        rate = self.elements / self.seconds if self.seconds else 0.0
        sent, held = self.timeline.bytes_moved, max(self.array_bytes)
        count = len(self.timeline.busy)
        lines = [
            f"Predicted on {self.cluster} ({count} processes): {self.scheme}",
            f"  a pass      {format_quantity(self.seconds, 's')}, {rate:,.0f} elements a second",
            f"  idle        {self.idle:.1%} of the processes' time",
            f"  imbalance   steps take {self.imbalance:.2f} times as long as with equal tiles",
            f"  sent        {format_quantity(sent, 'B')} a pass",
            f"  arrays      {format_quantity(held, 'B')} in a process at most",
            f"  an element  {self.provenance}",
        ]
        return "\n".join(lines)


def predict_loop(
    cluster: Cluster,
    scheme: Scheme,
    schedule: TileSchedule,
    uses: Sequence[ArrayUse],
    facts: DealFacts,
    seconds: float,
    provenance: str,
    chunks: int = 1,
) -> LoopPrediction:
    """Simulates a pass. `seconds` are those of an element on one core."""
    messages = list(pass_messages(uses, schedule, facts, chunks))
    pace = seconds * _crowding(cluster, schedule.processes)
    counts = np.array(facts.counts)
    tiles = list(schedule.tiles())
    duration = [round(1e9 * pace * int(counts[rank, time])) for _, rank, time in tiles]
    start, end = schedule_compiled(_network(cluster, schedule, tiles, duration, messages))
    busy = np.bincount(
        [rank for _, rank, _ in tiles], duration, minlength=schedule.processes
    ) / max(int(end.max(initial=1)), 1)
    line = Timeline(
        "simulated", start, end, tuple(busy.tolist()), sum(each.nbytes for each in messages)
    )
    return LoopPrediction(
        cluster.name, scheme, line, int(counts.sum()), _array_bytes(uses, schedule),
        _imbalance(schedule, counts), provenance,
    )  # fmt: skip


def _crowding(cluster: Cluster, processes: int) -> float:
    """By how much processes that share the cores of this machine are slower."""
    here = cluster.name.startswith("local:")
    return max(1.0, processes / usable_cores()) if here else 1.0


def _network(
    cluster: Cluster,
    schedule: TileSchedule,
    tiles: list[tuple[int, int, int]],
    duration: list[int],
    messages: list[LoopMessage],
) -> Network:
    """Tiles and messages as items, each after those that it waits for."""
    order = _in_order(tiles, messages)
    place = {each: at for at, each in enumerate(order)}
    tile_at = {(step, rank): place[number] for number, (step, rank, _) in enumerate(tiles)}
    before = _predecessors(schedule, tiles, messages, place, tile_at)
    n = len(order)
    time, latency = np.zeros(n, np.int64), np.zeros(n, np.int64)
    hops: list[list[tuple[int, int]]] = [[] for _ in range(n)]
    for number, nanoseconds in enumerate(duration):
        time[place[number]] = nanoseconds
    for number, message in enumerate(messages):
        at = place[len(tiles) + number]
        route = cluster.routes[message.sender][message.receiver]
        latency[at] = round(1e9 * sum(cluster.links[link].latency for link in route))
        hops[at] = [
            (link, round(1e9 * message.nbytes / cluster.links[link].bandwidth)) for link in route
        ]
    pairs = np.array([(a, b) for b, them in enumerate(before) for a in them], np.int64)
    pairs = pairs.reshape(-1, 2)[np.argsort(pairs.reshape(-1, 2)[:, 0], kind="stable")]
    hop_start = offsets(np.array([len(each) for each in hops], np.int64))
    flat = np.array([hop for each in hops for hop in each], np.int64).reshape(-1, 2)
    return Network(
        links=len(cluster.links),
        duration=time,
        release=np.zeros(n, np.int64),
        hold=np.zeros(n, np.int64),
        latency=latency,
        pending=np.array([len(each) for each in before], np.int64),
        next_start=np.searchsorted(pairs[:, 0], np.arange(n + 1)).astype(np.int64),
        next=pairs[:, 1].copy(),
        hop_start=hop_start,
        hop_link=flat[:, 0].copy(),
        hop_occupancy=flat[:, 1].copy(),
    )


def _in_order(tiles: list[tuple[int, int, int]], messages: list[LoopMessage]) -> list[int]:
    """Tiles (by their numbers) and messages (after them) in an order in which none waits for a
    later one: step by step, what is fetched, then tiles, then what is sent."""
    keys = [(step, 1) for step, _, _ in tiles]
    keys += [
        (each.before, 0) if each.kind == FETCH else (max(each.after, 0), 2) for each in messages
    ]
    return sorted(range(len(keys)), key=lambda number: (*keys[number], number))


def _predecessors(
    schedule: TileSchedule,
    tiles: list[tuple[int, int, int]],
    messages: list[LoopMessage],
    place: dict[int, int],
    tile_at: dict[tuple[int, int], int],
) -> list[set[int]]:
    before: list[set[int]] = [set() for _ in place]
    last: dict[int, int] = {}
    for number, (_, rank, _) in enumerate(tiles):
        at = place[number]
        if rank in last:
            before[at].add(last[rank])
        last[rank] = at
    returned: dict[tuple[int, int], set[int]] = {}  # what an owner gets back before a step
    for number, message in enumerate(messages):
        at = place[len(tiles) + number]
        source = _tile_near(schedule, tile_at, message.sender, message.after, -1)
        target = _tile_near(schedule, tile_at, message.receiver, message.before, 1)
        if source is not None:
            before[at].add(source)
        if target is not None:
            before[target].add(at)
        if message.kind == PUT_BACK:
            returned.setdefault((message.receiver, message.before), set()).add(at)
    for number, message in enumerate(messages):
        if message.kind == FETCH:
            at = place[len(tiles) + number]
            before[at] |= returned.get((message.sender, message.before), set())
    return before


def _tile_near(
    schedule: TileSchedule, tile_at: dict[tuple[int, int], int], rank: int, step: int, way: int
) -> int | None:
    """The tile of a rank at a step, or the nearest one before or after it."""
    while 0 <= step < schedule.steps:
        if (step, rank) in tile_at:
            return tile_at[step, rank]
        step += way
    return None


def _array_bytes(uses: Sequence[ArrayUse], schedule: TileSchedule) -> tuple[int, ...]:
    """Bytes of arrays that each process has: its parts, and room for parts on their way."""
    found = [0] * schedule.processes
    for use in uses:
        for _, owner, box in use.layout.parts(use.kernel.shape):
            twice = 2 if use.placement == ROTATING and schedule.processes > 1 else 1
            found[owner] += twice * box_size(box) * itemsize(use)
    return tuple(found)


def _imbalance(schedule: TileSchedule, counts: np.ndarray) -> float:
    """By which factor steps take longer than if all tiles of a step were equal."""
    rows: dict[int, list[int]] = {}
    for step, rank, time in schedule.tiles():
        rows.setdefault(step, []).append(int(counts[rank, time]))
    longest = sum(max(row) for row in rows.values())
    mean = sum(sum(row) / len(row) for row in rows.values())
    return longest / mean if mean else 1.0
