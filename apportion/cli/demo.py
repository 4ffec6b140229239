"""The demonstration behind `make demo`: data parallelism against Tofu's plan of a small GPT.

Part of the room cli. Both are planned for four local processes with costs measured there, run there
beside a single device, and checked; in the end their order as predicted stands beside that as
measured. Writes demo.html and demo.trace.json, of Tofu's plan, into the current folder. Exit status
1 if a plan does not train what the single device does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from apportion import zoo
from apportion.capture import Program, capture
from apportion.machine import cluster
from apportion.plan import Plan, with_model
from apportion.quantity import format_quantity
from apportion.run import Run, SharedPool, compare, run, source_of_model
from apportion.show import plan_tables, say

MODEL = "gpt2:layers=2,width=64,heads=4,vocab=512,seq=32,batch=8"
METHODS = ("data", "tofu")
PROCESSES, STEPS = 4, 12


def main(model: str = MODEL, folder: Path = Path()) -> bool:
    """Plans, runs and reports; whether both plans trained what the single device does."""
    it = zoo.load(model)
    program = capture(it.step, it.model, it.optimizer, it.batch, clip_norm=it.clip_norm)
    with SharedPool(PROCESSES) as processes:
        made = compare(
            program,
            cluster(f"local:{PROCESSES}"),
            METHODS,
            note=_note,
            source=source_of_model(program, model, 0),
            processes=processes,
        )
        plans = [with_model(plan, model) for plan in made]
        print(f"{model} on {PROCESSES} processes, predicted:")
        say(plan_tables.side_by_side(plans))
        done = [_run(plan, program, processes) for plan in plans]
    print(f"\n{order(plans, done)}")
    page, trace = folder / "demo.html", folder / "demo.trace.json"
    plans[-1].report(page)
    plans[-1].trace(trace)
    print(f"wrote {page} (open it in a browser) and {trace} (open it in ui.perfetto.dev)")
    return all(one.equal is True for one in done)


def _run(plan: Plan, program: Program, processes: SharedPool) -> Run:
    print(f"\n{plan.method}, {STEPS} steps beside a single device:", flush=True)
    done = run(
        plan.model, plan, STEPS, check=True, note=_note, program=program, processes=processes
    )
    for item in plan_tables.measured(plan, done):
        say(item)
    return done


def order(plans: Sequence[Plan], done: Sequence[Run]) -> str:
    """The plans from the fastest to the slowest, by prediction and as they ran."""
    names = [plan.method for plan in plans]
    predicted = [plan.predicted.step_seconds for plan in plans]
    return (
        f"fastest first, predicted: {_ranked(names, predicted)}; "
        f"measured: {_ranked(names, [one.measured_step_seconds for one in done])}"
    )


def _ranked(names: Sequence[str], seconds: Sequence[float]) -> str:
    pairs = sorted(zip(seconds, names, strict=True))
    return ", ".join(f"{name} {format_quantity(each, 's')}" for each, name in pairs)


def _note(text: str) -> None:
    print(f"  {text}", flush=True)


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
