"""flexflow: any Op cut in any way on any devices, by random walks over simulated steps.

In: a Problem, and Strategies to start from. Out: the best Strategy that a walk came by.

Walks (metropolis.py) begin at data parallelism, at the expert's strategy, at what tofu and optcnn
find, at a random strategy, and at whatever else is given; starts that are far behind the best of
them are judged and left. Every move (moves.py) is lowered and simulated by what it changes
(delta.py). Walks do not know of each other and are shared among the cores there are; each depends
only on its start, the seed and how many proposals it made. So more proposals never give a worse
plan, and the same number gives the same.

Past the paper: sums can be cut too; cells, loops and neighbours move together; the temperature is
relative, walks go on in runs at several temperatures; memory counts; a proposal is simulated only
until it is certain to be rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from apportion.columns import compiled_sooner
from apportion.lower import lower
from apportion.machine import usable_cores
from apportion.search.baselines.data import data
from apportion.search.levels.tofu import tofu
from apportion.search.problem import Problem, Progress, SearchResult, UnsuitableMethod
from apportion.search.walks.metropolis import Chain
from apportion.search.walks.moves import KINDS, MoveSampler
from apportion.search.walks.process_crew import Job, SendReport, run_jobs
from apportion.search.walks.simulated_walk import SimulatedWalk
from apportion.search.walks.units import LayerChoices
from apportion.simulate import delta_compile_seconds, simulate
from apportion.split import Choice, Layout, Space, Strategy, space_of, unsplit_choice
from apportion.work_clock import work_seconds

FAR = 3.0  # starts that take so many times as long as the best are not walked from
FAVOUR = 6  # how much more time walks have that are ahead: by this power of the ratio
SLICE = 32  # proposals between looks at the clock
TURN = 0.1  # share of the budget that a walk has before it is the next one's turn
CHECKED = 512  # proposals after which the memory of the best is looked at
REPORT_SECONDS = 0.05  # seconds between the reports of a walk, at the least
REPORT_MULTIPLE = 20  # and as a multiple of the time that a report takes
STARTING = 0.3  # share of the budget that finding starts may take
SLOW = 0.01  # seconds that a loop takes in the first SLICE proposals if it is worth that


@dataclass(frozen=True)
class StartingPoint:
    """Where walks begin."""

    name: str
    space: Space
    strategy: Strategy
    seconds: float = 0.0
    fits: bool = True


@dataclass
class WalkResult:
    """The best of a walk so far, by its latest report."""

    start: StartingPoint
    strategy: Strategy
    seconds: float
    fits: bool
    proposals: int = 0
    accepted: int = 0
    over: bool = False
    drawn: dict[str, list[int]] = field(default_factory=dict)


def flexflow(
    problem: Problem,
    *,
    budget: float = 30.0,
    seed: int = 0,
    starts: Sequence[tuple[Strategy, Space]] = (),
    proposals: int | None = None,
    kinds: Mapping[str, int] = KINDS,
    workers: int | None = None,
    pinned: frozenset[int] = frozenset(),
) -> SearchResult:
    """The best Strategy that walks come by within `budget` seconds, or within so many proposals,
    whatever time that takes. An interrupt ends it with the best so far. With `pinned` Ops, which
    keep the Choices that they have, walks begin at the Strategies in `starts` alone."""
    began = work_seconds()
    search = _WalkSearch(problem, began, began + budget, seed, proposals, kinds, pinned)
    interrupted = False
    try:
        if pinned:
            several = [_judge(problem, f"given {k}", *each) for k, each in enumerate(starts)]
        else:
            several = list(_starting_points(problem, starts, budget, seed, proposals is not None))
        search.begin(several)
        search.walk(workers or usable_cores())
    except KeyboardInterrupt:
        if not search.found:
            raise
        interrupted = True
    return search.result(interrupted)


# Starts


def _starting_points(
    problem: Problem,
    given: Sequence[tuple[Strategy, Space]],
    budget: float,
    seed: int,
    unhurried: bool,
) -> Iterator[StartingPoint]:
    """Where to begin, judged by a full simulation; those that take a search while there is time."""
    until = work_seconds() + STARTING * budget
    seen: list[Strategy] = []

    def judged(
        name: str, strategy: Strategy, space: Space | None = None
    ) -> Iterator[StartingPoint]:
        if strategy not in seen:
            seen.append(strategy)
            yield _judge(problem, name, strategy, space)

    for number, (strategy, space) in enumerate(given):
        yield from judged(f"given {number}", strategy, space)
    yield from judged("data", data(problem).strategy)
    for name in ("expert", "tofu", "optcnn"):
        left = until - work_seconds()
        if name != "expert" and (given or (left <= 0 and not unhurried)):
            continue
        try:
            found = _found_by(name, problem, budget if unhurried else left, seed)
        except UnsuitableMethod:
            continue
        yield from judged(name, found.strategy, found.space)
    if unhurried or work_seconds() < until:
        yield from judged("random", _random_strategy(problem, Random(f"start {seed}")))


def _found_by(name: str, problem: Problem, budget: float, seed: int) -> SearchResult:
    if name == "tofu":
        return tofu(problem, budget=budget, seed=seed)
    if name == "expert":
        from apportion.search.baselines.expert import expert

        return expert(problem)
    from apportion.search.layers.optcnn import optcnn

    return optcnn(problem, budget=budget, seed=seed)


def _random_strategy(problem: Problem, rng: Random) -> Strategy:
    """Every cell cut and placed at random."""
    space = problem.space
    members = LayerChoices(space)
    choices: list[Choice] = [unsplit_choice(space, op, (0,)) for op in range(len(space.graph.ops))]
    moves = MoveSampler(members, problem.cluster, choices)
    for cell in members.cells:
        for op, choice in moves.draw_cell(cell, rng).items():
            choices[op] = choice
    return Strategy(tuple(choices), digits=space.digits, opening=space.opening)


def _judge(problem: Problem, name: str, strategy: Strategy, space: Space | None) -> StartingPoint:
    space = space or space_of(problem.space.source, strategy, problem.space)
    line = simulate(lower(space, strategy, problem.devices), problem.cluster, problem.cost)
    limit = problem.memory_limit
    fits = limit is None or all(p <= n for p, n in zip(line.peak_bytes, limit, strict=True))
    return StartingPoint(name, space, strategy, line.step_seconds, fits)


# Walks


@dataclass
class _WalkSearch:
    problem: Problem
    began: float
    ends: float
    seed: int
    proposals: int | None
    kinds: Mapping[str, int]
    pinned: frozenset[int] = frozenset()
    starts: list[StartingPoint] = field(default_factory=list)
    found: dict[int, WalkResult] = field(default_factory=dict)  # by walk
    curve: list[tuple[float, float]] = field(default_factory=list)
    walking: float = 0.0  # since when
    ready: dict[int, SimulatedWalk] = field(default_factory=dict)  # walks that are made already
    lost: int = 0  # processes that did not finish

    def begin(self, starts: Sequence[StartingPoint]) -> None:
        """Takes note of all starts, the best first."""
        self.starts = sorted(starts, key=lambda start: (not start.fits, start.seconds))
        self._improved()

    def walk(self, workers: int) -> None:
        """Walks from all starts that are near the best, on several processes."""
        best = self.starts[0]
        near = [s for s in self.starts if not best.fits or s.seconds <= FAR * best.seconds]
        many = len(near)
        if self.proposals is None:  # with so many proposals the plan must not depend on the cores
            many = max(many, workers)
        walks = [near[k % len(near)] for k in range(many)]
        for number, start in enumerate(walks):
            self.found[number] = WalkResult(start, start.strategy, start.seconds, start.fits)
        each = None if self.proposals is None else -(-self.proposals // many)
        self.problem.report_progress(Progress("making ready", best.seconds))
        if self.ends > work_seconds() or each is not None:
            # what is compiled and made here is shared by all processes
            self.ready[0] = self._made_walk(near[0])
            delta = self.ready[0].delta
            delta.change({0: unsplit_choice(near[0].space, 0, (self.problem.devices - 1,))})
            delta.undo()
            if each is None and self.ends - work_seconds() > delta_compile_seconds():
                self._compile_loops(self.ready[0])
        self.walking = work_seconds()
        jobs: list[Job] = [self._job(k, each) for k in range(many)]
        ends = self.ends if each is None else None
        enough = self.problem.enough
        self.lost = run_jobs(jobs, min(workers, many), ends, self._take_report, enough)

    def _compile_loops(self, walk: SimulatedWalk) -> None:
        """Tries a few moves, so that the loops in which proposals spend their time are compiled
        here, and not in every process again. The walk is as it was."""
        rng = Random(f"loops {self.seed}")
        with compiled_sooner(SLOW):
            for _ in range(SLICE):
                if walk.change(rng, 2 * walk.cost) is not None:
                    walk.undo()
                if work_seconds() >= self.ends:
                    break
        walk.drawn = {kind: [0, 0, 0] for kind in walk.drawn}

    def _made_walk(self, start: StartingPoint) -> SimulatedWalk:
        how = (self.problem, start.space, start.strategy, self.kinds, None, self.pinned)
        return SimulatedWalk(*how)

    def _job(self, number: int, proposals: int | None) -> Job:
        start, problem = self.found[number].start, self.problem
        best_start = self.starts[0].seconds
        seed = f"{self.seed} {number}"
        longest = TURN * (self.ends - self.began)

        def work(send: SendReport) -> Iterator[float]:
            walk = self.ready.pop(number, None)
            if walk is None:
                walk = self._made_walk(start)
            chain = Chain(walk, Random(seed))
            next_report, checked, best = 0.0, 0, start.strategy
            turn = work_seconds()

            def send_report(ends: bool) -> None:
                nonlocal best
                limited = problem.memory_limit is not None
                sound = walk.sound if limited else walk.best
                known = best if sound is None and not ends else sound or walk.best
                report = _walk_report(number, chain, walk)
                if known is not best:
                    report |= {
                        "strategy": _packed(known),
                        "seconds": walk.sound_seconds if limited and sound else chain.best,
                        "fits": sound is not None,
                    }
                    best = known
                send(report)

            try:
                while not chain.over and (proposals is None or chain.proposals < proposals):
                    left = SLICE if proposals is None else min(SLICE, proposals - chain.proposals)
                    for _ in range(left):
                        chain.step()
                        if proposals is None and work_seconds() >= self.ends:
                            break
                    if chain.proposals - checked >= CHECKED:
                        checked = chain.proposals
                        if not walk.confirm():
                            chain.judge_again()
                    now = work_seconds()
                    if now >= next_report:
                        send_report(False)
                        took = work_seconds() - now
                        next_report = now + max(REPORT_SECONDS, REPORT_MULTIPLE * took)
                    if proposals is None and now - turn < longest:
                        yield 0.0
                    else:
                        yield (best_start / chain.best) ** FAVOUR
                        turn = work_seconds()
            finally:
                walk.confirm()
                send_report(True)

        return work

    def _take_report(self, report: dict[str, object]) -> None:
        """Takes note of the report of a walk, and reports to the user."""
        mine = self.found[int(str(report["walk"]))]
        mine.proposals, mine.accepted = int(str(report["proposals"])), int(str(report["accepted"]))
        mine.over = bool(report["over"])
        mine.drawn = report["drawn"]  # type: ignore[assignment]
        if "strategy" in report:
            mine.strategy = _unpacked(report["strategy"], mine.start)
            mine.seconds, mine.fits = float(str(report["seconds"])), bool(report["fits"])
            self._improved()
        total = sum(f.proposals for f in self.found.values())
        accepted = sum(f.accepted for f in self.found.values())
        passed = max(work_seconds() - self.walking, 1e-9)
        self.problem.report_progress(
            Progress(
                f"{len(self.found)} walks", self.curve[-1][1], proposals=total,
                per_second=total / passed, accepted=accepted / max(total, 1),
            )
        )  # fmt: skip

    def _improved(self) -> None:
        """Adds to the curve if the best is better than it was."""
        best = self.ranked()[0]
        if not self.curve or best[1] < self.curve[-1][1]:
            self.curve.append((work_seconds() - self.began, best[1]))

    def ranked(self) -> list[tuple[bool, float, int, Strategy, Space]]:
        """All that is known, the best first."""
        known = [(not s.fits, s.seconds, k, s.strategy, s.space) for k, s in enumerate(self.starts)]
        many = len(known)
        known += [
            (not f.fits, f.seconds, many + k, f.strategy, f.start.space)
            for k, f in self.found.items()
        ]
        return sorted(known, key=lambda each: each[:3])

    def result(self, interrupted: bool) -> SearchResult:
        """The best of all, the others of walks and starts behind it."""
        (_, _, _, strategy, space), *others = self.ranked()
        kept: list[tuple[Strategy, Space | None]] = []
        for *_, other, where in others:
            if other != strategy and all(other != known for known, _ in kept):
                kept.append((other, where))
        total = sum(f.proposals for f in self.found.values())
        accepted = sum(f.accepted for f in self.found.values())
        passed = max(work_seconds() - self.walking, 1e-9) if self.found else 1.0
        figures: dict[str, float] = {
            "proposals": total, "accepted": accepted, "proposals_per_second": total / passed,
        }  # fmt: skip
        for kind in self.kinds:
            counts = [f.drawn[kind] for f in self.found.values() if kind in f.drawn]
            for place, name in enumerate(("proposed", "accepted", "improved")):
                figures[f"{kind}_{name}"] = sum(count[place] for count in counts)
        notes = []
        if self.found and all(f.over for f in self.found.values()):
            notes.append("flexflow: all walks ended before the budget did, without improvements")
        if self.lost:
            notes.append(
                f"flexflow: {self.lost} processes of the search were lost, perhaps for want of "
                "memory; this is the best of what they and the others had told"
            )
        return SearchResult(
            strategy, notes=tuple(notes), space=space, others=tuple(kept),
            curve=tuple(self.curve), figures=figures, interrupted=interrupted,
        )  # fmt: skip


def _walk_report(number: int, chain: Chain, walk: SimulatedWalk) -> dict[str, object]:
    return {
        "walk": number, "proposals": chain.proposals, "accepted": chain.accepted,
        "over": chain.over, "drawn": walk.drawn,
    }  # fmt: skip


def _packed(strategy: Strategy) -> dict[str, object]:
    """The Choices and Layouts of a Strategy as plain data, equal ones once."""
    known: dict[Choice, int] = {}
    rows = [known.setdefault(choice, len(known)) for choice in strategy.choices]
    layouts = [[v, y.parts, y.devices] for v, y in strategy.layouts.items()]
    return {"known": [[c.parts, c.devices] for c in known], "rows": rows, "layouts": layouts}


def _unpacked(data: Any, start: StartingPoint) -> Strategy:
    known = [Choice(tuple(parts), tuple(devices)) for parts, devices in data["known"]]
    layouts = {v: Layout(tuple(p), tuple(d)) for v, p, d in data["layouts"]}
    choices = tuple([known[row] for row in data["rows"]])
    return replace(start.strategy, choices=choices, layouts=layouts)
