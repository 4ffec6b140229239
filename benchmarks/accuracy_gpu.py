"""How true predictions are on one GPU: step time and peak memory, predicted against measured.

    python benchmarks/accuracy_gpu.py measure DIR          # on the GPU: steps, kernels, peaks
    python benchmarks/accuracy_gpu.py table DIR --out D    # anywhere: tables of what was measured
    python benchmarks/accuracy_gpu.py page DIR --out PAGE  # anywhere: predictions beside it

`measure` runs each step in a process of its own, several at the same time, of which one at a time
has the GPU to itself, and writes a plan and a JSON file for each; `--times` measures every kernel
as well. `page` predicts by the tables that are shipped for the kind of GPU, or by `--costs T`.
"""

from __future__ import annotations

import argparse
import faulthandler
import fcntl
import gc
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from apportion import zoo
from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.capture.reference import capture_as
from apportion.execute.dry_run import device_memory_facts, measure_storage
from apportion.execute.executable import Executable
from apportion.execute.segment_cut import compiled_pieces
from apportion.lower.runnable import runnable
from apportion.lower.task_graph import with_storage
from apportion.machine import cost_fit
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost, shipped
from apportion.machine.cost_table import (
    CostFile,
    CostTable,
    KernelMeasurement,
    load_cost_file,
    save_cost_file,
)
from apportion.plan.fused_storage import fused_storage
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan
from apportion.run.calibrate_cuda import (
    CudaSamples,
    CudaTimes,
    device_kind,
    measured,
    on_device,
    peak_bytes,
    runner_on,
    step_seconds,
)
from apportion.run.channels_last import measured_channels_last
from apportion.run.fused_line import FusedStep, fused_table
from apportion.simulate.durations import (
    issue_nanoseconds,
    nanoseconds,
    shares,
)
from apportion.simulate.simulate import simulate


@dataclass(frozen=True)
class Case:
    """A step to run: a model, its precision, and how it is divided into parts on the one GPU."""

    spec: str
    precision: str = "float32"
    method: str = "single"
    seed: int = 0


LLAMA = "llama:layers=4,width=2048,hidden=5632,heads=16,kv_heads=4,vocab=32000,batch=4,seq=1024"
CALIBRATED = (
    Case("gpt2:batch=16,seq=512,dropout=0"),
    Case("gpt2:batch=8,seq=512,dropout=0"),
    Case("gpt2:batch=8,seq=512"),
    Case("bert:layers=12,batch=32,seq=256,dropout=0"),
    Case("resnet101:batch=128"),
    Case("wresnet:batch=64"),
    Case("inception-v3:batch=128"),
    Case("rnn:batch=1024"),
    Case("nmt:batch=512"),
    Case(LLAMA),
    Case("transformer-xl"),
    Case("vgg16:batch=64"),
    Case("gpt2:batch=32,seq=512,dropout=0", "bfloat16"),
)
PARTS = (
    Case("gpt2:layers=3,batch=16,seq=512,dropout=0", method="random", seed=1),
    Case("gpt2:layers=3,batch=16,seq=512,dropout=0", method="random", seed=2),
    Case("resnet50:batch=64", method="random", seed=1),
)
MIXED = (
    Case("gpt2:batch=16,seq=512,dropout=0,precision=bf16-mixed", "bf16-mixed"),
    Case(f"{LLAMA},precision=bf16-mixed", "bf16-mixed"),
)
UNSEEN = (
    Case("gpt2:batch=12,seq=768,dropout=0"),
    Case("bert:batch=8,seq=512,dropout=0"),
    Case("resnet50:batch=256"),
    Case("gnmt:batch=256"),
    Case("rnn:batch=512,hidden=1536"),
    Case("alexnet:batch=512"),
    Case("gpt2:layers=8,width=1536,heads=24,batch=16,seq=512,dropout=0", "bfloat16"),
)
UNSEEN_MIXED = (
    Case("gpt2:batch=32,seq=1024,dropout=0,precision=bf16-mixed", "bf16-mixed"),
    Case(f"{LLAMA.replace('layers=4', 'layers=8')},precision=bf16-mixed", "bf16-mixed"),
)
SIZES = (
    (256, 1, 16384), (256, 16, 16384), (512, 4, 16384), (1024, 2, 16384), (1024, 16, 16384),
    (2048, 4, 16384), (4096, 2, 8192), (4096, 8, 8192),
)  # fmt: skip
SHAPES = (
    *(
        Case(f"gpt2:layers=1,width={w},heads={w // 64},batch={b},seq=512,dropout=0,vocab={v}", kind)
        for w, b, v in SIZES
        for kind in ("float32", "bfloat16")
    ),
    Case("resnet50:batch=4"),
    Case("resnet50:batch=64", "bfloat16"),
    Case("rnn:hidden=512,batch=32,steps=8"),
    Case("rnn:batch=128,steps=8", "bfloat16"),
    Case("bert:layers=1,batch=4"),
)
ODD = (
    Case("gpt2:layers=1,width=1024,heads=16,batch=8,seq=512,dropout=0", "bfloat16"),
    Case("gpt2:layers=1,width=2048,heads=32,batch=4,seq=512,dropout=0", "bfloat16"),
    Case("gpt2:layers=4,width=256,heads=4,batch=4,seq=256,dropout=0"),
)
FUSED = (
    *(
        case
        for case in (*CALIBRATED[1:], *ODD, *UNSEEN)
        if case.spec[:4] in ("gpt2", "bert", "llam")
    ),
    *(case for case in (*CALIBRATED, *UNSEEN) if case.spec[:5] in ("vgg16", "alexn", "resne")),
)  # in an order of rising time to compile
LONG = tuple(case for case in CALIBRATED if case.spec.startswith(("transformer-xl", "nmt")))
UNROLLED = (
    *LONG,
    *(case for case in CALIBRATED if case.spec.startswith(("wresnet", "gpt2:batch=16"))),
    *(case for case in (*CALIBRATED, *UNSEEN) if "rnn" in case.spec or "gnmt" in case.spec),
)
CONVOLUTIONS = (Case("resnet50:batch=64"),)
"""Compiled as whole steps beside the calibrated ones."""
ALL = (*CALIBRATED, *UNSEEN, *PARTS, *SHAPES, *ODD, *CONVOLUTIONS, *MIXED, *UNSEEN_MIXED)
MODES = ("generated", "inductor")
UPDATE = "apportion.update"
WARM, STEPS, ROUNDS = 2, 7, 3
FAR, NEARER = 0.25, 0.7  # of the time of calls, for a fit to be replaced, and by one so much better
PATIENCE = 110.0  # seconds of one case
LIMITS = (
    "## Where predictions are off, and why",
    "",
    "- The host. Python issues the kernels, and the speed of the host's processor changes with its "
    "load. Steps whose host column is near their kernels column share that. Under `inductor` the "
    "device replays a recorded step, and the host hardly matters.",
    "- Fits know arithmetic and bytes, not which algorithm a library picks. What is known to "
    "matter has fits of its own: products in half precision with an odd side (the vocabulary of "
    "50257), convolutions with few channels. alexnet's convolutions, with windows of 5 and images "
    "of 13 by 13, are slower than the fit says.",
    "- What inductor fuses is a model (apportion/simulate/fusion.py): groups of operators between "
    "products read what they need once and write what is needed once, at a bandwidth and a cost "
    "per kernel that were fitted to whole steps. The gradient of pooling with windows that overlap "
    "takes up to three times what that says (alexnet).",
    "- Convolutions under `inductor` read images in memory order NHWC, and were measured so, each "
    "by itself (apportion/run/channels_last.py); within steps they took the same within 2%. The "
    "time of turning a batch around, in the first convolution, was added afterwards at the rate "
    "that it had in the steps of vgg16 and resnet50. Gradients of input and weight that are "
    "computed apart, as in divided plans, were not measured in that order: their fits are those of "
    "generated code.",
    "- resnet101 and inception-v3 with a batch of 128 are not among the steps of `inductor`: their "
    "first compiled step differed from the interpreter's by more than rounding in TF32 is taken to "
    "explain, and they ran in generated code. Steps whose raw measurements are from before "
    "segments of the allocator grew in place have been left out: inception-v3 and steps of several "
    "parts in generated code, and gpt2 and bert among the unseen ones of `inductor`.",
    "- Memory in generated code: what is asked of the allocator is predicted within 0.3%; an "
    "allowance covers what it hands out (`handed_out` in apportion/simulate/memory_curve.py), so "
    "predictions are a little high.",
    "- Memory with inductor: segments grow in place, and what a recorded step holds is what the "
    "allocator does with its requests, which is followed to the byte "
    "(apportion/simulate/segments.py). The requests are a model (apportion/plan/fused_storage.py): "
    "what is fused, what is written in place, the order that the compiler chooses, and the "
    "workspace of convolutions, which are measured or, for few channels, fitted to the bytes of "
    "their operands. Which of two orders the compiler takes where both hold about the same is "
    "not known (`LEAST_GAIN` in apportion/plan/compiled_order.py was settled with these runs in "
    "view); the margin of 0.2% and two pages was, too, and so were two rules for mixed precision: "
    "nobody writes a logarithmic softmax in float32 of logits in bfloat16, and casts of what was "
    "computed are written with their padding.",
)


# On the GPU


@dataclass
class CaseMeasurement:
    """What was measured of a Case, by mode: seconds of steps, bytes at the peak (asked for, and
    reserved), seconds of the first step, the host's seconds of a step, and notes. `times` is what
    every task took in generated code; `turned` are its convolutions in the order that torch's
    compiler gives them (run/channels_last.py)."""

    case: Case
    gpu: str
    torch: str
    seconds: dict[str, list[float]] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    reserved: dict[str, int] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    times: CudaTimes | None = None
    turned: dict[str, KernelMeasurement] = field(default_factory=dict)


def load_measurement(path: Path) -> CaseMeasurement:
    """What `measure` wrote of a Case."""
    data = json.loads(path.read_text())
    data["case"] = Case(**data["case"])
    if data["times"] is not None:
        workspace = {int(work): size for work, size in data["times"]["workspace"].items()}
        data["times"] = CudaTimes(**data["times"] | {"workspace": workspace})
    turned = data.get("turned", {})
    data["turned"] = {text: KernelMeasurement(*row) for text, row in turned.items()}
    return CaseMeasurement(**data)


def prepared(case: Case) -> tuple[Program, Plan]:
    """The step of a Case, and its Plan for one GPU of this kind."""
    it = zoo.load(case.spec, 0)
    program = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)
    if case.precision in ("float16", "bfloat16"):  # of everything; a mix is the model's own
        program = capture_as(program, getattr(torch, case.precision))
    where = cluster(f"1x{device_kind()}")
    return program, make_plan(program.graph, where, case.method, seed=case.seed)


@contextmanager
def the_gpu(folder: Path, alone: bool) -> Iterator[None]:
    """A context in which this process may use the GPU, `alone` or beside others that may."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a compiler's processes may have the file open too


def measure_one(number: int, folder: Path, modes: Sequence[str], times: bool) -> None:
    """Measures a Case in this process."""
    case = ALL[number]
    faulthandler.dump_traceback_later(PATIENCE - 20.0)
    program, made = prepared(case)
    made.save(folder / f"{number}.plan.json")
    found = CaseMeasurement(case, torch.cuda.get_device_name(), torch.__version__)
    for mode in modes:
        try:
            each = times and mode == "generated" and case not in (*UNSEEN, *UNSEEN_MIXED, *LONG)
            _measure_mode(found, program, made, mode, folder, each)
        except Exception as error:  # another mode may do
            found.notes.setdefault(mode, []).append(f"{type(error).__name__}: {error}"[:300])
        gc.collect()
        torch.cuda.empty_cache()
        (folder / f"{number}.json").write_text(json.dumps(asdict(found)))


def _measure_mode(
    found: CaseMeasurement, program: Program, made: Plan, mode: str, folder: Path, times: bool
) -> None:
    executable = Executable(made.space, made.strategy, made.tasks)
    if mode == "inductor" and found.case not in (*UNSEEN, *UNSEEN_MIXED):
        with the_gpu(folder, alone=True):
            found.turned = measured_channels_last(executable, made.storage)
            torch.cuda.empty_cache()
    with the_gpu(folder, alone=False):
        batch = on_device(program.batch)
        runner = runner_on(program, executable, mode=mode, timed=times)
        began = time.perf_counter()
        step_seconds(runner, batch, 1)
        found.first[mode] = time.perf_counter() - began
        step_seconds(runner, batch, WARM)
    found.notes[mode] = [*runner.worker.notes]
    gc.collect()
    gc.freeze()
    with the_gpu(folder, alone=True):
        step_seconds(runner, batch, 1)
        found.seconds[mode] = step_seconds(runner, batch, STEPS)
        torch.cuda.synchronize()
        began = time.perf_counter()
        runner.local_step(batch)
        found.host[mode] = time.perf_counter() - began
        torch.cuda.synchronize()
        if times:
            found.times = measured(runner, made.storage, batch, ROUNDS)
        del batch
        torch.cuda.empty_cache()
        found.peak[mode] = max(peak_bytes(runner, program.batch) for _ in range(2))
        found.reserved[mode] = torch.cuda.max_memory_reserved()
    gc.unfreeze()


def measure_all(
    folder: Path, cases: Sequence[Case], modes: Sequence[str], times: bool, jobs: int, limit: float
) -> None:
    """Measures Cases in processes of their own; begins none after `limit` seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    began, waiting = time.perf_counter(), [ALL.index(case) for case in cases]
    running: dict[int, tuple[subprocess.Popen[bytes], float]] = {}
    while waiting or running:
        spent = time.perf_counter() - began
        while waiting and len(running) < jobs and spent < limit:
            number = waiting.pop(0)
            command = [sys.executable, __file__, "one", str(folder), "--number", str(number)]
            command += ["--modes", ",".join(modes), *(["--times"] if times else [])]
            running[number] = (subprocess.Popen(command), time.perf_counter())
        for number, (process, since) in tuple(running.items()):
            late = time.perf_counter() - since > PATIENCE or spent > limit + PATIENCE / 4
            if late and process.poll() is None:
                process.kill()
                process.wait()
            if process.poll() is not None:
                del running[number]
                took = time.perf_counter() - since
                told = f"{spent:6.1f} s: {ALL[number].spec} {process.returncode} {took:.0f} s"
                print(told, flush=True)
        if spent >= limit:
            waiting.clear()
        time.sleep(0.1)


# Anywhere


def load_all(folder: Path) -> Iterator[tuple[CaseMeasurement, Plan]]:
    """What was measured, with the Plans; folders in the folder have more of the same Cases."""
    paths = sorted(folder.glob("**/*[0-9].json"), key=lambda p: (len(p.parts), p))
    found: dict[str, tuple[CaseMeasurement, Path]] = {}
    for path in paths:
        new = load_measurement(path)
        if path.name not in found:
            found[path.name] = (new, path.with_suffix(".plan.json"))
            continue
        known = found[path.name][0]
        for name in ("seconds", "peak", "reserved", "first", "host", "notes", "turned"):
            getattr(known, name).update(getattr(new, name))
    for _, (measurement, plan) in sorted(found.items(), key=lambda item: int(item[0][:-5])):
        yield measurement, Plan.load(plan)


def make_tables(folder: Path, before: CostTable | None) -> tuple[CostTable, ...]:
    """Tables of what was measured in `folder`, for each mode; works that were not measured again
    are those of an earlier table."""
    samples, steps, kind, day = CudaSamples(before), [], "", time.strftime("%Y-%m-%d")
    turned: dict[str, KernelMeasurement] = {}
    for found, made in load_all(folder):
        kind = made.cluster.devices[0].kind
        if found.times is not None and found.case not in (*UNSEEN, *UNSEEN_MIXED):
            executable = Executable(made.space, made.strategy, made.tasks)
            samples.add(executable, made.storage, found.times, keep=found.case not in PARTS)
        compiled = "inductor" in found.seconds and not found.notes.get("inductor")
        if compiled and found.case not in (*UNSEEN, *UNSEEN_MIXED):
            took = statistics.median(found.seconds["inductor"])
            steps.append(FusedStep(made.tasks, made.cluster, took))
        if found.case not in (*UNSEEN, *UNSEEN_MIXED):
            turned |= found.turned
    known = before if before is not None and before.condition.mode == "generated" else None
    if known is None:
        generated = samples.table(kind, day)
    else:
        generated = extended(known, samples.table(kind, day)) if samples.works else known
    tables = [generated, *([fused_table(generated, steps, day, turned)] if steps else [])]
    if before is not None and before.condition.mode == "none":  # the interpreter's host and updates
        works = {w: x for w, x in before.works.items() if w.startswith("apportion.update(")}
        tables.append(replace(before, works=works, fits={}, lines={}))
    return tuple(tables)


def extended(before: CostTable, new: CostTable) -> CostTable:
    """A table with the calls of another one as well. A fit stays, unless it is far off for the new
    calls and one of all calls is nearer: it may rest on calls that were measured and not kept."""
    works = {**before.works, **new.works}
    again, fits = cost_fit.fits(works), dict(before.fits)
    for name in new.fits.keys() & again.keys():
        was = _off(fits[name], name, new) if name in fits else np.inf
        if was > FAR and _off(again[name], name, new) < NEARER * was:
            fits[name] = again[name]
    return replace(before, works=works, fits=fits)


def _off(fit: cost_fit.Fit, name: str, table: CostTable) -> float:
    """How far a fit is from the measured calls that it is for, of their time."""
    of = (
        (work.seconds, fit.launch + fit.per_flop * work.flops + fit.per_byte * work.nbytes)
        for text, work in table.works.items()
        if cost_fit.key(cost_fit.fit_kind(text), work.itemsize) == name
    )
    pairs = list(of)
    return sum(abs(a - b) for a, b in pairs) / max(sum(a for a, _ in pairs), 1e-12)


@dataclass(frozen=True)
class Row:
    """What was predicted and measured of a Case in a mode. `device` and `host` are the predicted
    seconds of all kernels, and of issuing them."""

    case: Case
    mode: str
    predicted: float
    measured: float
    spread: float
    device: float
    host: float
    predicted_bytes: int
    measured_bytes: int
    known: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def bytes_error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def compared(found: CaseMeasurement, made: Plan, mode: str, own: Sequence[CostFile]) -> Row:
    """A Case predicted, beside what was measured."""
    where = made.cluster
    cost = default_cost(where, mode, own)
    executable = Executable(made.space, made.strategy, made.tasks)
    facts = device_memory_facts(cost.tables[where.devices[0].kind])
    storage = measure_storage(executable, None, facts)
    # which results are views is a matter of torch's version: as it was found beside the GPU
    kinds, first = made.tasks.kinds, made.tasks.slot_first
    updated = {s for s, _, _ in storage.slots if kinds[made.tasks.op[first[s]]] == UPDATE}
    there = [row for row in made.storage.slots if row[0] not in updated]
    own_rows = [row for row in storage.slots if row[0] in updated]
    storage = replace(storage, slots=tuple(sorted((*there, *own_rows))))
    bare = runnable(made.space, made.strategy, 1)
    if mode == "inductor":
        storage = fused_storage(bare, storage, where, cost, compiled_pieces(executable))
    tasks = with_storage(bare, storage)
    line = simulate(tasks, where, cost)
    seconds = sorted(found.seconds[mode])
    return Row(
        found.case, mode, line.step_seconds, statistics.median(seconds),
        seconds[-2] / seconds[1] - 1,
        float(nanoseconds(tasks, where, cost).sum()) / 1e9,
        float(issue_nanoseconds(tasks, where, cost).sum()) / 1e9,
        line.peak_bytes[0], _held(found, mode), shares(tasks, where, cost)["measured"],
    )  # fmt: skip


def _held(found: CaseMeasurement, mode: str) -> int:
    """Bytes at the peak; a replayed graph asks for none, it has what is reserved."""
    return found.reserved[mode] if mode == "inductor" else found.peak[mode]


def page(rows: Sequence[Row], gpu: str, version: str) -> str:
    """The results as Markdown."""
    lines = [
        f"# Accuracy on one {gpu.removeprefix('NVIDIA ')}", "",
        f"`python benchmarks/accuracy_gpu.py`, {time.strftime('%Y-%m-%d')}, {gpu}, torch "
        f"{version}, torch's defaults: products in float32, convolutions in TF32. Steps "
        "are the whole training step, from an idle device to an idle device, in two modes: "
        "`generated` code, and `inductor` with a recorded CUDA graph. Measured is the median of "
        f"{STEPS}, and the spread the second largest over the second smallest. Peaks are the "
        "allocator's (`torch.cuda.max_memory_allocated`).", "",
        "Predictions come from the shipped tables in `apportion/machine/costs`. The kernels "
        "of the steps under *measured on* were measured in the session that measured these steps, "
        "and whole steps of `inductor` are part of the fit of its fused kernels; the steps under "
        "*never seen* and their kernels took no part in the table; the margin of memory and which "
        "odd products have lines of their own were settled with these runs in view. *Kernels* and "
        "*host* are the predicted sums: of what the device computes, and of what the host needs to "
        "issue it; *of it measured* is the share of kernels' time that was measured for that very "
        "call, the rest is fitted. Of `inductor` the peak is what the process holds for good "
        "(`torch.cuda.max_memory_reserved` after the cache was emptied), since a replayed graph "
        "asks the allocator for nothing.", "",
        "## In short", "", *_summary(rows), "",
    ]  # fmt: skip
    for mode in dict.fromkeys(row.mode for row in rows):
        for title, some in _kinds([row for row in rows if row.mode == mode]):
            lines += [f"## {mode}: {title}", "", *_table(some), ""]
    return "\n".join([*lines, *LIMITS, ""])


def _kinds(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    for title, cases in (
        ("steps that the table was measured on", (*CALIBRATED, *CONVOLUTIONS, *MIXED)),
        ("several parts on the one device, in the fits only", PARTS),
        ("steps that the table has never seen", (*UNSEEN, *UNSEEN_MIXED)),
    ):
        some = [row for row in rows if row.case in cases]
        if some:
            yield title, some


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield (
        "| step | precision | kernels ms | host ms | predicted ms | measured ms | spread | error | "
        "predicted GB | measured GB | error | of it measured |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        name = f"{row.case.spec}" + (
            f", {row.case.method} {row.case.seed}" if row.case.seed else ""
        )
        cells = [
            name, row.case.precision, f"{row.device * 1e3:.1f}", f"{row.host * 1e3:.1f}",
            f"{row.predicted * 1e3:.1f}", f"{row.measured * 1e3:.1f}", f"{row.spread:.0%}",
            f"{row.error:+.1%}", f"{row.predicted_bytes / 1e9:.3f}",
            f"{row.measured_bytes / 1e9:.3f}", f"{row.bytes_error:+.2%}", f"{row.known:.0%}",
        ]  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def _summary(rows: Sequence[Row]) -> Iterator[str]:
    for mode in dict.fromkeys(row.mode for row in rows):
        for title, some in _kinds([row for row in rows if row.mode == mode]):
            times = [abs(r.error) for r in some]
            memory = [r.bytes_error for r in some]
            yield (
                f"- {mode}, {title}: {len(some)} steps, mean absolute error of the step "
                f"{statistics.mean(times):.1%}, largest {max(times):.1%}; of the peak "
                f"{min(memory):+.2%} to {max(memory):+.2%}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("measure", "one", "table", "page"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, help="the page, or the folder of the tables")
    parser.add_argument("--costs", type=Path, help="predict by this table, or add to it")
    parser.add_argument("--cases", default="calibrated,unseen,parts", help="which cases to measure")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--times", action="store_true", help="measure every kernel as well")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for beginning cases")
    parser.add_argument("--number", type=int, help="of the case to measure")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    modes = given.modes.split(",")
    if given.what == "one":
        measure_one(given.number, given.folder, modes, given.times)
    elif given.what == "measure":
        named = {"calibrated": CALIBRATED, "unseen": UNSEEN, "parts": PARTS}
        named |= {"shapes": SHAPES, "odd": ODD, "fused": FUSED, "mixed": (*MIXED, *UNSEEN_MIXED)}
        cases = [case for name in given.cases.split(",") for case in named[name]]
        cases.sort(key=lambda case: case in UNROLLED)  # those take long
        measure_all(given.folder, cases, modes, given.times, given.jobs, given.limit)
    elif given.what == "table":
        _write_table(given.folder, given.out, given.costs)
    else:
        own = () if given.costs is None else (load_cost_file(given.costs),)
        rows, gpu, version = [], "", ""
        for found, made in load_all(given.folder):
            gpu, version = found.gpu, found.torch
            ran = [mode for mode in modes if mode in found.peak]
            new = [compared(found, made, m, own) for m in ran if not found.notes.get(m)]
            print("\n".join(list(_table(new))[2:]), flush=True)
            rows += new
        text = page(rows, gpu, version)
        print("\n".join(_summary(rows)))
        if given.out is not None:
            given.out.write_text(text)


def _write_table(folder: Path, out: Path, earlier: Path | None) -> None:
    (found, made), *_ = load_all(folder)
    kind = made.cluster.devices[0].kind
    tables = shipped() if earlier is None else load_cost_file(earlier).tables
    before = next((t for t in tables if t.condition.kind == kind), None)
    new = make_tables(folder, before)
    renewed = {table.condition for table in new}
    others = (t for t in tables if t.condition.kind == kind and t.condition not in renewed)
    for table in (*new, *others):  # a file each, as they are large
        path = out / f"{kind}-{table.condition.mode}.json"
        save_cost_file(CostFile(found.gpu, found.torch, (table,)), path)
        print(table, path, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
