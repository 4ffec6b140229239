"""Workbench: the plans and searches that are open, for all tabs alike.

Part of the room serve. Checked requests come in, plain data for the page goes out. Everything is
kept here and nothing in a tab, so that a tab can be closed, opened again, or be there twice; a
change that was meant for an earlier version of a plan is refused.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from apportion.catalogue import known_models
from apportion.checked import read_field, read_flag, read_whole, read_wholes
from apportion.machine import known_clusters
from apportion.plan import (
    ChangeEffect,
    Plan,
    PlanEditor,
    decision,
    plan_to_json,
    read_plan,
)
from apportion.search import METHODS
from apportion.serve.page_requests import RECOMPUTE, SearchRequest, read_budget
from apportion.serve.search_process import RUNNING, SearchProcess
from apportion.show import page

MOST_PLANS = 24
MOST_SEARCHES = 2  # that run at once
MOST_CHANGES = 120  # of one operator that are listed
LIST_SECONDS = 0.2  # in which the first of them are simulated
KEPT_SEARCHES = 12


class OpenPlan:
    """A plan that is open. What it takes to change it is made at once, in a thread of its own:
    the first time on a machine that compiles, for a minute or so."""

    def __init__(self, number: int, name: str, plan: Plan) -> None:
        self.number, self.name, self.plan = number, name, plan
        self.lock = threading.Lock()
        self.decided = decision(plan)
        self.ready = threading.Event()
        self.failure = ""
        self._editor: PlanEditor | None = None
        threading.Thread(target=self._make_ready, daemon=True).start()

    def _make_ready(self) -> None:
        try:
            self._editor = PlanEditor(self.plan)
        except (ValueError, RuntimeError, MemoryError) as error:
            self.failure = f"this plan cannot be changed here: {error}"
        self.ready.set()

    @property
    def editor(self) -> PlanEditor:
        """Waits until it is there."""
        self.ready.wait()
        if self._editor is None:
            raise ValueError(self.failure)
        return self._editor

    def facts(self) -> dict[str, Any]:
        """What the table of plans shows."""
        editor = self._editor
        made = self.plan if editor is None else editor.settled
        found = {
            "id": self.number, "name": self.name, "model": made.model, "method": made.method,
            "cluster": made.cluster.name, "devices": len(made.cluster.devices),
            "step_seconds": made.predicted.step_seconds, "feasible": made.feasible,
            "peak_bytes": max(made.predicted.peak_bytes), "bytes_moved": made.predicted.bytes_moved,
            "decision": self.decided, "notes": list(made.notes), "ops": len(made.space.graph.ops),
            "version": 0, "pinned": [], "settled": True, "edited_seconds": None,
            "ready": self.ready.is_set(),
        }  # fmt: skip
        if editor is not None:
            found |= {
                "version": editor.version, "pinned": sorted(editor.pinned),
                "settled": editor.is_settled, "edited_seconds": editor.step_seconds,
            }  # fmt: skip
        return found


class Workbench:
    """What is open. Folders of searches are removed by `close`."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="apportion-serve-"))
        self.plans: dict[int, OpenPlan] = {}
        self.searches: dict[int, SearchProcess] = {}
        self._numbers = 0
        self._lock = threading.RLock()

    def close(self) -> None:
        """Ends all searches and removes what they have left."""
        for search in list(self.searches.values()):
            search.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    # What there is

    def choices(self) -> dict[str, Any]:
        """What the form offers."""
        return {
            "models": [{"name": m.name, "about": m.about} for m in known_models()],
            "clusters": [{"name": name, "about": about} for name, about in known_clusters()],
            "methods": [{"name": name, "about": row.help} for name, row in METHODS.items()],
            "recompute": list(RECOMPUTE),
        }

    def state(self) -> dict[str, Any]:
        """All plans and searches."""
        with self._lock:
            plans, searches = list(self.plans.values()), list(self.searches.items())
        return {
            "plans": [plan.facts() for plan in plans],
            "searches": [{"id": k, **search.facts()} for k, search in searches],
        }

    # Searches

    def search(self, request: SearchRequest) -> int:
        """Starts a search."""
        return self._start(str(request), request.to_json())

    def search_again(self, number: int, data: dict[str, Any]) -> int:
        """Starts walks from a plan with its changes, in which what is pinned stays."""
        opened = self._plan(number)
        with self._changing(opened, data):
            made, pinned = opened.editor.edited_plan(), sorted(opened.editor.pinned)
        if not pinned:
            raise ValueError("nothing is pinned: pin an operator, or start a new search")
        request = {
            "plan": plan_to_json(made), "pinned": pinned, "seed": made.seed,
            "budget": read_budget(data.get("budget", 10.0)),
        }  # fmt: skip
        return self._start(f"{opened.name}, {len(pinned)} pinned", request)

    def _start(self, name: str, request: dict[str, Any]) -> int:
        with self._lock:
            running = [s for s in self.searches.values() if s.status == RUNNING]
            if len(running) >= MOST_SEARCHES:
                raise ValueError(f"{MOST_SEARCHES} searches are running; stop one first")
            self._check_room()
            self._numbers += 1
            number, folder = self._numbers, self.folder / str(self._numbers)
            folder.mkdir()
            if "plan" in request:
                start = folder / "start.json"
                start.write_text(json.dumps(request["plan"]))
                request = request | {"plan": str(start)}
            self.searches[number] = SearchProcess(name, request, folder, self._found)
            for old in list(self.searches)[:-KEPT_SEARCHES]:
                if self.searches[old].status != RUNNING:
                    del self.searches[old]
            return number

    def _found(self, search: SearchProcess) -> None:
        self.open(search.name, Plan.load(search.out))

    def stop(self, number: int) -> None:
        """Stops a search."""
        if number not in self.searches:
            raise ValueError(f"there is no search {number}")
        self.searches[number].stop()

    # Plans

    def open(self, name: str, plan: Plan) -> int:
        """Opens a plan."""
        with self._lock:
            self._check_room()
            self._numbers += 1
            number = self._numbers
        opened = OpenPlan(number, name, plan)
        with self._lock:
            self.plans[number] = opened
        return number

    def upload(self, name: str, text: bytes) -> int:
        """Opens the file of a plan, checked as any other."""
        try:
            plan = read_plan(text)
        except ValueError as error:
            raise ValueError(f"this is not a plan that can be read: {error}") from None
        return self.open(name, plan)

    def _check_room(self) -> None:
        if len(self.plans) >= MOST_PLANS:
            raise ValueError(f"{MOST_PLANS} plans are open; close one first")

    def close_plan(self, number: int) -> None:
        """Closes a plan."""
        self._plan(number)
        with self._lock:
            self.plans.pop(number, None)

    def _plan(self, number: int) -> OpenPlan:
        found = self.plans.get(number)
        if found is None:
            raise ValueError(f"plan {number} is not open; it may have been closed in another tab")
        return found

    def ops(self, number: int) -> dict[str, Any]:
        """The operators of a plan with their cuts."""
        opened = self._plan(number)
        with opened.lock:
            editor = opened.editor
            known: dict[Any, str] = {}
            rows = []
            for index, op in enumerate(editor.space.graph.ops):
                choice = editor.choice(index)
                key = (editor.space.call_ids[index], choice)
                if key not in known:
                    known[key] = editor.words(index, choice)
                rows.append([index, op.name, op.kind, op.phase, op.module, known[key]])
            return {"version": editor.version, "ops": rows, "pinned": sorted(editor.pinned)}

    def changes(self, number: int, op: int) -> dict[str, Any]:
        """What an operator can be changed to; the first of them with what they do."""
        opened = self._plan(number)
        with opened.lock:
            editor = opened.editor
            several = editor.changes(op)[:MOST_CHANGES]
            ends, rows = time.perf_counter() + LIST_SECONDS, []
            for index, change in enumerate(several):
                effect = editor.effect(change) if time.perf_counter() < ends else None
                words = editor.words(change.op, change.choices[change.op])
                rows.append({
                    "index": index, "scope": change.scope, "ops": len(change.choices),
                    "words": words, "effect": _effect(effect),
                })  # fmt: skip
            now = editor.words(op, editor.choice(op))
            return {
                "version": editor.version, "op": op, "now": now, "changes": rows,
                "pinned": op in editor.pinned, "step_seconds": editor.step_seconds,
            }  # fmt: skip

    def try_change(self, number: int, data: dict[str, Any]) -> dict[str, Any]:
        """What a change does."""
        return self._with_change(number, data, lambda editor, change: editor.effect(change))

    def keep_change(self, number: int, data: dict[str, Any]) -> dict[str, Any]:
        """Changes a plan; with `pin` what was changed is pinned."""

        def keep(editor: PlanEditor, change: Any) -> ChangeEffect:
            found = editor.keep(change)
            if read_flag(data.get("pin", False), "pin"):
                editor.pin(change.choices, True)
            return found

        return self._with_change(number, data, keep)

    def _with_change(
        self, number: int, data: dict[str, Any], use: Callable[[PlanEditor, Any], ChangeEffect]
    ) -> dict[str, Any]:
        opened = self._plan(number)
        op = read_whole(read_field(data, "op", "the request"), "the operator")
        index = read_whole(read_field(data, "change", "the request"), "the change")
        with self._changing(opened, data):
            began, editor = time.perf_counter(), opened.editor
            several = editor.changes(op)
            if index >= len(several):
                raise ValueError(f"operator {op} has {len(several)} changes, not {index + 1}")
            effect = use(editor, several[index])
            return {"version": editor.version, "effect": _effect(effect),
                    "server_seconds": time.perf_counter() - began}  # fmt: skip

    def pin(self, number: int, data: dict[str, Any]) -> dict[str, Any]:
        """Pins operators as they are, or frees them."""
        opened = self._plan(number)
        ops = read_wholes(read_field(data, "ops", "the request"), "the operators")
        with self._changing(opened, data):
            opened.editor.pin(ops, read_flag(data.get("pin", True), "pin"))
            return {"version": opened.editor.version, "pinned": sorted(opened.editor.pinned)}

    @contextmanager
    def _changing(self, opened: OpenPlan, data: dict[str, Any]) -> Iterator[None]:
        """One at a time, and only the version that the page shows."""
        wanted = read_whole(read_field(data, "version", "the request"), "the version")
        with opened.lock:
            if opened.editor.version != wanted:
                raise ValueError(
                    "the plan was changed meanwhile, perhaps in another tab: it is shown anew"
                )
            yield

    def settle(self, number: int) -> Plan:
        """The plan with all changes, simulated as a whole."""
        opened = self._plan(number)
        with opened.lock:
            made = opened.editor.edited_plan()
            opened.decided = decision(made)
            return made

    def download(self, number: int) -> bytes:
        """The file of a plan with all changes, as the command line reads it."""
        return json.dumps(plan_to_json(self.settle(number)), separators=(",", ":")).encode()

    def report(self, number: int) -> bytes:
        """The report of a plan with all changes."""
        return page(self.settle(number), None).encode()


def _effect(effect: ChangeEffect | None) -> dict[str, Any] | None:
    if effect is None:
        return None
    return {name: getattr(effect, name) for name in ChangeEffect.__slots__}
