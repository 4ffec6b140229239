"""random: splittable, and random enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from graphs import CONTEXT

from apportion.capture.counter_random import (
    uniform,
    uniform_of_words,
    uniform_tensor,
    word_table,
)
from apportion.capture.lift_call import lift_call
from apportion.capture.random_rules import CounterRandom
from apportion.split.space import Space
from apportion.verify.run_split import run_op, run_split

KEY = (3, 1, 4)


def test_any_box_is_the_slice_of_the_whole() -> None:
    full = uniform_tensor(KEY, (8, 32, 48), torch.float32)
    rows, columns, depth = torch.tensor([6, 1]), torch.arange(5, 30), torch.arange(1, 48, 3)
    assert torch.equal(uniform(KEY, [rows, columns, depth]), full[rows][:, columns][:, :, depth])
    assert uniform(KEY, []).shape == ()
    assert uniform(KEY, [torch.arange(0)]).shape == (0,)


def test_all_dtypes_draw_the_same_numbers() -> None:
    single = uniform_tensor(KEY, (64, 64), torch.float32)
    assert torch.equal(uniform_tensor(KEY, (64, 64), torch.float64), single.double())
    assert torch.equal(uniform_tensor(KEY, (64, 64), torch.bfloat16), single.bfloat16())
    assert float(single.min()) >= 0.0 and float(single.max()) < 1.0


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


def test_numbers_look_uniform_and_independent() -> None:
    x = uniform_tensor(KEY, (8, 128, 768), torch.float64)
    assert float(x.mean()) == pytest.approx(0.5, abs=2e-3)
    assert float(x.var()) == pytest.approx(1 / 12, abs=2e-3)
    assert float((x < 0.9).double().mean()) == pytest.approx(0.9, abs=2e-3)
    counts = torch.histc(x.float(), 64, 0.0, 1.0)
    assert (
        float(((counts - counts.mean()) ** 2 / counts.mean()).sum()) < 110
    )  # 63 degrees of freedom
    for dim in range(3):
        lower, upper = x.narrow(dim, 0, x.shape[dim] - 1), x.narrow(dim, 1, x.shape[dim] - 1)
        assert abs(correlation(lower, upper)) < 5e-3
    rows = x.mean(-1)
    assert float(rows.var()) == pytest.approx(1 / 12 / 768, rel=0.15)


def test_the_three_parts_of_the_key_matter() -> None:
    x = uniform_tensor(KEY, (512, 512), torch.float64)
    for other in ((4, 1, 4), (3, 2, 4), (3, 1, 5), (1, 3, 4), (3 + 2**32, 1, 4)):
        assert abs(correlation(x, uniform_tensor(other, (512, 512), torch.float64))) < 8e-3


def test_words_from_a_table_draw_the_same_numbers() -> None:
    operators = [0, 7, 123456, 2**33 + 5]
    for seed, step in ((0, 0), (3, 11), (2**40 + 1, 2**33)):
        table = torch.from_numpy(word_table(seed, step, operators))
        for row, operator in zip(table, operators, strict=True):
            drawn = uniform_of_words(row[0], row[1], [torch.arange(5), torch.arange(3, 9)])
            meant = uniform((seed, step, operator), [torch.arange(5), torch.arange(3, 9)])
            assert torch.equal(drawn, meant)


def test_torchs_random_operators_are_replaced() -> None:
    with torch.random.fork_rng(devices=[]), CounterRandom(0, 0):
        noise = torch.randn(400, 400)
        kept = torch.nn.functional.dropout(torch.ones(400, 400), 0.25)
        decay = torch.empty(400, 400).exponential_(2.0)
    assert float(noise.mean()) == pytest.approx(0.0, abs=0.01)
    assert float(noise.std()) == pytest.approx(1.0, abs=0.01)
    assert float((kept != 0).float().mean()) == pytest.approx(0.75, abs=0.01)
    assert float(kept.max()) == pytest.approx(1 / 0.75)
    assert float(decay.mean()) == pytest.approx(0.5, abs=0.01)
    with torch.random.fork_rng(devices=[]), CounterRandom(0, 0):
        assert torch.equal(torch.randn(400, 400), noise)


@contextmanager
def ours() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]), CounterRandom(CONTEXT.seed, CONTEXT.step):
        yield


SIZE = (400, 400)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "mean", "std"),
    [
        (lambda: torch.empty(SIZE).uniform_(-1.0, 3.0), 1.0, 4 / 12**0.5),
        (lambda: torch.empty(SIZE).log_normal_(0.0, 0.5), 1.1331, 0.6039),
        (lambda: torch.empty(SIZE).geometric_(0.25), 4.0, 12**0.5),
        (lambda: torch.normal(torch.full(SIZE, 2.0), 3.0), 2.0, 3.0),
        (lambda: torch.normal(2.0, torch.full(SIZE, 3.0)), 2.0, 3.0),
        (lambda: torch.normal(torch.full((400, 1), 2.0), torch.full((400,), 3.0)), 2.0, 3.0),
        (lambda: torch.normal(2.0, 3.0, SIZE), 2.0, 3.0),
        (lambda: torch.randint(-2, 7, SIZE), 2.0, (80 / 12) ** 0.5),
        (lambda: torch.randint_like(torch.empty(SIZE), 9), 4.0, (80 / 12) ** 0.5),
        (lambda: torch.randint(1 << 40, SIZE), (1 << 39) - 0.5, (1 << 40) / 12**0.5),
        (lambda: torch.empty(SIZE, dtype=torch.int8).random_(), 63.5, (16383 / 12) ** 0.5),
        (lambda: torch.empty(SIZE).random_(5, 12), 8.0, 2.0),
        (lambda: torch.poisson(torch.full(SIZE, 3.5)), 3.5, 3.5**0.5),
        (lambda: torch.poisson(torch.full(SIZE, 4e4)), 4e4, 200.0),
        (lambda: torch.multinomial(torch.tensor([1.0, 2.0, 5.0]), 90000, True), 1.5, 0.5**0.5),
    ],
)
def test_distributions_have_their_moments(
    draw: Callable[[], torch.Tensor], mean: float, std: float
) -> None:
    with ours():
        found = draw()
    assert float(found.double().mean()) == pytest.approx(mean, rel=0.02, abs=0.02 * std)
    assert float(found.double().std()) == pytest.approx(std, rel=0.03)


def test_cauchy_has_its_quartiles() -> None:
    with ours():
        found = torch.empty(SIZE).cauchy_(1.0, 2.0).double().flatten()
    below, middle, above = found.quantile(torch.tensor([0.25, 0.5, 0.75]).double()).tolist()
    assert (below, middle, above) == pytest.approx((-1.0, 1.0, 3.0), abs=0.05)


def test_a_permutation_has_every_number_once() -> None:
    with ours():
        first, second = torch.randperm(20000), torch.randperm(20000, dtype=torch.int32)
    for found in (first, second.long()):
        assert torch.equal(found.sort().values, torch.arange(20000))
        assert abs(correlation(found.double(), torch.arange(20000).double())) < 0.03
    assert not torch.equal(first, second.long())


def test_classes_are_drawn_by_weight_and_once_without_replacement() -> None:
    weights = torch.tensor([1.0, 0.0, 3.0, 4.0]).repeat(40000, 1)
    with ours():
        found = torch.multinomial(weights, 3)
        often = torch.multinomial(weights[:4], 20000, replacement=True)
    assert torch.equal(found.sort(-1).values, torch.tensor([0, 2, 3]).expand(40000, 3))
    first = torch.bincount(found[:, 0], minlength=4) / 40000
    assert first.tolist() == pytest.approx([0.125, 0.0, 0.375, 0.5], abs=0.01)
    for row in often:
        share = torch.bincount(row, minlength=4) / 20000
        assert share.tolist() == pytest.approx([0.125, 0.0, 0.375, 0.5], abs=0.015)


def test_random_slopes_and_their_noise() -> None:
    x = torch.randn(SIZE, dtype=torch.float64)
    noise = torch.zeros_like(x)
    with ours():
        found = torch.ops.aten.rrelu_with_noise.default(x, noise, 0.1, 0.3, True)
        still = torch.ops.aten.rrelu_with_noise.default(x, noise.clone(), 0.1, 0.3, False)
    assert torch.equal(found, x * noise)
    assert torch.equal(noise[x > 0], torch.ones_like(noise[x > 0]))
    slopes = noise[x <= 0]
    assert float(slopes.min()) >= 0.1 and float(slopes.max()) < 0.3
    assert float(slopes.mean()) == pytest.approx(0.2, abs=0.001)
    torch.testing.assert_close(still, torch.where(x > 0, x, 0.2 * x))


def steps() -> dict[str, Callable[[torch.Tensor], Any]]:
    return {
        "randint": lambda x: x * torch.randint(9, x.shape),
        "normal": lambda x: torch.normal(x, 0.5),
        "geometric": lambda x: x.clone().geometric_(0.3),
        "log_normal": lambda x: x + torch.empty_like(x).log_normal_(),
        "poisson": torch.poisson,
        "multinomial": lambda x: torch.multinomial(x, 4),
        "replacement": lambda x: torch.multinomial(x, 9, replacement=True),
        "rrelu": lambda x: torch.nn.functional.rrelu(x - 0.5, training=True),
        "randperm": lambda x: x[:, torch.randperm(6)],
    }


@pytest.mark.parametrize("name", steps())
def test_a_captured_draw_is_the_eager_one_and_its_rows_can_be_cut(name: str) -> None:
    step = steps()[name]
    x = torch.rand(8, 6, dtype=torch.float64) + 0.1
    with ours():
        expected = step(x)
    found = lift_call(step, (x,), {})
    space = Space(found.graph)
    values = dict(found.constants) | dict(zip(found.inputs, (x,), strict=True))
    cut = 0
    for index, op in enumerate(found.graph.ops):
        tensors = [values[v] for v in op.inputs]
        whole = run_op(op, op.args, tensors, CONTEXT)
        values |= dict(zip(op.outputs, whole, strict=True))
        axes = space.axes(index)
        for position, able in enumerate(space.cuttable(index)):
            parts = [2 if k == position else 1 for k in range(len(axes))]
            if able and axes[position].extent == 8:
                cut += 1
                made = run_split(space, index, space.split(index, parts), tensors, CONTEXT)
                for ours_, theirs in zip(made, whole, strict=True):
                    torch.testing.assert_close(ours_, theirs, rtol=1e-12, atol=0)
    (result,) = found.outputs
    assert result is not None
    torch.testing.assert_close(values[result], expected, rtol=1e-12, atol=0)
    assert cut > 0
