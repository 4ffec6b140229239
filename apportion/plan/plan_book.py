"""A plan book: a folder with a plan for each number of devices that a job may have left.

Part of the room plan. Plans come in and are kept as `8.json`, `6.json` and so on, by how many
devices they are for; a number comes in and the plan for it goes out, if there is one. Then a job
that loses a machine need not search before it goes on.
"""

from __future__ import annotations

import re
from pathlib import Path

from apportion.machine import Cluster, cluster, first_devices
from apportion.plan.plan import Plan

_PAGE = re.compile(r"(\d{1,6})\.json")


def page(book: Path, devices: int) -> Path:
    """Where a book has the plan for so many devices."""
    return book / f"{devices}.json"


def book_sizes(book: Path) -> list[int]:
    """For how many devices a book has plans, most first."""
    try:
        names = [_PAGE.fullmatch(path.name) for path in book.iterdir()]
    except OSError as error:
        raise ValueError(f"cannot read the plan book {book}: {error.strerror}") from None
    return sorted((int(name[1]) for name in names if name), reverse=True)


def planned_for(book: Path, devices: int) -> Plan | None:
    """The plan for so many devices; None if the book has none. Raises ValueError if what it has is
    no such plan."""
    path = page(book, devices)
    if not path.exists():
        return None
    found = Plan.load(path)
    if len(found.cluster.devices) != devices:
        raise ValueError(f"{path} is a plan for {len(found.cluster.devices)} devices")
    return found


def smaller_cluster(whole: Cluster, devices: int) -> Cluster:
    """What is left of a cluster with so many devices. On this machine processes share its cores, so
    fewer of them have more each; elsewhere it is the first devices."""
    if len(whole.devices) == devices:
        return whole
    if whole.name.startswith("local:"):
        return cluster(f"local:{devices}")
    return first_devices(whole, devices, f"{whole.name}:{devices}")
