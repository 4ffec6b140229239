"""Steps with few of their equal layers: what may be left out, and what a search finds with it."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest

from apportion import zoo
from apportion.capture.capture import capture
from apportion.graph import (
    ACTIVATION,
    BACKWARD,
    BUFFER,
    FORWARD,
    GRADIENT,
    INPUT,
    PARAMETER,
    UPDATE,
    Graph,
    Op,
    Ref,
    Value,
    nbytes_of,
    verify,
)
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.search import Problem
from apportion.split import repeats as segments
from apportion.split.repeats import KEPT, LAYERS, ShortenedGraph, shorten
from apportion.split.space import Space

tofu = importlib.import_module(
    "apportion.search.levels.tofu"
)  # the package has a function of that name
DEEP = LAYERS + 4


class Chain:
    """A step of square linear layers `rows.0`, `rows.1`, ... with their gradients and updates."""

    def __init__(self, layers: int) -> None:
        self.values: list[Value] = []
        self.ops: list[Op] = []
        weights = [self.value(PARAMETER) for _ in range(layers)]
        x, wanted = self.value(INPUT), self.value(INPUT)
        inputs = []
        for layer, weight in enumerate(weights):
            inputs.append(x)
            x = self.op("aten.mm.default", x, weight, layer=layer)
        self.loss = self.op("aten.sub.Tensor", x, wanted)
        gradient, gradients = self.loss, {}
        for layer in reversed(range(layers)):
            turned = self.op("aten.t.default", inputs[layer], layer=layer, phase=BACKWARD)
            gradients[layer] = self.op(
                "aten.mm.default", turned, gradient, layer=layer, phase=BACKWARD
            )
            turned = self.op("aten.t.default", weights[layer], layer=layer, phase=BACKWARD)
            gradient = self.op("aten.mm.default", gradient, turned, layer=layer, phase=BACKWARD)
        self.state = []
        for layer, weight in enumerate(weights):
            new = self.op("aten.sub.Tensor", weight, gradients[layer], layer=layer, phase=UPDATE)
            self.state.append((weight, new))

    def value(self, role: str) -> int:
        shape = (8, 8)
        name = f"v{len(self.values)}"
        self.values.append(Value(name, role, shape, "float32", nbytes_of(shape, "float32")))
        return len(self.values) - 1

    def op(self, kind: str, *inputs: int, layer: int = -1, phase: str = FORWARD) -> int:
        made = self.value(ACTIVATION if phase == FORWARD else GRADIENT)
        args: tuple[Any, ...] = tuple(Ref(k) for k in range(len(inputs)))
        self.ops.append(
            Op(
                f"op{len(self.ops)}",
                kind,
                inputs,
                (made,),
                (*args, 1) if "sub" in kind else args,
                phase,
                module=f"rows.{layer}" if layer >= 0 else "",
                parameter=inputs[0] if phase == UPDATE else None,
            )
        )
        return made

    def graph(self) -> Graph:
        graph = Graph(tuple(self.values), tuple(self.ops), tuple(self.state), self.loss)
        verify(graph)
        return graph


def shortened(graph: Graph) -> ShortenedGraph | None:
    return shorten(graph, Space(graph).kinds)


def test_what_is_left_is_the_step_of_a_shallow_model() -> None:
    short = shortened(Chain(DEEP).graph())
    assert short is not None
    verify(short.graph)
    assert short.graph.fingerprint == Chain(2 * KEPT).graph().fingerprint


def test_every_op_has_its_like() -> None:
    graph = Chain(DEEP).graph()
    short = shortened(graph)
    assert short is not None
    for index, op in enumerate(graph.ops):
        like = short.graph.ops[short.ops[index]]
        assert (op.kind, op.phase) == (like.kind, like.phase)
        assert [short.values[v] for v in op.outputs] == list(like.outputs)
        layer = int(op.module.partition(".")[2] or 0)
        kept = layer < KEPT or layer >= DEEP - KEPT
        assert like.module == (op.module if kept else "rows.1" if op.module else "")
    own = [short.values[v] for v, meant in enumerate(graph.values) if meant.role == PARAMETER]
    assert own == [0, *[1] * (DEEP - 3), 2, 3]


def test_few_layers_stay() -> None:
    assert shortened(Chain(LAYERS - 1).graph()) is None


def odd_layer(chain: Chain) -> None:
    op = chain.ops[7]
    chain.ops[7] = replace(op, kind="aten.add.Tensor", args=(*op.args, 1))


def read_at_the_end(chain: Chain) -> None:
    end = next(n for n, op in enumerate(chain.ops) if op.kind == "aten.sub.Tensor")
    chain.ops[end] = replace(chain.ops[end], inputs=(chain.ops[9].outputs[0], DEEP + 1))


def read_from_afar(chain: Chain) -> None:
    chain.ops[9] = replace(chain.ops[9], inputs=(chain.ops[4].outputs[0], 9))


def shared_weight(chain: Chain) -> None:
    chain.ops[9] = replace(chain.ops[9], inputs=(chain.ops[9].inputs[0], 7))


def returned_from_inside(chain: Chain) -> None:
    chain.state.append((chain.value(BUFFER), chain.ops[9].outputs[0]))


@pytest.mark.parametrize(
    "spoil", [odd_layer, read_at_the_end, read_from_afar, shared_weight, returned_from_inside]
)
def test_layers_that_are_not_equal_stay(spoil: Any) -> None:
    chain = Chain(DEEP)
    spoil(chain)
    assert shortened(chain.graph()) is None


@pytest.fixture(scope="module")
def deep() -> Graph:
    it = zoo.load(f"gpt2:tiny,layers={LAYERS},batch=16", 0, meta=True)
    return capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm).graph


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["8xh100", "6xh100", "4x4xh100"])
def test_search_begun_on_few_layers_is_as_good(
    deep: Graph, devices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = cluster(devices)
    assert shortened(deep) is not None

    def bytes_moved() -> float:
        problem = Problem(Space(deep), machine, default_cost(machine))
        return float(tofu.partition(problem).bytes_moved)

    begun = bytes_moved()
    monkeypatch.setattr(segments, "LAYERS", LAYERS + 1)
    assert shortened(deep) is None
    assert begun <= bytes_moved() * (1 + 1e-9)


@pytest.mark.slow
def test_an_opened_space_is_that_of_the_opened_graph(deep: Graph) -> None:
    which = tofu.composites(deep)[1::3]
    closed = Space(deep)
    assert len(closed.kinds) == len(closed.alike) == len(deep.ops)
    made, anew = closed.opened(which), Space(deep, (), which)
    assert made.graph == anew.graph and made.origins == anew.origins
    assert made.atoms == anew.atoms
    assert made.calls == anew.calls
    assert made.classes == anew.classes
    for name in ("alike", "kinds"):
        here, there = getattr(made, name), getattr(anew, name)
        assert len(set(zip(here, there, strict=True))) == len(set(here)) == len(set(there))
