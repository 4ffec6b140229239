"""Communication: when a step's messages travel, in which order and in what pieces.

A part of split/: a decision of a Strategy. lower/coalesce.py and late_tasks.py carry it out, and so
simulation and ranks see the same.

A **policy** is who decided, by the name of what was published, or `auto`:

    none           no overlap: gradients travel when the backward pass is over
    wfbp           wait-free backpropagation: they travel while it goes on, and the step ends when
                   all parameters are new
    p3             the next step begins meanwhile, and waits for each parameter where it first reads
                   it; messages travel in slices, those that are read first before others
    tictac         likewise, whole and in an order that is worked out from how long things take
    bytescheduler  as p3, with the slice and the credit that take least time

What was decided:

    overlaps       the next step begins before the updates of this one are done
    held           gradients wait until the backward pass is over
    order          in which messages that wait for a wire get it: `made`, as they were posted;
                   `need`, as they are read; `ranked`, as `ranking` says
    slice_bytes    a message is sent in pieces of so many bytes, between which others may overtake
                   it; 0: whole
    credit_bytes   how much a wire may have taken and not yet delivered, which nothing overtakes; 0:
                   as much as it likes
    ranking        parameters, as Values of the opened Graph: the first is sent first
    algorithm      what a sum or a gather over several devices is made of: `direct`, a message from
                   each to each; `hierarchical`, groups of near devices do it among themselves and
                   one of them with other groups; `tree`, halves of halves. Empty before it is
                   decided: simulation then takes whichever is cheapest for each exchange
    levels         of an algorithm that has groups, the coarsest first: the group of every device
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from apportion.checked import (
    brief,
    read_field,
    read_flag,
    read_list,
    read_mapping,
    read_number,
    read_text,
    read_whole,
)

NONE, WFBP, P3, TICTAC, BYTESCHEDULER, AUTO = (
    "none", "wfbp", "p3", "tictac", "bytescheduler", "auto",
)  # fmt: skip
POLICIES = (NONE, WFBP, P3, TICTAC, BYTESCHEDULER, AUTO)
MADE, NEED, RANKED = "made", "need", "ranked"
ORDERS = (MADE, NEED, RANKED)
DIRECT, HIERARCHICAL, TREE = "direct", "hierarchical", "tree"
ALGORITHMS = (DIRECT, HIERARCHICAL, TREE)


@dataclass(frozen=True, slots=True)
class Communication:
    """What is decided about a step's messages."""

    policy: str = WFBP
    overlaps: bool = False
    held: bool = False
    order: str = MADE
    slice_bytes: int = 0
    credit_bytes: int = 0
    ranking: tuple[int, ...] = ()
    algorithm: str = ""
    levels: tuple[tuple[int, ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        lists = {"ranking": list(self.ranking), "levels": [list(level) for level in self.levels]}
        return found | lists

    @property
    def algorithm_in_words(self) -> str:
        """What exchanges are made of; empty where it is not decided."""
        if not self.levels:
            return self.algorithm
        if self.algorithm == TREE:
            return f"trees of {len(self.levels) + 1} levels"
        groups = " and ".join(str(len(set(level))) for level in self.levels)
        return f"{self.algorithm} over {groups} groups"

    def __str__(self) -> str:
        """The decisions in words."""
        relays = f"; exchanges are {self.algorithm_in_words}" * bool(self.levels)
        return self._when + relays

    @property
    def _when(self) -> str:
        if self.held:
            return "gradients travel when the backward pass is over"
        if not self.overlaps:
            return "gradients travel while the backward pass goes on"
        cut = f"slices of {in_bytes(self.slice_bytes)}" if self.slice_bytes else "whole messages"
        credit = f", {in_bytes(self.credit_bytes)} of them on the wire" * bool(self.credit_bytes)
        order = {MADE: "as they are made", NEED: "in the order of need", RANKED: "as ranked"}
        return f"{cut}{credit}, {order[self.order]}, while the next step begins"


WITHIN = Communication()


def in_bytes(count: int) -> str:
    """A number of bytes in words."""
    for size, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= size and count % size == 0:
            return f"{count // size} {name}"
    return f"{count} bytes"


def read_communication(data: Any) -> Communication:
    """The Communication that `to_json` wrote; ValueError if it is none."""
    if data is None:
        return WITHIN
    what = "the communication"
    data = read_mapping(data, what)
    policy = _one_of(read_field(data, "policy", what), POLICIES, "the policy of the communication")
    if "early" in data:  # as it was written before there were slices
        read_number(data["early"], "the early share of the communication", 0.0, 1.0)
        return Communication(policy, policy == P3, order=NEED if policy == P3 else MADE)
    ranking = read_list(read_field(data, "ranking", what), "the ranking of the communication")
    return Communication(
        policy,
        read_flag(read_field(data, "overlaps", what), "whether the communication overlaps"),
        read_flag(read_field(data, "held", what), "whether the communication is held"),
        _one_of(read_field(data, "order", what), ORDERS, "the order of the communication"),
        read_whole(read_field(data, "slice_bytes", what), "a slice of the communication"),
        read_whole(read_field(data, "credit_bytes", what), "the credit of the communication"),
        tuple(read_whole(value, "a value that the communication ranks") for value in ranking),
        *_read_algorithm(data),
    )


def _read_algorithm(data: Mapping[str, Any]) -> tuple[str, tuple[tuple[int, ...], ...]]:
    """The algorithm and its levels; plans were written without before there was a choice."""
    given = data.get("algorithm", "")
    what = "the algorithm of the communication"
    algorithm = _one_of(given, ALGORITHMS, what) if given else ""
    levels = read_list(data.get("levels", []), "the levels of the communication")
    found = tuple(
        tuple(
            read_whole(group, "a group of the communication")
            for group in read_list(level, "a level of the communication")
        )
        for level in levels
    )
    if bool(found) != (algorithm in (HIERARCHICAL, TREE)):
        raise ValueError(
            "the communication has levels where its algorithm is hierarchical or a tree, and "
            "nowhere else"
        )
    return algorithm, found


def _one_of(value: Any, known: tuple[str, ...], what: str) -> str:
    found = read_text(value, what)
    if found not in known:
        raise ValueError(f"{what} is one of {', '.join(known)}, not {brief(found)!r}")
    return found
