"""The optimum of small models on four devices, proven by exhaustive search with pruning.

FlexFlow (Jia, Zaharia and Aiken, MLSys 2019) proved its optimum for LeNet in 0.8 hours and for an
RNNLM of two steps in 18. Here every combination of the options of all units counts: a unit is a
layer, or what one module does in one step of a loop, and an option cuts it along sample, attribute
and parameter axes into 1, 2 or 4 parts, on any devices in any order, or on blocks of neighbours.

    python benchmarks/optimum.py --budget 600 --out optimum.md
    python benchmarks/optimum.py --best 312056 --cases 0   # only how soon this is found

Then how soon the method flexflow has a plan as fast as that: in seconds from its beginning on this
machine's cores, what it begins with included, compilation not. It may cut every operator otherwise,
on any devices, so it may find faster ones. And walks over the very options of the proof, from
everything on one device: in CPU seconds, without what it takes to make the walk ready.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

from proof.exhaustive import OptimalityProof, prove_optimum
from proof.picking import OptionWalk

from apportion import zoo
from apportion.capture.capture import capture
from apportion.columns import compile_at_once
from apportion.describe import ops
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.search.baselines.single import single
from apportion.search.problem import Problem
from apportion.search.walks import flexflow
from apportion.search.walks.metropolis import Chain
from apportion.search.walks.units import Unit, cell_units, layer_units
from apportion.split.space import Space

assert ops
DEVICES = 4


@dataclass(frozen=True)
class Case:
    """`largest` decides the units with the most operators first, else they come in order."""

    model: str
    machine: str
    unit: str
    anywhere: bool
    largest: bool

    def __str__(self) -> str:
        where = "any devices" if self.anywhere else "blocks of neighbours"
        return f"{self.model} on {self.machine}, {self.unit}s on {where}"


CASES = [
    Case(model, f"flexflow-{machine}:{DEVICES}", unit, anywhere, unit == "cell")
    for machine in ("p100", "k80")
    for model, unit, anywhere in (
        ("lenet", "layer", True),
        ("lenet", "layer", False),
        ("rnnlm:steps=2", "cell", False),
        ("rnnlm:steps=2", "cell", True),
    )
]


def problem_of(case: Case) -> tuple[Problem, list[Unit]]:
    """What is to be decided."""
    it = zoo.load(case.model, 0)
    graph = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm).graph
    place = cluster(case.machine)
    space = Space(graph)
    units = (layer_units if case.unit == "layer" else cell_units)(space, DEVICES, case.anywhere)
    return Problem(space, place, default_cost(place)), units


def proof_of(case: Case, budget: float) -> tuple[OptimalityProof, list[Unit]]:
    """The proof, or as far as it gets in a budget of processor seconds."""
    problem, units = problem_of(case)
    order = list(range(len(units)))
    if case.largest:
        order.sort(key=lambda k: -len(units[k].ops))
    return prove_optimum(problem, units, budget=budget, order=order), units


def walked(case: Case, best_ns: int, walks: int, seconds: float) -> str:
    """How soon walks find a step time, in processor seconds."""
    problem, units = problem_of(case)
    found = []
    for seed in range(-1, walks):  # the first one compiles
        walk = OptionWalk(problem, problem.space, single(problem).strategy, units)
        chain, began = Chain(walk, Random(seed)), time.process_time()
        while time.process_time() - began < (seconds if seed >= 0 else 0.5):
            if chain.step() and round(chain.best * 1e9) <= best_ns:
                break
        spent, least = time.process_time() - began, round(chain.best * 1e9)
        assert least >= best_ns or not best_ns, f"{least} is below the proven optimum"
        if seed >= 0:
            found.append((spent if least == best_ns else float("inf"), chain.proposals))
    times = sorted(spent for spent, _ in found)
    soon = [sum(t < limit for t in times) for limit in (1.0, seconds)]
    rate = sum(n for _, n in found) / max(sum(min(t, seconds) for t, _ in found), 1e-9)
    return (
        f"{case}: {soon[0]} of {walks} walks found it within 1 s, {soon[1]} within {seconds:g} s, "
        f"the median {statistics.median(times):.2f} s, {rate:.0f} proposals a second"
    )


def searched(case: Case, best_ns: int, trials: int, seconds: float) -> str:
    """How soon flexflow comes by a step time, and how much shorter steps it finds."""
    times, least = [], []
    for seed in range(-1, trials):  # the first one compiles
        problem, _ = problem_of(case)
        curve = flexflow(problem, budget=seconds, seed=seed).curve
        soon = [passed for passed, found in curve if round(found * 1e9) <= best_ns]
        if seed >= 0:
            times.append(soon[0] if soon else float("inf"))
            least.append(curve[-1][1])
    return (
        f"{case}: in {sum(t < 1 for t in times)} of {trials} searches within 1 s, in "
        f"{sum(t < seconds for t in times)} within {seconds:g} s, the median "
        f"{statistics.median(times):.2f} s; then down to {min(least) * 1e3:.6f} ms"
    )


HEAD = (
    "| model | cluster | units | devices | combinations | renamings | floors | simulated | CPU s "
    "| step | bound | proven |\n" + "|---" * 12 + "|"
)


def row(case: Case, proof: OptimalityProof, units: list[Unit]) -> str:
    """A line of the table."""
    where = "any" if case.anywhere else "blocks"
    return (
        f"| {case.model} | {case.machine} | {len(units)} {case.unit}s | {where} | "
        f"{proof.combinations:.2e} | {proof.symmetries} | {sum(proof.visited):,} | "
        f"{proof.simulated:,} | {proof.seconds:.0f} | {proof.step_ns / 1e6:.6f} ms | "
        f"{proof.bound_ns / 1e6:.6f} ms | {'yes' if proof.proven else 'no'} |"
    )


def options(proof: OptimalityProof, units: list[Unit]) -> str:
    """The best option of every unit, by its first operator."""
    chosen = (
        f"  {unit.name}: {unit.options[pick][0]}"
        for unit, pick in zip(units, proof.picks, strict=True)
    )
    return "\n".join(chosen)


def main() -> None:
    compile_at_once()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", default="", help="numbers from 0 on, such as 0,2; default: all")
    parser.add_argument("--budget", type=float, default=600.0, help="CPU seconds of each proof")
    parser.add_argument("--out", type=Path, help="a markdown file to write")
    parser.add_argument("--walks", type=int, default=20, help="and searches in each case")
    parser.add_argument("--walk-seconds", type=float, default=5.0, help="of each of these at most")
    parser.add_argument("--best", default="", help="optima in ns, known: only look for them")
    given = parser.parse_args()
    wanted = [int(k) for k in given.cases.split(",") if k] or list(range(len(CASES)))
    if not all(0 <= k < len(CASES) for k in wanted):
        parser.error(f"cases are 0 to {len(CASES) - 1}")
    rows = [HEAD]
    if given.best:
        for k, best in zip(wanted, given.best.split(","), strict=True):
            for way in (searched, walked):
                print(way(CASES[k], int(best), given.walks, given.walk_seconds), flush=True)
        return
    for case in (CASES[k] for k in wanted):
        proof, units = proof_of(case, given.budget)
        rows.append(row(case, proof, units))
        print(case, rows[-1], options(proof, units), sep="\n", flush=True)
        if proof.proven and given.walks:
            for way in (searched, walked):
                print(way(case, proof.step_ns, given.walks, given.walk_seconds), flush=True)
    print("\n".join(rows))
    if given.out is not None:
        given.out.write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
