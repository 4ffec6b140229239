"""A verification whose process is killed ends, with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from apportion.verify.survey import SurveyRequest, verified

KILLER = """
import os, signal

def make():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_worker_ends_the_verification(tmp_path: Path) -> None:
    file = tmp_path / "killer.py"
    file.write_text(KILLER)
    request = SurveyRequest(models=(f"{file}:make",))
    with pytest.raises(RuntimeError, match="was killed; verify again"):
        verified(request, 1, lambda text: None)


def test_a_model_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="There is no file"):
        verified(SurveyRequest(models=(f"{tmp_path / 'none.py'}:make",)), 1, lambda text: None)
