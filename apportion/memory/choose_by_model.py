"""choose_by_model: which Ops to recompute, found with a model of the step and then simulated.

Part of the room memory. A StepModel, the step in which nothing is recomputed and a function that
simulates a set come in; a RecomputeChoice goes out.

The sets to begin with are those of choose_recompute.py, with the model in place of simulation;
refine_recompute.py makes them better. The best one is simulated. If that is over the limit, then
the model was wrong by as much, and a lower limit is tried, lower by more each time; if that does
not lead to one that fits, sets are chosen by simulation alone, and last all is recomputed that can
be. Where by the model not even the best fits, the lowest limit that can be met is looked for by
halving.
"""

from __future__ import annotations

from collections.abc import Callable

from apportion.memory.choose_recompute import (
    RecomputeChoice,
    RecomputeOutcome,
    Simulate,
    choose_recompute,
    full_recompute,
)
from apportion.memory.refine_recompute import (
    FEW,
    RefinedRecompute,
    all_sets,
    refine_recompute,
)
from apportion.memory.step_model import StepModel

TRIES = 4  # sets that are simulated
FALLBACK = 8  # sets that are simulated where the model does not lead to one that fits
HOPELESS = 0.1  # of a limit, by which all that can be recomputed is not enough
MODELLED = 60  # sets that are modelled to begin with
HALVINGS = 5
GREEDY = 400  # units up to which a set is also built up from none


def choose_by_model(
    model: StepModel,
    kept: RecomputeOutcome,
    run: Simulate,
    is_late: Callable[[], bool] = lambda: False,
    tries: int = TRIES,
) -> RecomputeChoice:
    """The fastest set of Ops that was found to fit, or the one that is least over. `kept` is the
    step in which nothing is recomputed; `tries` sets are simulated at most, and when it is late no
    other than what recomputes all."""
    known: dict[frozenset[int], RecomputeOutcome] = {frozenset(): kept}
    modelled = model.of(()).peak
    everything = full_recompute(model.graph, model.costs)
    limit, right, more = modelled - kept.over, True, 1
    while kept.over > 0 and len(known) <= tries and not is_late():
        found = _best(model, limit)
        if found.ops in known:
            break
        out_of_reach = found.step.peak > limit
        if out_of_reach and len(model.units) > FEW:
            known[everything] = run(everything)
            if known[everything].over > HOPELESS * limit:
                right = True
                break
        now = known[found.ops] = run(found.ops)
        right = right and found.step.peak - now.over == modelled - kept.over
        if now.over <= 0 or out_of_reach:
            break
        limit, more = found.step.peak - more * now.over, 2 * more
    some = [one.over for ops, one in known.items() if len(known) == 1 or ops != everything]
    if not right and not is_late() and min(some) > 0:
        last = choose_recompute(model.graph, model.costs, kept, run, FALLBACK)
        known[last.ops] = last.outcome
    if min(one.over for one in known.values()) > 0:
        known[everything] = known.get(everything) or run(everything)
    ops, outcome = min(known.items(), key=lambda pair: pair[1].rank)
    return RecomputeChoice(ops, outcome, len(known) - 1)


def lowest_peak(model: StepModel) -> RefinedRecompute:
    """The set with the lowest peak that is found by the model."""
    return _best(model, 0)


def _best(model: StepModel, limit: int) -> RefinedRecompute:
    """The best set by the model."""
    if len(model.units) <= FEW:
        return all_sets(model, limit)
    found = refine_recompute(model, limit, _starts(model, limit))
    if not found.step.excess:
        return found
    low, high = limit, found.step.peak
    for _ in range(HALVINGS):
        if high <= limit:
            break
        middle = (low + high) // 2
        trial = refine_recompute(model, middle, [found.ops], 1 / HALVINGS)
        low, high = (middle, high) if trial.step.excess else (low, trial.step.peak)
        found = min(found, trial, key=lambda one: (one.step.peak, one.step.nanoseconds))
    return refine_recompute(model, limit, [found.ops]) if found.step.peak <= limit else found


def quick_by_model(model: StepModel, limit: int) -> frozenset[int]:
    """A set that fits by the model, by estimates only, and so in little time; or the nearest."""

    def run(ops: frozenset[int]) -> RecomputeOutcome:
        step = model.of(ops)
        return RecomputeOutcome(step.peak - limit, step.nanoseconds / 1e9)

    return choose_recompute(model.graph, model.costs, run(frozenset()), run, MODELLED).ops


def _starts(model: StepModel, limit: int) -> list[frozenset[int]]:
    graph, costs = model.graph, model.costs
    few = len(model.units) <= GREEDY
    some = [quick_by_model(model, limit), full_recompute(graph, costs)]
    return [*some, *([frozenset[int]()] if few else ())]
