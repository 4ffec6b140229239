"""Small TaskGraphs and Clusters, made by hand or at random, for tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from apportion.columns import Ints
from apportion.graph import Graph, Op
from apportion.lower.task_graph import (
    CATEGORIES,
    NO_ENDS,
    Copies,
    TaskGraph,
    counted,
    verify,
)
from apportion.lower.task_kinds import (
    ASSEMBLE,
    COLLECTIVE,
    COMPUTE,
    TASK_KINDS,
    TRANSFER,
    TaskKinds,
)
from apportion.machine.collective import (
    ALL_TO_ALL,
    PATTERNS,
)
from apportion.machine.cost_model import CostModel
from apportion.machine.topology import Cluster, Device, Link, Route
from apportion.simulate.schedule import Network, Times, _all_ran, _schedule
from apportion.simulate.simulate import simulate
from apportion.simulate.timeline import Timeline

ACTIVATION = CATEGORIES.index("activation")

SURVIVES = -2
"""As the last task of a slot: it survives the step."""

EXACT = CostModel("exact", "test", 1.0)


@dataclass
class Maker:
    """Collects tasks and slots; each call returns the index of what it added."""

    devices: int
    tasks: list[tuple[int, int, int, int, float]] = field(default_factory=list)
    deps: list[tuple[int, ...]] = field(default_factory=list)
    slots: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    copies: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    together: dict[int, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    task_kinds: TaskKinds = TASK_KINDS

    def compute(
        self, device: int, flops: float = 0, nbytes: int = 0, after: Sequence[int] = ()
    ) -> int:
        return self._task(COMPUTE, device, -1, nbytes, flops, after)

    def transfer(self, device: int, peer: int, nbytes: int, after: Sequence[int] = ()) -> int:
        return self._task(TRANSFER, device, peer, nbytes, 0.0, after)

    def collective(
        self,
        members: Sequence[int],
        nbytes: int,
        after: Sequence[int] = (),
        pattern: int = ALL_TO_ALL,
    ) -> int:
        """`nbytes` are what all pairs send together."""
        made = self._task(COLLECTIVE, members[0], -1, nbytes, 0.0, after)
        self.together[made] = (tuple(members), pattern)
        return made

    def assemble(self, device: int, nbytes: int, after: Sequence[int] = ()) -> int:
        return self._task(ASSEMBLE, device, -1, nbytes, 0.0, after)

    def work(self, kind: int, device: int, nbytes: int, after: Sequence[int] = ()) -> int:
        """A task of any kind that works on one device."""
        return self._task(kind, device, -1, nbytes, 0.0, after)

    def slot(
        self,
        device: int,
        nbytes: int,
        first: int,
        last: int,
        category: int = ACTIVATION,
        base: int = -1,
    ) -> int:
        self.slots.append((device, nbytes, category, base, first, last))
        return len(self.slots) - 1

    def copy(
        self, source: int, target: int, message: int, assembly: int, nbytes: int | None = None
    ) -> None:
        """All bytes of the message, or so many, go from the one slot into the other."""
        nbytes = self.tasks[message][3] if nbytes is None else nbytes
        self.copies.append((source, target, message, assembly, nbytes))

    def done(self) -> TaskGraph:
        n = len(self.tasks)
        kind, device, peer, nbytes, flops = _columns(self.tasks, 5)
        slots = [(*slot[:5], n if slot[5] == SURVIVES else slot[5]) for slot in self.slots]
        slot_device, slot_nbytes, category, base, first, last = _columns(slots, 6)
        source, target, message, assembly, copied = _columns(self.copies, 5)
        none, zeros = np.zeros(0, np.int64), np.zeros(n + 1, np.int64)
        groups = tuple(dict.fromkeys(members for members, _ in self.together.values()))
        group, pattern = np.full(n, -1), np.full(n, -1)
        for task, (members, way) in self.together.items():
            group[task], pattern[task] = groups.index(members), way
        made = TaskGraph(
            devices=self.devices, kind=kind, op=np.arange(n), part=np.zeros(n, np.int64),
            device=device, peer=peer, position=np.arange(n), nbytes=nbytes,
            flops=flops.astype(np.float64), itemsize=np.full(n, 4),
            dep_start=np.cumsum([0, *map(len, self.deps)]),
            dep=np.array([d for deps in self.deps for d in deps], np.int64),
            slot_device=slot_device, slot_value=np.zeros_like(slot_device),
            slot_region=np.zeros_like(slot_device), slot_nbytes=slot_nbytes,
            slot_category=category, slot_base=base, slot_first=first, slot_last=last,
            in_start=zeros, in_slot=none, out_start=zeros, out_slot=none,
            copies=Copies(
                source, target, np.zeros_like(source), np.zeros_like(source),
                np.zeros_like(source), message, assembly, copied, none, none,
                np.zeros(1, np.int64), ((),),
            ),
            op_start=np.append(np.arange(n + 1), n), taken=none, ends=NO_ENDS,
            group=group, pattern=pattern, groups=groups,
            task_kinds=self.task_kinds,
        )  # fmt: skip
        return counted(made)

    def _task(
        self, kind: int, device: int, peer: int, nbytes: int, flops: float, after: Sequence[int]
    ) -> int:
        self.tasks.append((kind, device, peer, nbytes, flops))
        self.deps.append(tuple(after))
        return len(self.tasks) - 1


def _columns(rows: Sequence[tuple[float, ...]], width: int) -> list[Ints]:
    return list(np.array(rows, np.int64).reshape(-1, width).T)


def graph_of(tasks: TaskGraph) -> Graph:
    """A Graph with an Op for every task but the last."""
    return Graph((), tuple(Op(f"op{i}", "test.op", (), (), ()) for i in range(len(tasks) - 1)))


def ports(
    devices: int, *, bus: bool = False, on_device: bool = False, latency: float = 0.0
) -> Cluster:
    """Devices of 1 flop and 1 byte a nanosecond, with a port out and in, and perhaps one bus."""
    names = [f"{way}{k}" for k in range(devices) for way in ("out", "in")] + ["bus"] * bus
    middle: Route = (2 * devices,) if bus else ()
    rate = 1e9
    return Cluster(
        name="test", description="", communication_on_device=on_device,
        devices=tuple(
            Device(f"d{k}", "cpu", 1000, ((4, rate),), rate, 0.0, "test") for k in range(devices)
        ),
        links=tuple(Link(name, rate, latency, "test") for name in names),
        routes=tuple(
            tuple((2 * a, *middle, 2 * b + 1) if a != b else () for b in range(devices))
            for a in range(devices)
        ),
        host_routes=((),) * devices,
    )  # fmt: skip


def random_tasks(
    seed: int, count: int = 60, devices: int = 3, *, collectives: bool = False
) -> TaskGraph:
    """Valid tasks with random kinds, dependencies, lengths and slots."""
    rng = random.Random(seed)
    make = Maker(devices)
    while len(make.tasks) < count:
        index = len(make.tasks)
        after = sorted(rng.sample(range(index), min(index, rng.randrange(4))))
        device, size = rng.randrange(devices), rng.choice([1, 1, 2, 5, 40])
        if devices > 1 and rng.random() < 0.5:
            if collectives and rng.random() < 0.3:
                _exchange(make, rng, size, after)
            else:
                _message(make, rng, device, size, after)
        else:
            made = make.compute(device, flops=size, nbytes=rng.randrange(3), after=after)
            make.slot(device, size, made, rng.choice([made, SURVIVES]))
    tasks = make.done()
    verify(tasks)
    return tasks


def _message(make: Maker, rng: random.Random, device: int, size: int, after: Sequence[int]) -> None:
    peer = rng.choice([d for d in range(make.devices) if d != device])
    message = make.transfer(device, peer, size, after)
    assembly = make.assemble(peer, size, [message])
    source = make.slot(device, size, -1, message)
    make.copy(source, make.slot(peer, size, assembly, assembly), message, assembly)


def _exchange(make: Maker, rng: random.Random, size: int, after: Sequence[int]) -> None:
    """Every one of some devices sends `size` bytes to every other one."""
    members = sorted(rng.sample(range(make.devices), rng.randint(2, make.devices)))
    k = len(members)
    message = make.collective(members, k * (k - 1) * size, after, rng.randrange(len(PATTERNS)))
    sources = [make.slot(device, size, -1, message) for device in members]
    for device in members:
        assembly = make.assemble(device, size * (k - 1), [message])
        target = make.slot(device, size * (k - 1), assembly, assembly)
        for other, source in zip(members, sources, strict=True):
            if other != device:
                make.copy(source, target, message, assembly, size)


def small() -> tuple[TaskGraph, Timeline]:
    """Device 0 computes, sends, and device 1 assembles and computes."""
    make = Maker(2)
    a = make.compute(0, flops=1500)
    message = make.transfer(0, 1, 500, after=[a])
    taken = make.assemble(1, 200, after=[message])
    make.compute(1, flops=100, after=[taken])
    make.copy(
        make.slot(0, 500, a, message), make.slot(1, 500, taken, SURVIVES, ACTIVATION),
        message, taken,
    )  # fmt: skip
    tasks = make.done()
    return tasks, simulate(tasks, ports(2), EXACT)


def schedule_as_compiled(net: Network) -> Times:
    """What `schedule` gives, by the source of what is compiled."""
    return _all_ran(*_schedule.function(net, net.release.copy(), net.pending.copy()))
