"""What a request of the page may say; everything else is a ValueError in one sentence.

Part of the room serve. Parsed JSON comes in, checked values go out. Models are named, those of the
zoo and of transformers: a file that is executed, or read from a path, is for the command line.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from apportion.checked import (
    brief,
    parse_json,
    read_mapping,
    read_number,
    read_text,
    read_whole,
)
from apportion.quantity import parse_size_limit
from apportion.search import METHODS

LONGEST_BUDGET = 3600.0
MOST_DEVICES = 4096
AS_NEEDED = "as needed"  # as the command line does without an option: the host is made use of too
RECOMPUTE = (AS_NEEDED, "none", "auto", "modules", "full")
_NAMED = re.compile(r"[A-Za-z0-9_.:,=+-]{1,300}")


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """A search as the page asks for it. `memory_limit` is as on the command line; "": the memory of
    the devices."""

    model: str
    cluster: str
    method: str = "auto"
    budget: float = 30.0
    memory_limit: str = ""
    recompute: str = AS_NEEDED
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.model} on {self.cluster} by {self.method}"


def read_search(data: Any) -> SearchRequest:
    """The search that parsed JSON asks for."""
    data = read_mapping(data, "the request")
    method = read_text(data.get("method", "auto"), "the method", 100)
    if method != "auto" and method not in METHODS:
        raise ValueError(f"there is no method {brief(method)!r}")
    recompute = read_text(data.get("recompute", AS_NEEDED), "recompute", 100)
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute is {brief(recompute)!r}; choose {', '.join(RECOMPUTE)}")
    limit = read_text(data.get("memory_limit", ""), "the memory limit", 100).strip()
    if limit:
        parse_size_limit(limit)
    return SearchRequest(
        read_model(data.get("model")),
        read_cluster(data.get("cluster")),
        method,
        read_budget(data.get("budget", 30.0)),
        limit,
        recompute,
        read_whole(data.get("seed", 0), "the seed", 0, 1 << 31),
    )


def read_budget(value: Any) -> float:
    """Seconds of a search."""
    return read_number(value, "the budget", 0.0, LONGEST_BUDGET)


def read_model(value: Any) -> str:
    """The name of a model with its settings."""
    name = _named(value, "the model")
    if ".py" in name or ".json" in name or "/" in name:
        raise ValueError(
            f"{brief(name)!r} is a file: give it to apportion plan and open the plan here"
        )
    return name


def read_cluster(value: Any) -> str:
    """The name of a cluster that is no file."""
    name = _named(value, "the cluster")
    if name.endswith(".toml"):
        raise ValueError(f"{brief(name)!r} is a file; name a preset or a count such as 8xh100")
    if any(len(number) > 5 for number in re.findall(r"\d+", name)):
        raise ValueError(f"{brief(name)!r} is larger than what can be planned here")
    return name


def _named(value: Any, what: str) -> str:
    name = read_text(value, what, 300).strip()
    if not _NAMED.fullmatch(name):
        raise ValueError(f"{what} {brief(name)!r} is no name with settings, such as gpt2:layers=4")
    return name


def read_json(body: bytes) -> dict[str, Any]:
    """The mapping that the body of a request is."""
    try:
        return read_mapping(parse_json(body or b"{}"), "the request")
    except ValueError as error:
        raise ValueError(f"the request cannot be read: {error}") from None
