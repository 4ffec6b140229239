"""tofu: its tables against lowering, its levels against exhaustive search, its bytes against
others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from graphs import Maker, captured, problem
from soak import cases, kept
from torch import nn

import apportion as ap
from apportion.capture.capture import capture
from apportion.describe import descriptions
from apportion.describe.descriptions import describe
from apportion.describe.errors import IllegalCut
from apportion.describe.language import Sum
from apportion.graph import PARAMETER, UPDATE, Graph
from apportion.lower.lower import lower
from apportion.lower.task_graph import Ends
from apportion.plan.plan import Plan
from apportion.search.baselines.data import data
from apportion.search.baselines.fsdp import fsdp
from apportion.search.levels.level_grids import checked_result
from apportion.search.levels.level_grids import strategy_of_levels as strategy_of
from apportion.search.levels.level_places import level_sets_of_classes
from apportion.search.levels.levels import Levels, fewest_bytes, polish, recurse, rho_and_phi
from apportion.search.levels.sites import OP, elements_covered, find_sites
from apportion.search.levels.tofu import bytes_moved, partition, tofu
from apportion.split.axis_effects import FIRST_ONLY, WHOLE, AxisEffects
from apportion.split.space import Space
from apportion.split.strategy import Choice, Layout, Strategy, space_of, verify_strategy

BOTH = (0, 1)
UNCUT = -1


def cut(space: Space, *ways: int, shared: bool = True) -> Levels:
    """Every level decided in order."""
    return recurse(find_sites(space, shared=shared), ways)


def halved(count: int, position: int) -> tuple[int, ...]:
    """Parts of `count` atoms, that at `position` in two; none for UNCUT."""
    return tuple(2 if k == position else 1 for k in range(count))


def moved(space: Space, strategy: Strategy, devices: int) -> int:
    return lower(Space(space.graph, strategy.digits), strategy, devices).bytes_moved


# The table at the head of tofu.py

ROWS, COLUMNS, INNER = 8, 6, 4
S = ROWS * COLUMNS * 4

TABLE = {
    # reader: rho and phi where the source is cut on rows, on columns, whole, partial
    "rows": [(1, 1), (1, 1 / 2), (1, 1), (2, 1)],
    "columns": [(1, 1 / 2), (1, 1), (1, 1), (2, 1)],
    "whole": [(2, 1), (2, 1), (2, 2), (4, 2)],
    "first": [(1, 1 / 2), (1, 1 / 2), (1, 1), (2, 1)],
}
SOURCES = ["rows", "columns", "whole", "partial"]


@pytest.mark.parametrize("reader", TABLE)
@pytest.mark.parametrize("source", SOURCES)
def test_the_table_counts_what_lowering_moves(source: str, reader: str) -> None:
    make = Maker()
    a, b = make.value(ROWS, INNER), make.value(INNER, COLUMNS)
    c, d = make.value(ROWS, INNER), make.value(INNER, COLUMNS)
    y = make.op("aten.mm.default", a, b, out=(ROWS, COLUMNS))
    if reader == "first":  # what is added to a product that is cut inside is added once
        make.op("aten.addmm.default", y, c, d, 1, 1, out=(ROWS, COLUMNS))
    else:
        make.op("aten.relu.default", y, out=(ROWS, COLUMNS))
    space = make.space()
    names = {"rows": 0, "columns": 1, "whole": UNCUT, "partial": 2, "first": 2}
    choices = tuple(
        Choice(halved(len(space.axes(op)), names[name]), BOTH)
        for op, name in enumerate((source, reader))
    )
    effects = AxisEffects(space)
    cuts = []
    for op, name in enumerate((source, reader)):
        effect = None if names[name] == UNCUT else effects.of(op, names[name])
        ends = () if effect is None else effect.outputs if op == 0 else effect.inputs
        cuts.append(ends[0] if ends else WHOLE)
    assert (cuts[1] == FIRST_ONLY) == (reader == "first")
    rho, phi = TABLE[reader][SOURCES.index(source)]
    assert rho_and_phi(*map(np.array, cuts), 2)[:2] == (rho, phi)
    assert lower(space, Strategy(choices), 2).bytes_moved == (rho - phi) * S


# conv1d of Tofu's paper, on two devices: data [b, ci, x + dx], filters [ci, co, dx], out [b, co, x]

DATA, FILTERS, OUT = (2, 4, 12), (4, 6, 5), (2, 6, 8)
SIZES = {"data": math.prod(DATA) * 4, "filters": math.prod(FILTERS) * 4, "out": math.prod(OUT) * 4}


@pytest.mark.parametrize(
    ("cut", "stored", "expected"),
    [
        ("b", (0, 0, 0), SIZES["filters"]),
        ("co", (1, 1, 1), SIZES["data"]),
        ("x", (2, 0, 2), (5 - 1) * SIZES["data"] // 12 + SIZES["filters"]),  # the halo
        ("ci", (1, 0, 0), SIZES["out"]),
        ("dx", (2, 2, 0), (3 + 4) * SIZES["data"] // 12 + SIZES["out"]),  # reads [0, 9) and [2, 12)
    ],
)
def test_bytes_of_conv1d(
    cut: str, stored: tuple[int, int, int], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptions, "DESCRIPTIONS", dict(descriptions.DESCRIPTIONS))
    describe("test.conv1d")(
        lambda data, filters: (
            lambda b, co, x: Sum(lambda ci, dx: data[b, ci, x + dx] * filters[ci, co, dx])
        )
    )
    make = Maker()
    tensors = [make.value(*DATA), make.value(*FILTERS)]
    tensors.append(make.op("test.conv1d.default", *tensors, out=OUT))
    space = make.space()
    names = [axis.name for axis in space.axes(0)]
    layouts = {t.index: Layout(halved(3, d), BOTH) for t, d in zip(tensors, stored, strict=True)}
    strategy = Strategy((Choice(halved(5, names.index(cut)), BOTH),), layouts)
    assert lower(space, strategy, 2).bytes_moved == expected


# One level against all strategies of its space


def linear(bias: bool, batch: int, width: int) -> Graph:
    """A training step of one layer with one output: no cut of it moves nothing."""
    model = nn.Linear(width, 1, bias=bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = (torch.zeros(batch, width), torch.zeros(batch, 1))

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    return capture(step, model, optimizer, given).graph


def chain(m: int, a: int, k: int, n: int) -> Graph:
    """y = x u w, and w updated by z y."""
    make = Maker()
    x, u, z = make.value(m, a), make.value(a, k, role=PARAMETER), make.value(k, m)
    w = make.value(k, n, role=PARAMETER)
    h = make.op("aten.mm.default", x, u, out=(m, k))
    y = make.op("aten.mm.default", h, w, out=(m, n))
    g = make.op("aten.mm.default", z, y, out=(k, n))
    after = make.op("aten.add.Tensor", w, g, 1, out=(k, n))
    make.survives(w, after)
    made = make.graph()
    return replace(made, ops=(*made.ops[:-1], replace(made.ops[-1], phase=UPDATE)))


def all_strategies(space: Space) -> Iterator[Strategy]:
    """Every Op cut in two along one axis, or whole on both devices where a level may leave it so;
    state stored along each atom or on both devices; partial values laid out likewise, or left to
    lowering."""
    graph, sites = space.graph, find_sites(space)
    domains = Levels(sites, (2,), fewest_bytes(1)).energy([0])[1]
    choices = [
        [
            Choice(halved(len(space.axes(op)), (*sites.atoms[site], UNCUT)[k]), BOTH)
            for k in np.flatnonzero(domains[site])
        ]
        for op, site in enumerate(sites.op_site)
    ]
    state = [before for before, _ in graph.state]
    for picked in product(*choices):
        partial = [
            value
            for op, choice in enumerate(picked)
            for value, terms in zip(
                graph.ops[op].outputs, space.split(op, choice.parts).terms, strict=True
            )
            if terms > 1
        ]
        kept = [all_layouts(space, v) for v in state]
        kept += [[*all_layouts(space, v), None] for v in partial]
        for layouts in product(*kept):
            named = zip([*state, *partial], layouts, strict=True)
            yield Strategy(picked, {v: layout for v, layout in named if layout is not None})


def all_layouts(space: Space, value: int) -> list[Layout | None]:
    factors = space.factors(value)
    cuts = [k for k, factor in enumerate(factors) if factor > 1]
    return [Layout(halved(len(factors), k), BOTH) for k in [*cuts, UNCUT]]


GRAPHS = {
    "linear": lambda: linear(False, 4, 4),
    "linear with bias": lambda: linear(True, 2, 4),
    "chain": lambda: chain(2, 4, 6, 8),
    "long chain": lambda: chain(16, 2, 8, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", kept(list(GRAPHS), "linear with bias", "chain"))
def test_a_level_equals_exhaustive_search(name: str) -> None:
    space = Space(GRAPHS[name]())
    levels = cut(space, 2)
    found = moved(space, strategy_of(levels), 2)
    assert levels.exact
    assert found == levels.bytes_moved > 0
    tried = [lower(space, strategy, 2).bytes_moved for strategy in all_strategies(space)]
    assert 500 < len(tried) < 20_000
    assert found == min(tried) < max(tried)


def test_all_slices_of_a_value_are_counted() -> None:
    """Readers of different rows want the whole Value together, cut as they are."""
    make = Maker()
    x = make.op("aten.cumsum.default", make.value(4, 6), 1, None, out=(4, 6))
    for k in range(4):
        row = make.op("aten.select.int", x, 0, k, out=(6,))
        make.op("aten.mul.Tensor", row, row, out=(6,))
    space = make.space()
    levels = cut(space, 2)
    assert moved(space, strategy_of(levels), 2) == levels.bytes_moved == 4 * 6 * 4 / 2
    tried = [lower(space, strategy, 2).bytes_moved for strategy in all_strategies(space)]
    assert min(tried) == levels.bytes_moved < max(tried)


@pytest.mark.parametrize("seed", range(20))
def test_elements_in_any_box(seed: int) -> None:
    rng = Random(seed)
    boxes = []
    for _ in range(rng.randint(1, 5)):
        ends = [sorted(rng.sample(range(6), 2)) for _ in range(3)]
        boxes.append(tuple([(low, high) for low, high in ends]))
    marks = np.zeros((6, 6, 6), bool)
    for box in boxes:
        marks[tuple([slice(*span) for span in box])] = True
    assert elements_covered(frozenset(boxes)) == marks.sum()


# Where recursion is not optimal (counted in elements, as the paper counts)


def counterexample() -> Space:
    make = Maker()
    x0, w0 = make.value(16, 8), make.value(8, 12, role=PARAMETER)
    x1 = make.op("aten.mm.default", x0, w0, out=(16, 12))
    make.op("aten.mm.default", x1, make.value(12, 24, role=PARAMETER), out=(16, 24))
    return make.space()


def plans(levels: Levels, open_levels: list[int]) -> Iterator[tuple[float, np.ndarray]]:
    """Every way to decide these levels: elements moved, and the values of all sites.

    For each way to cut the Ops every tensor takes its best storage: tensors meet only Ops."""
    shared, _ = levels.energy(open_levels)
    energy = shared.energy()
    ops = np.flatnonzero(levels.sites.kind == OP)
    stores = np.flatnonzero(levels.sites.kind != OP)
    picks = np.zeros(len(energy.sizes), np.int64)
    for chosen in product(*(range(energy.sizes[n]) for n in ops)):
        picks[ops] = chosen
        total = sum(energy.unary[n][picks[n]] for n in ops)
        for store in stores:
            costs = energy.unary[store].copy()
            for (a, b), table in energy.pairs.items():
                if store in (a, b):
                    costs += table[:, picks[b]] if store == a else table[picks[a]]
            picks[store] = costs.argmin()
            total += costs.min()
        yield float(total) / 4, picks.copy()


def test_recursion_is_not_always_optimal() -> None:
    space = counterexample()
    levels = cut(space, 2, 2, shared=False)
    assert levels.bytes_by_level() == [288 * 4, 480 * 4]
    assert levels.bytes_moved == 768 * 4
    assert moved(space, strategy_of(levels), 4) == 768 * 4
    joint = Levels(find_sites(space, shared=False), (2, 2), fewest_bytes(2))
    least, picks = min(plans(joint, [0, 1]), key=lambda pair: pair[0])
    assert least == pytest.approx(704, abs=1e-2)
    joint.take([0, 1], joint.energy([0, 1])[1], picks)
    assert joint.bytes_moved == 704 * 4
    assert moved(space, strategy_of(joint), 4) == 704 * 4
    together = Levels(find_sites(space, shared=False), (2, 2), fewest_bytes(2))
    together.solve([0, 1])
    assert together.bytes_moved == 704 * 4


def test_no_tie_of_the_first_level_leads_to_the_joint_optimum() -> None:
    """The two best first levels differ in how the first weight, read whole, is stored."""
    sites, ties = find_sites(counterexample(), shared=False), 0
    domains = Levels(sites, (2, 2), fewest_bytes(2)).energy([0])[1]
    for picks in product(*(range(n) for n in domains.sum(axis=1))):
        levels = Levels(sites, (2, 2), fewest_bytes(2))
        levels.take([0], domains, np.array(picks))
        assert levels.bytes_moved >= 288 * 4
        if levels.bytes_moved == 288 * 4:
            ties += 1
            assert min(found for found, _ in plans(levels, [1])) == pytest.approx(768, abs=1e-2)
    assert ties == 2


@pytest.mark.slow
def test_revising_levels_never_costs_more() -> None:
    """A level decided anew is the optimum given the others, and the cost is what is moved."""
    space = captured("wresnet:tiny")[1]
    levels = cut(space, 2, 2, 2)
    greedy = levels.bytes_moved
    polish(levels)
    assert levels.bytes_moved <= greedy
    assert sum(levels.bytes_by_level()) == pytest.approx(levels.bytes_moved)
    for level in range(3):
        assert levels.solve([level]) > -1e-6 * levels.cost


# Bytes


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["mlp:tiny,width=8", "gpt2:tiny,vocab=16"])
def test_modelled_bytes_are_those_moved(spec: str) -> None:
    space = captured(spec)[1]
    for count in (1, 2, 3):
        levels = cut(space, *[2] * count)
        assert moved(space, strategy_of(levels), 2**count) == levels.bytes_moved


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        "rnnlm:tiny,hidden=16,steps=2,vocab=80,batch=64",
        "nmt:tiny,layers=1,hidden=16,source=2,target=2,vocab=512,batch=64",
    ],
)
def test_words_cut_at_some_levels_are_ranges(spec: str) -> None:
    """The loss knows words by their number: it has the first digits of those that others cut at
    more levels."""
    given = problem(16, spec)
    levels = partition(given)
    made, kept = checked_result(levels)
    several = {
        len(n)
        for sets in level_sets_of_classes(levels.sites, chosen_by(levels)).values()
        for n in sets
    }
    assert several & {1, 2, 3}
    assert kept
    assert bytes_moved(given, made.strategy) == levels.bytes_moved


def chosen_by(levels: Levels) -> dict[int, np.ndarray]:
    return {n: chosen for n, chosen in enumerate(levels.chosen) if chosen is not None}


@pytest.mark.slow
def test_only_uneven_halves_move_other_bytes_than_modelled() -> None:
    """A width of 10 has an atom of 5 at the second level: of the biases that are added once, on
    the first half, more than half may be missing there."""
    space = captured("mlp:tiny")[1]
    levels = cut(space, 2)
    assert moved(space, strategy_of(levels), 2) == levels.bytes_moved
    levels = cut(space, 2, 2)
    biases = 2
    assert moved(space, strategy_of(levels), 4) - levels.bytes_moved == biases * 2 * 8 / 2


@pytest.mark.slow
def test_level_costs_do_not_fall() -> None:
    """Theorem 1 of the paper, under its counting."""
    levels = cut(captured("gpt2:tiny")[1], 2, 2, 2, shared=False)
    steps = levels.bytes_by_level()
    assert levels.exact
    assert 0 < steps[0] <= steps[1] <= steps[2]


def independent(space: Space, op: int, devices: int, rng: Random) -> Choice:
    """An Op cut into as many parts as there are devices, one on each, along random axes."""
    axes, legal = space.axes(op), space.cuttable(op)
    for _ in range(8):
        parts = [1] * len(axes)
        while math.prod(parts) < devices:
            able = [k for k, yes in enumerate(legal) if yes and axes[k].extent >= 2 * parts[k]]
            if not able:
                break
            parts[rng.choice(able)] *= 2
        if math.prod(parts) == devices and allowed(space, op, parts):
            return Choice(tuple(parts), tuple(rng.sample(range(devices), devices)))
    return Choice((1,) * len(axes), (rng.randrange(devices),))


def alike(space: Space, op: int, devices: int, rng: Random, rank: dict[int, float]) -> Choice:
    """As above, but all Ops prefer the same classes of axes and parts lie in order: a strategy that
    somebody could have meant."""
    axes = space.axes(op)
    able = [k for k, legal in enumerate(space.cuttable(op)) if legal]
    parts = [1] * len(axes)
    for k in sorted(able, key=lambda k: rank.setdefault(axes[k].group, rng.random())):
        while math.prod(parts) < devices and axes[k].extent >= 2 * parts[k]:
            parts[k] *= 2
    if math.prod(parts) == devices and allowed(space, op, parts):
        return Choice(tuple(parts), tuple(range(devices)))
    return independent(space, op, devices, rng)


def allowed(space: Space, op: int, parts: list[int]) -> bool:
    try:
        space.split(op, parts)
    except IllegalCut:
        return False
    return True


def full_device(space: Space, devices: int, seed: int) -> Strategy:
    """A random strategy that uses all devices for every Op that can be cut, without replicas."""
    rng, rank = Random(seed), dict[int, float]()
    ops = range(len(space.graph.ops))
    if seed % 2:
        return Strategy(tuple(alike(space, op, devices, rng, rank) for op in ops))
    return Strategy(tuple(independent(space, op, devices, rng) for op in ops))


# 200 of both kinds were run once for all (minutes). The least of them moved, as a multiple of tofu,
#                independent 2, 4 devices    alike 2, 4 devices
#   mlp:tiny              2.90, 3.47                1.00, 1.29
#   rnn:tiny              9.92, 6.52                2.00, 1.61
#   gpt2:tiny             10.2, 6.78                1.33, 1.49
#   wresnet:tiny          8.81, 7.54                1.64, 1.78
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "devices", "count"),
    [
        ("mlp:tiny", 2, cases(200)),
        ("mlp:tiny", 4, cases(200)),
        ("gpt2:tiny", 2, cases(12, 4)),
        ("gpt2:tiny", 4, cases(6, 3)),
        ("rnn:tiny", 2, cases(20, 4)),
        ("rnn:tiny", 4, cases(8, 3)),
        ("wresnet:tiny", 2, cases(8, 2)),
        ("wresnet:tiny", 4, cases(4, 2)),
    ],
)
def test_nobody_moves_fewer_bytes(spec: str, devices: int, count: int) -> None:
    given = problem(devices, spec)
    strategy = tofu(given).strategy
    verify_strategy(space_of(given.space.source, strategy), strategy, devices)
    least = bytes_moved(given, strategy)
    assert least <= bytes_moved(given, data(given).strategy)
    assert least <= bytes_moved(given, fsdp(given).strategy)
    for seed in range(count):
        other = full_device(given.space, devices, seed)
        assert least <= lower(given.space, other, devices).bytes_moved, seed


# The method


@pytest.mark.parametrize("devices", [3, 5, 6, 7, 12])
@pytest.mark.parametrize(
    "spec", ["mlp:tiny", "gpt2:tiny", pytest.param("wresnet:tiny", marks=pytest.mark.slow)]
)
def test_any_number_of_devices_will_do(spec: str, devices: int) -> None:
    given = problem(devices, spec)
    strategy = tofu(given).strategy
    verify_strategy(space_of(given.space.source, strategy), strategy, devices)
    least = bytes_moved(given, strategy)
    assert least <= bytes_moved(given, data(given).strategy)
    assert least <= bytes_moved(given, fsdp(given).strategy)


def test_one_device_needs_no_level() -> None:
    given = problem(1)
    assert bytes_moved(given, tofu(given).strategy) == 0


def test_a_level_too_wide_to_eliminate_is_passed_messages() -> None:
    given = problem(4)
    sites = find_sites(given.space)
    levels, least = recurse(sites, (2,), cap=20), recurse(sites, (2,)).bytes_moved
    assert least <= levels.bytes_moved <= 1.5 * least
    if levels.exact:
        assert levels.bytes_moved == least
    wide = recurse(sites, (2, 2), cap=20)
    verify_strategy(given.space.with_digits(strategy_of(wide).digits), strategy_of(wide), 4)


@pytest.mark.slow
def test_levels_that_narrow_can_be_eliminated_after_one_that_cannot() -> None:
    """Domains shrink: an order that was given up for the first level is none for the second."""
    given = problem(4, "transformer-xl:tiny")
    strategy = tofu(given).strategy
    verify_strategy(space_of(given.space.source, strategy), strategy, 4)
    assert bytes_moved(given, strategy) <= bytes_moved(given, data(given).strategy)


def test_equal_problems_have_equal_results() -> None:
    assert tofu(problem(4)) == tofu(problem(4))


@pytest.mark.slow
def test_steps_of_a_loop_are_tied_without_loss() -> None:
    """Untied, the steps of a small loop can still be eliminated: the optimum is the same."""
    space = captured("rnn:tiny,steps=2,layers=1")[1]
    tied, untied = (recurse(find_sites(space, tied=t), (2,)) for t in (True, False))
    assert tied.exact and untied.exact
    assert tied.bytes_moved == untied.bytes_moved


@pytest.mark.parametrize("method", ["tofu", "tofu-paper"])
def test_a_plan_on_digits_has_the_same_tasks_when_it_is_read(method: str, tmp_path: Path) -> None:
    plan = ap.plan(captured("mlp:tiny")[0], ap.cluster("local:4"), method)
    assert plan.strategy.digits
    plan.save(tmp_path / "p.json")
    loaded = Plan.load(tmp_path / "p.json")
    assert loaded.strategy == plan.strategy
    told = [
        dataclasses.asdict(p.tasks) | dataclasses.asdict(p.tasks._copies) for p in (plan, loaded)
    ]
    assert told[0].keys() == told[1].keys() >= {"dep", "ends", "boxes", "term"}
    for name in told[0].keys() - {"copies", "make_assemblies", "before_storage"}:
        here, there = (all_tasks[name] for all_tasks in told)
        if isinstance(here, np.ndarray | Ends):
            assert np.array_equal(np.array(here), np.array(there)), name
        else:
            assert here == there, name
