"""Refusals name the user's line and the library's that it leads to, and a remedy for each."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from test_read_probes import captured, mlp
from torch import nn

from apportion.capture.trace import CaptureError

LIBRARY = """
import torch

def doubled(loss):
    return loss * 2 if loss > 0 else loss

def several(x):
    return torch.unique(x)

def called(function, x):
    return function(x)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package as it is installed."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "some_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(packages)
    return importlib.import_module("some_library")


def test_a_line_of_a_library_is_remedied_by_its_settings(library: ModuleType) -> None:
    def step(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        loss: torch.Tensor = library.doubled(model(batch[0]).mean())
        return loss

    with pytest.raises(CaptureError, match=r"test_call_place\.py:\d+, inside some_library\.py:5"):
        captured(step, mlp())
    with pytest.raises(CaptureError, match=r"so choose a setting of some_library that does"):
        captured(step, mlp())


def test_a_line_of_the_library_is_named_and_not_that_of_torch(library: ModuleType) -> None:
    def step(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        loss: torch.Tensor = library.several(model(batch[0])).mean()
        return loss

    with pytest.raises(CaptureError, match=r"\.py:\d+, inside some_library\.py:8;"):
        captured(step, mlp())


def test_a_line_that_a_library_calls_is_the_users_own(library: ModuleType) -> None:
    def step(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        loss: torch.Tensor = library.called(lambda x: x[x > 0].mean(), model(batch[0]))
        return loss

    with pytest.raises(CaptureError, match=r"test_call_place\.py:\d+; .*so take all elements"):
        captured(step, mlp())
