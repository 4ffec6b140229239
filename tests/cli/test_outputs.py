"""Files that commands write: what cannot be written is refused before any work, and a result that
cannot be written after it is not lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from graphs import captured

import apportion as ap
from apportion.cli import main as cli
from apportion.files import open_atomic, write_atomic
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan

PLAN = ["plan", "mlp:tiny", "--cluster", "2xh100", "--method", "data", "--budget", "0"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "p.json"
    make_plan(captured("mlp:tiny")[0], ap.cluster("2xh100"), "data", 0.0).save(path)
    return path


@pytest.mark.parametrize("option", ["--out", "--trace"])
def test_where_nothing_can_be_written_no_search_begins(
    option: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("apportion.cli.plan_commands.capture_without_data", None)
    for place, why in (("/proc/p.json", "cannot write /proc/p.json"), (tmp_path, "is a folder")):
        assert cli.status([*PLAN, option, str(place)]) == 2
        said = capfd.readouterr()
        assert said.out == "" and said.err.count("\n") == 1 and why in said.err


def test_a_plan_book_is_checked_before_and_kept_as_it_grows(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    book = [*PLAN, "--devices", "2,1", "--out"]
    with monkeypatch.context() as patch:
        patch.setattr("apportion.cli.plan_commands.capture_without_data", None)
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "1.json").mkdir()
        for place in ("/proc/book", tmp_path / "none" / "book", tmp_path / "full"):
            assert cli.status([*book, str(place)]) == 2
            said = capfd.readouterr()
            assert said.out == "" and said.err.count("\n") == 1

    def interrupted(self: Plan, path: Path, real: Any = Plan.save) -> None:
        if path.name == "1.json":
            raise KeyboardInterrupt
        real(self, path)

    monkeypatch.setattr(Plan, "save", interrupted)
    assert cli.status([*book, str(tmp_path / "book")]) == 130
    assert [path.name for path in (tmp_path / "book").iterdir()] == ["2.json"]
    assert "planning for 2 devices, 1 of 2 plans" in capfd.readouterr().err


def test_a_report_does_not_overwrite_its_plan(
    saved: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = saved.read_bytes()
    link = saved.with_name("link.json")
    link.symlink_to(saved)
    for command in (
        ["report", str(saved), "-o", str(saved)],
        ["report", str(saved), "-o", str(link)],
        ["report", str(saved), "-o", f"{saved}.html", "--trace", str(saved)],
        ["simulate", str(saved), "--trace", str(saved)],
        ["report", str(saved), "-o", f"{saved}.x", "--trace", f"{saved}.x"],
    ):
        assert cli.status(command) == 2
        assert "by this command: write to another file." in capfd.readouterr().err
    assert saved.read_bytes() == before
    assert sorted(path.name for path in saved.parent.iterdir()) == ["link.json", "p.json"]


@pytest.mark.slow
def test_a_plan_that_cannot_be_saved_is_shown_and_put_elsewhere(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = Plan.save
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def save(self: Plan, path: Path) -> None:
        if path.name == "p.json":
            raise ValueError(f"cannot write {path}: No space left on device")
        real(self, path)

    monkeypatch.setattr(Plan, "save", save)
    assert cli.status([*PLAN, "--json", "--out", str(tmp_path / "p.json")]) == 1
    said = capfd.readouterr()
    assert json.loads(said.out)["feasible"] is True
    assert "No space left on device; it is in " in said.err
    (kept,) = tmp_path.glob("apportion-*.json")
    assert Plan.load(kept).method == "data"


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
from apportion.cli.main import main
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_on_a_full_disk_the_table_is_left(tmp_path: Path) -> None:
    """No file may have more than 2,000 bytes: a plan cannot be written anywhere."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *PLAN, "--out", str(tmp_path / "p.json")],
        capture_output=True, text=True, timeout=120, env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1 and "step time" in done.stdout
    assert "p.json: File too large; it is lost" in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_links_stay_and_streams_are_written_to(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    link.symlink_to(real)
    write_atomic(link, "text")
    assert link.is_symlink() and real.read_text() == "text"
    write_atomic(Path("/dev/null"), "text")
    assert Path("/dev/null").is_char_device()
    name = "x" * 255
    write_atomic(tmp_path / name, "long")
    assert (tmp_path / name).read_text() == "long"
    with pytest.raises(ZeroDivisionError), open_atomic(real) as file:
        file.write(b"other")
        raise ZeroDivisionError
    assert real.read_text() == "text" and len(list(tmp_path.iterdir())) == 3
