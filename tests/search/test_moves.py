"""Units and moves: what goes together, and that every change drawn is a legal one."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from graphs import captured

from apportion.graph import FORWARD, PARAMETER, UPDATE
from apportion.machine.cluster import cluster
from apportion.search.layers.layers import UNMAPPED
from apportion.search.walks.moves import KINDS, MoveSampler
from apportion.search.walks.units import LayerChoices, cell_units, layer_units, size_of
from apportion.split.space import Space
from apportion.split.strategy import Choice, Strategy, unsplit_choice, verify_strategy

LARGEST = pytest.param("inception-v3:tiny", marks=pytest.mark.slow)
MODELS = ["lenet", "rnnlm:tiny", "gpt2:tiny", LARGEST, "nmt:tiny"]


def space(spec: str) -> Space:
    return captured(spec)[1]


@pytest.mark.slow
@pytest.mark.parametrize("spec", MODELS)
def test_every_op_is_in_one_layer_and_every_layer_in_one_cell(spec: str) -> None:
    members = LayerChoices(space(spec))
    ops = [op for layer in members.layers for op in layer.ops]
    assert sorted(ops) == list(range(len(members.space.graph.ops)))
    assert [n for cell in members.cells for n in cell] == list(range(len(members.layers)))


def test_steps_of_a_loop_are_apart_and_alike() -> None:
    members = LayerChoices(space("rnnlm:tiny"))  # two layers of four steps
    first = [members.layers[cell[0]].name.split(".addmm")[0] for cell in members.cells]
    steps = Counter(name for name in first if name.startswith("cells."))
    assert steps == {"cells.0.input": 4, "cells.1.input": 4}
    assert {len(several) for several in members.alike} == {4, 8}


def test_groups_have_what_prepares_and_updates_their_parameters() -> None:
    it = space("lenet")
    members = LayerChoices(it)
    named = [{it.graph.ops[op].name for op in group} for group in members.groups]
    dense = next(names for names in named if "full1.addmm" in names)
    assert {"full1.t", "full1.mm.backward", "full1.weight.update", "full1.bias.update"} <= dense
    assert {"tanh#3", "tanh.backward#2"} in named
    assert sorted(op for group in members.groups for op in group) == list(range(len(it.graph.ops)))


@pytest.mark.slow
def test_an_op_is_cut_along_the_labels_it_has_and_there_again_along_others() -> None:
    it = space("mlp:tiny")
    members = LayerChoices(it)
    number = next(n for n, layer in enumerate(members.layers) if "addmm" in layer.name)
    layer = members.layers[number]
    names = [label.name for label in layer.labels]
    degrees = tuple({"i": 2, "j": 3}.get(name, 1) for name in names)
    made = members.choices(number, (degrees, (5, 4, 3, 2, 1, 0)))
    for op, positions in zip(layer.ops, layer.positions, strict=True):
        choice, kind = made[op], it.graph.ops[op]
        sample, feature = (positions[names.index(name)] for name in "ij")
        if kind.kind == "aten.addmm.default" and kind.phase == FORWARD:
            assert (choice.parts[sample], choice.parts[feature]) == (2, 3)
            assert choice.devices == (5, 4, 3, 2, 1, 0)
        if kind.phase == UPDATE and it.graph.values[kind.parameter or 0].role == PARAMETER:
            assert sample == UNMAPPED
            assert choice.parts[feature] == 3
            assert choice.devices == (5, 4, 3, 2, 1, 0)  # two replicas of three parts


@pytest.mark.parametrize("any_devices", [True, False])
def test_units_have_all_options_and_each_is_legal(any_devices: bool) -> None:
    it, rng = space("mlp:tiny"), Random(0)
    for units in (layer_units(it, 4, any_devices), cell_units(it, 4, any_devices)):
        ops = sorted(op for unit in units for op in unit.ops)
        assert ops == list(range(len(it.graph.ops)))
        assert size_of(units) > 1000
        for _ in range(20):
            choices: dict[int, Choice] = {}
            for unit in units:
                assert len(set(unit.options)) == len(unit.options)
                choices |= zip(unit.ops, rng.choice(unit.options), strict=True)
            verify_strategy(it, Strategy(tuple(choices[op] for op in ops)), 4)


@pytest.mark.parametrize("spec", MODELS)
@pytest.mark.parametrize("on", ["flexflow-k80:12", "4xh100", "mixed-a100-v100", "local:3"])
def test_every_move_is_legal(spec: str, on: str) -> None:
    it, them, rng = space(spec), cluster(on), Random(1)
    devices = len(them.devices)
    choices = [unsplit_choice(it, op, (0,)) for op in range(len(it.graph.ops))]
    moves = MoveSampler(LayerChoices(it), them, choices)
    changed: Counter[str] = Counter()
    for kind in KINDS:
        for _ in range(20):
            drawn = moves.draw(kind, rng)
            changed[kind] += bool(drawn)
            for op, choice in drawn.items():
                assert choice != choices[op]
                choices[op] = choice
        verify_strategy(it, Strategy(tuple(choices)), devices)
    assert all(changed[kind] for kind in KINDS), changed


def test_moves_reach_sums_subsets_and_replicas() -> None:
    it, them, rng = space("mlp:tiny"), cluster("4xh100"), Random(2)
    choices = [unsplit_choice(it, op, (0,)) for op in range(len(it.graph.ops))]
    moves = MoveSampler(LayerChoices(it), them, choices)
    seen: set[str] = set()
    for _ in range(500):
        for op, choice in moves.draw("op", rng).items():
            terms = it.split(op, choice.parts).terms
            seen |= {"sum"} if max(terms, default=1) > 1 else set()
            seen |= {"replicas"} if choice.replicas > 1 else set()
            seen |= {f"on {len(set(choice.devices))}"}
            seen |= {"uneven"} if 3 in choice.parts else set()
    assert seen >= {"sum", "replicas", "on 1", "on 2", "on 3", "on 4", "uneven"}


def test_a_sweep_tries_everything_alike_on_all_devices_once() -> None:
    it, them, rng = space("rnnlm:tiny"), cluster("4xh100"), Random(0)
    choices = [unsplit_choice(it, op, (0,)) for op in range(len(it.graph.ops))]
    members = LayerChoices(it)
    moves = MoveSampler(members, them, choices)
    seen: list[dict[int, Choice]] = []
    while not moves.swept:
        seen.append(moves.draw("sweep", rng))
    assert seen.pop() == {}
    staged = [d for d in seen if len({c.devices for c in d.values()}) > 1]
    assert staged  # loops on groups of devices
    loop = {op for cell in members.alike[0] for n in cell for op in members.layers[n].ops}
    alike = [drawn for drawn in seen if drawn.keys() == loop]
    assert len(alike) > 3  # as many ways to cut it
    assert all(set(c.devices) == {0, 1, 2, 3} for drawn in alike for c in drawn.values())
    assert not moves.draw("sweep", rng)
