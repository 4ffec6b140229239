"""From measured seconds to a CostTable: works, lines and fits.

Part of the room run. What rehearsals and exchanges took comes in (rehearse.py), a CostTable goes
out. Of each task the low quantile over the rounds counts, because whatever disturbs a measurement
makes it longer.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from apportion.columns import (
    Floats,
    Ints,
)
from apportion.lower import (
    ASSEMBLE,
    TaskGraph,
)
from apportion.machine import (
    ASSEMBLE_LINE,
    EXCHANGE_LINE,
    PACK_LINE,
    CostLine,
    CostTable,
    KernelMeasurement,
    cost_fit,
)
from apportion.machine import cluster as cluster_of
from apportion.run.cost_cache import QUANTILE, measured_cost
from apportion.run.rehearse import ExchangeTimes, RehearsalTimes
from apportion.simulate import feeds, simulate

EXCHANGE = "apportion.exchange"
STEP_EXCHANGES = "apportion.step_exchanges"
"""All exchanges of a step: their messages are in the place of flops, their number of workspace."""
FREE = CostLine(0.0, 0.0, 0.0, 0.0, 0)
GUESS = CostLine(1e-4, 3e-5, 1e-9, 0.0, 0)  # of exchanges, where no single one was measured
WAITING = 1.2  # how many times longer than work processes take that wait for each other, about
LEAST = 0.01  # the smallest share of anything: prices of nothing cannot be multiplied
LOOSE = 3.0  # how many times the prices of a line may change against each other to fit steps
MESSAGE_BYTES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
Exchanged = tuple[tuple[int, int, int], ...]
"""Messages (sender, receiver, bytes) of one exchange."""


def with_rehearsal(
    table: CostTable, tasks: TaskGraph, answers: Sequence[RehearsalTimes], disturbed: bool = False
) -> CostTable:
    """The table with new works; lines and fits are made anew. `disturbed`: other programs ran."""
    found: dict[int, list[float]] = {}
    first: dict[int, int] = {}
    joins: list[tuple[int, int, float]] = []
    boxes = tasks.taken
    for answer in answers:
        low = _low(answer.seconds)
        for task, seconds in zip(answer.task.tolist(), low.tolist(), strict=True):
            found.setdefault(int(tasks.work[task]), []).append(seconds)
            first.setdefault(int(tasks.work[task]), task)
            if tasks.kind[task] == ASSEMBLE:
                joins.append((int(boxes[task]), int(tasks.nbytes[task]), seconds))
    works = dict(table.works)
    for name, nbytes, device in feeds(tasks):
        low_ends = float(np.quantile(answers[device].ends, QUANTILE))
        works[name] = KernelMeasurement(low_ends, 0.0, nbytes, 1)
    for work, seconds in found.items():
        task = first[work]
        works[tasks.works[work]] = KernelMeasurement(
            float(np.mean(seconds)), float(tasks.flops[task]), int(tasks.nbytes[task]),
            int(tasks.itemsize[task]),
        )  # fmt: skip
    lines = dict(table.lines)
    if len(joins) >= 8:
        lines[ASSEMBLE_LINE] = cost_fit.line(joins)
    packs = _packs(tasks, answers)
    if len(packs) >= 3:
        lines[PACK_LINE] = cost_fit.line(packs)
    found_table = replace(
        table,
        measured=time.strftime("%Y-%m-%d"),
        works=works,
        lines=lines,
        fits=cost_fit.fits(works),
        noise=noise(answers),
    )
    return _with_step(found_table, tasks, answers, disturbed)


def _with_step(
    table: CostTable, tasks: TaskGraph, answers: Sequence[RehearsalTimes], disturbed: bool
) -> CostTable:
    """The table with what all exchanges of this step take together, and the line of exchanges made
    from such sums. They take what whole rounds take beyond their simulation without exchanges:
    exchanges go on beside computing, so that one of them alone has no time of its own. That has in
    it what processes wait for each other: no two take equally long every time, and now and then a
    thread loses its core. Beside other programs a round takes many times longer, and what processes
    use of the cores says more."""
    rounds: dict[int, list[tuple[int, int]]] = {}
    for answer in answers:
        for number, start, end, _ in answer.rounds:
            rounds.setdefault(number, []).append((start, end))
    exchanges = exchanges_in_step(tasks)
    if not rounds or not exchanges:
        return table
    count, messages = len(exchanges), sum(m for m, _ in exchanges)
    nbytes = sum(n for _, n in exchanges)
    took = [max(e for _, e in turn) - max(s for s, _ in turn) for turn in rounds.values()]
    whole = float(np.quantile(took, QUANTILE)) / 1e9
    if disturbed:
        used = [np.quantile([x for *_, x in a.rounds], QUANTILE) for a in answers if a.rounds]
        whole = min(whole, WAITING * float(max(used)) / 1e9)
    free = replace(table, lines=dict(table.lines) | {EXCHANGE_LINE: FREE})
    place = cluster_of(f"local:{tasks.devices}")
    alone = simulate(tasks, place, measured_cost(free)).step_seconds
    seconds = max(whole - alone, LEAST * whole)
    name = f"{STEP_EXCHANGES}({count} {messages} {nbytes})"
    works = dict(table.works) | {name: KernelMeasurement(seconds, messages, nbytes, 0, count)}
    line = exchange_line_of(works)
    return replace(table, works=works, lines=dict(table.lines) | {EXCHANGE_LINE: line})


def exchange_line_of(works: Mapping[str, KernelMeasurement]) -> CostLine:
    """The line of exchanges from single ones, and from those of whole steps where there are some:
    as near as can be to the line of single ones, all its prices multiplied with the same, that
    makes the steps take what they took."""
    line = cost_fit.line(exchange_samples(works))
    steps = [w for name, w in works.items() if name.startswith(f"{STEP_EXCHANGES}(")]
    if not steps:
        return line
    line = line if any(line[:3]) else GUESS
    rows = np.array([(w.workspace, w.flops, w.nbytes) for w in steps], np.float64)
    seconds = np.array([w.seconds for w in steps])
    alone = np.maximum(np.array(line[:3]), LEAST * (rows @ line[:3]).mean() / rows.max(axis=0))
    usual = alone * float(np.exp(np.log(seconds / (rows @ alone)).mean()))
    held = np.diag(1 / LOOSE / len(usual) ** 0.5 / usual)
    both = np.vstack([rows / seconds[:, None], held])
    wanted = np.concatenate([np.ones(len(seconds)), held @ usual])
    found = np.maximum(np.linalg.lstsq(both * usual, wanted, rcond=None)[0] * usual, 0.0)
    error = float(np.median(np.abs(rows @ found / seconds - 1)))
    each, per_box, per_byte = found.tolist()
    return CostLine(each, per_box, per_byte, error, len(steps))


def _low(seconds: Floats) -> Floats:
    """Seconds of each task (columns) over the rounds (rows): low quantiles, scaled so that together
    they are the low quantile of whole rounds, which is what a step is compared with."""
    each = np.quantile(seconds, QUANTILE, axis=0)
    whole = float(np.quantile(seconds.sum(axis=1), QUANTILE))
    scaled: Floats = each * (whole / max(float(each.sum()), 1e-12))
    return scaled


def _packs(tasks: TaskGraph, answers: Sequence[RehearsalTimes]) -> list[tuple[int, int, float]]:
    boxes = tasks.taken
    found = []
    for answer in answers:
        times: dict[int, list[float]] = {}
        for task, seconds in answer.packed:
            times.setdefault(task, []).append(seconds)
        for task, all_seconds in times.items():
            low = float(np.quantile(all_seconds, QUANTILE))
            found.append((int(boxes[task]), 2 * int(tasks.nbytes[task]), low))
    return found


def noise(answers: Sequence[RehearsalTimes]) -> float:
    """The largest spread of the reference kernel."""
    return max(_spread(answer.reference) for answer in answers)


def _spread(seconds: Sequence[float]) -> float:
    low, high = np.quantile(seconds, [QUANTILE, 0.75]) if len(seconds) else (1.0, 1.0)
    return float(high / low - 1)


# Messages


def exchanges_of_all_sizes(count: int) -> tuple[Exchanged, ...]:
    """Everybody to everybody, and one message alone, in all sizes."""
    everybody = [(a, b) for a in range(count) for b in range(count) if a != b]
    together = [tuple((a, b, n) for a, b in everybody) for n in MESSAGE_BYTES]
    return (*together, *(((0, 1, n),) for n in MESSAGE_BYTES))


def with_exchanges(
    table: CostTable, count: int, measured: Sequence[list[ExchangeTimes]]
) -> CostTable:
    """The table with what exchanges among `count` processes cost, from several measurements."""
    if not measured:
        return table
    times = np.concatenate([np.stack([a.times for a in turn]) for turn in measured], axis=1)
    works = dict(table.works) | _exchange_works(
        _exchange_samples(exchanges_of_all_sizes(count), times)
    )
    lines = dict(table.lines) | {EXCHANGE_LINE: exchange_line_of(works)}
    return replace(table, works=works, lines=lines)


def _exchange_works(samples: Iterable[tuple[int, int, float]]) -> dict[str, KernelMeasurement]:
    """(messages, bytes, seconds) of exchanges as works: messages are in the place of flops."""
    return {
        f"{EXCHANGE}({messages} {nbytes})": KernelMeasurement(seconds, messages, nbytes, 0)
        for messages, nbytes, seconds in samples
    }


def exchange_samples(works: Mapping[str, KernelMeasurement]) -> list[tuple[int, int, float]]:
    """(messages, bytes, seconds) of the exchanges among works."""
    rows = [w for name, w in works.items() if name.startswith(f"{EXCHANGE}(")]
    return [(int(w.flops), w.nbytes, w.seconds) for w in rows]


def exchanges_in_step(tasks: TaskGraph) -> list[tuple[int, int]]:
    """(messages, bytes) of the process with most bytes, for every position with messages."""
    found: dict[int, dict[int, list[int]]] = {}
    moving = np.flatnonzero(tasks.is_message)
    for task in moving.tolist():
        here, nbytes = found.setdefault(int(tasks.position[task]), {}), int(tasks.nbytes[task])
        if tasks.kind_of(task).is_collective:
            members = tasks.groups[tasks.group[task]]
            count, size = 2 * (len(members) - 1), 2 * (nbytes // len(members))
        else:
            members, count, size = (int(tasks.device[task]), int(tasks.peer[task])), 1, nbytes
        for device in members:
            total = here.setdefault(device, [0, 0])
            total[0], total[1] = total[0] + count, total[1] + size
    most = [max(devices.values(), key=lambda total: total[1]) for devices in found.values()]
    return [(messages, nbytes) for messages, nbytes in most]


def _exchange_samples(exchanges: Sequence[Exchanged], times: Ints) -> list[tuple[int, int, float]]:
    """(messages, bytes, seconds) of each exchange, as the process with the most of them sees it,
    from when the last one has come. `times`: ranks, rounds, exchanges, (start, end)."""
    took = times[..., 1].max(axis=0) - times[..., 0].max(axis=0)
    low = np.median(took, axis=0) / 1e9
    found = []
    for messages, seconds in zip(exchanges, low.tolist(), strict=True):
        per_rank = [
            (sum(r in m[:2] for m in messages), sum(m[2] for m in messages if r in m[:2]))
            for r in range(len(times))
        ]
        found.append((*max(per_rank, key=lambda x: x[1]), seconds))
    return found
