"""How true predictions are on one GPU: step time and peak memory, predicted against measured.

    python benchmarks/accuracy_gpu.py --out docs/accuracy-h200.md   # needs an H200; 5 minutes
    python benchmarks/accuracy_gpu.py --calibrate table.json        # measures a new table

Predictions come from the table that is shipped for the kind of GPU, which was measured on another
day and on some of these steps; the page says which share of the predicted time is a measurement of
that very call, and which is fitted.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from apportion import zoo
from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.capture.reference import capture_as
from apportion.execute.executable import Executable
from apportion.machine.cluster import cluster
from apportion.machine.cost_table import CostFile, save_cost_file
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan
from apportion.run.calibrate_cuda import (
    calibrate,
    device_kind,
    on_device,
    peak_bytes,
    runner_on,
    step_seconds,
)
from apportion.simulate.durations import (
    issue_nanoseconds,
    nanoseconds,
    shares,
)


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
UNSEEN = (
    Case("gpt2:batch=12,seq=768,dropout=0"),
    Case("bert:batch=8,seq=512,dropout=0"),
    Case("resnet50:batch=256"),
    Case("gnmt:batch=256"),
    Case("rnn:batch=512,hidden=1536"),
    Case("alexnet:batch=512"),
    Case("gpt2:layers=8,width=1536,heads=24,batch=16,seq=512,dropout=0", "bfloat16"),
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
WARM, STEPS = 3, 15
LIMITS = (
    "## Where predictions are off, and why",
    "",
    "- The host. Python issues the kernels, some tens of microseconds for each task, and the speed "
    "of the host's processor changes with its load: the same step has taken 150 and 200 ms in "
    "different sessions. Steps whose host column is near their kernels column share that; most of "
    "all the end of a step, where the optimizer's updates are many small kernels and the device's "
    "queue, which is limited, is soon empty.",
    "- Fits know arithmetic and bytes, not which algorithm a library picks: convolutions of unseen "
    "shapes (alexnet) are 30% off at the median, and products in half precision are much slower "
    "where a side is odd (the vocabulary of 50257) than where it is a multiple of 8.",
    "- Memory of seen and unseen steps: what is asked of the allocator is predicted within 0.3%; "
    "what it hands out depends on what was freed before. An allowance covers that (`handed_out` in "
    "apportion/simulate/memory_curve.py), so predictions are a little high.",
)


@dataclass(frozen=True)
class Row:
    """What was predicted and measured of a Case. `device` and `host` are the predicted seconds of
    all kernels, and of issuing them."""

    case: Case
    seen: bool
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


def prepared(case: Case) -> tuple[Program, Plan]:
    """The step of a Case, and its Plan for one GPU of this kind."""
    it = zoo.load(case.spec, 0)
    program = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)
    if case.precision != "float32":
        program = capture_as(program, getattr(torch, case.precision))
    where = cluster(f"1x{device_kind()}")
    return program, make_plan(program.graph, where, case.method, seed=case.seed)


def compared(case: Case, seen: bool) -> Row:
    """Runs a Case and its prediction."""
    program, made = prepared(case)
    runner = runner_on(program, Executable(made.space, made.strategy, made.tasks))
    batch = on_device(program.batch)
    step_seconds(runner, batch, WARM)
    gc.collect()
    gc.freeze()
    seconds = sorted(step_seconds(runner, batch, STEPS))
    gc.unfreeze()
    del batch
    cost, tasks, where = made.cost, made.tasks, made.cluster
    row = Row(
        case, seen, made.predicted.step_seconds, statistics.median(seconds),
        seconds[-3] / seconds[2] - 1,
        float(nanoseconds(tasks, where, cost).sum()) / 1e9,
        float(issue_nanoseconds(tasks, where, cost).sum()) / 1e9,
        made.predicted.peak_bytes[0],
        max(peak_bytes(runner, program.batch) for _ in range(2)),
        shares(tasks, where, cost)["measured"],
    )  # fmt: skip
    del runner, program, made
    gc.collect()
    torch.cuda.empty_cache()
    return row


def page(rows: Sequence[Row]) -> str:
    """The results as Markdown."""
    gpu = torch.cuda.get_device_name()
    return "\n".join([
        f"# Accuracy on one {gpu.removeprefix('NVIDIA ')}", "",
        f"`python benchmarks/accuracy_gpu.py`, {time.strftime('%Y-%m-%d')}, {gpu}, torch "
        f"{torch.__version__}, torch's defaults: products in float32, convolutions in TF32. Steps "
        "are the whole training step by apportion's interpreter, from an idle device to an idle "
        f"device; measured is the median of {STEPS}, and the spread the third largest over the "
        "third smallest. Peaks are the allocator's (`torch.cuda.max_memory_allocated`).", "",
        "Predictions come from the shipped table `apportion/costs/h200.json`, which was measured "
        "in another session, and not from these runs. *Kernels* and *host* are the predicted sums: "
        "of what the device computes, and of what the host needs to issue it; *of it measured* is "
        "the share of kernels' time that was measured for that very call, the rest is fitted.", "",
        "## Steps that the table was measured on", "",
        *_table([r for r in rows if r.seen and r.case.method == "single"]), "",
        "## Several parts on the one device", "",
        "Random strategies, which cut operators of such steps into parts. Their calls took part in "
        "the fits, and are not in the table.", "",
        *_table([r for r in rows if r.case.method != "single"]), "",
        "## Steps that the table has never seen", "",
        *_table([r for r in rows if not r.seen and r.case.method == "single"]), "",
        "## In short", "", *_summary(rows), "", *LIMITS, "",
    ])  # fmt: skip


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
    for title, some in (
        ("measured on", [r for r in rows if r.seen and r.case.method == "single"]),
        ("in parts", [r for r in rows if r.case.method != "single"]),
        ("never seen", [r for r in rows if not r.seen and r.case.method == "single"]),
    ):
        if some:
            times = [abs(r.error) for r in some]
            memory = [r.bytes_error for r in some]
            yield (
                f"- {title}: {len(some)} steps, mean absolute error of the step "
                f"{statistics.mean(times):.1%}, largest {max(times):.1%}; of the peak "
                f"{min(memory):+.2%} to {max(memory):+.2%}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the page here")
    parser.add_argument("--calibrate", type=Path, help="measure a table and write it here")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.calibrate is not None:
        cases = (*CALIBRATED, *PARTS, *SHAPES)
        table = calibrate((prepared(case) for case in cases), note=print)
        machine = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
        save_cost_file(CostFile(machine, torch.__version__, (table,)), given.calibrate)
        return
    rows = []
    for case in (*CALIBRATED, *PARTS, *UNSEEN):
        rows.append(compared(case, case not in UNSEEN))
        print("\n".join(list(_table(rows[-1:]))[2:]), flush=True)
    text = page(rows)
    if given.out is not None:
        given.out.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
