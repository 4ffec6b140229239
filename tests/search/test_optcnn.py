"""optcnn: its tables against the definition of t_O, its result against exhaustive search, its plans
against the single device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from random import Random

import numpy as np
import pytest
from compare_runs import compare
from graphs import Maker, captured

from apportion import zoo
from apportion.capture.capture import capture
from apportion.describe.descriptions import find_description
from apportion.describe.interval import Box
from apportion.graph import FORWARD, PARAMETER, UPDATE
from apportion.lower.lower import lower
from apportion.lower.task_kinds import (
    COMPUTE,
)
from apportion.machine.cluster import cluster
from apportion.machine.collective import all_reduce
from apportion.machine.cost_model import (
    CostModel,
    default_cost,
)
from apportion.machine.topology import Cluster
from apportion.search.baselines.data import data
from apportion.search.layers.layers import UNMAPPED, find_layers
from apportion.search.layers.optcnn import minimise, optcnn, optcnn_paper
from apportion.search.layers.summed_seconds import MOST_GRIDS, SummedSeconds, layer_grids
from apportion.search.problem import Problem
from apportion.search.tables.eliminate import TooWide, eliminate, try_all_choices
from apportion.simulate.durations import nanoseconds
from apportion.simulate.simulate import simulate
from apportion.split.part import Part
from apportion.split.space import Space
from apportion.split.strategy import Choice, Strategy, unsplit_choice, verify_strategy

NEVER = math.inf


def machine(spec: str, speed: float = 1.0) -> Cluster:
    """A cluster whose links are so many times faster, and with no latency if they are."""
    it = cluster(spec)
    if speed == 1.0:
        return it
    links = (replace(k, bandwidth=k.bandwidth * speed, latency=0.0) for k in it.links)
    return replace(it, links=tuple(links))


def problem(spec: str, on: Cluster, limit: int | None = None) -> Problem:
    limits = None if limit is None else (limit,) * len(on.devices)
    return Problem(captured(spec)[1], on, default_cost(on), limits)


@cache
def costs(spec: str, on: str, speed: float = 1.0, paper: bool = False) -> SummedSeconds:
    return SummedSeconds(problem(spec, machine(on, speed)), paper)


def some_rows(it: SummedSeconds, rng: Random) -> list[int]:
    """Grids at random, each one that all Ops of its layer can be cut by."""
    rows = [rng.randrange(grids.rows) for grids in it.grids]
    while wrong := it.illegal(rows):
        for layer in wrong:
            rows[layer] = rng.randrange(it.grids[layer].rows)
    return rows


# t_O by its definition: element by element, from the Splits of the Choices

Element = tuple[int, ...]


@cache
def elements(box: Box) -> frozenset[Element]:
    return frozenset(itertools.product(*(range(low, high) for low, high in box)))


class Definition:
    """The summed seconds of a Strategy whose Ops are divided into these layers."""

    def __init__(self, given: Problem, layers: Sequence[Sequence[int]], strategy: Strategy) -> None:
        self.space, self.graph = given.space, given.space.graph
        self.cluster, self.cost = given.cluster, given.cost
        self.strategy = strategy
        self.layers = layers
        self.layer = {op: k for k, ops in enumerate(layers) for op in ops}

    def seconds(self) -> float:
        after = dict(self.graph.state)
        total = self.compute()
        for value in range(len(self.graph.values)):
            made = self.graph.producer[value] or (
                self.graph.producer[after[value]] if value in after else None
            )
            if made is not None:
                readers = {self.layer[op] for op in self.graph.consumers[value]}
                total += sum(self.exchange(value, made, layer) for layer in sorted(readers))
        return total

    def compute(self) -> float:
        """What the slowest part of every Op takes."""
        if not self.cost.tables:
            return sum(self.slowest(op) for op in self.layer)
        tasks = lower(self.space, self.strategy, len(self.cluster.devices))
        duration = nanoseconds(tasks, self.cluster, self.cost)
        slowest = {}
        for task in np.flatnonzero(tasks.kind == COMPUTE).tolist():
            op = int(tasks.op[task])
            slowest[op] = max(slowest.get(op, 0), int(duration[task]))
        return sum(slowest.values()) * 1e-9

    def slowest(self, op: int) -> float:
        """By the head of cost_model.py, where nothing was measured."""
        ends, (device, *_) = self.graph.ops[op], self.cluster.devices
        description = find_description(ends.kind)
        if description is not None and description.alias:
            return 0.0
        sizes = [self.size(v) for v in (*ends.inputs, *ends.outputs)]
        found = []
        for _, part in self.parts(op):
            regions = (*part.inputs, *part.outputs)
            nbytes = sum(
                len(elements(box)) * size for box, size in zip(regions, sizes, strict=True)
            )
            rate = dict(device.flops)[self.size(ends.outputs[0])]
            found.append(max(part.flops / rate, nbytes / device.memory_bandwidth))
        return max(found) / self.cost.efficiency

    def size(self, value: int) -> int:
        """Bytes of an element."""
        meant = self.graph.values[value]
        return meant.nbytes // max(math.prod(meant.shape or ()), 1)

    def parts(self, op: int) -> Iterator[tuple[int, Part]]:
        choice = self.strategy.choices[op]
        split = self.space.split(op, choice.parts)
        for n, device in enumerate(choice.devices):
            yield device, split.parts[n % choice.count]

    def exchange(self, value: int, made: tuple[int, int], layer: int) -> float:
        op, place = made
        held = {device: (part.outputs[place], part.terms[place]) for device, part in self.parts(op)}
        wanted: dict[int, Box] = {}
        for reader in self.graph.consumers[value]:
            if self.layer[reader] != layer:
                continue
            for device, part in self.parts(reader):
                for k, v in enumerate(self.graph.ops[reader].inputs):
                    if v == value:
                        wanted[device] = hull(wanted.get(device), part.inputs[k])
        return self.moved(held, wanted, self.size(value), self.space.factors(value))

    def moved(
        self,
        held: dict[int, tuple[Box, int]],
        wanted: dict[int, Box],
        size: int,
        factors: tuple[int, ...],
    ) -> float:
        terms = len({term for _, term in held.values()})
        bytes_direct = self.messages(held, wanted, size)
        if terms == 1 or not bytes_direct:
            return self.link_seconds(bytes_direct)
        if {device: box for device, (box, _) in held.items()} == wanted:
            groups: dict[Box, list[int]] = {}
            for device, (box, _) in sorted(held.items()):
                groups.setdefault(box, []).append(device)
            return max(  # on one node groups share no links
                all_reduce(tuple(group), len(elements(box)) * size, self.cluster).seconds
                for box, group in groups.items()
            )
        owners = [d for _, d in sorted((term, device) for device, (_, term) in held.items())]
        long = [k for k, f in enumerate(factors) if f >= len(owners)]
        spread = {owners[0]: tuple((0, f) for f in factors)}
        if long:
            cuts = [begin(factors[long[0]], len(owners), k) for k in range(len(owners) + 1)]
            spread = {
                owner: tuple(
                    (cuts[n], cuts[n + 1]) if k == long[0] else (0, f)
                    for k, f in enumerate(factors)
                )
                for n, owner in enumerate(owners)
            }
        reduced = self.messages(held, spread, size)
        again = self.messages({d: (box, 0) for d, box in spread.items()}, wanted, size)
        if sum(reduced.values()) + sum(again.values()) < sum(bytes_direct.values()):
            return self.link_seconds(reduced) + self.link_seconds(again)
        return self.link_seconds(bytes_direct)

    def messages(
        self, held: dict[int, tuple[Box, int]], wanted: dict[int, Box], size: int
    ) -> dict[tuple[int, int], int]:
        """Bytes from device to device: every element of every term once, from the nearest after."""
        count = len(self.cluster.devices)
        found: dict[tuple[int, int], int] = {}
        for device, box in wanted.items():
            for copy in set(held.values()):
                if held.get(device) == copy:
                    continue
                both = len(elements(box) & elements(copy[0]))
                turns = [(device + k) % count for k in range(count)]
                sender = next(d for d in turns if held.get(d) == copy)
                if both:
                    found[sender, device] = found.get((sender, device), 0) + both * size
        return found

    def link_seconds(self, messages: dict[tuple[int, int], int]) -> float:
        busy: dict[int, float] = {}
        late = 0.0
        for (a, b), nbytes in messages.items():
            route = [self.cluster.links[k] for k in self.cluster.routes[a][b]]
            late = max(late, sum(link.latency for link in route))
            for k in self.cluster.routes[a][b]:
                busy[k] = busy.get(k, 0.0) + nbytes / self.cluster.links[k].bandwidth
        return max(busy.values(), default=0.0) + late


def begin(extent: int, parts: int, index: int) -> int:
    """Where the index-th of `parts` ranges begins: the first ones are the longer ones."""
    small, more = divmod(extent, parts)
    return index * small + min(index, more)


def hull(box: Box | None, other: Box) -> Box:
    if box is None:
        return other
    pairs = zip(box, other, strict=True)
    return tuple((min(a[0], b[0]), max(a[1], b[1])) for a, b in pairs)


CASES = [
    ("mlp:tiny", "4xp100"),
    ("lenet:tiny", "4xp100"),
    ("lenet:tiny", "6xp100"),
    ("wresnet:tiny", "3xp100"),
    ("gpt2:tiny", "4xp100"),
    ("rnn:tiny", "2xp100"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "on"), CASES)
def test_tables_are_what_the_definition_says(spec: str, on: str) -> None:
    it, rng = costs(spec, on), Random(3)
    layers = [layer.ops for layer in it.layers]
    for _ in range(2):
        rows = some_rows(it, rng)
        expected = Definition(it.problem, layers, it.strategy(rows)).seconds()
        found = it.energy.value(rows)
        assert found == pytest.approx(expected, rel=1e-9, abs=2e-9 * len(it.graph.ops)), rows


# Against exhaustive search


def diamond() -> Space:
    """Two products of one product, added."""
    make = Maker()
    x = make.op(
        "aten.mm.default", make.value(64, 96), make.value(96, 64, role=PARAMETER), out=(64, 64)
    )
    left = make.op("aten.mm.default", x, make.value(64, 32, role=PARAMETER), out=(64, 32))
    right = make.op("aten.mm.default", x, make.value(64, 32, role=PARAMETER), out=(64, 32))
    make.op("aten.add.Tensor", left, right, 1, out=(64, 32))
    return make.space()


TINY = {"diamond": diamond, "mlp": lambda: captured("mlp:tiny")[1]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices", "speed"),
    [("diamond", 2, 1.0), ("diamond", 2, 1e-4), ("mlp", 3, 1.0), ("mlp", 3, 1e-4), ("mlp", 4, 1e3)],
)
def test_the_result_equals_exhaustive_search(name: str, devices: int, speed: float) -> None:
    on = machine(f"{devices}xp100", speed)
    given = Problem(TINY[name](), on, slow(on))
    it = SummedSeconds(given)
    layers = [layer.ops for layer in it.layers]
    choices = [[[it.choice(op, row) for op in layer.ops] for row in range(grids.rows)]
               for layer, grids in zip(it.layers, it.grids, strict=True)]  # fmt: skip
    tried = []
    for several in itertools.product(*choices):
        of = {op: c for ops, some in zip(layers, several, strict=True)
              for op, c in zip(ops, some, strict=True)}  # fmt: skip
        strategy = Strategy(tuple(of[op] for op in range(len(of))))
        tried.append(Definition(given, layers, strategy).seconds())
    found = optcnn(given)
    assert found.lower_bound == pytest.approx(min(tried), rel=1e-9)
    assert Definition(given, layers, found.strategy).seconds() == pytest.approx(
        min(tried), rel=1e-4
    )
    assert len(tried) >= 64 and min(tried) < max(tried)


def slow(on: Cluster) -> CostModel:
    """Costs far above the published ones, so that it pays to cut small things."""
    return CostModel("slow", "for tests", 1e-6)


@pytest.mark.parametrize("spec", ["mlp:tiny", "lenet:tiny", "gpt2:tiny"])
def test_elimination_equals_descent_bounds_and_exhaustion(spec: str) -> None:
    """No choice of grids is below the result; on the smallest, all are tried."""
    it, rng = costs(spec, "4xp100"), Random(0)
    _, best = eliminate(it.energy)
    for _ in range(200):
        assert it.energy.value([rng.randrange(n) for n in it.energy.sizes]) >= best
    if math.prod(it.energy.sizes) < 10_000:
        assert try_all_choices(it.energy)[1] == pytest.approx(best)


# Plans run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "devices"),
    [("gpt2:tiny", 2), ("gpt2:tiny", 6), ("nmt:tiny", 3), ("nmt:tiny", 4), ("wresnet:tiny", 4),
     ("wresnet:tiny", 3), ("lenet:tiny", 2), ("lenet:tiny", 6)],
)  # fmt: skip
def test_plans_train_the_same_model(spec: str, devices: int) -> None:
    """The best grids where links are fast, and grids at random."""
    program, space = captured(spec)
    on = machine(f"{devices}xp100", 1e6)
    given = Problem(space, on, slow(on))
    best = optcnn(given).strategy
    assert max(choice.count for choice in best.choices) == devices
    it = SummedSeconds(given)
    other = it.strategy(some_rows(it, Random(devices)))
    for strategy in (best, other) if "lenet" in spec else (best,):
        verify_strategy(space, strategy, devices)
        found = compare(program, space, strategy, devices, steps=1)
        assert found.equal, found


@pytest.mark.parametrize(
    "spec", ["wresnet:tiny", "nmt:tiny", pytest.param("amoebanet:tiny", marks=pytest.mark.slow)]
)
def test_grids_of_several_axes_are_what_lowering_takes(spec: str) -> None:
    """Regions put together axis by axis are those of the Split along all axes: windows, wide ones
    too, strides and slices among them."""
    it, rng = costs(spec, "4xp100"), Random(1)
    checked = 0
    for _ in range(2):
        rows = some_rows(it, rng)
        for op in range(len(it.graph.ops)):
            row = rows[it.at[op][0]]
            choice = it.choice(op, row)
            split = it.space.split(op, choice.parts)
            for n, device in enumerate(choice.devices):
                part = split.parts[n % choice.count]
                for place, box in enumerate(part.inputs):
                    assert it.boxes(op, place)[row, device].tolist() == [list(r) for r in box]
                for place, box in enumerate(part.outputs):
                    assert it.held_regions(op, place).terms[row] == split.terms[place]
                    assert it.boxes(op, -1 - place)[row, device].tolist() == [list(r) for r in box]
                checked += sum(p > 1 for p in choice.parts) > 1
    assert checked > 100


# What it finds


def pattern(it: SummedSeconds, rows: Sequence[int]) -> list[dict[str, int]]:
    """For every layer the axes that are cut, and into how many parts."""
    return [
        {label.name: int(d) for label, d in zip(layer.labels, grids.degrees[row], strict=True)
         if d > 1}
        for layer, grids, row in zip(it.layers, it.grids, rows, strict=True)
    ]  # fmt: skip


@cache
def published(spec: str) -> Problem:
    it = zoo.load(spec, meta=True)
    on = cluster("flexflow-p100:4")
    return Problem(Space(capture(it.step, it.model, it.optimizer, it.batch).graph), on,
                   default_cost(on))  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("paper", [False, True])
def test_vgg_has_the_published_pattern(paper: bool) -> None:
    """Convolutions by sample, the large dense layers by channel. What differs, and why, is in
    docs/optcnn.md."""
    it = SummedSeconds(published("vgg16:batch=128"), paper)
    found = minimise(it, it.energy, NEVER, 0)
    assert found.exact
    cuts = pattern(it, found.rows)
    assert len(cuts) == 22  # 13 convolutions, 5 poolings, 3 dense layers, softmax
    two, three = [{"n": 4}] * 2 + [{"i0": 4}], [{"n": 4}] * 3 + [{"i0": 4}]
    assert cuts[:18] == 2 * two + 3 * three
    assert cuts[18:20] == [{"j": 4}, {"j": 4}]


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["vgg16:tiny", "inception-v3:tiny"])
def test_published_models_reduce_to_two_layers(spec: str) -> None:
    """By eliminating layers between two others, as the paper does."""
    energy = costs(spec, "4xp100").energy
    near: dict[int, set[int]] = {k: set() for k in range(len(energy.sizes))}
    for a, b in energy.pairs:
        near[a].add(b)
        near[b].add(a)
    while between := [k for k, some in near.items() if len(some) == 2]:
        a, b = near.pop(between[0])
        near[a] = near[a] - {between[0]} | {b}
        near[b] = near[b] - {between[0]} | {a}
    assert len(near) == 2


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["lenet:batch=128", "alexnet:batch=128"])
def test_it_is_faster_than_data_parallelism_in_the_simulator(spec: str) -> None:
    given = published(spec)
    seconds = [
        simulate(lower(given.space, s, 4), given.cluster, given.cost).step_seconds
        for s in (optcnn(given).strategy, data(given).strategy)
    ]
    assert seconds[0] < seconds[1]


def test_the_paper_counts_every_transfer() -> None:
    given = problem("mlp:tiny", machine("4xp100"))
    assert SummedSeconds(given, paper=True).energy.value([0, 0, 0]) <= SummedSeconds(
        given
    ).energy.value([0, 0, 0])
    verify_strategy(given.space, optcnn_paper(given).strategy, 4)


# Layers


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["gpt2:tiny", "nmt:tiny", "wresnet:tiny", "inception-v3:tiny"])
def test_every_op_is_in_one_layer_with_what_belongs_to_it(spec: str) -> None:
    space = captured(spec)[1]
    graph = space.graph
    layers, _ = find_layers(space)
    home = {op: k for k, layer in enumerate(layers) for op in layer.ops}
    assert sorted(home) == list(range(len(graph.ops)))
    assert sum(len(layer.ops) for layer in layers) == len(graph.ops)
    for index, op in enumerate(graph.ops):
        if op.forward is not None and op.kind != "aten.add.Tensor":  # sums are with their readers
            assert home[index] == home[op.forward]
        if op.phase == UPDATE:
            made = graph.producer[op.inputs[1]]
            assert made is not None and home[index] == home[made[0]]


def test_features_of_a_square_weight_are_told_apart() -> None:
    """Between residual additions in and out features are one class; cut along the one, a layer
    must not exchange its weights with itself."""
    it = costs("gpt2:tiny", "4xp100")
    for layer, grids in zip(it.layers, it.grids, strict=True):
        if not layer.name.endswith("proj.addmm"):
            continue
        (last,) = [k for k, label in enumerate(layer.labels) if label.name == "j"]
        row = next(r for r in range(grids.rows) if grids.degrees[r].tolist()[last] == 4)
        for op in layer.ops:
            if it.graph.ops[op].phase == UPDATE:
                made = it.graph.producer[it.graph.ops[op].inputs[1]]
                assert made is not None
                update, gradient = it.boxes(op, -1)[row], it.held_regions(*made)
                assert (update == gradient.box[row]).all() and gradient.terms[row] == 1


def test_normalisations_and_losses_are_cut_along_what_they_reduce() -> None:
    """Else data parallelism would not be among the strategies."""
    for spec in ("wresnet:tiny", "gpt2:tiny"):
        it = costs(spec, "2xp100")
        rows = []
        for layer, grids in zip(it.layers, it.grids, strict=True):
            first = [k for k, label in enumerate(layer.labels) if label.extent == 6]
            cut = [r for r in range(grids.rows) if first and grids.degrees[r, first[0]] == 2]
            rows.append(cut[0] if cut else grids.rows - 1)
        by_data = data(it.problem).strategy
        for op, choice in enumerate(it.strategy(rows).choices):
            if it.graph.ops[op].phase == FORWARD and by_data.choices[op].count > 1:
                assert choice.count == 2, it.graph.ops[op].name


# Grids


@pytest.mark.parametrize(("extents", "devices"), [((8, 3, 7), 4), ((5, 2), 6), ((9,), 7), ((), 4)])
def test_grids_are_all_that_divide_the_devices(extents: tuple[int, ...], devices: int) -> None:
    found = layer_grids(extents, devices)
    every = [
        row
        for row in itertools.product(*(range(1, n + 1) for n in extents))
        if devices % math.prod(row) == 0
    ]
    assert sorted(map(tuple, found.degrees[:-1].tolist())) == sorted(every)
    assert not found.left_out
    for row, used, index in zip(found.degrees, found.used, found.index, strict=True):
        parts = [tuple(i) for i in index[used].tolist()]
        if row.prod() > 1:
            assert sorted(parts) == sorted(itertools.product(*map(range, row.tolist())))
            assert used.tolist() == [d < row.prod() for d in range(devices)]
    assert found.used[-1].all() and found.degrees[-1].prod() == 1


def test_too_many_grids_are_left_out_and_counted() -> None:
    found = layer_grids((64,) * 6, 64)
    assert found.rows == MOST_GRIDS and found.left_out > 0
    assert found.degrees.prod(axis=1)[1:-1].min() == 64


# Beyond elimination


@pytest.mark.slow
def test_what_is_too_wide_gets_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem("gpt2:tiny", machine("4xp100"))
    exact = optcnn(given)
    assert exact.lower_bound is not None and not exact.notes
    monkeypatch.setattr("apportion.search.layers.optcnn.WIDEST", 100)
    with pytest.raises(TooWide):
        eliminate(SummedSeconds(given).energy, 100)
    found = optcnn(given, budget=5.0)
    assert found.lower_bound is not None
    assert found.lower_bound <= exact.lower_bound * (1 + 1e-9)
    it = SummedSeconds(given)
    reached = Definition(given, [k.ops for k in it.layers], found.strategy).seconds()
    assert reached >= exact.lower_bound * (1 - 1e-3)


# Memory


def peak(given: Problem, strategy: Strategy) -> int:
    tasks = lower(given.space, strategy, given.devices)
    return max(simulate(tasks, given.cluster, given.cost).peak_bytes)


def test_a_plan_fits_the_memory_limit_where_grids_can() -> None:
    on = machine("4xp100")
    spec = "mlp:tiny"
    free = problem(spec, on)
    most = peak(free, optcnn(free).strategy)
    fast = machine("4xp100", 1e6)
    least = peak(free, optcnn(Problem(free.space, fast, slow(fast))).strategy)
    limit = (most + least) // 2
    assert least < limit < most
    within = problem(spec, on, limit)
    found = optcnn(within)
    assert peak(within, found.strategy) <= limit
    assert any("memory limit" in note for note in found.notes)
    assert found.lower_bound == optcnn(free).lower_bound


def test_a_limit_that_nothing_fits_is_said() -> None:
    found = optcnn(problem("mlp:tiny", machine("4xp100"), 100))
    assert any("no grids were found" in note for note in found.notes)


# Results


def test_equal_problems_have_equal_results() -> None:
    given = problem("lenet:tiny", machine("4xp100"))
    assert optcnn(given) == optcnn(given)


def test_one_device_is_the_single_device() -> None:
    given = problem("mlp:tiny", machine("1xp100"))
    ops = range(len(given.space.graph.ops))
    assert optcnn(given).strategy.choices == tuple(
        unsplit_choice(given.space, op, (0,)) for op in ops
    )


def test_replicas_have_the_devices_of_their_part() -> None:
    it = costs("mlp:tiny", "4xp100")
    (row,) = [r for r in range(it.grids[0].rows) if it.grids[0].degrees[r].tolist() == [2, 2]]
    update = next(op for op in it.layers[0].ops if it.graph.ops[op].phase == UPDATE)
    choice = it.choice(update, row)
    assert choice == Choice(choice.parts, (0, 1, 2, 3)) and choice.count == choice.replicas == 2
    positions = it.at[update][1]
    assert positions[0] == UNMAPPED != positions[1]
