"""How fast an undivided plan is on one GPU, beside eager PyTorch and torch.compile.

    python benchmarks/speed_gpu.py --out speed_gpu.json          six models, and compile times
    python benchmarks/speed_gpu.py --models "small gpt2" --rounds 20

Every model has a process of its own, with an empty cache of compiled code. Processes compile side
by side, a few at a time; then one after the other measures, while the others wait. In a process the
contenders take turns, step by step: eager, torch.compile of the step (default and reduce-overhead),
each with a fused optimizer, and apportion's modes. A step goes from an idle device to an idle
device, with the batch on the device. Products are float32 and convolutions TF32, torch's defaults,
for everybody.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from apportion import zoo
from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.capture.reference import capture_as
from apportion.execute.executable import Executable
from apportion.execute.transport import worker
from apportion.machine.cluster import cluster
from apportion.plan.make_plan import make_plan
from apportion.run.runner import Runner

LLAMA = "llama:layers=8,width=2048,hidden=5632,heads=16,kv_heads=4,vocab=32000,batch=4,seq=1024"
SMALL = "gpt2:layers=4,width=256,heads=4,vocab=1000,seq=64,batch=8,dropout=0"
DEEP = "gpt2:layers={},batch=8,seq=512,dropout=0"
MODELS = {
    "gpt2 bf16 32x512": ("gpt2:batch=32,seq=512,dropout=0", "bfloat16"),
    "small gpt2": (
        "gpt2:layers=4,width=256,heads=4,vocab=1000,seq=64,batch=8,dropout=0",
        "float32",
    ),
    "llama bf16 8x2048": (LLAMA, "bfloat16"),
    "gpt2 8x512": ("gpt2:batch=8,seq=512,dropout=0", "float32"),
    "resnet50 64": ("resnet50:batch=64", "float32"),
    "bert": ("bert:layers=12,batch=32,seq=256,dropout=0", "float32"),
}
DEPTHS = (12, 24, 48)
TORCH = ("eager", "compile", "reduce-overhead")
ROUNDS, WARM, SEED = 12, 3, 0
CONTENDERS = ("compile", "inductor", "eager", "generated", "graph", "reduce-overhead")
TOGETHER, LIMIT = 2, 170.0
READY = 0.6  # of the time: what does not begin to compile before is left out
OPTIONS = {"compile": {}, "reduce-overhead": {"mode": "reduce-overhead"}}
BARS = {"generated": ("eager",), "graph": ("eager",), "inductor": ("compile", "reduce-overhead")}


@dataclass(frozen=True)
class Row:
    """One contender: milliseconds of a step, median and lower quartile; seconds of its first step,
    compiling included; the losses of the first steps; the ratio of the medians to
    the faster of those that it is compared with; notes of what does not run as asked."""

    model: str
    contender: str
    step: float
    low: float
    first: float
    losses: list[float]
    notes: list[str]
    ratio: float | None = None


# One model, in a process of its own


def measure(
    name: str,
    spec: str,
    kind: str,
    contenders: Sequence[str],
    rounds: int,
    place: str,
    turn: Path,
    limit: float,
) -> list[Row]:
    """All contenders of one model, as far as they are compiled in time."""
    trains: dict[str, Callable[[], Any]] = {}
    first: dict[str, float] = {}
    losses: dict[str, list[float]] = {}
    notes: dict[str, list[str]] = {}
    deadline = time.monotonic() + READY * limit
    prepared = planned(spec, kind) if set(contenders) - set(TORCH) else None
    for contender in contenders:
        if time.monotonic() > deadline:
            _note(f"{name}, {contender}: left out, {READY * limit:g} s are over")
            continue
        try:
            if contender in TORCH:
                train, said = _eager(spec, kind, contender, place), list[str]
            else:
                assert prepared is not None
                train, said = _ours(*prepared, kind, contender, place)
            began = time.perf_counter()
            found = [float(train())]
            first[contender] = time.perf_counter() - began
            _note(f"{name}, {contender}: first step after {first[contender]:.1f} s")
            losses[contender] = found + [float(train()) for _ in range(WARM)]
            trains[contender], notes[contender] = train, list(said())
        except Exception as error:  # the others are measured all the same
            _note(f"{name}, {contender}: {type(error).__name__}: {str(error)[:300]}")
    seconds: dict[str, list[float]] = {contender: [] for contender in trains}
    with _alone(turn):
        for number in range(rounds + 1):
            for contender, train in trains.items():
                took = [_timed(train, place) for _ in range(3)][1:]
                seconds[contender] += took if number else []
    return [
        Row(name, c, 1e3 * float(np.median(s)), 1e3 * float(np.quantile(s, 0.25)), first[c],
            losses[c], notes[c])
        for c, s in seconds.items()
    ]  # fmt: skip


def planned(spec: str, kind: str) -> tuple[Program, Executable]:
    """The step of a model, captured, and planned for one device."""
    it = zoo.load(spec, SEED)
    program = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)
    if kind != "float32":
        program = capture_as(program, getattr(torch, kind))
    made = make_plan(program.graph, cluster("1xh200"), "single")
    return program, Executable(made.space, made.strategy, made.tasks)


def _eager(spec: str, kind: str, contender: str, place: str) -> Callable[[], Any]:
    it = zoo.load(spec, SEED)
    names = {id(p): name for name, p in it.model.named_parameters()}
    model = it.model.to(place, getattr(torch, kind))
    now = dict(model.named_parameters())
    groups = [
        {**{k: v for k, v in group.items() if k not in ("params", "foreach", "fused")},
         "params": [now[names[id(p)]] for p in group["params"]]}
        for group in it.optimizer.param_groups
    ]  # fmt: skip
    optimizer: Any = type(it.optimizer)(groups, fused=True)  # type: ignore[call-arg]
    batch = _on(it.batch, place, kind)
    step: Any = it.step
    if contender != "eager":
        step = torch.compile(partial(it.step, model), **OPTIONS[contender])
    else:
        step = partial(it.step, model)

    def train() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = step(batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train


def _ours(
    program: Program, executable: Executable, kind: str, mode: str, place: str
) -> tuple[Callable[[], Any], Callable[[], list[str]]]:
    """A step, and what does not run as the mode says."""
    runner = Runner(program, worker(executable, 0, place, mode))
    batch = _on(program.batch, place, kind)
    return lambda: runner.step(batch), lambda: runner.worker.notes


def _on(batch: Any, place: str, kind: str) -> Any:
    """The batch on the device; what is floating point in the precision of the model."""

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.to(place, getattr(torch, kind) if leaf.is_floating_point() else leaf.dtype)

    return tree_map(moved, batch)


def _timed(train: Callable[[], Any], place: str) -> float:
    _wait(place)
    began = time.perf_counter()
    train()
    _wait(place)
    return time.perf_counter() - began


def _wait(place: str) -> None:
    if place != "cpu":
        torch.cuda.synchronize()


@contextmanager
def _alone(turn: Path) -> Iterator[None]:
    """Waits until every process of the wave is ready, then for a turn of its own.

    Each writes a line when it has compiled; the parent makes the file `go` when all have, or when
    it has waited long enough.
    """
    with turn.open("a", encoding="ascii") as file:
        file.write("ready\n")
        file.flush()
        while not turn.with_name("go").exists():
            time.sleep(0.05)
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


# All of them


def wave(cases: Sequence[dict[str, Any]], given: argparse.Namespace) -> list[Row]:
    """Some cases side by side; those that fail or take too long are left out, with a note."""
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        turn, started = Path(folder, "turn"), []
        turn.touch()
        for number, case in enumerate(cases):
            out, cache = Path(folder, f"{number}.json"), Path(folder, f"cache{number}")
            command = [sys.executable, __file__, "--one", json.dumps(case), "--turn", str(turn)]
            command += ["--rounds", str(given.rounds), "--place", given.place, "--out", str(out)]
            command += ["--limit", str(given.limit)]
            environment = os.environ | {
                "TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")
            }  # fmt: skip
            started.append((case, out, subprocess.Popen(command, env=environment)))
        deadline = time.monotonic() + given.limit
        while time.monotonic() < deadline and any(p.poll() is None for *_, p in started):
            ready = len(turn.read_text(encoding="ascii").splitlines())
            running = sum(process.poll() is None for *_, process in started)
            if ready >= running or time.monotonic() > deadline - (1 - READY) / 2 * given.limit:
                turn.with_name("go").touch()
            time.sleep(0.05)
        for case, out, process in started:
            if process.poll() is None:
                process.kill()
                _note(f"{case['name']} took more than {given.limit:g} s")
            process.wait()
            if out.exists():
                found += [Row(**row) for row in json.loads(out.read_text(encoding="utf-8"))]
    return _compared(found)


def _compared(rows: Sequence[Row]) -> list[Row]:
    found = []
    for row in rows:
        names = BARS.get(row.contender, ())
        rivals = [r.step for r in rows if r.model == row.model and r.contender in names]
        ratio = row.step / min(rivals) if rivals else None
        found.append(Row(**{**asdict(row), "ratio": ratio}))
    return found


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The rows in Markdown."""
    yield "| model | contender | step ms | quartile | first step s | loss | ratio | notes |"
    yield "|---" * 8 + "|"
    for r in rows:
        ratio = "" if r.ratio is None else f"{r.ratio:.3f}"
        cells = [r.model, r.contender, f"{r.step:.2f}", f"{r.low:.2f}", f"{r.first:.1f}"]
        cells += [f"{r.losses[-1]:.5f}", ratio, str(len(r.notes) or "")]
        yield f"| {' | '.join(cells)} |"


def _note(text: str) -> None:
    print(f"speed_gpu: {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--depths", nargs="*", type=int, default=list(DEPTHS))
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for so many at a time")
    parser.add_argument("--out", type=Path, help="write the rows here")
    parser.add_argument("--place", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.place == "cuda" and not torch.cuda.is_available():
        _note("this needs a CUDA device, and torch finds none here")
        return 2
    warnings.simplefilter("ignore")
    if given.one:
        how = {"rounds": given.rounds, "place": given.place, "turn": given.turn}
        rows = measure(**given.one, **how, limit=given.limit)
        given.out.write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")
        return 0
    cases = []
    for name in given.models:
        spec, kind = MODELS.get(name, (name, "float32"))
        cases.append({"name": name, "spec": spec, "kind": kind, "contenders": given.contenders})
    waves = [cases[k : k + TOGETHER] for k in range(0, len(cases), TOGETHER)]
    deep = [
        {"name": f"gpt2 of {layers} layers", "spec": DEEP.format(layers), "kind": "float32",
         "contenders": ["inductor"]}
        for layers in given.depths
    ]  # fmt: skip
    waves += [deep] if deep else []
    found: list[Row] = []
    for some in waves:
        rows = wave(some, given)
        print("\n".join(list(table(rows))[2 if found else 0 :]), flush=True)
        found += rows
        if given.out:
            given.out.write_text(json.dumps([asdict(row) for row in found], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
