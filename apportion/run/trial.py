"""trial: plans run for a few real steps each, so that the really fastest is kept.

A prediction ranks plans that are close as well as it is accurate. Where the processes are at hand
one can look: each plan in turn runs whole steps on all of them, the first few uncounted. Of the
others the low quantile decides, as wherever costs are measured: what disturbs a step makes it
longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from apportion.execute import Context, Executable, worker
from apportion.graph import Graph
from apportion.lower import lower
from apportion.plan import Plan, PlanTrial, with_trials
from apportion.quantity import shown
from apportion.run.calibrate import MEMORY_SHARE, QUANTILE, STATE, StepSource, free_memory
from apportion.run.pool import ProcessPool
from apportion.run.rehearse import latest, step_of
from apportion.split import Strategy, space_of

WARM = 2  # steps that are not counted: pages, caches and threads are new then
TIMED = 5
MOST = 20.0  # seconds for the steps of one plan, about; one step is always timed
Note = Callable[[str], None]
Span = tuple[float, float]
"""Start and end of a step, in seconds, by a clock that all ranks have."""


@dataclass(frozen=True)
class TrialRequest:
    """A request to a pool's process: whole steps of a strategy, as in a run, for about `budget`
    seconds. The step is that of the model `spec`; or, if that is empty, `graph` with the tensors
    `given` for Values and made up ones for the rest."""

    spec: str
    model_seed: int
    graph: Graph | None
    given: Mapping[int, Any]  # arrays
    strategy: Strategy
    devices: int
    warm: int
    timed: int
    budget: float

    def __call__(self, process: Any) -> list[Span]:
        """Runs in a process of a pool; the steps that count."""
        step = step_of(process, self.spec, self.model_seed, self.graph, self.given)
        space = space_of(step.graph, self.strategy)
        executable = Executable(space, self.strategy, lower(space, self.strategy, self.devices))
        mine = worker(executable, process.rank)
        mine.progress = process.progress
        mine.progress[0] = 1
        mine.rank.load(step.tensor)
        spans: list[Span] = []
        began = time.perf_counter()
        for number in range(self.warm + self.timed):
            spent = latest(time.perf_counter() - began)  # ranks meet, and decide alike
            if number >= 2 and spent * (number + 1) / number > self.budget:
                break
            start = time.perf_counter()
            mine.rank.feed(step.tensor)
            mine.run(Context(0, number, step.setting, executable.graph.bodies))
            spans.append((start, time.perf_counter()))
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


def tried(plans: Sequence[Plan], source: StepSource, note: Note) -> Plan:
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
    return settled(feasible, _results(feasible, source))


def _several(count: int) -> str:
    return "1 plan" if count == 1 else f"{count} plans"


def _results(plans: Sequence[Plan], source: StepSource) -> list[float | TrialFailure]:
    results: list[float | TrialFailure] = []
    pool: ProcessPool | None = None
    try:
        for plan in plans:
            if why := unfit(plan, free_memory()):
                results.append(TrialFailure(why))
                continue
            try:
                pool = pool or ProcessPool(len(plan.cluster.devices))
                results.append(step_seconds(pool.ask(_practice(plan, source))))
            except RuntimeError as error:
                results.append(TrialFailure(str(error)))
                pool = None  # it has ended its processes
    except KeyboardInterrupt:
        results += [TrialFailure("interrupted")] * (len(plans) - len(results))
    finally:
        if pool is not None:
            pool.close()
    return results


def _practice(plan: Plan, source: StepSource) -> TrialRequest:
    graph = None if source.spec else source.graph
    how = (plan.strategy, len(plan.cluster.devices), WARM, TIMED, MOST)
    return TrialRequest(source.spec, source.model_seed, graph, dict(source.given), *how)


def unfit(plan: Plan, free: float) -> str:
    """Why a plan had better not be run with so many bytes of memory free; "" if nothing is against
    it."""
    state = sum(value.nbytes for value in plan.graph.values if value.role in STATE)
    wanted = sum(plan.predicted.peak_bytes) + len(plan.predicted.peak_bytes) * state
    if wanted > MEMORY_SHARE * free:
        return f"running it would need {shown(wanted, 'B')} of memory, {shown(free, 'B')} are free"
    if plan.predicted.step_seconds > MOST:
        return f"one step would take about {plan.predicted.step_seconds:.0f} s"
    return ""


def settled(plans: Sequence[Plan], results: Sequence[float | TrialFailure]) -> Plan:
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
        f"{shown(least, 's')} a step, {shown(best.predicted.step_seconds, 's')} predicted"
    )
    return with_trials(best, trials, notes)
