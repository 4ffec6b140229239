"""TensorFlowMem's experiments by simulation of its machine, with the published figures beside.

    python benchmarks/tensorflowmem.py length            unrolled DeepSpeech, longer and longer
    python benchmarks/tensorflowmem.py depth --batch 16  the deepest ResNet
    python benchmarks/tensorflowmem.py experts           experts of a Transformer
    python benchmarks/tensorflowmem.py ablation          five models, pass by pass
    ... --write PAGE                                     puts the table into a page
    python benchmarks/tensorflowmem.py plans FOLDER      plans of the same for a real H200, by
                       [--costs TABLE]                   what `apportion calibrate` measured there

Nothing is trained: steps are captured without data, lowered, and simulated on one TITAN X with 64
GB of host memory (machine/presets/titanx.toml) and prices from its specification. 11 GB of its 12
are given to a step, where the bars of stock TensorFlow end in the published chart. The columns are

    levels         breadth first, as TensorFlow's executor runs a step (memory/level_order.py)
    as captured    the order in which eager PyTorch runs it
    tensorflowmem  the reconstruction in memory/tensorflowmem.py: the fastest of three sizes of
                   chunks and of one, two or three passes that fits
    ours           --memory-limit: recomputation, offloading and state on the host together

Largest sizes are found by a straight line through two sizes and then looked at; the one that is
told fits, by simulation.

`plans` makes the published sizes and the passes of the five models for an H200 of which a step may
use as much, and a file `jobs` with what memory_depth.py is to run of them.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from apportion.capture.capture import capture
from apportion.columns import compile_at_once
from apportion.machine.cluster import cluster
from apportion.machine.cost_table import CostFile, load_cost_file
from apportion.machine.host_links import host_link
from apportion.machine.topology import Cluster
from apportion.memory.level_order import level_order
from apportion.memory.low_order import low_order
from apportion.memory.order_model import OrderModel, order_model
from apportion.memory.planned_graph import MemoryPlan
from apportion.memory.step_model import StepModel, step_model
from apportion.memory.tensorflowmem import partition, tensorflowmem
from apportion.memory.time_offloads import HostWay
from apportion.plan.auto import choose
from apportion.plan.candidate import Candidate
from apportion.plan.candidates import DefaultCosts, PlanRequest, excess
from apportion.plan.make_plan import made_plan, make_plan
from apportion.plan.plan import Plan
from apportion.plan.planned_memory import with_memory
from apportion.split.space import Space
from apportion.zoo import load

LIMIT = 11_000_000_000
CHUNKS = (16, 64, 256)  # of the limit, what a chunk makes
PASSES = ((False, False), (True, False), (True, True))  # it offloads, it places on the host
WHERE = cluster("1xtitanx")

LENGTHS = {100: (1.15, 1.56), 200: (2.31, 3.03), 400: (4.65, 6.03), 500: (None, None),
           800: (None, 12.01)}  # fmt: skip
"""Seconds of TensorFlow and TensorFlowMem; None: out of memory, or not told."""
DEPTHS = {16: (504, 1916), 32: (235, 1001)}
MODELS = {
    "ResNet-152": "resnet152:batch={size}",
    "Transformer": "gpt2:layers=12,width=1024,heads=16,vocab=32000,seq=256,batch={size}",
    "TransformerMoE": "transformer-moe:batch={size}",
    "WGAN-GP": "wgan-gp:batch={size}",
    "DeepSpeech": "deepspeech:frames=200,batch={size}",
}


@dataclass(frozen=True)
class Outcome:
    """What a step holds and takes; `over`: bytes over the device's limit or the host's memory."""

    peak: int
    seconds: float
    over: int
    how: str = ""

    @property
    def fits(self) -> bool:
        return self.over <= 0

    @property
    def rank(self) -> tuple[bool, float]:
        return not self.fits, self.seconds if self.fits else float(self.over)


class Step:
    """A captured step on the machine."""

    def __init__(
        self, spec: str, where: Cluster = WHERE, limit: int = LIMIT, own: Sequence[CostFile] = ()
    ) -> None:
        it = load(spec, meta=True)
        made = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)
        self.graph, self.spec, self.where, self.limit = made.graph, spec, where, limit
        self.parameters = sum(p.numel() for p in it.model.parameters())
        self.costs = DefaultCosts(where, own=tuple(own))
        self.request = PlanRequest(Space(self.graph), where, self.costs, (limit,))
        self.start = choose(self.request, "single", 1.0).best
        self.way = HostWay(host_link(where, 0))

    @cached_property
    def model(self) -> StepModel:
        one = self.start
        return step_model(one.space, one.tasks, one.timeline, 0, self.where, one.cost)

    @cached_property
    def orders(self) -> OrderModel:
        one = self.start
        return order_model(self.model, one.tasks, one.timeline, 0, one.space.origins)

    @cached_property
    def low(self) -> list[int]:
        return low_order(self.graph, self.orders)

    def outcome(self, found: Candidate, how: str = "") -> Outcome:
        line = found.timeline
        return Outcome(line.peak_bytes[0], line.step_seconds, max(excess(self.request, found)), how)

    def captured(self) -> Outcome:
        return self.outcome(self.start)

    def levels(self) -> Outcome:
        return self.outcome(self.by_levels())

    def by_levels(self) -> Candidate:
        plan = MemoryPlan(self.orders.ops(level_order(self.orders)))
        return with_memory(self.request, self.start, plan)

    def passes(self, chunks: int, how: tuple[bool, bool], limit: int) -> Outcome:
        """So many of TensorFlowMem's passes with chunks of this share of the limit."""
        name = ("order", "offload", "placement")[sum(how)]
        found, count = self.passed(chunks, how, limit)
        return self.outcome(found, f"{name}, {count} chunks")

    def passed(self, chunks: int, how: tuple[bool, bool], limit: int) -> tuple[Candidate, int]:
        """The same as a Candidate, and the number of chunks."""
        parts = partition(self.orders, self.low, self.limit // chunks)
        plan = tensorflowmem(self.model, self.orders, self.way, limit, parts, *how)
        return with_memory(self.request, self.start, plan), len(parts.chunks)

    def tensorflowmem(self) -> Outcome:
        """The fastest that fits; passes are added while nothing does. Where a plan is over, the
        estimate was too low, and it is made for a lower limit."""
        found: list[Outcome] = []
        for how in PASSES:
            for chunks in CHUNKS:
                one = self.passes(chunks, how, self.limit)
                found.append(one)
                if not one.fits and any(how):
                    found.append(self.passes(chunks, how, self.limit - 5 * one.over // 4))
            if any(one.fits for one in found):
                break
        return min(found, key=lambda one: one.rank)

    def ours(self, limit: int | None = None) -> Outcome:
        limit = limit or self.limit
        made = self.planned(limit)
        peak, memory = made.predicted.peak_bytes[0], made.memory
        told = (
            f"{len(memory.recomputed)} recomputed, {len(memory.host_state)} parameters and "
            f"{len(memory.offloaded)} activations on the host"
        )
        over = max(peak - limit, 0 if made.feasible else 1)
        return Outcome(peak, made.predicted.step_seconds, over, told)

    def planned(self, limit: int) -> Plan:
        return make_plan(
            self.graph, self.where, "single", 60.0, limit,
            recompute="auto", offload="auto", host_state="auto", costs=self.costs,
        )  # fmt: skip


def cell(one: Outcome, digits: int = 2) -> str:
    if not one.fits:
        return f"over by {one.over / 1e9:.1f} GB"
    return f"{one.seconds:.{digits}f} s, {one.peak / 1e9:.1f} GB"


def largest(run: Callable[[int], Outcome], first: int, second: int, most: int) -> int:
    """The largest size that fits, by a straight line through the peaks of two and then by looking:
    what it returns fits and the next one does not, unless it is the most."""
    known: dict[int, Outcome] = {}

    def at(size: int) -> Outcome:
        if size not in known:
            known[size] = run(size)
            print(f"  size {size}: {cell(known[size])}", flush=True)
        return known[size]

    slope = (at(second).peak - at(first).peak) / (second - first)
    guess = min(max(math.floor(first + (LIMIT - at(first).peak) / slope), 1), most)
    while guess > 1 and not at(guess).fits:
        guess -= max(math.ceil((at(guess).peak - LIMIT) / slope), 1)
    while guess < most and at(guess + 1).fits:
        guess += 1
    return guess


def length(only: str | None) -> Iterator[str]:
    """Unrolled DeepSpeech."""
    yield (
        "| length | operators | levels | as captured | tensorflowmem | ratio | ours | ratio | "
        "TensorFlow, published | TensorFlowMem | ratio |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for frames, (stock, mem) in LENGTHS.items():
        if only not in (None, str(frames)):
            continue
        step = Step(f"deepspeech:frames={frames}")
        levels, eager = step.levels(), step.captured()
        theirs, ours = step.tensorflowmem(), step.ours()
        published = [f"{stock} s" if stock else "out of memory", f"{mem} s" if mem else "not told"]
        ratio = f"{mem / stock:.2f}" if stock and mem else ""
        yield (
            f"| {frames} | {len(step.graph.ops)} | {cell(levels)} | {cell(eager)} | "
            f"{cell(theirs)} | {theirs.seconds / levels.seconds:.2f} | {cell(ours)} | "
            f"{ours.seconds / levels.seconds:.2f} | {' | '.join(published)} | {ratio} |"
        )


def resnet(blocks: int, batch: int) -> str:
    return f"resnet152:stage3={blocks},batch={batch}"


def depth_of(blocks: int) -> int:
    """Layers of a ResNet with so many blocks in its third stage, and 14 in the others."""
    return 3 * (blocks + 14) + 2


def depth(batch: int) -> Iterator[str]:
    """The deepest ResNet."""
    stock, mem = DEPTHS[batch]
    yield "| batch | | deepest, layers | ms a layer | peak | | published |"
    yield "|---|---|---|---|---|---|---|"
    for name in ("levels", "captured"):
        best = largest(
            lambda n, name=name: getattr(Step(resnet(n, batch)), name)(), 36, 72, 1000
        )  # fmt: skip
        one = getattr(Step(resnet(best, batch)), name)()
        yield _deep(batch, name, best, one, f"TensorFlow {stock}" if name == "levels" else "")
    blocks = math.ceil((mem - 2) / 3) - 14
    step = Step(resnet(blocks, batch))
    for name, one in (("tensorflowmem", step.tensorflowmem()), ("ours", step.ours())):
        told = f"TensorFlowMem {mem}" if name == "tensorflowmem" else ""
        yield _deep(batch, name, blocks, one, told, "at least ")


def _deep(batch: int, name: str, blocks: int, one: Outcome, told: str, least: str = "") -> str:
    layers = depth_of(blocks)
    size = f"{least}{layers}" if one.fits else f"less than {layers}"
    return (
        f"| {batch} | {name} | {size} | {one.seconds / layers * 1e3:.2f} | "
        f"{one.peak / 1e9:.1f} GB | {one.how} | {told} |"
    )


def moe(experts: int, batch: int) -> str:
    return f"transformer-moe:width=512,hidden=4096,experts={experts},batch={batch}"


def experts() -> Iterator[str]:
    """Experts of a Transformer with 12 layers of experts of 4.2 million parameters."""
    batch = largest(lambda n: Step(moe(4, n)).levels(), 4, 8, 256)
    yield f"Batch {batch} of 256 tokens: the largest at which 4 experts a layer run by levels.\n"
    yield "| | experts a layer | parameters | samples a second | peak | | published |"
    yield "|---|---|---|---|---|---|---|"
    told = {
        "levels": "TensorFlow: 4 experts, 0.24 B, 19.0",
        "tensorflowmem": "TensorFlowMem: 48 experts, 2.5 B, 1.9",
    }
    runs: dict[str, Callable[[Step], Outcome]] = {
        "levels": Step.levels, "as captured": Step.captured,
        "tensorflowmem": Step.tensorflowmem, "ours": Step.ours,
    }  # fmt: skip
    for name, run in runs.items():
        count = _most_experts(run, batch)
        step = Step(moe(count, batch))
        one = run(step)
        yield (
            f"| {name} | {count} | {step.parameters / 1e9:.2f} B | {batch / one.seconds:.1f} | "
            f"{one.peak / 1e9:.1f} GB | {one.how} | {told.get(name, '')} |"
        )
    for name in ("tensorflowmem", "ours"):
        step = Step(moe(48, batch))
        one = runs[name](step)
        yield (
            f"| {name}, the published size | 48 | {step.parameters / 1e9:.2f} B | "
            f"{batch / one.seconds:.1f} | {one.peak / 1e9:.1f} GB | {one.how} | |"
        )


def _most_experts(run: Callable[[Step], Outcome], batch: int) -> int:
    """The most experts that fit, by halving."""
    low, high = 4, 8
    while run(Step(moe(high, batch))).fits:
        low, high = high, 2 * high
    while high - low > max(low // 16, 1):
        middle = (low + high) // 2
        one = run(Step(moe(middle, batch)))
        print(f"  {middle} experts: {cell(one)}", flush=True)
        low, high = (middle, high) if one.fits else (low, middle)
    return low


def ablation(only: str | None) -> Iterator[str]:
    """Five models, pass by pass; ours within the peak that all passes reach."""
    yield "| model | batch | levels | + partition | + offload | + placement | ours, in that peak |"
    yield "|---|---|---|---|---|---|---|"
    for name, spec in MODELS.items():
        if only not in (None, name):
            continue
        size = largest(lambda n, spec=spec: Step(spec.format(size=n)).levels(), 8, 16, 2000)
        step = Step(spec.format(size=size))
        base = step.levels()
        found = [step.passes(CHUNKS[1], how, 0) for how in PASSES]
        ours = step.ours(found[-1].peak)
        cells = [
            f"{one.peak / 1e9:.1f} GB, {one.seconds / base.seconds:.2f}"
            for one in (base, *found, ours)
        ]
        if not ours.fits:
            cells[-1] += ", over"
        yield f"| {name} | {size} | {' | '.join(cells)} |"


# On a real GPU

REAL = cluster("1xh200")
SIZES = {
    "deepspeech-400": "deepspeech:frames=400", "deepspeech-800": "deepspeech:frames=800",
    "resnet-236-32": resnet(64, 32), "resnet-1001-32": resnet(319, 32),
    "resnet-503-16": resnet(153, 16), "resnet-1916-16": resnet(624, 16),
    "moe-4": moe(4, 34), "moe-48": moe(48, 34),
}  # fmt: skip
"""The published sizes: of TensorFlow and of TensorFlowMem."""
BATCHES = {"ResNet-152": 56, "Transformer": 17, "TransformerMoE": 4, "WGAN-GP": 840,
           "DeepSpeech": 320}  # fmt: skip
"""A little less than the largest that the ablation finds to fit by levels."""


def plans(folder: Path, only: Sequence[str], own: Sequence[CostFile]) -> None:
    """Plans for a real GPU, and the jobs that run them. Ours is given the peak of all passes."""
    folder.mkdir(exist_ok=True, parents=True)
    for name, spec in SIZES.items():
        if only and name not in only:
            continue
        made = Step(spec, REAL, own=own).planned(LIMIT)
        _saved(folder, name, spec, made)
        _job(folder, f"peer --kind eager --spec {spec} --steps 3")
    for model, pattern in MODELS.items():
        if only and model not in only:
            continue
        spec = pattern.format(size=BATCHES[model])
        step = Step(spec, REAL, own=own)
        found = {"levels": step.by_levels()}
        for name, how in zip(("partition", "offload", "placement"), PASSES, strict=True):
            found[name] = step.passed(CHUNKS[1], how, 0)[0]
        for name, one in found.items():
            _saved(folder, f"{model}-{name}", spec, made_plan(step.request, one, 0.0))
        ours = step.planned(found["placement"].timeline.peak_bytes[0])
        _saved(folder, f"{model}-ours", spec, ours)


def _saved(folder: Path, name: str, spec: str, made: Plan) -> None:
    path = folder / f"{name}.json"
    made.save(path)
    _job(folder, f"run --spec {spec} --layers 1 --mode generated --steps 3 --plan {path}")
    peak, seconds = made.predicted.peak_bytes[0], made.predicted.step_seconds
    print(f"{name}: {seconds * 1e3:.1f} ms, {peak / 1e9:.2f} GB", flush=True)


def _job(folder: Path, job: str) -> None:
    with (folder / "jobs").open("a") as file:
        file.write(job + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", choices=("length", "depth", "experts", "ablation", "plans"))
    parser.add_argument("folder", nargs="?", type=Path, help="where to put plans")
    parser.add_argument("names", nargs="*", help="of these only")
    parser.add_argument("--batch", type=int, default=32, choices=DEPTHS)
    parser.add_argument("--costs", type=Path, help="for plans: a table of one's own")
    parser.add_argument("--only", help="one length, or one model; nothing is written")
    parser.add_argument("--write", type=Path, help="a page to put the table into")
    asked = parser.parse_args()
    compile_at_once()
    if asked.part == "plans":
        own = [load_cost_file(asked.costs)] if asked.costs else []
        plans(asked.folder, asked.names, own)
        return
    began, lines = time.process_time(), []
    parts: dict[str, Callable[[], Iterator[str]]] = {
        "length": lambda: length(asked.only),
        "depth": lambda: depth(asked.batch),
        "experts": experts,
        "ablation": lambda: ablation(asked.only),
    }
    for line in parts[asked.part]():
        print(line, flush=True)
        lines.append(line)
    print(f"{time.process_time() - began:.0f} s of processor time", flush=True)
    if asked.write is not None and not asked.only:
        mark = f"{asked.part} {asked.batch}" if asked.part == "depth" else asked.part
        begin, end = f"<!-- tensorflowmem: {mark} -->", f"<!-- end of {mark} -->"
        before, _, rest = asked.write.read_text().partition(begin)
        body = "\n".join(lines)
        asked.write.write_text(f"{before}{begin}\n{body}\n{end}{rest.partition(end)[2]}")


if __name__ == "__main__":
    main()
