"""How true predictions are: step time, peak memory and bytes moved, predicted against measured.

    python benchmarks/accuracy.py --out docs/accuracy.md            # all of it, some 15 minutes
    python benchmarks/accuracy.py --models mlp --procs 2 --loops 2  # a part, printed

Every model is divided in several ways over 1, 2 and 4 processes, one thread each, whose segments
run as generated code; `data/4` is data parallelism of four parts, all in one process. Calibration
and measurement take turns, so that both see the same machine: some rounds of a rehearsal, some
steps of real training, some messages, and again. One process is kept on one core. Results go to a
JSON file beside the page, and a plot.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

MODELS = {
    "mlp": "mlp:width=512,batch=128",
    "gpt2": "gpt2:layers=4,width=256,heads=4,vocab=1000,seq=64,batch=8",
    "bert": "bert:layers=2,width=256,heads=4,vocab=1000,seq=64,masked=10,batch=8",
    "rnn": "rnn:layers=2,hidden=256,steps=6,vocab=1000,batch=32",
    "wresnet": "wresnet:depth=14,width=1,base=16,image=48,classes=100,batch=8",
    "alexnet": "alexnet:base=16,hidden=256,image=95,classes=100,batch=16",
}
STRATEGIES = {
    1: ("single", "data/2", "data/4", "random:1"),
    2: ("data", "fsdp", "tofu", "random:1"),
    4: ("data", "fsdp", "tofu"),
}
STEPS, WARM, ROUNDS, LOOPS = 10, 4, 6, 4  # of a turn's steps the first few are not counted
QUANTILE = 0.25
MEAN_ERROR, RANKS = 0.15, 0.9  # what must hold


@dataclass(frozen=True)
class Case:
    """One model divided in one way over some processes. `fitted` is the prediction without this
    strategy's own measurements, `shares` where the seconds of that one come from; `used` is what
    the slowest rank used of its core."""

    model: str
    processes: int
    strategy: str
    predicted: float
    fitted: float
    measured: float
    used: float
    spread: float
    shares: dict[str, float]
    predicted_peak: list[int]
    measured_peak: list[int]
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """Of the step time, relative."""
        return self.predicted / self.measured - 1

    @property
    def fitted_error(self) -> float:
        """The same without this strategy's own measurements."""
        return self.fitted / self.measured - 1


# Measuring: in a process of its own, because cores are chosen before the first pool starts


def measured(name: str, processes: int, loops: int) -> list[Case]:
    """All strategies of one model on so many processes."""
    import apportion.describe.ops  # noqa: F401 (registers the descriptions)
    from apportion import zoo
    from apportion.capture.capture import capture
    from apportion.machine.cluster import cluster
    from apportion.machine.cost_model import ASSUMED
    from apportion.run.calibrate import lower_strategy
    from apportion.run.pool import ProcessPool
    from apportion.run.step_source import StepSource
    from apportion.search import METHODS, Problem
    from apportion.split.space import Space

    spec = MODELS[name]
    it = zoo.load(spec, 0)
    program = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)
    place, space = cluster(f"local:{processes}"), Space(program.graph)
    found = {}
    for label in STRATEGIES[processes]:
        plain, _, fold = label.partition("/")
        method, _, seed = plain.partition(":")
        problem = Problem(space, cluster(f"local:{fold}") if fold else place, ASSUMED)
        strategy = METHODS[method](problem, budget=10.0, seed=int(seed or 0)).strategy
        strategy = folded(strategy) if fold else strategy
        found[label] = lower_strategy(program.graph, strategy, processes)
    with ProcessPool(processes) as pool:
        return _cases(name, processes, pool, StepSource(program.graph, spec), place, found, loops)


def folded(strategy: Any) -> Any:
    """The strategy with all its parts on one device; each replica is there once."""
    choices = tuple(replace(c, devices=(0,) * c.count) for c in strategy.choices)
    layouts = {v: replace(x, devices=(0,) * prod(x.parts)) for v, x in strategy.layouts.items()}
    return replace(strategy, choices=choices, layouts=layouts)


def _cases(
    name: str,
    processes: int,
    pool: Any,
    source: Any,
    place: Any,
    found: dict[str, Any],
    loops: int,
) -> list[Case]:
    """Takes turns, loop after loop; then predicts."""
    from apportion.machine.cost_table import CostTable
    from apportion.run.calibrate import exchange_times, rehearsal_request
    from apportion.run.cost_cache import condition_of, measured_cost
    from apportion.run.measured_table import with_exchanges, with_rehearsal
    from apportion.run.training import step_seconds
    from apportion.simulate.durations import shares
    from apportion.simulate.simulate import simulate

    rounds: dict[str, list[Any]] = {label: [] for label in found}
    steps: dict[str, list[float]] = {label: [] for label in found}
    used: dict[str, list[float]] = {label: [] for label in found}
    last: dict[str, Any] = {}
    spoken = []
    for loop in range(loops):
        if processes > 1:
            spoken.append(exchange_times(pool, processes, 3, 3.0))
        for label, one in found.items():
            rounds[label].append(pool.ask(rehearsal_request(source, one, ROUNDS, 10.0)))
            job = _train(source, one, processes, profile=loop == 0)
            ranks = pool.train(job)
            last.setdefault(label, ranks)
            steps[label] += step_seconds(ranks)[WARM:]
            used[label] += [max(r.cpu_seconds[k] for r in ranks) for k in range(WARM, STEPS)]
    empty = with_exchanges(CostTable(condition_of(place)), processes, spoken)
    cases = []
    for label, one in found.items():
        own = with_rehearsal(empty, one.tasks, _joined(rounds[label]))
        rest = empty
        for other, two in found.items():
            if other != label:
                rest = with_rehearsal(rest, two.tasks, _joined(rounds[other]))
        line = simulate(one.tasks, place, measured_cost(own))
        blind = simulate(one.tasks, place, measured_cost(rest))
        low, high = np.quantile(steps[label], [QUANTILE, 0.75])
        ranks = last[label]
        cases.append(
            Case(
                name,
                processes,
                label,
                line.step_seconds,
                blind.step_seconds,
                float(low),
                float(np.quantile(used[label], QUANTILE)),
                float(high / low - 1),
                shares(one.tasks, place, measured_cost(rest)),
                list(line.peak_bytes),
                [r.peak_bytes for r in ranks],
                line.bytes_moved,
                sum(r.sent_bytes for r in ranks) // STEPS,
            )
        )
    return cases


def _train(source: Any, one: Any, processes: int, profile: bool) -> Any:
    from apportion.run.training import TrainingRequest

    return TrainingRequest(source, one.strategy, processes, STEPS, 0, profile=profile)


def _joined(loops: list[list[Any]]) -> list[Any]:
    """The rounds of all loops as those of one, rank by rank."""
    joined = []
    for answers in zip(*loops, strict=True):
        joined.append(
            replace(
                answers[0],
                seconds=np.concatenate([a.seconds for a in answers]),
                ends=[e for a in answers for e in a.ends],
                packed=[p for a in answers for p in a.packed],
                rounds=[
                    (1000 * turn + number, *rest)
                    for turn, a in enumerate(answers)
                    for number, *rest in a.rounds
                ],
                reference=[r for a in answers for r in a.reference],
            )
        )
    return joined


def in_own_process(name: str, processes: int, loops: int) -> list[Case]:
    """`measured`, on as many cores as there are processes, or all."""
    cores = sorted(os.sched_getaffinity(0))
    chosen = ",".join(map(str, cores[-processes:]))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "cases.json")
        command = [sys.executable, __file__, "--one", name, "--procs", str(processes)]
        command += ["--loops", str(loops), "--cores", chosen, "--json", str(out)]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        return [Case(**row) for row in json.loads(out.read_text())]


# What it comes to


def rank_correlation(cases: Sequence[Case]) -> float:
    """Spearman's, of predicted and measured step times."""
    from scipy.stats import spearmanr

    found = spearmanr([c.predicted for c in cases], [c.measured for c in cases])
    return float(found.statistic)


def concordant(cases: Sequence[Case]) -> tuple[int, int]:
    """Pairs of strategies in the right order, and all pairs; those whose measured times differ by
    less than their own spread are not counted."""
    right = total = 0
    for k, a in enumerate(cases):
        for b in cases[k + 1 :]:
            low, high = sorted((a, b), key=lambda c: c.measured)
            if high.measured / low.measured - 1 > max(a.spread, b.spread, 0.03):
                total += 1
                right += low.predicted < high.predicted
    return right, total


def grouped(cases: Iterable[Case]) -> dict[tuple[str, int], list[Case]]:
    """Cases by model and number of processes."""
    groups: dict[tuple[str, int], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.model, case.processes), []).append(case)
    return groups


def page(cases: Sequence[Case], machine: str) -> str:
    """The results in Markdown."""
    peaks = [
        p / m - 1 for c in cases for p, m in zip(c.predicted_peak, c.measured_peak, strict=True)
    ]
    exact = all(c.predicted_bytes == c.measured_bytes for c in cases)
    lines = [
        "# Accuracy of predictions on CPU processes",
        "",
        f"Measured on {time.strftime('%Y-%m-%d')}: {machine}; processes with one thread each,",
        "their segments as generated code. Made by `python benchmarks/accuracy.py --out",
        "docs/accuracy.md`. 1 and 2 processes have a core each, 4 share two cores.",
        "",
        *(
            f"- Step time, {count} process{'es' * (count > 1)}, rehearsed: mean absolute error "
            f"{_mean(cases, count, 'error')}; unrehearsed: {_mean(cases, count, 'fitted_error')}."
            for count in sorted({c.processes for c in cases})
        ),
        "- *Rehearsed*: this very strategy was run for the calibration, in turns with the",
        "  measurement, and the cost of messages was fitted to its rounds: it says that the",
        "  simulation puts measured pieces together rightly, not how well a step is foreseen that",
        "  never ran. *Unrehearsed* says that: only the model's other strategies were run.",
        f"- Peak memory of tensors, by the allocator's events: {min(peaks):+.2%} to "
        f"{max(peaks):+.2%}.",
        f"- Bytes moved: {'exact in all cases' if exact else 'NOT exact in some cases'}.",
        "",
        f"*measured* is the lower quartile over the steps of all turns but the first {WARM} of",
        "each, while memory and threads are still new; from when the last rank begins a step to",
        "when the last is done;",
        "*spread* is how far the upper quartile is above it. *predicted* is the simulated step.",
        "*unrehearsed* is the prediction without this strategy's own measurements.",
        "",
        "![predicted against measured](accuracy.svg)",
        "",
        "| model | processes | strategy | predicted ms | measured ms | error | spread | "
        "unrehearsed | error | measured / fitted |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for c in cases:
        part = f"{c.shares['measured']:.0%} / {c.shares['fitted'] + c.shares['estimated']:.0%}"
        lines.append(
            f"| {c.model} | {c.processes} | {c.strategy} | {c.predicted * 1e3:.1f} | "
            f"{c.measured * 1e3:.1f} | {c.error:+.1%} | {c.spread:.0%} | {c.fitted * 1e3:.1f} | "
            f"{c.fitted_error:+.1%} | {part} |"
        )
    return "\n".join([*lines, "", *_ranking(cases), ""])


def _mean(cases: Sequence[Case], processes: int, name: str) -> str:
    found = [abs(getattr(c, name)) for c in cases if c.processes == processes]
    return f"{np.mean(found):.1%}, largest {max(found):.1%} ({len(found)} cases)"


def _ranking(cases: Sequence[Case]) -> list[str]:
    lines = [
        "## Order of strategies within a model",
        "",
        "Spearman's rank correlation of predicted and measured step times, all strategies of a",
        "model; beside it the pairs in the right order among those whose measured times differ by",
        "more than 3% and more than their own spread: where two strategies take the same time,",
        "their order is chance and not a matter of prediction.",
        "",
        "| model | processes | Spearman | pairs in order |",
        "|---|---|---|---|",
    ]
    for (model, processes), group in grouped(cases).items():
        right, total = concordant(group)
        lines.append(
            f"| {model} | {processes} | {rank_correlation(group):.2f} | {right} of {total} |"
        )
    return lines


def plot(cases: Sequence[Case]) -> str:
    """Predicted against measured step times as SVG, both axes logarithmic."""
    size, edge = 480, 50
    times = [t for c in cases for t in (c.predicted, c.measured)]
    low, high = np.log10(min(times)) - 0.1, np.log10(max(times)) + 0.1

    def at(seconds: float) -> float:
        return float((np.log10(seconds) - low) / (high - low) * (size - 2 * edge))

    colours = {1: "#4477aa", 2: "#ee6677", 4: "#999999"}
    body = [
        f'<line x1="{edge}" y1="{size - edge}" x2="{size - edge}" y2="{edge}" stroke="#888"/>',
        f'<text x="{size / 2}" y="{size - 12}" text-anchor="middle">measured step</text>',
        f'<text x="14" y="{size / 2}" text-anchor="middle" transform="rotate(-90 14 {size / 2})">'
        "predicted step</text>",
    ]
    for seconds in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0):
        if low <= np.log10(seconds) <= high:
            x, y, text = edge + at(seconds), size - edge - at(seconds), f"{seconds * 1e3:g} ms"
            body.append(f'<line x1="{x}" y1="{edge}" x2="{x}" y2="{size - edge}" stroke="#ddd"/>')
            body.append(f'<line x1="{edge}" y1="{y}" x2="{size - edge}" y2="{y}" stroke="#ddd"/>')
            body.append(f'<text x="{x}" y="{size - edge + 14}" text-anchor="middle">{text}</text>')
            body.append(f'<text x="{edge - 4}" y="{y + 3}" text-anchor="end">{text}</text>')
    for c in cases:
        x, y = edge + at(c.measured), size - edge - at(c.predicted)
        title = f"{c.model}, {c.processes} processes, {c.strategy}: {c.error:+.1%}"
        body.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colours[c.processes]}" '
            f'fill-opacity="0.7"><title>{title}</title></circle>'
        )
    for k, (count, colour) in enumerate(colours.items()):
        y = edge + 14 * k
        body.append(f'<circle cx="{edge + 10}" cy="{y - 3}" r="4" fill="{colour}"/>')
        body.append(f'<text x="{edge + 20}" y="{y}">{count} process{"es" * (count > 1)}</text>')
    inside = "\n".join(body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" font-size="10" '
        f'font-family="sans-serif"><rect width="{size}" height="{size}" fill="white"/>\n'
        f"{inside}\n</svg>\n"
    )


def main() -> None:
    """Measures, prints a line per case, writes what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--procs", default="1,2,4")
    parser.add_argument("--loops", type=int, default=LOOPS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cases", type=Path, nargs="*", help="JSON files to make the page from")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--cores", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        os.sched_setaffinity(0, {int(core) for core in given.cores.split(",")})
        found = measured(given.one, int(given.procs), given.loops)
        given.json.write_text(json.dumps([asdict(case) for case in found]))
        return
    cases = [Case(**row) for file in given.cases or () for row in json.loads(file.read_text())]
    for name in given.models.split(",") if not given.cases else ():
        for processes in map(int, given.procs.split(",")):
            for case in in_own_process(name, processes, given.loops):
                cases.append(case)
                print(
                    f"{case.model:8} {case.processes} {case.strategy:9} predicted "
                    f"{case.predicted * 1e3:7.1f} ms, measured {case.measured * 1e3:7.1f} ms "
                    f"({case.error:+.1%}, spread {case.spread:.0%}, on the processor "
                    f"{case.used * 1e3:.1f} ms), unrehearsed "
                    f"{case.fitted_error:+.1%}",
                    flush=True,
                )
    few = [abs(case.error) for case in cases if case.processes < 4]
    if few:
        print(f"mean absolute error on 1 and 2 processes {np.mean(few):.1%} ({len(few)} cases)")
    if given.json:
        given.json.write_text(json.dumps([asdict(case) for case in cases], indent=1))
    if given.out:
        from apportion.run.cost_cache import machine_name

        given.out.write_text(page(cases, machine_name()))
        given.out.with_suffix(".svg").write_text(plot(cases))


if __name__ == "__main__":
    main()
