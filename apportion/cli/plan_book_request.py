"""What `plan` makes of --devices: a plan book, with a plan for each number of devices.

Part of the room cli. Numbers from the command line and a cluster come in; a folder of plans goes
out, each of them as soon as it is found.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from apportion.cli.requests import check_outputs, complain, keep_result
from apportion.files import check_writable
from apportion.show import answer, note, plan_facts, plan_tables

if TYPE_CHECKING:
    from apportion.machine import Cluster
    from apportion.plan import Plan


def check_book(devices: str | None, out: Path | None, trace: Path | None, certify: bool) -> None:
    """Before any work: raises ValueError if a plan book cannot be what is asked for."""
    if devices is None:
        return
    if out is None:
        raise ValueError("Give --out DIR with --devices: the folder of the plan book.")
    if trace is not None or certify:
        raise ValueError("--trace and --certify are for a single plan; leave --devices out.")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; --devices writes a folder with a plan for each number.")
    sizes = book_sizes(devices)
    if out.is_dir():
        check_outputs(*(out / f"{size}.json" for size in sizes))
    else:
        check_writable(out)


def book_sizes(devices: str) -> list[int]:
    """The numbers of devices, most first; raises ValueError if they are none."""
    if not re.fullmatch(r"\d{1,5}(,\d{1,5})*", devices.replace(" ", "")):
        raise ValueError(f"--devices {devices!r} are no numbers; give some such as 8,6,4.")
    sizes = sorted({int(number) for number in devices.split(",")}, reverse=True)
    if sizes[-1] < 1:
        raise ValueError("--devices: a plan needs at least 1 device.")
    return sizes


def plan_book(
    devices: str,
    out: Path | None,
    whole: Cluster,
    planned: Callable[[Cluster], Plan],
    as_json: bool,
) -> int:
    """Plans for each number of a cluster's devices, writes each and answers; the status. Raises
    ValueError if the cluster has not as many, or the folder cannot be made."""
    from apportion.plan import page, smaller_cluster

    assert out is not None
    places = [smaller_cluster(whole, size) for size in book_sizes(devices)]
    try:
        out.mkdir(exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder {out}: {error.strerror}") from None
    plans: list[Plan] = []
    lost: list[str] = []
    for number, place in enumerate(places, 1):
        note(f"planning for {len(place.devices)} devices, {number} of {len(places)} plans")
        plans.append(planned(place))
        lost.append(keep_result(plans[-1].save, page(out, len(place.devices))))
    facts = {"book": str(out), "plans": [plan_facts(plan) for plan in plans]}
    answer(as_json, facts, plan_tables.compared(plans))
    complain(lost)
    return 0 if all(plan.feasible for plan in plans) and not any(lost) else 1
