"""Proven bounds against every method's plan, and exact levels against all there are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from graphs import Maker, problem
from soak import kept
from test_tofu import chain

from apportion.graph import PARAMETER, UPDATE, Graph
from apportion.lower.lower import lower
from apportion.search import METHODS, UnsuitableMethod
from apportion.search.levels.exact import exact, solve_jointly
from apportion.search.levels.joint_levels import disputed_class, domains_of, free_sets, levels_of
from apportion.search.levels.level_grids import strategy_of_levels as strategy_of
from apportion.search.levels.levels import Levels, fewest_bytes, recurse
from apportion.search.levels.sites import find_sites
from apportion.search.levels.tofu import bytes_moved
from apportion.search.problem import Problem
from apportion.split.space import Space
from apportion.split.strategy import Choice, Layout, Strategy, space_of

UNCUT = -1
BUDGET = 4.0


# Bounds in bytes


def is_cut(given: Problem, strategy: Strategy) -> bool:
    """Whether all devices take part in every Op that no level may leave whole."""
    space = space_of(given.space.source, Strategy(strategy.choices, opening=strategy.opening))
    sites = find_sites(space)
    must = ~sites.uncut[sites.op_site] & (sites.choices[sites.op_site] > 1)
    return all(strategy.choices[op].count == given.devices for op in np.flatnonzero(must))


@pytest.mark.slow
@pytest.mark.parametrize("devices", kept([2, 4], 4))
@pytest.mark.parametrize(
    "spec",
    [
        "mlp:tiny,width=8,batch=8",
        "gpt2:tiny,layers=1,vocab=16,batch=8,seq=8",
        pytest.param("gpt2:tiny,layers=1,vocab=64,batch=64,seq=8", marks=pytest.mark.soak),
        pytest.param("lenet:tiny,batch=8", marks=pytest.mark.soak),
    ],
)
def test_no_plan_is_below_the_bound(spec: str, devices: int) -> None:
    given = problem(devices, spec)
    proven = exact(given, budget=BUDGET)
    assert proven.bound_of.startswith("bytes moved") and proven.lower_bound is not None
    bound = proven.lower_bound
    assert bound > 0.9 * proven.lower_bound
    judged = []
    cutting = {name: row for name, row in METHODS.items() if "placer" not in row.options}
    for name, method in {"exact": exact, **cutting}.items():
        try:
            found = method(given, budget=BUDGET)
        except UnsuitableMethod:
            continue
        if name != "random" and is_cut(given, found.strategy):
            judged.append(name)
            assert bytes_moved(given, found.strategy) >= bound, name
    assert {"data", "fsdp", "owt", "tofu", "allrow-greedy", "equalchop", "exact"} <= set(judged)
    assert not {"single", "op-placement"} & set(judged)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["mlp:tiny,width=8,batch=8", "lenet:tiny,batch=8"])
def test_a_bound_is_of_plans_that_cut(spec: str) -> None:
    """What leaves work whole is below it: the condition is not an empty one."""
    given = problem(4, spec)
    proven = exact(given, budget=BUDGET).lower_bound
    single = METHODS["single"](given).strategy
    assert not is_cut(given, single)
    assert proven is not None and bytes_moved(given, single) < proven


# One level of any factor against all strategies of its space


def all_strategies(space: Space, k: int) -> Iterator[Strategy]:
    """Every Op cut in k along one axis, or whole on all devices where a level may leave it so;
    state stored along each atom or on all devices; partial values laid out likewise, or left to
    lowering."""
    graph, sites = space.graph, find_sites(space)
    domains = Levels(sites, (k,), fewest_bytes(1)).energy([0])[1]
    everyone = tuple(range(k))
    choices = [
        [
            Choice(cut(len(space.axes(op)), (*sites.atoms[site], UNCUT)[n], k), everyone)
            for n in np.flatnonzero(domains[site])
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
        kept = [all_layouts(space, v, k) for v in state]
        kept += [[*all_layouts(space, v, k), None] for v in partial]
        for layouts in product(*kept):
            named = zip([*state, *partial], layouts, strict=True)
            yield Strategy(picked, {v: layout for v, layout in named if layout is not None})


def cut(count: int, position: int, k: int) -> tuple[int, ...]:
    """Parts of `count` atoms, that at `position` in k; none for UNCUT."""
    return tuple(k if n == position else 1 for n in range(count))


def all_layouts(space: Space, value: int, k: int) -> list[Layout | None]:
    factors = space.factors(value)
    able = [n for n, factor in enumerate(factors) if factor >= k]
    return [Layout(cut(len(factors), n, k), tuple(range(k))) for n in [*able, UNCUT]]


GRAPHS = {
    "chain": lambda: chain(2, 3, 9, 6),
    "narrow": lambda: narrow_chain(12, 8),
    "narrow and long": lambda: narrow_chain(4, 36),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "k"), [("chain", 3), ("narrow", 2), ("narrow", 4), ("narrow and long", 3)]
)
def test_a_level_of_any_factor_equals_exhaustive_search(name: str, k: int) -> None:
    space = Space(GRAPHS[name]())
    levels = recurse(find_sites(space), (k,))
    found = lower(space, strategy_of(levels), k).bytes_moved
    assert levels.exact
    assert found == levels.bytes_moved > 0
    tried = [lower(space, strategy, k).bytes_moved for strategy in all_strategies(space, k)]
    assert 20 < len(tried) < 2_000
    assert found == min(tried) < max(tried)


# Two levels jointly against all partitions, each lowered


def narrow_chain(m: int, k: int) -> Graph:
    """y = x w, and w updated by z y, where y has one column."""
    make = Maker()
    x, w, z = make.value(m, k), make.value(k, 1, role=PARAMETER), make.value(k, m)
    y = make.op("aten.mm.default", x, w, out=(m, 1))
    g = make.op("aten.mm.default", z, y, out=(k, 1))
    after = make.op("aten.add.Tensor", w, g, 1, out=(k, 1))
    make.survives(w, after)
    made = make.graph()
    return replace(made, ops=(*made.ops[:-1], replace(made.ops[-1], phase=UPDATE)))


def all_partitions(space: Space, factors: tuple[int, ...]) -> Iterator[Strategy]:
    """Every way to decide all levels at once. Where a Value that is not made here is held as a copy
    is left to lowering: one way will do."""
    sites, window = find_sites(space), range(len(factors))
    levels = Levels(sites, factors, fewest_bytes(len(factors)))
    free = free_sets(levels, window)
    domains = domains_of(sites, window, free)
    sizes = domains.sum(axis=1)
    sizes[[site for value, site in sites.copy.items() if not space.graph.producer[value]]] = 1
    seen = set()
    for picks in product(*map(range, sizes.tolist())):
        found = levels_of(levels, window, domains, picks)
        if disputed_class(found, free) is None:
            made = strategy_of(found)
            key = (made.choices, *made.layouts.items())
            if key not in seen:
                seen.add(key)
                yield made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("m", "k", "recursion"),
    [pytest.param(2, 4, 48, marks=pytest.mark.slow), (4, 2, 64), (4, 3, 96)],
)  # what levels decided one after the other move: the second and third are not optimal
def test_two_levels_jointly_equal_exhaustive_search(m: int, k: int, recursion: int) -> None:
    space, factors = Space(narrow_chain(m, k)), (2, 2)
    start = recurse(find_sites(space), factors)
    assert start.bytes_moved == recursion
    found = solve_jointly(start, math.inf)
    tried = [
        lower(space.with_digits(one.digits), one, 4).bytes_moved
        for one in all_partitions(space, factors)
    ]
    assert len(tried) > 80
    assert found.levels.bytes_moved == min(tried) < max(tried)
    assert min(tried) - 0.1 < found.bound <= min(tried)
    made = strategy_of(found.levels)
    assert lower(space.with_digits(made.digits), made, 4).bytes_moved == min(tried) > 0
