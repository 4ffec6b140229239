"""Tensors of the batch that are the same in every step: shapes may follow from their values."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_capture import run
from test_read_probes import assert_equals_eager
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import apportion as ap
from apportion.capture import CaptureError, Program, batch_leaves, capture, eager_steps
from apportion.plan.make_plan import make_plan
from apportion.run.vary_batch import vary
from apportion.zoo import load


class Recurrent(torch.nn.Module):
    def __init__(self, kind: type[torch.nn.RNNBase] = torch.nn.LSTM, **settings: Any) -> None:
        super().__init__()
        self.rows = kind(4, 6, batch_first=True, **settings)  # type: ignore[call-arg]
        self.out = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        rows, lengths = pad_packed_sequence(self.rows(packed)[0], batch_first=True, total_length=6)
        return self.out(rows).sum(1) / lengths[:, None]


def linear() -> torch.nn.Module:
    return torch.nn.Linear(4, 6)


def without_loops(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    edges = batch["edges"]
    edges = edges[:, edges[0] != edges[1]]
    weights = torch.ones(edges.shape[1])
    weights[edges[0] < edges[1]] += 1.0
    made = model(batch["x"])
    return torch.zeros_like(made).index_add(0, edges[1], made[edges[0]] * weights[:, None]).mean()


def packed(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return model(batch["x"], batch["lengths"]).square().mean()


def ctc(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    scores = model(batch["x"]).log_softmax(-1).reshape(6, 2, 3)
    return F.ctc_loss(scores, batch["classes"][:4].reshape(2, 2), batch["frames"], batch["counts"])


def one_hot(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    wanted = F.one_hot(batch["classes"])
    return (model(batch["x"])[:, : wanted.shape[1]] - wanted).square().mean()


def branch(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    loss = model(batch["x"]).square().mean()
    return loss * 2 if batch["lengths"].sum() > 3 else loss


def pieces(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    parts = model(batch["x"]).split(batch["lengths"].tolist())
    return torch.stack([part.square().mean() for part in parts]).sum()


def repeated(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return model(batch["x"][:3].repeat_interleave(batch["lengths"], 0)).square().mean()


def chosen(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return model(batch["x"])[batch["mask"]].square().mean()


def counted(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    rows = batch["mask"].nonzero().squeeze(1)
    return model(batch["x"])[rows].masked_select(batch["mask"][rows][:, None]).square().mean()


def twice(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    rows = model(batch["x"])[batch["mask"]]
    return rows.square().mean() * (batch["lengths"] > 1).nonzero().shape[0]


def own_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(6, 4, generator=generator),
        "edges": torch.randint(6, (2, 12), generator=generator),
        "lengths": torch.tensor([3, 1, 2]),
        "classes": torch.tensor([1, 2, 1, 2, 2, 1]),
        "frames": torch.tensor([6, 5]),
        "counts": torch.tensor([2, 1]),
        "mask": torch.tensor([True, False, True, True, False, True]),
    }


def sequences() -> dict[str, torch.Tensor]:
    return own_batch() | {"x": torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))}


STEPS: dict[str, tuple[Callable[..., Any], Callable[[], Any], Callable[[], Any]]] = {
    "without_loops": (without_loops, linear, own_batch),
    "packed": (packed, Recurrent, sequences),
    "packed_gru": (packed, lambda: Recurrent(torch.nn.GRU, num_layers=2), sequences),
    "ctc": (ctc, linear, own_batch),
    "one_hot": (one_hot, linear, own_batch),
    "branch": (branch, linear, own_batch),
    "pieces": (pieces, linear, own_batch),
    "repeated": (repeated, linear, own_batch),
    "chosen": (chosen, linear, own_batch),
    "counted": (counted, linear, own_batch),
    "twice": (twice, linear, own_batch),
}


def captured(name: str, fixed: Any = ()) -> Program:
    step, make, batch = STEPS[name]
    torch.manual_seed(0)
    model = make()
    return capture(step, model, torch.optim.AdamW(model.parameters()), batch(), fixed=fixed)


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_the_remedy_that_a_refusal_names_works(name: str) -> None:
    with pytest.raises(CaptureError, match=r"is|are the same in every step") as refused:
        captured(name)
    found = re.search(r"fixed=\[(.*)\]", str(refused.value))
    assert found is not None
    program = captured(name, [each.strip('"') for each in found[1].split(", ")])
    assert_equals_eager(program)


def refusal_of(step: Callable[..., Any]) -> str:
    model = linear()
    with pytest.raises(CaptureError) as refused:
        capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), own_batch())
    return str(refused.value)


def test_a_remedy_that_is_not_enough_says_what_is_left() -> None:
    def step(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        losses = model(batch["x"])[batch["mask"]].square()
        return losses[losses > 0.1].mean()

    said = refusal_of(step)
    line = step.__code__.co_firstlineno
    assert said.count(";") == 2
    assert f"depends on data at {Path(__file__).name}:{line + 1};" in said.replace(
        "tests/capture/", ""
    )
    assert 'fixed=["batch.mask"], though then an index by a mask gives a result' in said
    assert said.endswith(f"{Path(__file__).name}:{line + 2}")


def test_a_remedy_that_leaves_the_same_line_refused_is_not_named() -> None:
    def moved(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return model(rows)[:, :4] if rows.mean() > 0 else model(rows)[:, 2:]

    def step(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        first = moved(model, batch["x"])
        return moved(model, first).square().mean()

    said = refusal_of(step)
    assert "branches on a value that depends on batch.x" in said
    assert "fixed=" not in said


@pytest.mark.slow
def test_a_name_may_be_short_or_that_of_a_part() -> None:
    step, make, batch = STEPS["chosen"]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    short = capture(step, model, optimizer, batch(), fixed=["mask"])
    assert [each.name for each in short.fixed_inputs] == ["batch.mask"]
    assert any("batch.mask must be the same in every step" in note for note in short.notes)

    def inner(model: torch.nn.Module, batch: Any) -> Any:
        return step(model, {"x": batch["x"], **batch["rest"]})

    given = batch()
    part = capture(inner, model, optimizer, {"x": given.pop("x"), "rest": given}, fixed=["rest"])
    assert {each.name for each in part.fixed_inputs} == {f"batch.rest.{key}" for key in given}
    with pytest.raises(CaptureError, match=r"no such tensor; it has batch.x, batch.edges"):
        capture(step, model, optimizer, batch(), fixed=["masks"])


@pytest.mark.slow
def test_another_value_of_a_fixed_tensor_is_refused() -> None:
    program = captured("chosen", ["mask"])
    assert set(batch_leaves(program, own_batch())) == {index for index, _ in program.inputs}
    other = own_batch() | {"mask": torch.tensor([True, True, False, True, False, True])}
    with pytest.raises(ValueError, match=r"batch.mask has other values than when the step was"):
        batch_leaves(program, other)


@pytest.mark.slow
def test_a_batch_that_is_written_to_after_capture_is_noticed() -> None:
    program = captured("chosen", ["mask"])
    program.batch["mask"].logical_not_()
    with pytest.raises(ValueError, match=r"batch.mask has other values"):
        batch_leaves(program, program.batch)


@pytest.mark.slow
def test_varied_batches_keep_what_is_fixed() -> None:
    program = captured("chosen", ["mask", "edges"])
    other = vary(program.batch, 0, 1, fixed=program.fixed_positions)
    batch_leaves(program, other)
    assert not torch.equal(other["x"], program.batch["x"])


@pytest.mark.slow
def test_the_captured_step_follows_the_rest_of_the_batch() -> None:
    program = captured("without_loops", ["edges"])
    batches = [vary(program.batch, 0, n, fixed=program.fixed_positions) for n in range(3)]
    losses, _ = eager_steps(program, batches, 0)
    assert len(set(losses)) == 3
    assert run(program, batches)[0] == pytest.approx(losses, rel=1e-5)


@pytest.mark.slow
def test_the_check_keeps_what_is_fixed() -> None:
    program = captured("chosen", ["mask"])
    assert ap.check(program, make_plan(program, ap.cluster("local:2"), "data", budget=0.5)).equal


def test_a_file_names_what_is_fixed(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "import torch\n"
        "def step(model, batch):\n"
        "    return model(batch[0])[batch[1]].square().mean()\n"
        "def train(fixed=['batch.1']):\n"
        "    model = torch.nn.Linear(3, 2)\n"
        "    batch = (torch.randn(4, 3), torch.tensor([True, False, True, True]))\n"
        "    return step, model, torch.optim.SGD(model.parameters(), lr=0.1), batch, None, fixed\n"
        "def wrong():\n"
        "    return train('batch.1')\n"
    )
    it = load(f"{file}:train")
    assert it.fixed == ("batch.1",)
    with pytest.raises(ValueError, match="a list of their names"):
        load(f"{file}:wrong")
