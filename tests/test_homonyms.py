"""One name, one meaning; no long functions; state in modules is listed with its reason."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parent.parent / "tools" / "homonyms.py"


@pytest.fixture(scope="module")
def homonyms() -> ModuleType:
    spec = importlib.util.spec_from_file_location("homonyms", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_everything_is_listed_with_its_reason(homonyms: ModuleType) -> None:
    assert homonyms.unlisted() == []


@pytest.mark.slow
def test_what_is_listed_is_still_there(homonyms: ModuleType) -> None:
    assert homonyms.STATE.keys() == homonyms.state().keys()
    assert homonyms.SHARED.keys() <= homonyms.homonyms().keys()


def test_two_classes_of_one_name_are_seen(
    homonyms: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "a.py").write_text("class Thing: ...\nCACHE = {}\ndef f(): CACHE[1] = 2\n")
    (package / "b.py").write_text("class _Thing: ...\n")
    monkeypatch.setattr(homonyms, "PACKAGE", package)
    monkeypatch.setattr(homonyms, "files", lambda: sorted(package.glob("*.py")))
    assert list(homonyms.homonyms()) == ["class Thing"]
    assert list(homonyms.state()) == ["package.a.CACHE"]
