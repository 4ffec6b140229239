"""choose_modules: how many modules to compute again so that a step fits.

Part of the room memory. A StepModel, modules of a step in the order in which they run, the step in
which nothing is recomputed and a function that simulates a set of Ops come in; a RecomputeChoice
goes out.

The modules are taken from the first on, as few as suffice: the backward reaches the last ones
first, and while it computes the early ones again, what the late ones kept is gone. Where the model
says how many are enough, the search begins; it goes on in growing steps while that is not so, and
ends by halving.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from apportion.graph import Graph
from apportion.memory.choose_recompute import RecomputeChoice, RecomputeOutcome, Simulate
from apportion.memory.recompute import recompute
from apportion.memory.step_model import StepModel
from apportion.memory.whole_modules import (
    homes_of,
    inside_modules,
    modules_of,
    numbered_modules,
)


def choose_modules(
    model: StepModel,
    kept: RecomputeOutcome,
    run: Simulate,
    is_late: Callable[[], bool] = lambda: False,
) -> RecomputeChoice:
    """The Ops of as few modules as were found to suffice, or those of all. `kept` is the step in
    which nothing is recomputed; when it is late, no other set is simulated than that of all."""
    modules = repeating_modules(model.graph)
    if kept.over <= 0 or not modules:
        return RecomputeChoice(frozenset(), kept, 0)

    def ops(count: int) -> frozenset[int]:
        return frozenset(inside_modules(model.graph, modules[:count]))

    most = len(modules)
    known: dict[int, RecomputeOutcome] = {}
    low, high = 0, most + 1  # too few; enough, or more than there are
    at = _by_model(model, model.of(()).peak - kept.over, ops, most)
    while high - low > 1 and not is_late():
        known[at] = run(ops(at))
        low, high = (at, high) if known[at].over > 0 else (low, at)
        if high > most:
            at = min(low + (1 << len(known) - 1), most)
        else:
            at = high - 1 if len(known) == 1 else (low + high) // 2
    if high > most and most not in known:
        known[most] = run(ops(most))
    best = min(known, key=lambda count: (known[count].rank, count))
    return RecomputeChoice(ops(best), known[best], len(known))


def repeating_modules(graph: Graph) -> list[str]:
    """The layers of a step, in the order in which they run, of which the backward would compute
    something again; where no module has a number, the outermost modules."""
    found = numbered_modules(graph) or [path for path in modules_of(graph) if "." not in path]
    inside = inside_modules(graph, found)
    made = recompute(graph, inside)
    homes = homes_of(graph, found)
    again = {homes[made.origins[op]] for op in made.repeats}
    return [path for path in dict.fromkeys(homes) if path is not None and path in again]


def _by_model(model: StepModel, limit: int, ops: Callable[[int], frozenset[int]], most: int) -> int:
    """The least number of modules that is enough by the model, or all."""
    counts = range(1, most + 1)
    found = bisect_left(counts, True, key=lambda count: model.of(ops(count)).peak <= limit)
    return min(found + 1, most)
