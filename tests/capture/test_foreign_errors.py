"""What the user's step raises while it is captured becomes one sentence with its line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import apportion as ap
from apportion.capture.foreign_errors import in_our_words


def plain(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def wrong_shape(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[:, :3]).square().mean()


def missing_key(model: nn.Module, batch: Any) -> torch.Tensor:
    return plain(model, {"x": batch}["y"])


def to_a_gpu(model: nn.Module, batch: Any) -> torch.Tensor:
    raise RuntimeError("No CUDA GPUs are available")


def memory(model: nn.Module, batch: Any) -> torch.Tensor:
    return plain(model, batch) * batch.data_ptr()


def leaving(model: nn.Module, batch: Any) -> torch.Tensor:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (wrong_shape, "see that it runs in plain PyTorch"),
        (missing_key, "KeyError: 'y'); see that it runs in plain PyTorch"),
        (to_a_gpu, "device=x.device"),
        (leaving, "SystemExit: 3"),
    ],
)
def test_an_error_is_one_sentence_with_the_line(
    step: Any, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ap.CaptureError) as caught:
        ap.capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(5, 4))
    message = str(caught.value)
    assert said in message and "\n" not in message
    assert f"test_foreign_errors.py:{step.__code__.co_firstlineno + 1}" in message
    assert "Traceback" not in capfd.readouterr().err


def test_code_that_looks_into_memory_is_told_a_way_out() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ap.CaptureError, match="implementation in plain PyTorch"):
        ap.capture(memory, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(5, 4))


def test_an_error_of_ours_is_not_the_steps() -> None:
    try:
        raise KeyError("inside")
    except KeyError as error:
        assert in_our_words(error) is None
