"""Which programs that nobody wrote for apportion does it take, and is it right? A survey.

    python benchmarks/programs.py                        all that is installed
    python benchmarks/programs.py --kind idiom --jobs 2  the idioms on a small network
    python benchmarks/programs.py --only vit_pytorch     programs whose name contains that
    python benchmarks/programs.py --page docs/programs.md   the page from the JSON file

Every program of benchmarks/surveyed/ runs in a process of its own: it is built, run by plain
PyTorch, captured, planned for two devices by data, tofu, random and auto, and each plan is run and
compared with plain PyTorch. Plain PyTorch runs on objects that are built anew from the same seed,
by the loop below and not by the package's own reference, and the second step has another batch.
The package's own judgement, `apportion.check`, is asked about the last of the plans and must agree.
What capture might have touched is compared before and after, also by code of its own.

    equal      captured, and equal under every plan
    remedied   refused by one sentence, and equal once what it says is done: as remedies.py has it,
               or with the `fixed` that it names
    refused    by one sentence
    traceback  by anything else
    wrong      different from plain PyTorch
    changed    a live object is not as it was
    timeout    not done within the limit
    invalid    plain PyTorch itself does not run it (a defect of the survey)
    skipped    its package is not installed
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import os
import re
import resource
import selectors
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

EXTRA = os.environ.get("SURVEY_PACKAGES", "")
if EXTRA and EXTRA not in sys.path:
    sys.path.append(EXTRA)

from surveyed.live_objects import differences, snapshot  # noqa: E402
from surveyed.plain_runs import (  # noqa: E402
    Built,
    Plain,
    build,
    coarsest_precision,
    distance_of,
    in_float64,
    noise_of,
    plain,
    with_fixed,
)
from surveyed.registry import Entry, entries  # noqa: E402
from surveyed.remedies import REMEDIES, Remedy  # noqa: E402

# torchvision's own kernels may be built for another PyTorch; its models need none of them, but its
# import registers something for one.
_TORCHVISION = torch.library.Library("torchvision", "FRAGMENT")

METHODS = ("data", "tofu", "random", "auto")
DEVICES, STEPS, BUDGET = 2, 2, 0.5
CPU_SECONDS, WALL_SECONDS = 900, 2400
FIXED = re.compile(r"fixed=\[([^\]]+)\]")
BAD = ("traceback", "wrong", "changed", "timeout")


@dataclass
class Outcome:
    """What became of one program."""

    name: str
    kind: str
    package: str
    outcome: str = "equal"
    sentence: str = ""
    changed: list[str] = field(default_factory=list)
    plans: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)
    remedy: str = ""
    ops: int = 0
    seconds: float = 0.0
    checked: bool = False


def survey(entry: Entry, methods: tuple[str, ...] = METHODS) -> Outcome:
    """Judges one program, in this process."""
    out = Outcome(entry.name, entry.kind, entry.package)
    began = time.perf_counter()
    try:
        truth = plain(entry.make, STEPS)
    except Exception as error:
        out.outcome, out.sentence = "invalid", _last_line(error)
        return out
    try:
        _judge(entry, out, truth, methods)
    except Exception as error:
        out.outcome, out.sentence = "traceback", _where(error)
    out.seconds = round(time.perf_counter() - began, 1)
    return out


def _judge(entry: Entry, out: Outcome, truth: Plain, methods: tuple[str, ...]) -> None:
    from apportion.capture import CaptureError

    built = build(entry.make, 0)
    out.fixed = list(built.fixed)
    live = {"model": built.model, "optimizer": built.optimizer, "batch": built.batch}
    live["step"] = inspect.unwrap(built.step)
    before = snapshot(live)
    program, refusal = None, ""
    try:
        program = captured(built)
    except CaptureError as error:
        refusal = str(error)
    except Exception as error:
        out.outcome, out.sentence = "traceback", f"capture: {_where(error)}"
    out.changed = differences(before, snapshot(live))
    if out.outcome == "traceback":
        return
    if refusal:
        out.outcome, out.sentence = "refused", refusal
        if "\n" in refusal.strip():
            out.outcome = "traceback"
        elif methods:
            _judge_remedied(entry, out, methods)
    elif program is not None:
        out.ops = len(program.graph.ops)
        out.notes = list(getattr(program, "notes", ()))
        _judge_plans(entry, out, program, truth, methods)
    if out.changed and out.outcome in ("equal", "refused"):
        out.sentence = f"({out.outcome}) {out.changed[0]}; {out.sentence}"
        out.outcome = "changed"


def _judge_remedied(entry: Entry, out: Outcome, methods: tuple[str, ...]) -> None:
    """Follows the remedy of a refusal and judges the program that comes of it."""
    from apportion.capture import CaptureError

    remedy = REMEDIES.get(entry.name) or _fixed_remedy(entry, out.sentence)
    if remedy is None:
        return
    remedied, refusal = replace(entry, make=remedy.make), out.sentence
    out.remedy, out.outcome = remedy.done, "equal"
    try:
        program = captured(build(remedied.make, 0))
    except CaptureError as error:
        out.outcome, out.sentence = "refused", f"{refusal}; with {remedy.done}: {error}"
        return
    out.ops = len(program.graph.ops)
    _judge_plans(remedied, out, program, plain(remedied.make, STEPS), methods)
    if out.outcome == "equal":
        out.outcome, out.sentence = "remedied", refusal


def _fixed_remedy(entry: Entry, refusal: str) -> Remedy | None:
    """The remedy that some tensors of the batch are always the same, where a refusal names it."""
    named = FIXED.search(refusal)
    if named is None:
        return None
    names = re.findall(r'"([^"]+)"', named[1])
    return Remedy(f"`{named[0]}`", with_fixed(entry.make, names))


def captured(built: Built) -> Any:
    """The program as apportion captures it."""
    from apportion.capture import capture

    given = (built.step, built.model, built.optimizer, built.batch, built.clip_norm)
    return capture(*given, fixed=built.fixed)


def _judge_plans(
    entry: Entry, out: Outcome, program: Any, truth: Plain, methods: tuple[str, ...]
) -> None:
    from surveyed.divided_runs import divided

    import apportion as ap
    from apportion.plan.make_plan import make_plan  # which measures nothing

    if not methods:
        return
    eps = coarsest_precision(program)
    noise = noise_of(entry.make, STEPS, eps)
    others = [build(entry.make, seed).batch for seed in range(STEPS)]
    after = build(entry.make, 0).after
    check = None if os.environ.get("SURVEY_NO_CHECK") else getattr(ap, "check", None)
    out.checked = check is not None
    for method in methods:
        try:
            if after is not None:  # it has changed the settings of the program before
                built = build(entry.make, 0)
                program, after = captured(built), built.after
            plan = make_plan(program, ap.cluster(f"local:{DEVICES}"), method, budget=BUDGET)
            found = distance_of(program, divided(program, plan, others, after), truth, noise, eps)
            if found and eps < 1e-5 and _equal_in_float64(entry, method):
                found = ""
            if not found and check is not None and method == methods[-1]:
                judged = check(program, plan, steps=STEPS)
                found = "" if judged.equal else f"ap.check: {judged}"
        except Exception as error:
            if type(error).__name__ == "UnsuitableMethod":
                out.plans[method] = f"not for this step: {error}"
                continue
            out.plans[method] = f"traceback: {_where(error)}"
            out.outcome, out.sentence = "traceback", f"{method}: {_where(error)}"
            return
        out.plans[method] = found or "equal"
        if found:
            out.outcome, out.sentence = "wrong", f"{method}: {found}"
            return


def _equal_in_float64(entry: Entry, method: str) -> bool:
    """Whether a difference is gone where rounding is."""
    from surveyed.divided_runs import divided

    import apportion as ap
    from apportion.plan.make_plan import make_plan

    make, eps = in_float64(entry.make), torch.finfo(torch.float64).eps
    try:
        built = build(make, 0)
        wide = captured(built)
        truth, noise = plain(make, STEPS), noise_of(make, STEPS, eps)
    except Exception:
        return False  # it does not run so
    plan = make_plan(wide, ap.cluster(f"local:{DEVICES}"), method, budget=BUDGET)
    others = [build(make, seed).batch for seed in range(STEPS)]
    return not distance_of(
        wide, divided(wide, plan, others, built.after), truth, noise, eps, relative=1e-9
    )


def _last_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


def _where(error: BaseException) -> str:
    """The error and the innermost line of this repository that it went through."""
    frames = traceback.extract_tb(error.__traceback__)
    root = str(Path(__file__).parents[1])
    mine = [f for f in frames if f.filename.startswith(root) and "surveyed" not in f.filename]
    at = f" at {Path(mine[-1].filename).name}:{mine[-1].lineno}" if mine else ""
    last = frames[-1]
    return f"{_last_line(error)[:300]}{at} (raised at {Path(last.filename).name}:{last.lineno})"


# Processes


def child(entry: Entry, write: int, methods: tuple[str, ...]) -> None:
    """Runs in a forked process: judges and writes the outcome as JSON."""
    torch.set_num_threads(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    if not os.environ.get("SURVEY_LOUD"):
        os.dup2(quiet, 2)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    warnings.simplefilter("ignore")
    out = survey(entry, methods)
    with os.fdopen(write, "w") as pipe:
        json.dump(asdict(out), pipe)
        pipe.flush()
    os._exit(0)


@dataclass
class Running:
    """A child at work."""

    entry: Entry
    pid: int
    read: int
    began: float
    text: bytes = b""


def start(entry: Entry, methods: tuple[str, ...]) -> Running:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            child(entry, write, methods)
        finally:
            os._exit(1)
    os.close(write)
    return Running(entry, pid, read, time.monotonic())


def finished(running: Running) -> dict[str, Any]:
    """The outcome of a child that has closed its pipe or is over its time."""
    over = time.monotonic() - running.began > WALL_SECONDS
    with contextlib.suppress(ProcessLookupError):
        if over:
            os.kill(running.pid, signal.SIGKILL)
    _, status, used = os.wait4(running.pid, 0)
    os.close(running.read)
    if running.text:
        with contextlib.suppress(json.JSONDecodeError):
            return dict(json.loads(running.text))
    killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    entry = running.entry
    out = Outcome(entry.name, entry.kind, entry.package)
    late = over or killed in (signal.SIGXCPU, signal.SIGKILL)
    out.outcome = "timeout" if late else "traceback"
    if killed == signal.SIGKILL and not over and used.ru_utime + used.ru_stime < CPU_SECONDS:
        out.sentence = f"killed by the system, with {used.ru_maxrss / 1e6:.0f} GB of memory in use"
    elif late:
        out.sentence = f"not done within {CPU_SECONDS} s of processor time"
    else:
        out.sentence = f"died of signal {killed}"
    out.seconds = round(time.monotonic() - running.began, 1)
    return asdict(out)


def run_all(chosen: list[Entry], jobs: int, keep: Any, methods: tuple[str, ...]) -> None:
    """All programs, `jobs` at a time; `keep(outcome)` hears each."""
    waiting, working = list(reversed(chosen)), {}
    with selectors.DefaultSelector() as ready:
        while waiting or working:
            while waiting and len(working) < jobs:
                one = start(waiting.pop(), methods)
                working[one.read] = one
                ready.register(one.read, selectors.EVENT_READ)
            for key, _ in ready.select(1.0):
                one = working[int(key.fd)]
                more = os.read(one.read, 1 << 16)
                one.text += more
                if not more:
                    ready.unregister(one.read)
                    keep(finished(working.pop(one.read)))
            for one in list(working.values()):
                if time.monotonic() - one.began > WALL_SECONDS:
                    ready.unregister(one.read)
                    keep(finished(working.pop(one.read)))


def name_missing_operator() -> None:
    """Names torchvision's operators without which it cannot be imported."""
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):
            _TORCHVISION.define(
                f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )


# Packages that many programs share and whose import changes nothing else.
COMMON = (
    "diffusers", "einops", "monai.networks.nets", "pytorch_optimizer", "pytorchcv.model_provider",
    "segmentation_models_pytorch", "timm", "torch_geometric.nn", "torch_optimizer",
    "torchvision.models", "transformers", "vit_pytorch", "x_transformers",
)  # fmt: skip


def warm(chosen: list[Entry], methods: tuple[str, ...]) -> None:
    """Imports here what every child would import: what a first one needed for a small program. (A
    program itself may not run here: children of a process that ran a backward can run none.)"""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        small = Entry("small", "", "", _small)
        survey(small, methods)
        os.write(write, json.dumps(sorted(sys.modules)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    used = {name for entry in chosen for name in entry.package.split()}
    for name in [*json.loads(text or "[]"), *(n for n in COMMON if n.split(".")[0] in used)]:
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)


def _small() -> Any:
    from surveyed.registry import classifier

    return classifier(
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), torch.randn(4, 8), 8
    )


# What is written


def commit() -> str:
    here = Path(__file__).parent
    if (note := here.parent / "COMMIT").exists():  # a copy of the tree
        return note.read_text().strip()
    made = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True
    )
    return made.stdout.strip()


def figures(rows: list[dict[str, Any]]) -> str:
    """One line per kind: how many came to which outcome."""
    lines = []
    for kind in sorted({row["kind"] for row in rows}):
        mine = Counter(row["outcome"] for row in rows if row["kind"] == kind)
        tried = sum(n for o, n in mine.items() if o not in ("skipped", "invalid"))
        share = f"{100 * mine['equal'] / tried:.1f}% equal" if tried else "nothing tried"
        lines.append(f"{kind}: {tried} tried, {share}: {dict(mine.most_common())}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", help="part of a name; may be given again")
    parser.add_argument("--kind", choices=("program", "idiom"))
    parser.add_argument("--methods", nargs="*", default=METHODS, help="of planning; none: capture")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--slice", default="1/1", help="the K-th of N shares, K/N")
    parser.add_argument("--out", type=Path, default=Path("programs.json"))
    parser.add_argument("--failed", action="store_true", help="only what was not equal in --out")
    parser.add_argument("--rest", action="store_true", help="only what is not in --out")
    parser.add_argument("--page", type=Path, help="write the page from --out and run nothing")
    parser.add_argument("--list", action="store_true", help="print the names and run nothing")
    options = parser.parse_args()
    known = json.loads(options.out.read_text()) if options.out.exists() else {"rows": []}
    rows = {row["name"]: row for row in known["rows"]}
    if options.page:
        from surveyed.page import page

        registered = Counter(entry.kind for entry in entries())
        options.page.write_text(page(list(rows.values()), registered))
        return 0
    chosen = [e for e in entries() if options.kind in (None, e.kind)]
    if options.only:
        chosen = [e for e in chosen if any(part in e.name for part in options.only)]
    if options.failed:
        chosen = [e for e in chosen if rows.get(e.name, {}).get("outcome") != "equal"]
    if options.rest:
        chosen = [e for e in chosen if rows.get(e.name, {}).get("outcome", "skipped") == "skipped"]
    Random(0).shuffle(chosen)  # so that a part of a run says something of all
    share, shares = map(int, options.slice.split("/"))
    chosen = chosen[share - 1 :: shares]
    if options.list:
        print("\n".join(f"{e.kind} {e.name}{'' if e.installed else ' (missing)'}" for e in chosen))
        return 0
    at = commit()

    def keep(row: dict[str, Any]) -> None:
        said = row["sentence"].replace(f"{EXTRA}/", "") if EXTRA else row["sentence"]
        rows[row["name"]] = row = row | {"commit": at, "sentence": said}
        print(f"{row['outcome']:9} {row['name']:44} {row['seconds']:6} s  {row['sentence'][:200]}")
        sys.stdout.flush()
        options.out.write_text(json.dumps({"rows": list(rows.values())}, indent=1))

    for entry in chosen:
        if not entry.installed:
            keep(asdict(Outcome(entry.name, entry.kind, entry.package, "skipped")))
    name_missing_operator()
    chosen_now = [e for e in chosen if e.installed]
    warm(chosen_now, tuple(options.methods))
    run_all(chosen_now, options.jobs, keep, tuple(options.methods))
    print(figures([rows[e.name] for e in chosen]))
    return 1 if any(rows[e.name]["outcome"] in BAD for e in chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
