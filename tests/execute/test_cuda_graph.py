"""Segments under CUDA graphs, on a CPU: what is recorded is called again, on the same tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compare_runs import batches
from generated_runs import RanksInMode, differing_replicas
from graphs import captured, problem
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from apportion.execute.cuda_graph import GraphedSegment, graphed
from apportion.execute.inductor import kernel_by_kernel
from apportion.execute.rank_steps import Segment
from apportion.search.baselines.data import data
from apportion.search.baselines.random_strategy import draw

Tensor = torch.Tensor


class Recorder(TorchDispatchMode):
    """Remembers calls with their tensors. What they write over is put back in the end, because a
    real recording executes nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.made: set[int] = set()
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in written(func, args, kwargs):
            if tensor.untyped_storage()._cdata not in self.made:
                self.before.append((tensor, tensor.clone()))
        result = func(*args, **kwargs)
        given = {t.untyped_storage()._cdata for t in tensors((args, kwargs))}
        fresh = [t for t in tensors(result) if t.untyped_storage()._cdata not in given]
        self.made.update(t.untyped_storage()._cdata for t in fresh)
        self.calls.append((func, args, kwargs, fresh))
        return result

    def replay(self) -> None:
        for func, args, kwargs, fresh in self.calls:
            again = tensors(func(*args, **kwargs))
            if fresh:
                for room, tensor in zip(fresh, again, strict=True):
                    room.copy_(tensor)


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that a call writes to."""
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    return [
        tensor
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors(named.get(argument.name))
    ]


@contextmanager
def recording(graph: Recorder, **_: Any) -> Iterator[None]:
    with graph:
        yield
    for tensor, before in reversed(graph.before):
        tensor.copy_(before)


@pytest.fixture
def graphs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorder)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "device", lambda place: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def recorded(ranks: RanksInMode) -> list[GraphedSegment]:
    """Lets all segments run under graphs."""
    pool: Any = SimpleNamespace(id=(0, 1))
    found = []
    for ladder in ranks.ladders:
        for segment in ladder.functions:
            assert isinstance(segment, Segment)
            inner = kernel_by_kernel(ranks.executable, segment, "cpu")
            ladder.functions[segment] = graphed(ranks.executable, segment, inner, pool, "cpu")
            found.append(ladder.functions[segment])
    return found  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["data", "random"])
@pytest.mark.parametrize("spec", ["mlp:tiny", pytest.param("gpt2:tiny", marks=pytest.mark.slow)])
def test_recorded_segments_do_what_the_interpreter_does(
    spec: str, kind: str, graphs_on_a_cpu: None
) -> None:
    program, space = captured(spec)
    strategy = data(problem(2, spec)).strategy if kind == "data" else draw(space, 2, Random(5))
    found, meant = (RanksInMode(program, space, strategy, 2, "none") for _ in range(2))
    graphs = recorded(found)
    for number, batch in enumerate(batches(program, 0, 5)):
        losses = meant.step(batch, 3, number)
        assert found.step(batch, 3, number) == pytest.approx(losses, rel=1e-12)
        for mine, state in zip(found.state(), meant.state(), strict=True):
            assert mine.keys() == state.keys()
            for slot, tensor in state.items():
                torch.testing.assert_close(mine[slot], tensor, rtol=1e-9, atol=1e-11)
    assert differing_replicas(found.executable, found.ranks) == []
    assert all(graph.recordings == 1 and not graph.notes for graph in graphs)


def test_a_setting_that_changes_is_recorded_again(graphs_on_a_cpu: None) -> None:
    program, space = captured("mlp:tiny")  # in float64, where rates are numbers
    strategy = data(problem(2, "mlp:tiny")).strategy
    found, meant = (RanksInMode(program, space, strategy, 2, "none") for _ in range(2))
    graphs = recorded(found)
    group = program.optimizer.param_groups[0]
    rate = group["lr"]
    for number, batch in enumerate(batches(program, 0, 4)):
        group["lr"] = rate * (1 if number < 2 else 3)
        losses = meant.step(batch, 3, number)
        assert found.step(batch, 3, number) == pytest.approx(losses, rel=1e-12)
    group["lr"] = rate
    with_updates = [graph for graph in graphs if graph.recordings > 1]
    assert with_updates
    assert all(graph.recordings == 2 for graph in with_updates)


def test_what_cannot_be_recorded_runs_as_it_is(
    graphs_on_a_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def failing(graph: Any, **_: Any) -> Iterator[None]:
        yield
        raise RuntimeError("operation not permitted when stream is capturing")

    program, space = captured("mlp:tiny")
    strategy = data(problem(2, "mlp:tiny")).strategy
    found, meant = (RanksInMode(program, space, strategy, 2, "none") for _ in range(2))
    graphs = recorded(found)
    found.step(program.batch, 3, 0)
    meant.step(program.batch, 3, 0)
    monkeypatch.setattr(torch.cuda, "graph", failing)
    monkeypatch.setattr(GraphedSegment, "_carry_over", lambda *_: None)
    for graph in graphs:  # what a real recording does not do: it executes nothing
        monkeypatch.setattr(graph, "inner", _once_nothing(graph))
    losses = meant.step(program.batch, 3, 1)
    assert found.step(program.batch, 3, 1) == pytest.approx(losses, rel=1e-12)
    assert all("operation not permitted" in graph.notes[0] for graph in graphs)


def _once_nothing(graph: GraphedSegment) -> Any:
    """The segment's function, whose first call leaves tensors that nobody has computed."""
    plain, calls = graph.inner, []

    def run(rank: Any, context: Any) -> None:
        calls.append(rank)
        if len(calls) > 1:
            plain(rank, context)
            return
        for slot in graph.segment.frees:
            rank.tensors.pop(slot, None)
        rank.tensors.update({slot: torch.zeros(()) for slot in graph.segment.outs})

    return run
