"""random: splittable, and random enough."""

from __future__ import annotations

import pytest
import torch

from apportion.random import CounterRandom, uniform, whole

KEY = (3, 1, 4)


def test_any_box_is_the_slice_of_the_whole() -> None:
    full = whole(KEY, (8, 32, 48), torch.float32)
    rows, columns, depth = torch.tensor([6, 1]), torch.arange(5, 30), torch.arange(1, 48, 3)
    assert torch.equal(uniform(KEY, [rows, columns, depth]), full[rows][:, columns][:, :, depth])
    assert uniform(KEY, []).shape == ()
    assert uniform(KEY, [torch.arange(0)]).shape == (0,)


def test_all_dtypes_draw_the_same_numbers() -> None:
    single = whole(KEY, (64, 64), torch.float32)
    assert torch.equal(whole(KEY, (64, 64), torch.float64), single.double())
    assert torch.equal(whole(KEY, (64, 64), torch.bfloat16), single.bfloat16())
    assert float(single.min()) >= 0.0 and float(single.max()) < 1.0


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


def test_numbers_look_uniform_and_independent() -> None:
    x = whole(KEY, (8, 128, 768), torch.float64)
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
    x = whole(KEY, (512, 512), torch.float64)
    for other in ((4, 1, 4), (3, 2, 4), (3, 1, 5), (1, 3, 4), (3 + 2**32, 1, 4)):
        assert abs(correlation(x, whole(other, (512, 512), torch.float64))) < 8e-3


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
