"""Plans run for a few real steps each, so that the really fastest is kept.

Part of the room run. Plans come in, best predicted first; the one that was measured to be the
fastest goes out, with what was predicted and measured of each.

A prediction ranks plans that are close as well as it is accurate. Where the processes are at hand
one can look: each plan in turn runs whole steps on all of them, the first few uncounted. Of the
others the low quantile decides, as wherever costs are measured: what disturbs a step makes it
longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from apportion.execute import Context, Executable, worker
from apportion.free_memory import free_memory
from apportion.lower import runnable
from apportion.machine import GENERATED
from apportion.memory import planned_graph
from apportion.plan import Plan, PlanTrial, with_trials
from apportion.quantity import format_quantity
from apportion.run.calibrate import MEMORY_SHARE, STATE
from apportion.run.cost_cache import QUANTILE
from apportion.run.planned_program import planned_bindings
from apportion.run.pool import TIMEOUT, SharedPool
from apportion.run.process import PoolProcess
from apportion.run.rehearse import longest_of_all
from apportion.run.step_source import StepSource
from apportion.split import Strategy, space_of

WARM = 2  # steps that are not counted: pages, caches and threads are new then
TIMED = 5
MOST = 20.0  # seconds for the steps of one plan, about; one step is always timed
Note = Callable[[str], None]
Span = tuple[float, float]
"""Start and end of a step, in seconds, by a clock that all ranks have."""


@dataclass(frozen=True)
class TrialRequest:
    """A request for whole steps of a strategy, as in a run, for about `budget` seconds."""

    source: StepSource
    strategy: Strategy
    devices: int
    warm: int
    timed: int
    budget: float
    mode: str = GENERATED

    def __call__(self, process: PoolProcess) -> list[Span]:
        """Runs in a process of a pool; the steps that count."""
        step = process.step(self.source)
        space = space_of(step.graph, self.strategy)
        executable = Executable(space, self.strategy, runnable(space, self.strategy, self.devices))
        mine = worker(executable, process.rank, mode=self.mode)
        mine.backends = process.backends
        mine.progress = process.progress
        mine.progress[0] = 1
        mine.rank.load(step.tensor)
        spans: list[Span] = []
        began = time.perf_counter()
        for number in range(self.warm + self.timed):
            spent = longest_of_all(time.perf_counter() - began)  # all ranks decide alike
            if number >= 2 and spent * (number + 1) / number > self.budget:
                break
            start = time.perf_counter()
            mine.rank.feed(step.tensor)
            mine.run(Context(0, number, step.setting, executable.graph.bodies))
            spans.append((start, time.perf_counter()))
        mine.finish()
        return spans[min(self.warm, len(spans) - 1) :]


def step_seconds(ranks: Iterable[Sequence[Span]]) -> float:
    """The low quantile of the steps, each from when its first rank began to when its last was done.

    Counted from when the last rank began, a step would be too short: one that has little to do may
    be late to begin while the others are at work.
    """
    steps = zip(*ranks, strict=True)
    each = [max(end for _, end in step) - min(start for start, _ in step) for step in steps]
    return float(np.quantile(each, QUANTILE))


@dataclass(frozen=True, slots=True)
class TrialFailure:
    """Why there is no measurement of a plan."""

    why: str


def fastest_measured(
    plans: Sequence[Plan], source: StepSource, note: Note, processes: SharedPool
) -> Plan:
    """The Plan whose steps are really the shortest, of those that are feasible, with what was
    predicted and measured of each.

    A plan that cannot be run is left out, and a note says why. An interrupt ends it with what is
    known by then.
    """
    feasible = [plan for plan in plans if plan.feasible]
    if not feasible:
        return with_trials(plans[0], (), ("nothing was measured: no plan fits",))
    count = len(feasible[0].cluster.devices)
    note(f"running {_several(len(feasible))} for {WARM + TIMED} steps each on {count} processes")
    return keep_fastest(feasible, _results(feasible, source, processes))


def _several(count: int) -> str:
    return "1 plan" if count == 1 else f"{count} plans"


def _results(
    plans: Sequence[Plan], source: StepSource, processes: SharedPool
) -> list[float | TrialFailure]:
    results: list[float | TrialFailure] = []
    try:
        for plan in plans:
            if why := unfit(plan, free_memory()):
                results.append(TrialFailure(why))
                continue
            try:
                answers = processes.pool().ask(trial_request(plan, source), TIMEOUT)
                results.append(step_seconds(answers))
            except RuntimeError as error:  # which has ended the processes; the next are new ones
                results.append(TrialFailure(str(error)))
    except KeyboardInterrupt:
        results += [TrialFailure("interrupted")] * (len(plans) - len(results))
    return results


def trial_request(plan: Plan, source: StepSource) -> TrialRequest:
    """The request to run a plan."""
    count = len(plan.cluster.devices)
    if plan.memory:
        made, facts = planned_graph(source.graph, plan.memory), source.facts
        if facts is not None:
            facts = replace(facts, bindings=planned_bindings(facts.bindings, made))
        source = replace(source, graph=plan.graph, facts=facts)
    return TrialRequest(source, plan.strategy, count, WARM, TIMED, MOST, plan.cost.mode)


def unfit(plan: Plan, free: float) -> str:
    """Why a plan had better not be run with so many bytes of memory free; "" if nothing is against
    it."""
    state = sum(value.nbytes for value in plan.graph.values if value.role in STATE)
    wanted = sum(plan.predicted.peak_bytes) + len(plan.predicted.peak_bytes) * state
    if wanted > MEMORY_SHARE * free:
        needed, there = format_quantity(wanted, "B"), format_quantity(free, "B")
        return f"running it would need {needed} of memory, {there} are free"
    if plan.predicted.step_seconds > MOST:
        return f"one step would take about {plan.predicted.step_seconds:.0f} s"
    return ""


def keep_fastest(plans: Sequence[Plan], results: Sequence[float | TrialFailure]) -> Plan:
    """The Plan with the least measured seconds; where nothing was measured, the first."""
    pairs = list(zip(plans, results, strict=True))
    notes = [f"{p.method} was left out: {r.why}" for p, r in pairs if isinstance(r, TrialFailure)]
    done = [(p, r) for p, r in pairs if not isinstance(r, TrialFailure)]
    if not done:
        return with_trials(plans[0], (), [*notes, "nothing was measured: the best as predicted"])
    best, least = min(done, key=lambda pair: pair[1])
    trials = [PlanTrial(p.method, p.predicted.step_seconds, r, p is best) for p, r in done]
    notes.append(
        f"of {_several(len(done))} that ran, that by {best.method} was the fastest: "
        f"{format_quantity(least, 's')} a step, "
        f"{format_quantity(best.predicted.step_seconds, 's')} predicted"
    )
    return with_trials(best, trials, notes)
