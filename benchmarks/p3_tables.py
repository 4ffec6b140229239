"""What p3.py found, and its tables.

In: the Sweeps of some models, measured or read from the JSON of an earlier run. Out: Markdown,
which `write_tables` puts between two marks of a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from p3_models import PUBLISHED

DDP, DDP_SMALL = "ddp", "ddp in eighths"
NONE, WFBP, P3, AUTO = "none", "wfbp", "p3", "auto"
BEGIN, END = "<!-- table: p3 -->", "<!-- end: p3 -->"
APART = 0.03  # from which two policies are said to differ
TITLES = {"none": "none", "wfbp": "WFBP", "p3": "P3", "tictac": "TicTac"}
TITLES |= {"bytescheduler": "ByteScheduler", "auto": "auto"}


@dataclass(frozen=True)
class Contender:
    """Who takes a turn over a cable: a policy's plan, or DDP, which has none.

    how       what the policy decided
    file      of its plan
    planning  seconds that the decision took
    predicted seconds of a step
    """

    name: str
    how: str = ""
    file: str = ""
    planning: float = 0.0
    predicted: float = 0.0


@dataclass(frozen=True)
class Found:
    """One contender over one cable: seconds of a step, wall time of the slower rank and processor
    time of both, low quantiles; `median` and `rounds` of wall time."""

    contender: Contender
    wall: float
    median: float
    cpu: float
    rounds: list[float]


@dataclass(frozen=True)
class Point:
    """All contenders over a cable of `rate` bytes/s."""

    ratio: float
    rate: float
    found: list[Found]


@dataclass(frozen=True)
class Sweep:
    """One model over all cables. `compute`: predicted seconds of a step over one that is not
    limited; `messages`: bytes that a rank sends in a step; losses of the first steps."""

    model: str
    machine: str
    made: str
    samples: int
    parameters: int
    messages: int
    compute: float
    calibration: float
    losses: dict[str, list[float]]
    points: list[Point]


def read_sweep(data: dict[str, Any]) -> Sweep:
    """The Sweep that was written as JSON."""
    points = [
        Point(
            p["ratio"], p["rate"],
            [Found(**{**f, "contender": Contender(**f["contender"])}) for f in p["found"]],
        )
        for p in data["points"]
    ]  # fmt: skip
    return Sweep(**{**data, "points": points})


def by_name(point: Point) -> dict[str, Found]:
    """The contenders of a Point, by name; DDP is the faster of its two."""
    found = {one.contender.name: one for one in point.found}
    forms = [found.pop(name) for name in (DDP, DDP_SMALL) if name in found]
    return found | ({DDP: min(forms, key=lambda one: one.wall)} if forms else {})


def limited(sweep: Sweep) -> list[Point]:
    """The points whose cable is limited."""
    return [point for point in sweep.points if point.ratio]


def gain(point: Point, name: str, over: str) -> float:
    """By how much more samples a second one contender does than another."""
    found = by_name(point)
    return found[over].wall / found[name].wall - 1


def lead(point: Point) -> float:
    """By how much more samples a second `auto` does than the best of all others."""
    found = by_name(point)
    return min(f.wall for name, f in found.items() if name != AUTO) / found[AUTO].wall - 1


def errors(points: Sequence[Point]) -> list[float]:
    """Relative errors of all predictions."""
    return [
        f.contender.predicted / f.wall - 1 for p in points for f in p.found if f.contender.predicted
    ]


def in_order(points: Sequence[Point]) -> tuple[int, int]:
    """Of the pairs of policies that differ, how many are predicted in the measured order; and how
    many there are."""
    right = count = 0
    for point in points:
        for one, other in combinations([f for f in point.found if f.contender.predicted], 2):
            if abs(np.log(one.wall / other.wall)) > APART:
                count += 1
                likely = one.contender.predicted - other.contender.predicted
                right += (likely > 0) == (one.wall > other.wall)
    return right, count


def noise(points: Sequence[Point]) -> float:
    """By how much the median round is above the lower quartile, on average."""
    return float(np.mean([f.median / f.wall - 1 for p in points for f in p.found]))


def tables(sweeps: Sequence[Sweep]) -> Iterator[str]:
    """Everything in Markdown."""
    yield from _summary(sweeps)
    for sweep in sweeps:
        yield from _model(sweep)
    yield from _unlimited(sweeps)
    yield from _planning(sweeps)


def _summary(sweeps: Sequence[Sweep]) -> Iterator[str]:
    yield (
        "| model | published: P3 over WFBP | P3 over WFBP | auto over WFBP | auto over DDP | "
        "auto over the best other, worst to best | mean error | in order | noise |"
    )
    yield "|---" * 9 + "|"
    for sweep in sweeps:
        points = limited(sweep)
        published = PUBLISHED.get(sweep.model)
        peaks = []
        for name, over in ((P3, WFBP), (AUTO, WFBP), (AUTO, DDP)):
            best = max(points, key=lambda point: gain(point, name, over))
            peaks.append(f"{gain(best, name, over):+.0%} at {best.ratio:g}")
        leads = [lead(point) for point in points]
        right, count = in_order(points)
        yield (
            f"| {_title(sweep)} | {f'{published.gain:+.0%}' if published else ''} | "
            f"{' | '.join(peaks)} | {min(leads):+.1%} to {max(leads):+.1%} | "
            f"{np.mean(np.abs(errors(points))):.1%} | {right} of {count} | {noise(points):.1%} |"
        )


def _title(sweep: Sweep) -> str:
    return PUBLISHED[sweep.model].name if sweep.model in PUBLISHED else sweep.model


def _model(sweep: Sweep) -> Iterator[str]:
    names = [n for n in by_name(sweep.points[0]) if n != DDP]
    yield (
        f"\n**{_title(sweep)}**: {sweep.parameters / 1e6:.1f} million parameters, {sweep.samples} "
        f"samples a step, {sweep.compute * 1e3:.0f} ms of computation, {sweep.messages / 1e6:.1f} "
        f"MB from each rank. {sweep.machine}, {sweep.made}.\n"
    )
    head = [
        "messages / compute",
        "Mbit/s",
        *(TITLES[n] for n in names),
        "DDP",
        "auto over the best",
    ]
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for point in limited(sweep):
        found = by_name(point)
        best = min(found.values(), key=lambda one: one.wall)
        cells = [f"{point.ratio:g}", f"{point.rate * 8e-6:.0f}"]
        for one in (found[name] for name in (*names, DDP)):
            speed = f"{sweep.samples / one.wall:.1f}"
            speed = f"**{speed}**" if one is best else speed
            guess = one.contender.predicted
            cells.append(f"{speed} ({sweep.samples / guess:.1f})" if guess else speed)
        yield f"| {' | '.join(cells)} | {lead(point):+.1%} |"
    decided = {f"{p.ratio:g}": by_name(p)[AUTO].contender.how for p in limited(sweep)}
    yield f"\nauto chose {_grouped(decided)}."


def _grouped(decided: dict[str, str]) -> str:
    """What was decided, with the ratios at which it was."""
    at: dict[str, list[str]] = {}
    for ratio, how in decided.items():
        at.setdefault(how, []).append(ratio)
    return "; ".join(f"at {', '.join(ratios)}: {how}" for how, ratios in at.items())


def _unlimited(sweeps: Sequence[Sweep]) -> Iterator[str]:
    points = [(sweep, point) for sweep in sweeps for point in sweep.points if not point.ratio]
    if not points:
        return
    names = list(by_name(points[0][1]))
    titles = [TITLES.get(name, "DDP") for name in names]
    yield "\nOver a cable that is not limited, processor time of both ranks (ms), beside none:\n"
    yield f"| model | {' | '.join(titles)} |"
    yield "|---" * (len(names) + 1) + "|"
    for sweep, point in points:
        found = by_name(point)
        cells = [
            f"{found[n].cpu * 1e3:.0f} ({found[n].cpu / found[NONE].cpu - 1:+.1%})" for n in names
        ]
        yield f"| {_title(sweep)} | {' | '.join(cells)} |"


def _planning(sweeps: Sequence[Sweep]) -> Iterator[str]:
    """What a user waits for."""
    names = [n for n in by_name(sweeps[0].points[0]) if n != DDP]
    yield "\nSeconds that the decision takes, the mean over the cables:\n"
    yield f"| model | {' | '.join(TITLES[name] for name in names)} | plan and calibration before |"
    yield "|---" * (len(names) + 2) + "|"
    for sweep in sweeps:
        took = [
            np.mean([by_name(p)[name].contender.planning for p in sweep.points]) for name in names
        ]
        cells = " | ".join(f"{seconds:.2f}" for seconds in took)
        yield f"| {_title(sweep)} | {cells} | {sweep.calibration:.1f} |"


def write_tables(page: Path, sweeps: Sequence[Sweep]) -> None:
    """Puts the tables between their marks."""
    before, mark, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    if not mark:
        raise ValueError(f"{page} has no {BEGIN}")
    after = rest.partition(END)[2]
    body = "\n".join(tables(sweeps))
    page.write_text(f"{before}{BEGIN}\n{body}\n{END}{after}", encoding="utf-8")
