"""calibrate: measures what a step's tasks cost on this machine, and keeps it.

The measurements of a machine are cached in one file (`cache_file`), one table for each Condition.
What is missing for a step is found out by rehearsals (rehearse.py) of the step divided in several
ways; of each task the low quantile over the rounds counts, because whatever disturbs a measurement
makes it longer.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from apportion.capture import Program, batch_leaves
from apportion.columns import (
    Floats,
    Ints,
)
from apportion.execute import Executable, measure, threads
from apportion.graph import BUFFER, OPTIMIZER_STATE, PARAMETER, Graph
from apportion.lower import (
    ASSEMBLE,
    COLLECTIVE,
    TRANSFER,
    TaskGraph,
    lower,
    with_storage,
)
from apportion.machine import (
    ASSEMBLE_LINE,
    ASSUMED,
    EXCHANGE_LINE,
    PACK_LINE,
    Cluster,
    Condition,
    CostFile,
    CostModel,
    CostTable,
    Line,
    Work,
    cost_fit,
    load,
    save,
)
from apportion.machine import cluster as cluster_of
from apportion.run.pool import ProcessPool
from apportion.run.rehearse import (
    WHOLE,
    ExchangeRequest,
    ExchangeTimes,
    RehearsalRequest,
    RehearsalTimes,
)
from apportion.simulate import feeds, simulate
from apportion.split import Strategy, space_of

QUANTILE = 0.25
EXCHANGE = "apportion.exchange"
ROUNDS = 12
BUDGET = 20.0  # seconds for measuring by itself what a plan needs
MOST_OF_ONE = 8.0  # seconds for one strategy
MESSAGE_BUDGET = 4.0
MEMORY_SHARE = 0.7  # of the free memory that a rehearsal may take
STATE = (PARAMETER, OPTIMIZER_STATE, BUFFER)
NOISY = 0.15  # relative spread of the reference kernel above which a warning is due
MESSAGE_BYTES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
Note = Callable[[str], None]
Array = np.ndarray[Any, Any]
Exchanged = tuple[tuple[int, int, int], ...]
"""Messages (sender, receiver, bytes) of one exchange."""


@dataclass(frozen=True)
class StepSource:
    """The step that is rehearsed: of a model's specification, or of a Graph with tensors for some
    of its Values."""

    graph: Graph
    spec: str = ""
    model_seed: int = 0
    given: Mapping[int, Array] = field(default_factory=dict)


def source_of(program: Program | Graph) -> StepSource:
    """The step of a captured program: its batch and constants are given, where they have data."""
    if isinstance(program, Graph):
        return StepSource(program)
    tensors = batch_leaves(program, program.batch) | program.constants
    known = {v: t for v, t in tensors.items() if not t.is_meta and t.dtype != torch.bfloat16}
    return StepSource(program.graph, given={v: t.detach().numpy() for v, t in known.items()})


# Where measurements are kept


def machine() -> str:
    """This machine in words: what costs depend on."""
    model = ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        model = next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "")
    return f"{model or platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def cache_file() -> Path:
    """Where this machine's measurements are: under APPORTION_CACHE, or the user's cache folder."""
    folder = os.environ.get("APPORTION_CACHE")
    if not folder:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        folder = os.path.join(base, "apportion")
    name = hashlib.sha256(f"{machine()} torch {torch.__version__}".encode()).hexdigest()[:12]
    return Path(folder) / f"costs-{name}.json"


def cached() -> CostFile:
    """This machine's measurements; none if there are none yet or they cannot be read."""
    empty = CostFile(machine(), torch.__version__)
    try:
        return load(cache_file()) if cache_file().exists() else empty
    except ValueError:
        return empty


def keep(table: CostTable) -> None:
    """Puts a table into the cache."""
    path = cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder {path.parent}: {error.strerror}") from None
    save(cached().with_table(table), path)


def condition(cluster: Cluster) -> Condition:
    """Under which Condition the processes of a local cluster run."""
    count = len(cluster.devices)
    return Condition("cpu", threads(count), count)


def measured_cost(table: CostTable) -> CostModel:
    """The CostModel of a local cluster from a table."""
    if not table.works:
        return ASSUMED
    text = f"measured on this machine, {table.condition.processes} processes at the same time"
    return CostModel("calibrated", text, ASSUMED.efficiency, {"cpu": table})


# Works


@dataclass(frozen=True)
class LoweredStrategy:
    """A strategy with its tasks and their works."""

    strategy: Strategy
    tasks: TaskGraph


def divided(graph: Graph, strategy: Strategy, devices: int) -> LoweredStrategy:
    """The tasks of a strategy, with the signatures of their kernel calls."""
    space = space_of(graph, strategy)
    tasks = lower(space, strategy, devices)
    storage = measure(Executable(space, strategy, tasks), threads(devices))
    return LoweredStrategy(strategy, with_storage(tasks, storage))


def rehearsed(
    pool: ProcessPool,
    source: StepSource,
    one: LoweredStrategy,
    table: CostTable,
    rounds: int,
    budget: float,
) -> CostTable:
    """The table with what one rehearsal has measured."""
    return with_measured(table, one.tasks, pool.ask(rehearsal(source, one, rounds, budget)))


def rehearsal(
    source: StepSource, one: LoweredStrategy, rounds: int, budget: float
) -> RehearsalRequest:
    """The request to rehearse a strategy."""
    return RehearsalRequest(
        source.spec, source.model_seed, None if source.spec else source.graph,
        dict(source.given), one.strategy, one.tasks.devices, rounds, budget,
    )  # fmt: skip


def missing(table: CostTable, tasks: TaskGraph) -> int:
    """How many of the tasks' works are not in the table."""
    return sum(work not in table.works for work in tasks.works)


class Calibrator:
    """Costs of a step's tasks on a local cluster: those of the cache, and those that it measures
    when they are missing. A context manager; its processes start when they are first needed.

    budget   seconds that all rehearsals together may take, about
    note     is told what is done
    seconds  that measuring has taken
    """

    def __init__(
        self,
        source: StepSource,
        cluster: Cluster,
        budget: float = BUDGET,
        note: Note = warnings.warn,
    ) -> None:
        self.source, self.cluster, self.note = source, cluster, note
        self.left, self.seconds = budget, 0.0
        self.table = cached().table(condition(cluster))
        self.pool: ProcessPool | None = None

    def __enter__(self) -> Calibrator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.pool is not None:
            self.pool.close()

    def known(self) -> CostModel:
        """The CostModel of what is known so far."""
        return measured_cost(self.table)

    def cost(self, strategy: Strategy, tasks: TaskGraph) -> CostModel:
        """The CostModel for a strategy's tasks; what is missing is measured first, within the
        budget."""
        lacking, count = missing(self.table, tasks), len(self.cluster.devices)
        if lacking and self.left > 0 and self.fits(tasks):
            self.note(f"measuring {lacking} kernel calls on {count} processes")
            began = time.perf_counter()
            try:
                self.measure(strategy, tasks)
            except (RuntimeError, ValueError) as error:  # planning goes on without
                self.note(f"not measured: {error}")
                self.left = 0.0
            finally:
                self.seconds += time.perf_counter() - began
        return self.known()

    def measure(self, strategy: Strategy, tasks: TaskGraph) -> None:
        """Rehearses a strategy and keeps what was measured."""
        count = len(self.cluster.devices)
        began = time.perf_counter()
        if self.pool is None:
            self.pool = ProcessPool(count)
        if EXCHANGE_LINE not in self.table.lines:
            self.table = talked(self.pool, self.table, MESSAGE_BUDGET)
        share = min(self.left, MOST_OF_ONE)
        self.table = rehearsed(
            self.pool, self.source, LoweredStrategy(strategy, tasks), self.table, ROUNDS, share
        )
        self.left -= time.perf_counter() - began
        keep(self.table)
        if self.table.noise > NOISY:
            self.note(
                f"this machine is busy with something else: the same kernel took up to "
                f"{self.table.noise:.0%} longer, so predictions may be off by as much"
            )

    def fits(self, tasks: TaskGraph) -> bool:
        """Whether there is memory and time for a rehearsal."""
        guess = simulate(tasks, self.cluster, ASSUMED)
        state = sum(v.nbytes for v in self.source.graph.values if v.role in STATE)
        wanted = sum(guess.peak_bytes) + len(guess.peak_bytes) * state
        if wanted > MEMORY_SHARE * free_memory():
            self.note(f"not measured: that would need {wanted / 1e9:.1f} GB of memory")
            return False
        if guess.step_seconds > self.left:
            self.note(f"not measured: one step would take about {guess.step_seconds:.0f} s")
            return False
        return True


def free_memory() -> float:
    """Bytes of this machine's memory that programs can still have."""
    info = Path("/proc/meminfo")
    if info.exists():
        rows = dict(line.split(":") for line in info.read_text().splitlines() if ":" in line)
        if "MemAvailable" in rows:
            return float(rows["MemAvailable"].split()[0]) * 1024
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) / 2


def with_measured(
    table: CostTable, tasks: TaskGraph, answers: Sequence[RehearsalTimes]
) -> CostTable:
    """The table with new works; lines and fits are made anew."""
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
        works[name] = Work(low_ends, 0.0, nbytes, 1)
    for work, seconds in found.items():
        task = first[work]
        works[tasks.works[work]] = Work(
            float(np.mean(seconds)), float(tasks.flops[task]), int(tasks.nbytes[task]),
            int(tasks.itemsize[task]),
        )  # fmt: skip
    lines = dict(table.lines)
    if len(joins) >= 8:
        lines[ASSEMBLE_LINE] = cost_fit.line(joins)
    packs = _packs(tasks, answers)
    if len(packs) >= 8:
        lines[PACK_LINE] = cost_fit.line(packs)
    pack = lines.get(PACK_LINE) or lines.get(ASSEMBLE_LINE)
    spoken = _spoken(tasks, answers, pack)
    works |= _exchange_works(_averaged(spoken))
    if samples := exchange_samples(works):
        lines[EXCHANGE_LINE] = _scaled(cost_fit.line(samples), spoken)
    found_table = replace(
        table,
        measured=time.strftime("%Y-%m-%d"),
        works=works,
        lines=lines,
        fits=cost_fit.fits(works),
        noise=max(_spread(answer.reference) for answer in answers),
    )
    return _with_waiting(found_table, tasks, answers, len(spoken))


def _with_waiting(
    table: CostTable, tasks: TaskGraph, answers: Sequence[RehearsalTimes], exchanges: int
) -> CostTable:
    """The table in which an exchange also costs what processes wait for each other before it: no
    two take equally long every time, and the later one counts. That is what whole rounds take
    beyond what their simulation says."""
    rounds: dict[int, list[tuple[int, int]]] = {}
    for answer in answers:
        for number, position, start, end in answer.exchanged:
            if position == WHOLE:
                rounds.setdefault(number, []).append((start, end))
    if not rounds or not exchanges:
        return table
    took = [max(e for _, e in turn) - max(s for s, _ in turn) for turn in rounds.values()]
    place = cluster_of(f"local:{tasks.devices}")
    guess = simulate(tasks, place, measured_cost(table)).step_seconds
    more = max(float(np.quantile(took, QUANTILE)) / 1e9 - guess, 0.0) / exchanges
    line = table.lines[EXCHANGE_LINE]
    waiting = line._replace(each=line.each + more)
    return replace(table, lines=dict(table.lines) | {EXCHANGE_LINE: waiting})


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


def _spread(seconds: Sequence[float]) -> float:
    low, high = np.quantile(seconds, [QUANTILE, 0.75]) if len(seconds) else (1.0, 1.0)
    return float(high / low - 1)


# Messages


def talked(pool: ProcessPool, table: CostTable, budget: float) -> CostTable:
    """The table with what messages cost between the pool's processes."""
    count = table.condition.processes
    return table if count < 2 else with_messages(table, count, [talks(pool, count, ROUNDS, budget)])


def talks(pool: ProcessPool, count: int, rounds: int, budget: float) -> list[ExchangeTimes]:
    """What each process has measured of exchanges of many sizes."""
    answers: list[ExchangeTimes] = pool.ask(ExchangeRequest(_exchanges(count), rounds, budget))
    return answers


def _exchanges(count: int) -> tuple[Exchanged, ...]:
    """Everybody to everybody, and one message alone, in all sizes."""
    everybody = [(a, b) for a in range(count) for b in range(count) if a != b]
    together = [tuple((a, b, n) for a, b in everybody) for n in MESSAGE_BYTES]
    return (*together, *(((0, 1, n),) for n in MESSAGE_BYTES))


def with_messages(table: CostTable, count: int, spoken: Sequence[list[ExchangeTimes]]) -> CostTable:
    """The table with what exchanges among `count` processes cost, from several measurements."""
    if not spoken:
        return table
    times = np.concatenate([np.stack([a.times for a in turn]) for turn in spoken], axis=1)
    works = dict(table.works) | _exchange_works(_exchange_samples(_exchanges(count), times))
    line = cost_fit.line(exchange_samples(works))
    return replace(table, works=works, lines=dict(table.lines) | {EXCHANGE_LINE: line})


def _exchange_works(samples: Iterable[tuple[int, int, float]]) -> dict[str, Work]:
    """(messages, bytes, seconds) of exchanges as works: messages are in the place of flops."""
    return {
        f"{EXCHANGE}({messages} {nbytes})": Work(seconds, messages, nbytes, 0)
        for messages, nbytes, seconds in samples
    }


def exchange_samples(works: Mapping[str, Work]) -> list[tuple[int, int, float]]:
    """(messages, bytes, seconds) of the exchanges among works."""
    rows = [w for name, w in works.items() if name.startswith(f"{EXCHANGE}(")]
    return [(int(w.flops), w.nbytes, w.seconds) for w in rows]


def _spoken(
    tasks: TaskGraph, answers: Sequence[RehearsalTimes], pack: Line | None
) -> list[tuple[int, int, float]]:
    """(messages, bytes, seconds) of the exchanges in rehearsals, without packing: from when the
    last process has come, for the one that has the most to do."""
    times: dict[int, dict[int, list[tuple[int, int]]]] = {}
    for answer in answers:
        for number, position, start, end in answer.exchanged:
            if position != WHOLE:
                times.setdefault(position, {}).setdefault(number, []).append((start, end))
    boxes = tasks.taken
    took = [
        [max(e for _, e in turn) - max(s for s, _ in turn) for turn in turns.values()]
        for turns in times.values()
    ]
    found = []
    for position, seconds in zip(
        times, (_low(np.array(took).T) / 1e9 if took else ()), strict=True
    ):
        messages, nbytes, packing = _busiest(tasks, position, boxes, pack)
        if messages and seconds > packing:
            found.append((messages, nbytes, float(seconds) - packing))
    return found


def _scaled(line: Line, spoken: Sequence[tuple[int, int, float]]) -> Line:
    """The Line by which these exchanges together take what they took. Most take as long as
    exchanges by themselves do, some several times longer because a thread has lost its core: what
    counts in a step is the sum."""
    if not spoken:
        return line
    guess = sum(line.each + m * line.per_box + n * line.per_byte for m, n, _ in spoken)
    scale = float(sum(seconds for _, _, seconds in spoken) / guess)
    each, per_box, per_byte = (scale * x for x in line[:3])
    return line._replace(each=each, per_box=per_box, per_byte=per_byte)


def _busiest(
    tasks: TaskGraph, position: int, boxes: Ints, pack: Line | None
) -> tuple[int, int, float]:
    """Messages and bytes of the process with most bytes at a position, and its seconds of
    packing."""
    low, high = np.searchsorted(tasks.position, [position, position + 1])
    most = (0, 0, 0.0)
    each = pack or Line(0.0, 0.0, 0.0, 0.0, 0)
    for device in range(tasks.devices):
        count, size, packing = 0, 0, 0.0
        for task in range(int(low), int(high)):
            nbytes = int(tasks.nbytes[task])
            if tasks.kind[task] == TRANSFER and device in (tasks.device[task], tasks.peer[task]):
                count, size = count + 1, size + nbytes
                if device == tasks.device[task]:
                    packing += each.each + boxes[task] * each.per_box + 2 * nbytes * each.per_byte
            elif tasks.kind[task] == COLLECTIVE and device in tasks.groups[tasks.group[task]]:
                members = len(tasks.groups[tasks.group[task]])
                share = nbytes // members
                count, size = count + 2 * (members - 1), size + 2 * share
                packing += (members - 1) * (each.each + each.per_box) + 2 * share * each.per_byte
        if size > most[1]:
            most = (count, size, packing)
    return most


def _averaged(samples: Sequence[tuple[int, int, float]]) -> list[tuple[int, int, float]]:
    """One sample for equal exchanges."""
    groups: dict[tuple[int, int], list[float]] = {}
    for messages, nbytes, seconds in samples:
        groups.setdefault((messages, nbytes), []).append(seconds)
    return [(m, n, float(np.mean(seconds))) for (m, n), seconds in groups.items()]


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
