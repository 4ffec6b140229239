"""plan_for_ranks: the plan for as many ranks as a job has: from a file, a plan book, or made now.

Part of the room run. A path comes in on every rank: a saved plan, or the folder of a plan book; or
the name of a method. Rank 0 takes the plan for the number of ranks there are, or finds one within
seconds and adds it to the book, and tells the others; so they need not see the folder, and all run
the same plan.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

from apportion.capture import Program
from apportion.checkpoint import first_rank_says, rank_count
from apportion.machine import Cluster, cluster
from apportion.memory import DEVICE, HOST
from apportion.plan import (
    KEEP,
    Plan,
    PlanCosts,
    book_sizes,
    make_plan,
    page,
    plan_from_json,
    plan_to_json,
    planned_for,
    smaller_cluster,
    with_model,
)
from apportion.search import METHODS

SEARCH_SECONDS = 5.0  # for a plan that no book has


def plan_for_ranks(
    program: Program,
    where: str | Path,
    place: Cluster | str | None = None,
    note: Callable[[str], None] | None = None,
) -> Plan:
    """The plan at a path for the ranks of this job, or one that a method of that name finds for the
    cluster `place`: processes of this machine, unless it is given. Raises ValueError on all ranks
    if there is none and none can be found."""

    def found() -> str:
        ranks, path = rank_count(), Path(where)
        if not path.exists() and str(where) in ("auto", *METHODS):
            plan = _made_now(program, str(where), place, ranks)
        else:
            plan = _from_path(program, path, ranks, note or _say)
        return json.dumps(plan_to_json(plan), separators=(",", ":"))

    return plan_from_json(json.loads(first_rank_says(found)))


def _made_now(program: Program, method: str, place: Cluster | str | None, ranks: int) -> Plan:
    place = place or f"local:{ranks}"
    place = cluster(place) if isinstance(place, str) else place
    return make_plan(program, place, method, SEARCH_SECONDS)


def _from_path(program: Program, path: Path, ranks: int, note: Callable[[str], None]) -> Plan:
    if not path.exists():
        raise ValueError(f"there is no plan {path}, nor a method of that name")
    if not path.is_dir():
        return Plan.load(path)
    known = planned_for(path, ranks)
    if known is not None:
        return known
    sizes = book_sizes(path)
    if not sizes:
        raise ValueError(
            f"the plan book {path} is empty; make one with `apportion plan MODEL --cluster C "
            "--devices 8,6,4 --out DIR`"
        )
    note(f"{path} has no plan for {ranks} devices, so that one is searched for now")
    made = replanned(program, Plan.load(page(path, sizes[0])), ranks)
    with contextlib.suppress(ValueError):  # a folder that cannot be written to
        made.save(page(path, ranks))
    return made


def replanned(program: Program, known: Plan, ranks: int) -> Plan:
    """A plan for another number of devices, by the method of a known one and within its limits.
    State that lay on the host lies there again, as much as must; if none must, it was the user's
    wish, and is again."""
    host = [each.update for each in known.host_state if each.update in (HOST, DEVICE)]
    made = _planned_again(program, known, ranks, "auto" if host else KEEP)
    if host and not made.host_state:
        made = _planned_again(program, known, ranks, host[0])
    return with_model(made, known.model)


def _planned_again(program: Program, known: Plan, ranks: int, host_state: str) -> Plan:
    where = smaller_cluster(known.cluster, ranks)
    limit = None if known.memory_limit is None else float(min(known.memory_limit))
    return make_plan(
        program, where, known.method, SEARCH_SECONDS, limit, known.seed, PlanCosts(known.cost),
        recompute="auto" if known.recomputed else KEEP,
        offload="auto" if known.offloaded else KEEP,
        host_state=host_state,
        communication=known.strategy.communication.policy,
    )  # fmt: skip


def _say(text: str) -> None:
    print(f"apportion: {text}", file=sys.stderr)
