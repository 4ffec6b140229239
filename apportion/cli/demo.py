"""The demonstration behind `make demo`: data parallelism against Tofu's plan of a small GPT.

Part of the room cli. Both are planned for four local processes, run there beside a single device,
and checked. Writes demo.html and demo.trace.json, of Tofu's plan, into the current folder. Exit
status 1 if a plan does not train what the single device does.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from apportion import zoo
from apportion.capture import capture
from apportion.machine import cluster
from apportion.plan import Plan, compare_methods
from apportion.run import run
from apportion.show import tables

MODEL = "gpt2:layers=2,width=64,heads=4,vocab=512,seq=32,batch=8"
METHODS = ("data", "tofu")
PROCESSES, STEPS = 4, 4


def main(model: str = MODEL, folder: Path = Path()) -> bool:
    """Plans, runs and reports; whether both plans trained what the single device does."""
    print(f"{model} on {PROCESSES} processes, predicted:")
    plans = [replace(made, model=model) for made in _plans(model)]
    _print(tables.side_by_side(plans))
    equal = [_run(plan) for plan in plans]
    page, trace = folder / "demo.html", folder / "demo.trace.json"
    plans[-1].report(page)
    plans[-1].trace(trace)
    print(f"\nwrote {page} (open it in a browser) and {trace} (open it in ui.perfetto.dev)")
    return all(equal)


def _plans(model: str) -> list[Plan]:
    it = zoo.load(model, meta=True)
    program = capture(it.step, it.model, it.optimizer, it.batch, clip_norm=it.clip_norm)
    return compare_methods(program, cluster(f"local:{PROCESSES}"), METHODS)


def _run(plan: Plan) -> bool:
    print(f"\n{plan.method}, {STEPS} steps beside a single device:", flush=True)
    done = run(plan.model, plan, steps=STEPS, check=True)
    for item in tables.measured(plan, done):
        _print(item)
    return done.equal is True


def _print(item: Table | str) -> None:
    if isinstance(item, str):
        print(item, flush=True)
    else:
        Console().print(item)


def _status() -> int:
    try:
        return 0 if main() else 1
    except KeyboardInterrupt:
        print("demo: Interrupted.", file=sys.stderr)
        return 130
    except (RuntimeError, ValueError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(_status())
