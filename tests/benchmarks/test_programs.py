"""The survey's own judgement: what it must notice."""

from __future__ import annotations

import random
from typing import Any

import programs
import pytest
import torch
from surveyed import divided_runs, idioms
from surveyed.live_objects import differences, snapshot
from surveyed.page import page
from surveyed.plain_runs import own_loop, plain
from surveyed.registry import IDIOM, PROGRAM, Entry, entries
from surveyed.remedies import REMEDIES, Remedy
from torch import nn


def entry(name: str) -> Entry:
    return Entry(name, IDIOM, "", getattr(idioms, name))


def test_names_are_unique_and_there_are_enough() -> None:
    kinds = [each.kind for each in entries()]  # raises for a name that is there twice
    assert kinds.count(PROGRAM) >= 150
    assert kinds.count(IDIOM) >= 100


@pytest.mark.slow
def test_equal() -> None:
    found = programs.survey(entry("own_backward"), ("data",))
    assert (found.outcome, found.plans) == ("equal", {"data": "equal"})


def test_refused_by_a_sentence() -> None:
    found = programs.survey(Entry("no remedy", IDIOM, "", idioms.branch_on_data), ("data",))
    assert found.outcome == "refused"
    assert "branches" in found.sentence


@pytest.mark.slow
@pytest.mark.parametrize("name", ["branch_on_data", "scheduler_in_step"])
def test_a_remedy_is_followed(name: str) -> None:
    found = programs.survey(entry(name), ("data", "random"))
    assert (found.outcome, found.remedy) == ("remedied", REMEDIES[name].done)
    assert found.plans == {"data": "equal", "random": "equal"}


def test_a_remedy_that_is_refused_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REMEDIES, "branch_on_data", Remedy("nothing", idioms.branch_on_data))
    found = programs.survey(entry("branch_on_data"), ("data",))
    assert found.outcome == "refused"
    assert "with nothing: the step branches" in found.sentence


def test_remedies_are_of_programs() -> None:
    assert REMEDIES.keys() <= {each.name for each in entries()}


@pytest.mark.slow
def test_a_wrong_run_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    true = divided_runs.divided

    def off(*args: Any) -> Any:
        losses, state = true(*args)
        return losses, {v: [_changed(copy) for copy in copies] for v, copies in state.items()}

    monkeypatch.setattr(divided_runs, "divided", off)
    found = programs.survey(entry("clip_norm_given"), ("data",))
    assert found.outcome == "wrong"
    assert "differs by" in found.sentence


def _changed(copy: Any) -> Any:
    copy.tensor.add_(1e-3)
    return copy


@pytest.mark.slow
def test_a_wrong_loss_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    true = divided_runs.divided

    def off(*args: Any) -> Any:
        losses, state = true(*args)
        return [losses[0], losses[1] + 1e-3], state

    monkeypatch.setattr(divided_runs, "divided", off)
    assert programs.survey(entry("clip_norm_given"), ("data",)).outcome == "wrong"


def test_what_is_no_capture_error_is_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **named: Any) -> Any:
        raise KeyError("planted")

    monkeypatch.setattr(programs, "captured", fails)
    found = programs.survey(entry("clip_norm_given"), ())
    assert found.outcome == "traceback"
    assert "planted" in found.sentence


def test_what_plain_pytorch_does_not_run_is_invalid() -> None:
    def broken() -> Any:
        raise ImportError("nothing there")

    assert programs.survey(Entry("broken", IDIOM, "", broken), ()).outcome == "invalid"


def test_steps_have_different_batches() -> None:
    assert len(set(plain(idioms.clip_norm_given, 2).losses)) == 2


def test_forms_of_step() -> None:
    assert own_loop(lambda model, optimizer, batch: None)
    assert not own_loop(lambda model, batch: None)


def _objects() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.cache = {"mask": torch.zeros(2)}
    kept = torch.ones(2)
    optimizer = torch.optim.Adam(model.parameters())
    return {"model": model, "optimizer": optimizer, "step": lambda: kept, "batch": [torch.ones(2)]}


CHANGES = {
    "parameter": lambda o: o["model"][0].weight.data.add_(1),
    "gradient": lambda o: setattr(o["model"][0].weight, "grad", torch.zeros(2, 2)),
    "attribute": lambda o: setattr(o["model"][1], "momentum", 0.2),
    "new attribute": lambda o: setattr(o["model"], "seen", 1),
    "cached tensor": lambda o: o["model"].cache["mask"].add_(1),
    "tensor replaced by an equal one": lambda o: o["model"].cache.update(mask=torch.zeros(2)),
    "training flag": lambda o: o["model"].eval(),
    "hook": lambda o: o["model"].register_forward_hook(lambda *_: None),
    "learning rate": lambda o: o["optimizer"].param_groups[0].update(lr=1.0),
    "closure": lambda o: o["step"]().add_(1),
    "batch": lambda o: o["batch"][0].add_(1),
    "Python random state": lambda o: random.random(),
    "torch random state": lambda o: torch.rand(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_live_object_is_noticed(change: str) -> None:
    objects = _objects()
    before = snapshot(objects)
    assert differences(before, snapshot(objects)) == []
    CHANGES[change](objects)
    assert differences(before, snapshot(objects))


def test_page() -> None:
    rows = [
        {
            "name": "a",
            "kind": PROGRAM,
            "outcome": "equal",
            "sentence": "",
            "plans": {"data": "equal"},
        },
        {
            "name": "b",
            "kind": PROGRAM,
            "outcome": "refused",
            "sentence": "no | way",
            "plans": {},
            "remedy": "x",
        },
        {"name": "c", "kind": IDIOM, "outcome": "skipped", "sentence": "", "plans": {}},
    ]
    text = page(rows, {PROGRAM: 5, IDIOM: 1})
    assert "Third-party programs: 3 of 5 have not been run" in text
    assert "Idioms on a small network:" not in text
    assert "| equal | 1 |" in text
    assert "| `b` | refused | no \\| way | x |" in text
    assert "1 programs whose packages are not installed" in text
