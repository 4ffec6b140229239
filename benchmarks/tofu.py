"""Tofu's evaluation (EuroSys 2019), rebuilt in simulation on its machine: p2.8xlarge, 8 K80.

    python benchmarks/tofu.py --out docs/tofu.md      everything: 12 minutes of one core
    python benchmarks/tofu.py --quick                 the smallest and the largest of each family
    python benchmarks/tofu.py --only throughput --models rnn-6-4,wresnet-152-10

Throughput: samples a second of all 8 devices, with the largest batch (a power of two) that fits.

    Ideal         one device without a limit of memory, at a batch that saturates it, times 8
    SmallBatch    one device, the largest batch that fits, times 8
    Swap          one device that swaps (swap.py) at an eighth of the batch, times 8; the devices
                  share the link to the host
    Op-Placement  layers to devices in turn
    Tofu          every operator on all devices

Algorithms: seconds a batch, and the share of it by which communication makes the step longer:
1 - (the step with messages and assemblies that take no time) / (the step).

Bytes: what one step moves, lowered and counted alike for every method, without a limit of memory.

Memory is what the simulator predicts, state included: a weight, its gradient and one history
(momentum), as in the paper.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from swap import swap

from apportion import zoo
from apportion.capture.capture import capture
from apportion.files import write_atomic
from apportion.graph import Graph
from apportion.lower.task_kinds import (
    COMPUTE,
)
from apportion.machine.cluster import (
    cluster,
)
from apportion.machine.topology import (
    Cluster,
)
from apportion.plan.auto import choose
from apportion.plan.candidates import Candidate, DefaultCosts, PlanRequest, state_bytes
from apportion.search import METHODS, UnsuitableMethod
from apportion.simulate.durations import nanoseconds
from apportion.simulate.network import network
from apportion.simulate.routes import no_hops
from apportion.simulate.schedule import schedule_compiled
from apportion.split.space import Space

MACHINE = "p2.8xlarge"
BUDGET = 60.0
OOM = "OOM"
SECTIONS = ("throughput", "algorithms", "bytes")
COMPARED = ("data", "fsdp", "allrow-greedy", "spartan", "equalchop", "icml18", "tofu-paper", "tofu")


@dataclass(frozen=True, order=True)
class Model:
    """One of the paper's models; `size` is the widening of a WResNet or the thousands of hidden
    units of an RNN."""

    family: str
    depth: int
    size: int

    def __str__(self) -> str:
        return f"{self.family}-{self.depth}-{self.size}"

    def spec(self, batch: int) -> str:
        if self.family == "rnn":
            return f"rnn:layers={self.depth},hidden={1024 * self.size},batch={batch}"
        return f"wresnet:depth={self.depth},width={self.size},batch={batch}"

    @property
    def saturating(self) -> int:
        """The largest batch that the paper trains with on 8 devices."""
        return 512 if self.family == "rnn" else 128


WRESNETS = [Model("wresnet", depth, size) for depth in (50, 101, 152) for size in (4, 6, 8, 10)]
RNNS = [Model("rnn", depth, size) for depth in (6, 8, 10) for size in (4, 6, 8)]
QUICK = (WRESNETS[0], WRESNETS[-1], RNNS[0], RNNS[-1])

Figure = float | str
Column = tuple[Figure, ...]


def _figures(models: Sequence[Model], text: str) -> dict[Model, Column]:
    rows = [line.split() for line in text.strip().splitlines()]
    return {
        model: tuple(OOM if cell == OOM else float(cell) for cell in row)
        for model, row in zip(models, rows, strict=True)
    }


# The figures printed on the bars: Ideal, SmallBatch, Swap, Tofu; RNNs also Op-Placement.
PAPER = _figures(
    WRESNETS,
    """
    47 46 28 41
    18 16 12 17
    10 OOM 5.9 9.3
    6.4 OOM 4.0 6.0
    27 23 11 20
    9.4 OOM 5.4 8.7
    5.3 OOM 3.2 4.8
    3.3 OOM 2.1 3.1
    19 OOM 7.7 11
    6.5 OOM 3.4 5.4
    3.6 OOM 2.2 2.7
    2.3 OOM 1.6 1.9
    """,
) | _figures(
    RNNS,
    """
    233 130 183 107 210
    108 OOM 32 44 102
    58 OOM 13 24 57
    172 OOM 120 95 154
    78 OOM 18 40 75
    45 OOM 9.3 22 41
    136 OOM 58 59 122
    60 OOM 13 21 55
    33 OOM 7.2 OOM 23
    """,
)

# Seconds without communication, then per algorithm the share of communication; None: out of memory.
SHARES: dict[tuple[Model, int], tuple[float, dict[str, float | None]]] = {
    (Model("rnn", 4, 8), 512): (
        5.15,
        {"allrow-greedy": 0.245, "spartan": 0.211, "equalchop": 0.138, "icml18": 0.132,
         "tofu": 0.064},
    ),
    (Model("wresnet", 152, 10), 8): (
        3.3,
        {"allrow-greedy": None, "spartan": 0.338, "equalchop": 0.352, "icml18": None,
         "tofu": 0.219},
    ),
}  # fmt: skip


@lru_cache(maxsize=6)
def captured(spec: str) -> Graph:
    """A model's step, without data; its optimizer keeps one history of each weight."""
    it = zoo.load(spec, meta=True)
    optimizer = torch.optim.SGD(it.model.parameters(), lr=0.02, momentum=0.9)
    return capture(it.step, it.model, optimizer, it.batch).graph


def planned(
    model: Model, batch: int, machine: Cluster, method: str, *, limited: bool = False
) -> Candidate:
    """What a method finds, simulated; `limited`: it is to stay within the devices' memory."""
    space = Space(captured(model.spec(batch)))
    limit = tuple(device.memory_bytes for device in machine.devices) if limited else None
    return choose(PlanRequest(space, machine, DefaultCosts(machine), limit), method, BUDGET).best


def seconds(made: Candidate) -> float:
    return made.timeline.step_seconds


def fits(made: Candidate, machine: Cluster) -> bool:
    peaks = made.timeline.peak_bytes
    return all(p <= d.memory_bytes for p, d in zip(peaks, machine.devices, strict=True))


@dataclass(frozen=True)
class Rate:
    """Samples a second of all devices, and the batch of one step on them; None: out of memory."""

    samples: float | None
    batch: int = 0

    @property
    def figure(self) -> Figure:
        return OOM if self.samples is None else self.samples


def largest(model: Model, machine: Cluster, method: str, first: int) -> Rate:
    """The rate at the largest batch that fits: a power of two, `first` at most."""
    batch = first
    while batch:
        made = planned(model, batch, machine, method, limited=True)
        if fits(made, machine):
            return Rate(batch / seconds(made), batch)
        if state_bytes(made.space.graph) > sum(d.memory_bytes for d in machine.devices):
            break
        batch //= 2
    return Rate(None)


def swapping(model: Model, whole: Cluster, one: Cluster) -> Rate:
    """Every device trains its share of the batch alone; all swap through one link."""
    (link,) = whole.host_routes[0]
    sharing = sum(link in route for route in whole.host_routes)
    batch = model.saturating // len(whole.devices)
    while batch:
        made = planned(model, batch, one, "single")
        times = nanoseconds(made.tasks, one, made.cost)
        bandwidth = whole.links[link].bandwidth / sharing
        done = swap(made.tasks, times, one.devices[0].memory_bytes, bandwidth)
        if done is not None:
            return Rate(sharing * batch / done.step_seconds, sharing * batch)
        batch //= 2
    return Rate(None)


def rates(model: Model) -> list[Rate]:
    """Ours, in the order of PAPER."""
    whole, one = cluster(MACHINE), cluster(f"{MACHINE}:1")
    count = len(whole.devices)
    ideal = seconds(planned(model, model.saturating, one, "single"))
    small = largest(model, one, "single", model.saturating // count)
    found = [
        Rate(count * model.saturating / ideal, count * model.saturating),
        replace(small, samples=small.samples and count * small.samples, batch=count * small.batch),
        swapping(model, whole, one),
    ]
    if model.family == "rnn":
        found.append(largest(model, whole, "op-placement", model.saturating))
    return [*found, largest(model, whole, "tofu", model.saturating)]


# Algorithms


@dataclass(frozen=True)
class Share:
    """A step of one algorithm: seconds with and without communication, whether it fits."""

    seconds: float
    compute: float
    fits: bool

    @property
    def communication(self) -> float:
        return 1 - self.compute / self.seconds


def shared(model: Model, batch: int, method: str) -> Share:
    machine = cluster(MACHINE)
    made = planned(model, batch, machine, method)
    return Share(seconds(made), computing(made, machine), fits(made, machine))


def computing(made: Candidate, machine: Cluster) -> float:
    """The step in seconds, were messages and assemblies to take no time."""
    tasks = made.tasks
    net, quiet = network(tasks, machine, made.cost), no_hops(len(tasks))
    silent = net._replace(
        duration=np.where(tasks.kind == COMPUTE, net.duration, 0),
        latency=quiet.latency,
        hop_start=quiet.start,
        hop_link=quiet.link,
        hop_occupancy=quiet.occupancy,
    )
    return float(schedule_compiled(silent)[1].max(initial=0)) / 1e9


# Tables


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def number(figure: Figure) -> str:
    return figure if isinstance(figure, str) else f"{figure:.3g}"


def beside(ours: Figure, paper: Figure) -> str:
    """Both, and ours as a multiple of the paper's."""
    if isinstance(ours, str) or isinstance(paper, str):
        return f"{number(ours)} / {number(paper)}"
    return f"{number(ours)} / {number(paper)} ({ours / paper:.2f})"


def throughput(models: Sequence[Model], note: Callable[[str], None]) -> Iterator[str]:
    yield "## Throughput\n"
    yield "Samples a second, ours / the paper's (and the ratio).\n"
    for family in ("wresnet", "rnn"):
        placed = ["Op-Placement"] if family == "rnn" else []
        head = ["model", "Ideal", "SmallBatch", "Swap", *placed, "Tofu", "Tofu's batch",
                "Tofu / Ideal"]  # fmt: skip
        rows = []
        for model in models:
            if model.family == family:
                ours, paper = rates(model), PAPER[model]
                cells = [beside(r.figure, p) for r, p in zip(ours, paper, strict=True)]
                tofu = ours[-1].samples or 0.0
                against = beside(tofu / (ours[0].samples or 1.0), _over(paper[-1], paper[0]))
                rows.append([str(model), *cells, str(ours[-1].batch), against])
                note(f"{model}: {', '.join(cells)}, batches {[r.batch for r in ours]}")
        if rows:
            yield table(head, rows)


def _over(a: Figure, b: Figure) -> Figure:
    return OOM if isinstance(a, str) or isinstance(b, str) else a / b


def algorithms(models: Sequence[Model], note: Callable[[str], None]) -> Iterator[str]:
    yield "## Partition algorithms\n"
    yield (
        "Seconds a batch, and the share of communication, ours / the paper's. The last column is\n"
        "the share that our seconds of communication would be beside the paper's of computing.\n"
    )
    for (model, batch), (compute, shares) in SHARES.items():
        if str(model) not in map(str, models) and models is not ALL:
            continue
        rows = []
        for method in _known(("fsdp", *shares, "tofu-paper")):
            try:
                ours = shared(model, batch, method)
            except UnsuitableMethod as why:
                note(f"{model} {method}: {why}")
                continue
            share = shares.get(method)
            paper: Figure = "-" if method not in shares else OOM
            if share is not None:
                paper = compute / (1 - share)
            exposed = ours.seconds - ours.compute
            fit = "" if ours.fits else f" ({OOM})"
            rows.append([
                method,
                beside(ours.seconds, paper) + fit,
                beside(ours.communication, paper if share is None else share),
                f"{exposed / (exposed + compute):.3f}",
            ])  # fmt: skip
            note(f"{model}, batch {batch}: {' | '.join(rows[-1])}, computing {ours.compute:.3g} s")
        yield f"{model}, batch {batch}; computing alone the paper takes {compute} s.\n"
        yield table(["method", "seconds", "share of communication", "beside its computing"], rows)


def bytes_moved(models: Sequence[Model], note: Callable[[str], None]) -> Iterator[str]:
    yield "## Bytes\n"
    yield "GB that one step moves.\n"
    methods = _known(COMPARED)
    rows = []
    for model in models:
        batch = _batch(model)
        cells = []
        for method in methods:
            try:
                made = planned(model, batch, cluster(MACHINE), method)
                cells.append(f"{made.timeline.bytes_moved / 1e9:.4g}")
            except UnsuitableMethod as why:
                cells.append("-")
                note(f"{model} {method}: {why}")
        rows.append([str(model), str(batch), *cells])
        note(
            f"{model}, batch {batch}: " + ", ".join(map(" ".join, zip(methods, cells, strict=True)))
        )
    yield table(["model", "batch", *methods], rows)


def _batch(model: Model) -> int:
    """The batches that the paper names, and between them the one that most models had."""
    named = {WRESNETS[0]: 128, WRESNETS[-1]: 8, RNNS[-1]: 128}
    return named.get(model, 512 if model.family == "rnn" else 32)


def _known(methods: Iterable[str]) -> list[str]:
    return [method for method in methods if method in METHODS]


ALL = (*WRESNETS, *RNNS)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help=f"sections, separated by commas: {', '.join(SECTIONS)}")
    parser.add_argument("--models", help="such as rnn-6-4,wresnet-152-10")
    parser.add_argument("--quick", action="store_true", help="two models of each family")
    parser.add_argument("--out", type=Path, help="a markdown file to write")
    given = parser.parse_args()
    sections = given.only.split(",") if given.only else SECTIONS
    named: dict[str, Model] = {str(m): m for m in (*ALL, *(m for m, _ in SHARES))}
    asked = given.models.split(",") if given.models else []
    for word, known in ((sections, SECTIONS), (asked, named)):
        for item in word:
            if item not in known:
                parser.error(f"{item!r} is none of {', '.join(known)}")
    models: Sequence[Model] = [named[name] for name in asked] or (QUICK if given.quick else ALL)
    text = "\n".join(_page(sections, models, _noter()))
    print(text) if given.out is None else write_atomic(given.out, text)


def _page(
    sections: Sequence[str], models: Sequence[Model], note: Callable[[str], None]
) -> Iterator[str]:
    yield HEAD
    for name, tables in (
        ("throughput", throughput), ("algorithms", algorithms), ("bytes", bytes_moved)
    ):  # fmt: skip
        if name in sections:
            yield from tables(
                [m for m in models if m in PAPER] if name != "algorithms" else models, note
            )
            yield EXPLAINED[name]


def _noter() -> Callable[[str], None]:
    def note(text: str) -> None:
        print(f"{time.process_time():6.0f} s  {text}", file=sys.stderr, flush=True)

    return note


HEAD = """# Tofu's evaluation, rebuilt

Tofu (Wang, Huang and Li, EuroSys 2019) was measured on a p2.8xlarge with 8 K80. Here its tables
are rebuilt in simulation on a description of that machine, with costs estimated from published
rates: nothing was run on a K80. `python benchmarks/tofu.py --out docs/tofu.md` writes this page in
12 minutes of one core; the head of that file defines every column. The last number of a model's
name is how many times a WResNet is widened, or how many thousand hidden units an RNN has.
"""

EXPLAINED = {
    "throughput": """Where we differ, and why:

- **Ideal is 1.2 to 2.0 times the paper's on WResNets, 1.0 to 1.13 on RNNs.** The paper's figures
  mean that a K80 sustained about 2 TFLOP/s on convolutions and 2.9 on large products; our costs,
  estimated from published rates, let large kernels come near the published 4.37. All columns but
  Swap share it, so the last column, Tofu as a share of Ideal, is the fair one: 0.78 to 0.95 here,
  0.58 to 0.98 there.
- **Tofu / Ideal varies less.** The paper's range comes from batches that had to shrink (8 for
  WResNet-152-10, at most 32 for WResNet-152-4, 128 for RNN-10-8). Ours shrink later: 64 and 512 fit
  for the last two; the simulated allocator loses nothing to fragmentation.
- **What does not fit** agrees in 50 of 51 cells of SmallBatch, Op-Placement and Tofu: only
  WResNet-152-4 fits one device here, with 2 samples.
- **Swap is at 0.45 to 1.2 of the paper's** except WResNet-50-4 and 101-4 (2.1 and 2.0), which fit,
  or nearly, at 16 samples a device and hardly swap. For the others the link decides, and computing
  is hidden behind it: 8 devices get 1.25 GB/s each for both directions together.
- **Op-Placement is at 0.74 to 1.26 of the paper's.** 10 layers do not fit at 8K in either.
""",
    "algorithms": """Where we differ, and why:

- **The order** on WResNet-152-10 is the paper's: Tofu, then EqualChop and Spartan close together,
  then the others. On RNN-4-8 EqualChop is 1% faster than Tofu, which moves fewer bytes, as it
  should, but in more and smaller transfers; and ICML18, third there, is last here.
- **ICML18** has no reductions, and the parts that it is left with take longer by the estimated
  costs: computing alone takes 6.9 s instead of 5.7 on the RNN. On the WResNet it does not fit in
  either. AllRow-Greedy fits here and did not there.
- **Shares on the RNN** are 0.3 to 0.7 of the paper's; Spartan and EqualChop move only 1.5 and 1.1
  times Tofu's bytes here, where a fetched tensor moves once, however many operators read it.
- **Shares on WResNet-152-10 are about half of the paper's**, and less beside its slower computing.
  Its 0.93 s of communication for Tofu mean 4.4 GB/s for each device, if it moved the 32 GB of
  `tofu-paper`; the 0.35 s on the RNN mean 16 GB/s. Ours has the printed 21 GB/s for each device
  at the same time. What slows many small fetches on a real PCIe tree is not in the description.
- `fsdp` is not in the paper. It is what data parallelism with sharded state would do.
""",
    "bytes": """Tofu moves the fewest bytes in all 21 rows. `tofu-paper` minimises what the paper
counts, a fetch for every reader, and stores every tensor cut; counted as the others are, it moves
up to 1.7 times as much, and on eight of nine RNNs more than EqualChop.
""",
}


if __name__ == "__main__":
    main()
