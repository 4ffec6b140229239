"""BlockMaker: the Blocks of Ops, from the Flows of their Values. A part of simulate/delta/.

In: a Lowering, a Cluster and a CostModel, and then Ops whose Choices have changed. Out: Blocks in a
BlockStore (block_store.py): what lowering and the costs of a full simulation give. The tasks are
lowered, priced and stored by one compiled call.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np

from apportion.columns import Ints, compiled
from apportion.lower import (
    ASSEMBLE,
    COLLECTIVE,
    COMPUTE,
    FLOWS,
    GROUPS,
    MEMBERS,
    NO_ENDS,
    TASKS,
    TRANSFER,
    Copies,
    Lowering,
    OpTasks,
    TaskGraph,
    lower_ops,
    pair_columns,
)
from apportion.machine import (
    Cluster,
    CostModel,
    algorithm_lines,
    price_table,
    times_messages,
)
from apportion.simulate.delta.block_store import (
    MessageFacts,
    add_blocks,
    empty_blocks,
    enlarged,
    room_for,
)
from apportion.simulate.delta.stage_names import LONGEST, NAMED, StageNames, name_stages, with_room
from apportion.simulate.delta.task_prices import (
    TaskPrices,
    empty_prices,
    pair_routes,
    price_tasks,
    route_messages,
    unknown_groups,
    with_group,
)
from apportion.simulate.durations import (
    issue_nanoseconds,
    nanoseconds,
)
from apportion.simulate.routes import Lines, message_lines

SPARE = 1024
NOTHING, LINES, ROOM = range(3)  # what is missing


class BlockMaker:
    """Blocks of Ops, each made once, and what it takes to make more."""

    def __init__(self, lowering: Lowering, cluster: Cluster, cost: CostModel) -> None:
        self.lowering, self.cluster, self.cost = lowering, cluster, cost
        self.devices = len(cluster.devices)
        self.on_device = cluster.communication_on_device
        self.on_links = not times_messages(cluster, cost)
        self.pairs = pair_columns(self.devices)
        self.operators = lowering.records.operators
        self.prices = price_table(cost, cluster, (*self.operators, ""))
        self.issue = self._issue()
        self.routes = pair_routes(self._pair_lines())
        self.restart(0)

    def restart(self, span: int) -> None:
        """Drops all Blocks; from now on no stage of a Value has more pieces than the span."""
        self.span = span
        self.names: StageNames | None = None
        self.blocks = empty_blocks(self.devices, np.full(7, SPARE))
        self.known: dict[tuple[int, ...], int] = {}  # Blocks, by what they were asked for

    def name_flows(self) -> StageNames:
        """The names of all Flows that there are now."""
        store, names = self.lowering.store, self.names_with_room()
        if names.named[NAMED] < store.used[FLOWS]:
            name_stages(store, names, self.span)
        return names

    def names_with_room(self) -> StageNames:
        """The names of Flows, with room for those that have none yet."""
        self.names = with_room(self.lowering.store, self.names)
        return self.names

    @property
    def fits(self) -> bool:
        """Whether no stage has more pieces than the span."""
        return self.names is None or int(self.names.named[LONGEST]) <= self.span

    def blocks_of(self, ops: Sequence[int], flows: Sequence[int]) -> Ints:
        """The Blocks of Ops under the Flows of all Values; one for those that are alike."""
        known, new, found = self.known, [], []
        for request in self.lowering.requests_of(ops, flows):
            block = known.get(request)
            if block is None:
                block = known[request] = len(known)
                new.append(request)
            found.append(block)
        if new:
            self._make_blocks(np.fromiter(chain.from_iterable(new), np.int64))
        return np.array(found, np.int64)

    def _make_blocks(self, requests: Ints) -> None:
        """Makes Blocks; what turns out to be missing is made first."""
        make = self._make if self.on_links else self._make_timed
        missing = make(requests)
        while missing != NOTHING:
            tasks = self._lower(requests)
            prices = empty_prices(tasks)
            route_messages(self.routes, tasks, prices)
            if missing == LINES:
                self._learn_lines(tasks, prices)
            else:
                more = room_for(tasks, prices, self._message_facts())
                self.blocks = enlarged(self.blocks, more)
            missing = make(requests)

    def _make(self, requests: Ints) -> int:
        names = self.name_flows()
        missing: int = make_blocks(
            self.blocks, self.lowering.store, self.lowering.records.flat, requests, self.prices,
            self.issue, self.routes, self.pairs, names.place, self.on_device,
        )  # fmt: skip
        return missing

    def _make_timed(self, requests: Ints) -> int:
        """The same where what a message takes depends on the others of its exchange."""
        tasks = self._lower(requests)
        prices, bare = empty_prices(tasks), self._bare(tasks)
        prices.duration[:] = nanoseconds(bare, self.cluster, self.cost)
        prices.issue[:] = issue_nanoseconds(bare, self.cluster, self.cost)
        fits = add_blocks(
            self.blocks, tasks, prices, self._message_facts(), self.name_flows().place,
            self.lowering.store.device,
        )  # fmt: skip
        return NOTHING if fits else ROOM

    def _lower(self, requests: Ints) -> OpTasks:
        lowering = self.lowering
        found: OpTasks = lower_ops(
            lowering.store, lowering.records.flat, requests, self.devices, self.pairs, 0
        )
        return found

    def _message_facts(self) -> MessageFacts:
        return MessageFacts(self.routes.lines, self.on_device, self.on_links)

    def _bare(self, it: OpTasks) -> TaskGraph:
        """The tasks as far as costs need them."""
        rows = slice(int(it.used[TASKS]))
        members = it.member[: it.used[MEMBERS]].tolist()
        edges = it.group_start[: it.used[GROUPS] + 1].tolist()
        groups = tuple(tuple(members[a:b]) for a, b in pairwise(edges))
        return bare_tasks(
            self.devices, it.kind[rows], it.device[rows], it.peer[rows], it.nbytes[rows],
            it.group[rows], it.pattern[rows], groups, op=it.operator[rows], part=it.part[rows],
            position=2 * it.owner[rows] + it.late[rows], flops=it.flops[rows],
            itemsize=it.itemsize[rows], taken=it.taken[rows], kinds=self.operators,
        )  # fmt: skip

    def _issue(self) -> Ints:
        """Nanoseconds to issue every operator, and last an assembly, to every device."""
        many = len(self.operators) + 1
        shape = self.devices, many
        op, device = np.tile(np.arange(many), self.devices), np.repeat(np.arange(shape[0]), many)
        kind, none = np.where(op < many - 1, COMPUTE, ASSEMBLE), np.full(len(op), -1)
        tasks = bare_tasks(
            self.devices, kind, device, none, _zeros(len(op)), none, none, (), op=op,
            kinds=self.operators,
        )  # fmt: skip
        return issue_nanoseconds(tasks, self.cluster, self.cost).reshape(shape)

    # What messages travel on

    def _pair_lines(self) -> Lines:
        """A line for every pair of devices."""
        pairs = np.arange(self.devices * self.devices)
        none = np.full(len(pairs), -1)
        sender, receiver = pairs // self.devices, pairs % self.devices
        kind = np.full(len(pairs), TRANSFER)
        tasks = bare_tasks(self.devices, kind, sender, receiver, _zeros(len(pairs)), none, none, ())
        return message_lines(tasks, self.cluster)[0]

    def _learn_lines(self, tasks: OpTasks, prices: TaskPrices) -> None:
        """Adds the lines of groups that tasks have and none are known of."""
        for pattern, group in unknown_groups(tasks, prices):
            alone = bare_tasks(
                self.devices, np.full(1, COLLECTIVE), np.full(1, group[0]), np.full(1, -1),
                _zeros(1), _zeros(1), np.full(1, pattern), (group,),
            )  # fmt: skip
            lines = message_lines(alone, self.cluster)[0]
            costs = [
                (each.alpha, each.beta) for each in algorithm_lines(pattern, group, self.cluster)
            ]
            self.routes = with_group(self.routes, pattern, group, lines, costs)


@compiled
def make_blocks(  # type: ignore[no-untyped-def]
    blocks, store, records, requests, prices, issue, routes, pairs, place, on_device
):  # fmt: skip
    """Lowers Ops, prices their tasks and adds their Blocks, unless something is missing."""
    tasks = lower_ops(store, records, requests, blocks.devices, pairs, np.int64(0))
    priced = empty_prices(tasks)
    if not route_messages(routes, tasks, priced):
        return LINES
    price_tasks(prices, issue, tasks, priced)
    messages = MessageFacts(routes.lines, on_device, True)
    fits = add_blocks(blocks, tasks, priced, messages, place, store.device)
    return NOTHING if fits else ROOM


def bare_tasks(
    devices: int,
    kind: Ints,
    device: Ints,
    peer: Ints,
    nbytes: Ints,
    group: Ints,
    pattern: Ints,
    groups: tuple[tuple[int, ...], ...],
    **others: Any,
) -> TaskGraph:
    """Tasks as far as costs need them: no slots, no dependencies."""
    none, n = _zeros(0), len(kind)
    columns = {
        "op": _zeros(n), "part": _zeros(n), "position": _zeros(n), "flops": np.zeros(n),
        "itemsize": np.ones(n, np.int64), "op_start": np.array([0, n]), "taken": _zeros(n),
    } | others  # fmt: skip
    return TaskGraph(
        devices, kind=kind, device=device, peer=peer, nbytes=nbytes, dep_start=none, dep=none,
        slot_device=none, slot_value=none, slot_region=none, slot_nbytes=none, slot_category=none,
        slot_base=none, slot_first=none, slot_last=none, in_start=none, in_slot=none,
        out_start=none, out_slot=none, copies=_no_copies, ends=NO_ENDS, group=group,
        pattern=pattern, groups=groups, **columns,
    )  # fmt: skip


def _zeros(count: int) -> Ints:
    return np.zeros(count, np.int64)


def _no_copies() -> Copies:
    raise AssertionError("costs need no copies")
