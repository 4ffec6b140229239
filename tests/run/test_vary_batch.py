"""Varied batches are other data, and valid where the given one is."""

from __future__ import annotations

import pytest
import torch

from apportion.run.vary_batch import AS_GIVEN, FREE, MILD, accepted, in_order, vary


def test_the_first_batch_is_the_given_one() -> None:
    batch = {"x": torch.randn(4, 3)}
    assert vary(batch, 0, 0) is batch
    assert vary(batch, 0, 1, AS_GIVEN) is batch


def test_numbers_change_and_stay_in_their_bounds() -> None:
    ids = torch.arange(40).reshape(8, 5).flip(0) * 7 % 11
    batch = {"ids": ids, "x": torch.rand(8, 3), "one": torch.rand(1, 6)}
    made = vary(batch, 3, 1)
    assert sorted(made["ids"].flatten().tolist()) == sorted(ids.flatten().tolist())
    assert not torch.equal(made["ids"], ids)
    assert made["x"].min() >= 0 and made["x"].max() <= 0.5
    assert not torch.equal(made["one"], batch["one"])
    assert all(
        torch.equal(a, b) for a, b in zip(made.values(), vary(batch, 3, 1).values(), strict=True)
    )
    assert not torch.equal(vary(batch, 3, 2)["ids"], made["ids"])


def test_the_same_numbers_in_every_precision() -> None:
    batch = torch.randn(5, 4)
    assert torch.equal(vary(batch, 0, 1).double(), vary(batch.double(), 0, 1))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([0, 3, 7, 9]),
        torch.tensor([9, 7, 7, 2]),
        torch.arange(6).reshape(1, 6),
        torch.tensor(3),
        torch.tensor([True, False]),
    ],
    ids=["offsets", "lengths", "positions", "a number", "truth values"],
)
def test_what_is_in_order_stays(tensor: torch.Tensor) -> None:
    assert torch.equal(vary(tensor, 0, 1), tensor)


def test_rows_of_a_mask_stay_whole() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    made = vary(mask, 0, 1)
    assert sorted(made.tolist()) == sorted(mask.tolist()) and in_order(made)
    causal = torch.full((4, 4), float("-inf")).triu(1)
    assert (vary(causal, 0, 1) == 0).any(-1).all()


def test_a_step_decides_how_much_is_varied() -> None:
    batch = {"ids": torch.tensor([[5, 0, 5], [4, 1, 4], [5, 2, 5]]), "x": torch.rand(4)}

    def sorted_columns(batches: list[dict[str, torch.Tensor]]) -> int:
        for each in batches:
            if (each["ids"][:, 1] > 2).any():
                raise IndexError("no such row")
        return len(batches)

    assert accepted(batch, 0, 3, sorted_columns) == (MILD, 3)
    assert accepted(batch, 0, 3, len) == (FREE, 3)

    def only_given(batches: list[dict[str, torch.Tensor]]) -> None:
        if any(b is not batch for b in batches):
            raise ValueError("something else")

    assert accepted(batch, 0, 3, only_given) == (AS_GIVEN, None)

    def never(batches: list[dict[str, torch.Tensor]]) -> None:
        raise RuntimeError("always")

    with pytest.raises(RuntimeError, match="always"):
        accepted(batch, 0, 2, never)
