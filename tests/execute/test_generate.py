"""Generated code makes the interpreter's results, bit for bit but for fused updates."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from compare_runs import batches
from generated_runs import RanksInMode, differing_replicas
from graphs import captured, problem
from soak import cases
from torch import nn

from apportion.capture.capture import capture
from apportion.capture.reference import capture_as, eager_steps
from apportion.execute.executable import Executable
from apportion.execute.generate import SegmentGenerator
from apportion.execute.plain_sum import MessageBox, MessageViews
from apportion.execute.rank_steps import rank_steps
from apportion.lower.lower import lower
from apportion.search.baselines.data import data
from apportion.search.baselines.fsdp import fsdp
from apportion.search.baselines.random_strategy import draw
from apportion.split.space import Space
from apportion.split.strategy import Strategy, unsplit_choice

EXACT = 1e-11
NOISE = 1e-18  # gradients that are truly zero


def whole(space: Space) -> Strategy:
    return Strategy(tuple(unsplit_choice(space, o, (0,)) for o in range(len(space.graph.ops))))


def assert_same(program: Any, space: Space, strategy: Strategy, devices: int, steps: int) -> None:
    """Both modes train the same, and replicas are bit-equal after every step."""
    oracle = RanksInMode(program, space, strategy, devices, "none")
    made = RanksInMode(program, space, strategy, devices, "generated")
    for number, batch in enumerate(batches(program, 0, steps)):
        meant, found = oracle.step(batch, 0, number), made.step(batch, 0, number)
        for a, b in zip(meant, found, strict=True):
            assert a == b if number == 0 else abs(a - b) <= EXACT * abs(a)
        assert not differing_replicas(made.executable, made.ranks)
        for old, new in zip(oracle.state(), made.state(), strict=True):
            assert old.keys() == new.keys()
            for slot, tensor in old.items():
                largest = float(tensor.abs().max()) if tensor.numel() else 0.0
                assert torch.allclose(new[slot], tensor, rtol=0.0, atol=EXACT * largest + NOISE)
    assert not made.notes


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["mlp:tiny", "gpt2:tiny", "lenet:tiny", "rnntc:tiny"])
def test_a_whole_step_trains_as_interpreted(spec: str) -> None:
    program, space = captured(spec)
    assert_same(program, space, whole(space), 1, 3)


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("seed", range(cases(6, 3)))
def test_random_strategies_train_as_interpreted(devices: int, seed: int) -> None:
    program, space = captured("mlp:tiny")
    assert_same(program, space, draw(space, devices, Random(100 * devices + seed)), devices, 2)


@pytest.mark.slow
def test_a_random_strategy_of_gpt2_trains_as_interpreted() -> None:
    program, space = captured("gpt2:tiny")
    assert_same(program, space, draw(space, 2, Random(7)), 2, 2)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norm = nn.LayerNorm(8)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.dropout(self.norm(self.first(x).relu())))
        return result


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(batch).square().mean()
    return result


OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"lr": 0.1, "maximize": True}),
    (torch.optim.Adam, {"lr": 0.01}),
    (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    (torch.optim.Adam, {"lr": 0.01, "maximize": True}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "maximize": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "settings"), OPTIMIZERS)
def test_fused_updates_are_the_optimizers_with_settings_that_change(
    cls: Any, settings: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = Small()
    optimizer = cls(model.parameters(), **settings)
    batch = torch.randn(5, 6)
    program = capture_as(capture(loss, model, optimizer, batch, 0.5), torch.float64)
    space = Space(program.graph)
    for devices, strategy in ((1, whole(space)), (2, draw(space, 2, Random(3)))):
        made = RanksInMode(program, space, strategy, devices, "generated")
        oracle = RanksInMode(program, space, strategy, devices, "none")
        lr = program.optimizer.param_groups[0]["lr"]
        for number in range(4):
            program.optimizer.param_groups[0]["lr"] = lr * (1 + number)
            for ranks in (made, oracle):
                ranks.step(program.batch, 1, number)
            assert not differing_replicas(made.executable, made.ranks)
        program.optimizer.param_groups[0]["lr"] = lr
        for old, new in zip(oracle.state(), made.state(), strict=True):
            for slot, tensor in old.items():
                largest = float(tensor.abs().max())
                assert torch.allclose(new[slot], tensor, rtol=0.0, atol=EXACT * largest), slot
        assert not made.notes


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["mlp:tiny", "gpt2:tiny"])
@pytest.mark.parametrize("method", [data, fsdp])
def test_the_usual_plans_train_as_interpreted(spec: str, method: Any) -> None:
    program, space = captured(spec)
    assert_same(program, space, method(problem(2, spec)).strategy, 2, 3)


def test_views_of_a_message_are_made_once_where_it_stays() -> None:
    raw = torch.arange(64, dtype=torch.uint8)
    box = MessageBox(0, 16, 16, torch.float32, (2, 2))
    views = MessageViews([box])
    first, second, third = (views(raw)[0] for _ in range(3))
    assert torch.equal(first, raw[16:32].view(torch.float32).view(2, 2))
    assert second is third
    assert torch.equal(views(raw.clone())[0], first)


def test_a_step_equals_eager_pytorch() -> None:
    program, space = captured("gpt2:tiny")
    losses, _ = eager_steps(program, batches(program, 0, 3), 0)
    made = RanksInMode(program, space, whole(space), 1, "generated")
    for number, batch in enumerate(batches(program, 0, 3)):
        (found,) = made.step(batch, 0, number)
        assert abs(found - losses[number]) <= EXACT * abs(losses[number])


def test_state_keeps_its_address() -> None:
    program, space = captured("gpt2:tiny")
    made = RanksInMode(program, space, whole(space), 1, "generated")
    trained = {slot for slot, _ in program_state(made)}
    before = {slot: t.data_ptr() for slot, t in made.state()[0].items() if slot in trained}
    for number in range(3):
        made.step(program.batch, 0, number)
    after = made.state()[0]
    assert {slot: after[slot].data_ptr() for slot in before} == before


def program_state(ranks: RanksInMode) -> list[tuple[int, int]]:
    """(slot, Value) of the state that a step changes."""
    executable = ranks.executable
    return [(b, executable.slots[b].value) for _, b in executable.carry]


def test_segments_that_are_alike_share_their_code() -> None:
    _, space = captured("mlp:tiny")
    strategy = data(problem(2)).strategy
    executable = Executable(space, strategy, lower(space, strategy, 2))  # a segment per parameter
    generator = SegmentGenerator(executable, 0, "cpu")
    sources = generator.segments(rank_steps(executable, 0))
    assert len({source.plain.text for source in sources}) == len(generator.codes) < len(sources)


def test_the_text_has_only_names_of_our_own() -> None:
    program, space = captured("gpt2:tiny")
    ranks = RanksInMode(program, space, whole(space), 1, "none")
    (source,) = SegmentGenerator(ranks.executable, 0, "cpu").segments(ranks.steps[0])
    first, *rest = source.plain.text.replace(" x.clear()", "").splitlines()
    assert first == "def segment(x, s, w, context, clock, mark):"
    assert not set("\"'.\\@{:") & set("".join(rest))


@pytest.mark.slow
def test_tasks_are_recorded_once_for_all_that_are_alike() -> None:
    counts = []
    for layers in (2, 4):
        program, space = captured(f"gpt2:tiny,layers={layers}")
        ranks = RanksInMode(program, space, whole(space), 1, "none")
        generator = SegmentGenerator(ranks.executable, 0, "cpu")
        generator.segments(ranks.steps[0])
        counts.append(len(generator.book.traces))
    assert counts[0] == counts[1]
