"""placement: every placer of place/ as a method: whole Ops, each on one device.

In: a Problem, and the name of a row of PLACERS. Out: the Strategy in which nothing is cut and every
Op is where the placer puts its unit.

The step becomes a PlacementProblem (place/imports/captured.py), whose evaluator is a fast copy of
the simulator's rules. What the placer finds is simulated as it will be run. Where that is over the
memory limit, the placer is asked again with a limit that is lower by the excess, while there is
time. A row that refines spends the rest of its budget on moves of whole units that the simulator
itself judges (simulate/delta), so that what the copy leaves out counts as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from apportion.columns import Ints
from apportion.lower import lower
from apportion.place import (
    PLACERS,
    PlacementProblem,
    PlacementResult,
    PlacerProgress,
    StepObjective,
    captured_problem,
    check_placement,
    worst_ticks,
)
from apportion.search.baselines.layer_placement import with_layers_as_expert
from apportion.search.problem import Problem, Progress, SearchResult, UnsuitableMethod
from apportion.search.walks.simulated_walk import SimulatedWalk
from apportion.search.walks.unit_moves import UNIT_KINDS, UnitMoves
from apportion.simulate import Timeline, simulate
from apportion.split import Choice, Strategy, unsplit_choice
from apportion.work_clock import work_seconds

FIRST = 0.8  # share of the budget that a placer has at first, if it is limited
REFINED = 0.5  # the same of a row that refines
ROUNDS = 3  # how often a placer is asked when what it finds is over the limit
QUICK = ("blocks", "m-topo", "m-etf", "m-sct", "list-schedule", "metis", "scotch")
STARTED = ("local-search", "annealing", "brkga")  # begin with list scheduling and the expert's
LISTED = 0.5  # share of their budget that this may take
SETTLING = ("auto", "local-search", "policy")  # end when they find nothing better
SETTLED = 200  # namely after so many evaluations for every move of one unit
CHECKED = 256  # proposals of the refinement between looks at the memory
IDLE = 4  # it ends after so many proposals a unit, and a few hundred, without an improvement
LARGE = 20_000  # Ops above which nothing is refined: making ready takes too long


def placement(
    problem: Problem,
    *,
    placer: str,
    refines: bool = False,
    budget: float = 10.0,
    seed: int = 0,
    policy: Path | None = None,
) -> SearchResult:
    """The Strategy of whole Ops that a row of PLACERS finds; `policy` is the file of what it has
    learned, for rows that learn."""
    began = work_seconds()
    step = placement_problem_of(problem)
    found = _placed(problem, step, placer, refines, began, budget, seed, policy)
    curve = tuple((at, score) for at, _, score in found.result.curve if score < found.worst)
    strategy, figures, notes = found.strategy, dict(found.result.figures), found.result.notes
    interrupted = found.result.interrupted
    large = len(problem.space.graph.ops) > LARGE
    if refines and not interrupted and not large and step.units > 1:
        strategy = _best_start(problem, step, found)
        refined = _Refinement(problem, step, strategy, began + budget, seed)
        interrupted = refined.run()
        strategy = refined.strategy
        figures |= {"proposals": float(refined.proposals), "accepted": float(refined.accepted)}
        curve += tuple((at - began, seconds) for at, seconds in refined.curve)
    bound = found.result.lower_bound
    return SearchResult(
        strategy,
        lower_bound=None if refines else bound,
        bound_of="" if bound is None or refines else "seconds, over placements of whole operators",
        notes=notes,
        curve=curve,
        figures=figures,
        interrupted=interrupted,
    )


def placement_problem_of(problem: Problem) -> PlacementProblem:
    """The step of a Problem, to be placed, with the expert's placement of it."""
    limit = problem.memory_limit
    step = captured_problem(problem.space, problem.cluster, problem.cost, limit)
    return with_layers_as_expert(_unlimited(step) if limit is None else step, problem.space.graph)


def _unlimited(step: PlacementProblem) -> PlacementProblem:
    """The same on devices that hold anything."""
    return replace(step, devices=tuple(replace(it, memory_bytes=None) for it in step.devices))


def strategy_of(problem: Problem, step: PlacementProblem, place: Ints) -> Strategy:
    """Every Op whole, on the device of its unit."""
    space, ops = problem.space, len(problem.space.graph.ops)
    whole: dict[tuple[int, int], Choice] = {}  # many Ops have one
    choices = []
    for op, device in enumerate(place[step.columns.unit[-ops:]].tolist() if ops else ()):
        key = len(space.axes(op)), device
        if key not in whole:
            whole[key] = unsplit_choice(space, op, (device,))
        choices.append(whole[key])
    return Strategy(tuple(choices), digits=space.digits, opening=space.opening)


# Placing


@dataclass(frozen=True)
class _Found:
    """What a placer found: as a Strategy, and simulated; `over` is its largest excess in bytes."""

    result: PlacementResult
    strategy: Strategy
    line: Timeline
    over: int
    worst: float

    @property
    def rank(self) -> tuple[int, float]:
        """Less is better: what fits before what does not, then the seconds of a step."""
        return max(self.over, 0), self.line.step_seconds


def _placed(
    problem: Problem,
    step: PlacementProblem,
    placer: str,
    refines: bool,
    began: float,
    budget: float,
    seed: int,
    policy: Path | None,
) -> _Found:
    """The best that the placer finds, asked again while that is over the memory limit. Quick ones
    are first asked without a limit: what they count as memory is more than the simulator does."""
    best: _Found | None = None
    if problem.memory_limit is not None and placer in QUICK:
        best = _asked(problem, _unlimited(step), placer, FIRST * budget, seed, policy)
        if best.over <= 0:
            return best
    aim, share = step, REFINED if refines else 1.0 if problem.memory_limit is None else FIRST
    for turn in range(ROUNDS):
        left = began + budget - work_seconds()
        found = _asked(problem, aim, placer, max(share * left, 0.0), seed + turn, policy)
        if best is None or found.rank < best.rank:
            best = found
        if best.over <= 0 or found.result.interrupted or work_seconds() >= began + budget:
            break
        aim = _tighter(problem, aim, found.line)
    assert best is not None
    return best


def _asked(
    problem: Problem,
    step: PlacementProblem,
    placer: str,
    budget: float,
    seed: int,
    policy: Path | None,
) -> _Found:
    objective = StepObjective(step)
    worst = worst_ticks(step) / step.tick  # whatever takes longer is over a limit

    settled = _Settled(step.units * problem.devices if placer in SETTLING else None)

    def report(progress: PlacerProgress) -> None:
        settled.look(progress)
        known = progress.best if progress.best is not None and progress.best < worst else None
        problem.report_progress(
            Progress("placing", known, progress.bound, proposals=progress.evaluations)
        )

    if placer not in PLACERS:
        raise UnsuitableMethod(f"there is no placer {placer}")
    ends = work_seconds() + budget
    try:
        starts = _starts(objective, budget, seed) if placer in STARTED else []
        result = PLACERS[placer](
            objective, budget=max(ends - work_seconds(), 0.0), seed=seed, starts=starts,
            report=report, policy=policy,
        )  # fmt: skip
    except ValueError as error:  # a missing extra, a policy for other devices
        raise UnsuitableMethod(str(error)) from error
    if settled.happened:
        result = replace(result, interrupted=False)
    check_placement(step, result.placement)
    return _simulated(problem, step, result, worst)


def _starts(objective: StepObjective, budget: float, seed: int) -> list[Ints]:
    """Where searches begin: list scheduling, the expert's layers, one device."""
    listed = PLACERS["list-schedule"](objective, budget=LISTED * budget, seed=seed).placement
    alone = PLACERS["single"](objective).placement
    expert = objective.problem.expert
    found = [listed, alone] if expert is None else [listed, alone, expert]
    return sorted(found, key=objective.score)


def _simulated(
    problem: Problem, step: PlacementProblem, result: PlacementResult, worst: float
) -> _Found:
    strategy = strategy_of(problem, step, result.placement)
    tasks = lower(problem.space, strategy, problem.devices)
    line = simulate(tasks, problem.cluster, problem.cost)
    limit = problem.memory_limit or line.peak_bytes
    over = max(p - n for p, n in zip(line.peak_bytes, limit, strict=True))
    return _Found(result, strategy, line, over, worst)


@dataclass
class _Settled:
    """Ends a search of placements as Ctrl-C would, once nothing has improved for long."""

    moves: int | None  # from one placement; None: it goes on
    best: float = float("inf")
    latest: int = 0  # evaluations when it improved
    happened: bool = False

    def look(self, progress: PlacerProgress) -> None:
        """Sees whether the search has settled; raises KeyboardInterrupt if so."""
        if self.moves is None or progress.best is None or self.happened:
            return
        if progress.best < self.best:
            self.best, self.latest = progress.best, progress.evaluations
        elif progress.evaluations - self.latest > SETTLED * self.moves:
            self.happened = True
            raise KeyboardInterrupt


def _tighter(problem: Problem, step: PlacementProblem, line: Timeline) -> PlacementProblem:
    """The problem with limits that are lower by as much as a step is over them."""
    limits = problem.memory_limit or line.peak_bytes
    devices = tuple(
        replace(device, memory_bytes=max(int((device.memory_bytes or n) - max(p - n, 0)), 1))
        for device, p, n in zip(step.devices, line.peak_bytes, limits, strict=True)
    )
    return replace(step, devices=devices)


# Refining


def _best_start(problem: Problem, step: PlacementProblem, found: _Found) -> Strategy:
    """What was found, or one device, or the expert's layers, if the simulator likes these better
    than its copy did."""
    alone = PLACERS["single"](StepObjective(step))
    others = [alone] if step.expert is None else [alone, PlacementResult(step.expert)]
    several = [found, *(_simulated(problem, step, other, found.worst) for other in others)]
    return min(several, key=lambda each: each.rank).strategy


class _Refinement:
    """Moves of whole units, kept where the simulated step is shorter."""

    def __init__(
        self,
        problem: Problem,
        step: PlacementProblem,
        strategy: Strategy,
        ends: float,
        seed: int,
    ) -> None:
        self.problem, self.step, self.strategy = problem, step, strategy
        self.ends, self.rng = ends, Random(f"refine {seed}")
        self.proposals = self.accepted = 0
        self.curve: list[tuple[float, float]] = []

    def run(self) -> bool:
        """Refines until the time is up, or nothing has improved for long; whether interrupted."""
        if work_seconds() >= self.ends:
            return False
        interrupted, walk = False, self._walk()
        try:
            self._descend(walk)
        except KeyboardInterrupt:
            interrupted = True
        walk.confirm()
        self.strategy = walk.sound or self.strategy
        return interrupted

    def _walk(self) -> SimulatedWalk:
        step, space = self.step, self.problem.space
        unit = step.columns.unit[-len(space.graph.ops) :]
        edges, seconds = step.unit_edges[0], step.unit_seconds.min(axis=1)

        def moves(choices: list[Choice]) -> UnitMoves:
            return UnitMoves(space, choices, unit, edges, seconds, step.columns.allowed)

        return SimulatedWalk(self.problem, space, self.strategy, UNIT_KINDS, moves)

    def _descend(self, walk: SimulatedWalk) -> None:
        latest = 0
        while work_seconds() < self.ends and self.proposals - latest < 300 + IDLE * walk.units:
            self.proposals += 1
            if self.proposals % CHECKED == 0 and not walk.confirm():
                walk.back()
            before = walk.cost
            cost = walk.change(self.rng, before)
            if cost is None:
                continue
            if cost >= before:
                walk.undo()
                continue
            walk.keep()
            walk.note()
            self.accepted += 1
            latest = self.proposals
            self.curve.append((work_seconds(), walk.cost))
            self.problem.report_progress(
                Progress("refining", walk.cost, proposals=self.proposals)
            )  # fmt: skip
