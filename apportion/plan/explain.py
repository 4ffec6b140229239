"""Why an Op has the Choice that it has, and what each alternative would cost.

Part of the room plan. A Plan and the name of an Op come in, an Explanation goes out.

Every alternative (alternatives.py) is put in the place of the Op's Choice, alone and with the Op's
Group, and simulated by delta: its step time is that of `simulate(lower(...))`, before messages are
merged, and is compared with the plan's own by the same measure. What it moves and holds is worked
out for the best of them. Then it is said what keeps the best from being taken:

    optimal     no alternative is faster
    resharding  one would compute faster, but what it moves costs more than that
    memory      the faster ones do not fit
    legality    none of its axes can be cut, and no other device is better
    search      one is faster and fits: the search did not find it
    budget      none of those that were tried is faster, and not all were tried

A saved Plan has all that this needs: neither the model nor torch.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

import numpy as np

from apportion.columns import Ints
from apportion.graph import FORWARD, Graph, Value
from apportion.lower import (
    Lowering,
    TaskGraph,
)
from apportion.plan.alternatives import OpAlternatives, OpAxis
from apportion.plan.explanation import (
    ALONE,
    BUDGET,
    GROUP,
    LEGALITY,
    MEMORY,
    OPTIMAL,
    RESHARDING,
    SEARCH,
    Alternative,
    CutAxis,
    Explanation,
    NamedChoice,
    OpTiming,
    ValueTraffic,
    best_there_is,
    missed,
    moves_more,
    seconds,
    too_large,
    undivided,
)
from apportion.plan.plan import Plan
from apportion.simulate import Delta, curves, granules, network, slack
from apportion.split import Choice, Layout, Space
from apportion.work_clock import work_seconds

NEAREST = 3  # names that are suggested for one that is not known


@dataclass(frozen=True, slots=True)
class StrategyChange:
    """A change of Choices and Layouts, of which `op`'s is described; and what it does."""

    op: int
    scope: str
    choices: dict[int, Choice]
    layouts: dict[int, Layout | None]
    step_ns: int = -1
    bytes_moved: int = -1

    @property
    def cost(self) -> tuple[int, int]:
        """Less is better."""
        return self.step_ns, self.bytes_moved

    @property
    def looks(self) -> tuple[object, ...]:
        """All but the order of the devices."""
        choice = self.choices[self.op]
        return self.scope, choice.parts, tuple(sorted(choice.devices))


Tell = Callable[[int, int], None]
"""Is told how many alternatives are done, and of how many."""


def explain(
    plan: Plan,
    op: str | int,
    alternatives: int = 12,
    budget: float = 10.0,
    progress: Tell | None = None,
) -> Explanation:
    """Why an Op of a Plan has its Choice, and what the alternatives would cost.

    `op` is its name or number, or the path of a module: then its heaviest forward Op. Simulates
    alternatives for at most `budget` seconds. Raises ValueError, with the nearest names, if nothing
    is named so.
    """
    if alternatives < 1:
        raise ValueError(f"at least 1 alternative is to be shown, not {alternatives}")
    index, others = find(plan, op)
    graph, line = plan.space.graph, plan.timeline
    around = OpAlternatives(plan.space, len(plan.cluster.devices))
    live = Delta(plan.space, plan.strategy, plan.cluster, plan.cost)
    several = trials_of(around, plan, index)
    trials, tried = simulated(live, several, alternatives, budget, progress)
    shown = _alternatives(plan, around, live, trials)
    meant, axes, group = graph.ops[index], around.axes(index), around.group(index)
    spent = _spent(plan, index)
    refused = tuple((axis.name, axis.refused) for axis in axes if axis.refused)
    constraint, because = _constraint(plan, shown, spent, axes, meant.kind, (tried, len(several)))
    return Explanation(
        meant.name, index, meant.kind, meant.phase, meant.line, meant.module, others,
        tuple(graph.ops[k].name for k in group),
        _named(axes, plan.strategy.choices[index]), *_moved(plan, index), spent,
        line.step_seconds, live.step_seconds, line.bytes_moved, line.peak_bytes,
        plan.memory_limit, tuple(shown), tried, len(several), refused, constraint, because,
        _notes(plan, live, tried, len(several)),
    )  # fmt: skip


# Which Op


def find(plan: Plan, op: str | int) -> tuple[int, tuple[str, ...]]:
    """The Op that is meant, and the names of further ones that may have been."""
    graph = plan.space.graph
    count = len(graph.ops)
    if isinstance(op, int) or op.isdecimal():
        if not 0 <= int(op) < count:
            raise ValueError(f"there is no operator {op}; they are numbered 0 to {count - 1}")
        return int(op), ()
    named = [k for k, meant in enumerate(graph.ops) if meant.name == op]
    if not named:
        origins = {k for k, meant in enumerate(plan.graph.ops) if meant.name == op}
        named = [k for k, origin in enumerate(plan.space.origins) if origin in origins]
    if not named:
        exact = [k for k, meant in enumerate(graph.ops) if meant.module == op]
        inside = [k for k, m in enumerate(graph.ops) if m.module.startswith(f"{op}.")]
        named = exact or inside
        named = [k for k in named if graph.ops[k].phase == FORWARD] or named
    if not named or not op:
        raise ValueError(f"no operator or module is named {op!r}; {_nearest(graph, op)}")
    named.sort(key=lambda k: -_flops(plan.space, k))
    return named[0], tuple(graph.ops[k].name for k in named[1:])


def _flops(space: Space, op: int) -> float:
    return space.split(op, [1] * len(space.axes(op))).parts[0].flops


def _nearest(graph: Graph, name: str) -> str:
    names = dict.fromkeys(m for op in graph.ops for m in (op.module, op.name) if m)
    near = get_close_matches(name, names, NEAREST, 0.0)
    return f"the nearest names are {', '.join(near)}" if near else "there are none"


# Alternatives


def trials_of(around: OpAlternatives, plan: Plan, op: int) -> list[StrategyChange]:
    """What is to be simulated: the Op alone, and the Op with its Group."""
    now, group = plan.strategy.choices, around.group(op)
    alone = around.choices(op, now)
    found = [StrategyChange(op, ALONE, {op: choice}, {}) for choice in alone]
    if len(group) == 1:
        return found
    leader = group[0]
    layouts = _freed(plan, group)
    together = [now[leader], *(alone if leader == op else around.choices(leader, now))]
    more = []
    for choice in together:
        choices = around.following(leader, choice, group)
        legal = all(around.is_legal(k, made) for k, made in choices.items())
        if legal and (layouts or any(now[k] != made for k, made in choices.items())):
            more.append(StrategyChange(leader, GROUP, choices, layouts))
    return [trial for pair in _alternating(found, more) for trial in pair]


def _alternating(
    first: Sequence[StrategyChange], second: Sequence[StrategyChange]
) -> list[list[StrategyChange]]:
    """One of each in turn, so that a budget that ends early serves both."""
    return [[*first[k : k + 1], *second[k : k + 1]] for k in range(max(len(first), len(second)))]


def _freed(plan: Plan, group: Sequence[int]) -> dict[int, Layout | None]:
    """No Layouts of their own for what a Group makes, and for the state that it updates: what is
    laid out for other cuts would be moved twice."""
    graph = plan.space.graph
    after = dict(graph.state)
    made = {v for k in group for v in graph.ops[k].outputs}
    state = {before for before, value in after.items() if value in made}
    return dict.fromkeys(v for v in plan.strategy.layouts if v in made | state)


def simulated(
    live: Delta,
    trials: Sequence[StrategyChange],
    best: int | None = None,
    budget: float = math.inf,
    progress: Tell | None = None,
) -> tuple[list[StrategyChange], int]:
    """Trials with what they do, the fastest first, of equal ones those that move less; and how many
    the budget allowed. With `best` only so many, of those that differ in nothing but the order of
    their devices one; that others are worse may be all that is worked out of them."""
    ends, done = work_seconds() + budget, list[StrategyChange]()
    for number, trial in enumerate(trials):
        if progress is not None:
            progress(number, len(trials))
        if number and work_seconds() > ends:
            return done, number
        limit = done[-1].step_ns if len(done) == best else None
        step = live.change(trial.choices, trial.layouts, limit)
        if limit is None or step <= limit:
            moved = live.bytes_moved
            _take(done, replace(trial, step_ns=step, bytes_moved=moved), best)
        live.undo()
    return done, len(trials)


def _take(done: list[StrategyChange], trial: StrategyChange, best: int | None) -> None:
    """Adds a trial in its place, if it is among the best."""
    if best is not None:
        rival = next((k for k, it in enumerate(done) if it.looks == trial.looks), None)
        if rival is not None:
            if done[rival].cost <= trial.cost:
                return
            del done[rival]
    insort(done, trial, key=lambda it: it.cost)
    if best is not None:
        del done[best:]


@dataclass(frozen=True, slots=True)
class _Figures:
    """A step as delta has it, without what kernels allocate beside what they leave."""

    step_ns: int
    bytes_moved: int
    peaks: Ints
    busiest_ns: int


def _figures(live: Delta, members: Iterable[int]) -> _Figures:
    """`busiest_ns` is what the members compute on their busiest device."""
    tasks, (start, end) = live.tasks(), live.times()
    found = curves(tasks, start, end, granules(live.cluster))
    peaks = np.array([curve.peak_bytes for curve in found], np.int64)
    return _Figures(live.step_ns, tasks.bytes_moved, peaks, _busiest(tasks, end - start, members))


def _busiest(tasks: TaskGraph, length: Ints, members: Iterable[int]) -> int:
    rows = np.isin(tasks.op, list(members)) & tasks.task_kinds.computes[tasks.kind]
    sums = np.bincount(tasks.device[rows], length[rows], tasks.devices)
    return int(sums.max(initial=0))


def _alternatives(
    plan: Plan, around: OpAlternatives, live: Delta, trials: Sequence[StrategyChange]
) -> list[Alternative]:
    """What trials do, in their order."""
    now: dict[tuple[int, ...], _Figures] = {}
    found = []
    for trial in trials:
        members = tuple(trial.choices)
        if members not in now:
            now[members] = _figures(live, members)
        live.change(trial.choices, trial.layouts)
        then = _figures(live, members)
        live.undo()
        found.append(_alternative(plan, around, trial, now[members], then))
    return found


def _alternative(
    plan: Plan, around: OpAlternatives, trial: StrategyChange, now: _Figures, then: _Figures
) -> Alternative:
    peaks = np.array(plan.timeline.peak_bytes, np.int64) + then.peaks - now.peaks
    excess = peaks - np.array(plan.memory_limit or peaks, np.int64)
    worst = int(excess.argmax())
    over = max(int(excess[worst]), 0)
    return Alternative(
        _named(around.axes(trial.op), trial.choices[trial.op]), trial.scope,
        then.step_ns / 1e9, (then.step_ns - now.step_ns) / 1e9, then.bytes_moved,
        then.bytes_moved - now.bytes_moved, then.busiest_ns / 1e9,
        (then.busiest_ns - now.busiest_ns) / 1e9, tuple(peaks.tolist()),
        int(peaks.max() - max(plan.timeline.peak_bytes)), over, worst if over else None,
    )  # fmt: skip


def _named(axes: Sequence[OpAxis], choice: Choice) -> NamedChoice:
    """A Choice with the names of its axes."""
    cuts = []
    for axis in axes:
        parts = math.prod(choice.parts[k] for k in axis.positions)
        if parts > 1:
            cuts.append(CutAxis(axis.name, axis.extent, parts, axis.kind, axis.partial, axis.dims))
    return NamedChoice(tuple(cuts), choice.replicas, choice.devices)


# The Op as it is


def _moved(plan: Plan, op: int) -> tuple[tuple[ValueTraffic, ...], tuple[ValueTraffic, ...]]:
    """What an Op reads and what it leaves."""
    graph = plan.space.graph
    lowering = Lowering(plan.space, plan.strategy, len(plan.cluster.devices))
    lowering.flows_of([value for value, _ in lowering.feeds[op]] + [*graph.ops[op].outputs])
    lowering.relay()
    reads, leaves = [], []
    for value, stage in lowering.feeds[op]:
        made = graph.producer[value]
        maker = graph.values[value].role if made is None else graph.ops[made[0]].name
        moved = lowering.bytes_read(value, stage)
        reads.append(_row(graph.values[value], maker, moved))
    for value in graph.ops[op].outputs:
        readers = ", ".join(graph.ops[k].name for k in graph.consumers[value]) or "the next step"
        leaves.append(
            _row(graph.values[value], readers, lowering.bytes_moved([lowering.flow_of(value)]))
        )
    return tuple(reads), tuple(leaves)


def _row(value: Value, other: str, moved: int) -> ValueTraffic:
    shape = "?" if value.shape is None else ",".join(map(str, value.shape))
    return ValueTraffic(value.name, f"{value.dtype or '?'}[{shape}]", value.nbytes, other, moved)


def _spent(plan: Plan, op: int) -> OpTiming:
    tasks, line = plan.tasks, plan.timeline
    mine = np.flatnonzero(tasks.op == op)
    start, end = line.start_ns, line.end_ns
    left = slack(network(tasks, plan.cluster, plan.cost), (start, end))
    return OpTiming(
        int(start[mine].min(initial=start.max(initial=0))) / 1e9,
        int(end[mine].max(initial=0)) / 1e9,
        _busiest(tasks, end - start, [op]) / 1e9,
        int(left[mine].min(initial=left.max(initial=0))) / 1e9,
    )


# Why


def _constraint(
    plan: Plan,
    shown: Sequence[Alternative],
    spent: OpTiming,
    axes: Sequence[OpAxis],
    kind: str,
    tried: tuple[int, int],
) -> tuple[str, str]:
    """What keeps the best alternative from being taken, and a sentence that says so. `tried`: how
    many alternatives were, and of how many."""
    if not shown:
        return LEGALITY, "there is no alternative: there is only one device"
    faster = [it for it in shown if it.step_difference < 0]
    taken = next((it for it in faster if it.fits), None)
    if taken is not None:
        return SEARCH, missed(taken, plan)
    if faster:
        return MEMORY, too_large(faster[0], plan)
    if not any(not axis.refused for axis in axes):
        return LEGALITY, undivided(axes, plan.space.undescribed.get(kind, ""))
    count, known = tried
    none = f"none of the {known} alternatives is faster"
    if count < known:
        none = f"none of the {count} alternatives that were tried, of {known}, is faster"
    lighter = next(
        (it for it in shown if it.busiest_difference < 0 and it.bytes_difference > 0), None
    )
    if lighter is not None and lighter.step_difference > 0:
        return RESHARDING, f"{none}; {moves_more(lighter)}"
    return OPTIMAL if count == known else BUDGET, f"{none}; {best_there_is(shown[0], spent)}"


def _notes(plan: Plan, live: Delta, tried: int, known: int) -> tuple[str, ...]:
    found = []
    ours, plans = live.step_ns, plan.timeline.step_ns
    if ours != plans:
        found.append(
            "alternatives are compared by fitted costs and before messages are merged, by which "
            f"the plan's step takes {seconds(ours / 1e9)}, not {seconds(plans / 1e9)}: what was "
            "measured of its kernels, and what travels together, says nothing of others"
        )
    if tried < known:
        found.append(f"the budget ended after {tried} of {known} alternatives")
    return tuple(found)
