"""One search, in a process of its own: what search_process.py starts.

Part of the room serve. A request comes in as one line of JSON, lines of JSON about its progress go
out, and the Plan goes into a file. It ends with its parent: when stdin is closed, or by a signal.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apportion.serve.page_requests import AS_NEEDED

if TYPE_CHECKING:
    from apportion.plan import Plan, PlanningProgress

BETWEEN = 0.1  # seconds between two lines, at the least
Say = Callable[..., None]


def main() -> None:
    """Runs the search that stdin asks for."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what others print does not get among the lines
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def say(**facts: Any) -> None:
        out.write(json.dumps(facts) + "\n")

    try:
        plan = _again(request, say) if "plan" in request else _searched(request, say)
        say(state="simulated: writing the plan")
        plan.save(Path(request["out"]))
        say(done=True)
    except ValueError as error:
        say(error=" ".join(str(error).split())[:2000])
    except (RuntimeError, OSError, MemoryError) as error:
        say(error=f"the search failed: {' '.join(str(error).split())[:2000]}")


def _end_with_parent() -> None:
    """Ends this process, and the walks that it has started, once stdin is closed."""
    while os.read(0, 1 << 12):
        pass
    os.killpg(0, signal.SIGKILL)


def _searched(request: dict[str, Any], say: Say) -> Plan:
    say(state="capturing the step")
    from apportion import zoo
    from apportion.capture import capture
    from apportion.machine import cluster
    from apportion.plan import make_plan, memory_defaults, with_model
    from apportion.quantity import parse_size_limit

    place = cluster(request["cluster"])
    it = zoo.load(request["model"], request["seed"], meta=True)
    program = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm, it.fixed)
    limit = parse_size_limit(request["memory_limit"]) if request["memory_limit"] else None
    say(state=f"searching: {len(program.graph.ops)} operators on {len(place.devices)} devices")
    asked = None if request["recompute"] == AS_NEEDED else request["recompute"]
    recompute, offload, host_state = memory_defaults(place, limit, asked, None, None)
    plan = make_plan(
        program, place, request["method"], request["budget"], limit, request["seed"],
        progress=_Teller(say), recompute=recompute, offload=offload, host_state=host_state,
    )  # fmt: skip
    return with_model(plan, request["model"])


def _again(request: dict[str, Any], say: Say) -> Plan:
    from apportion.plan import Plan, search_again

    say(state="reading the plan")
    plan = Plan.load(request["plan"])
    pinned = frozenset(request["pinned"])
    say(state=f"walking from the plan, {len(pinned)} operators pinned")
    found = search_again(plan, pinned, request["budget"], request["seed"])
    return replace(found, notes=(*found.notes, f"{len(pinned)} operators were pinned by hand"))


class _Teller:
    """Says where planning stands, a few times a second, and whenever a plan was simulated."""

    def __init__(self, say: Say) -> None:
        self.say, self.last = say, 0.0

    def __call__(self, told: PlanningProgress) -> None:
        now = time.monotonic()
        if told.step_seconds is not None:
            self.say(
                method=told.method, step_seconds=told.step_seconds, fits=told.fits,
                peak_bytes=told.peak_bytes, bytes_moved=told.bytes_moved,
            )  # fmt: skip
        elif now - self.last > BETWEEN:
            what = told.progress.what if told.progress is not None else "begins"
            self.say(state=f"{told.method}: {what}")
            self.last = now
