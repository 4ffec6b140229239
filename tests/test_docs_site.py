"""The documentation as pages: built without a warning, whole, and without anything to fetch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import browser
import pytest
from page_reader import tool

import apportion as ap
from apportion.cli.main import app

ROOT = Path(__file__).parent.parent
RESOURCE = re.compile(r'<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="((?:https?:)?//[^"]*)"')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All pages, as `make docs` builds them; a warning ends it."""
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_a_page_is_in_one_of_eight_tabs() -> None:
    contents = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    tabs = re.findall(r"^  - ([\w ]+):", contents, re.M)
    assert tabs == [
        "Home", "Start", "How to", "Papers", "How it works", "Measured", "Reference", "Develop"
    ]  # fmt: skip
    named = re.findall(r"([\w/-]+\.md)", contents)
    there = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").glob("*.md")}
    assert len(named) == len(set(named)) and there <= set(named)


@pytest.mark.slow
def test_pages_fetch_nothing(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        found = RESOURCE.findall(page.read_text())
        assert [each for each in found if "canonical" not in each] == [], page.name
    styles = [path.read_text() for path in site.rglob("*.css")]
    assert not any("url(http" in text or "@import" in text for text in styles)


@pytest.mark.slow
def test_the_reference_has_every_public_name_and_command(site: Path) -> None:
    api = (site / "reference" / "api.html").read_text()
    assert [name for name in ap.__all__ if f">ap.{name}<" not in api] == []
    commands = (site / "reference" / "commands.html").read_text()
    for info in app.registered_commands:
        assert f">apportion {info.name}<" in commands
    assert "--recompute" in commands and "memory-limit" in commands


@pytest.mark.slow
@pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.WITHOUT)
def test_search_works_from_the_disk(site: Path, tmp_path: Path) -> None:
    with browser.browsing(tmp_path) as chromium:
        tab = chromium.tab()
        tab.open(f"file://{site / 'index.html'}")
        tab.evaluate("document.querySelector('.md-search__input').focus()")
        tab.evaluate(
            "(() => { const box = document.querySelector('.md-search__input');"
            "box.value = 'recomputation';"
            "box.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}));"
            "box.dispatchEvent(new InputEvent('input', {bubbles: true})); })()"
        )
        tab.wait("document.querySelectorAll('.md-search-result__link').length > 0", 20)
        assert tab.errors == []


def test_pictures_are_what_their_program_draws() -> None:
    pictures = tool("pictures")
    for name, draw in pictures.PICTURES.items():
        assert (ROOT / "docs" / name).read_text() == draw()


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "examples" / "first_plan.ipynb").read_text())
    printed = tool("run_notebook").run_cells(notebook)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    kept = ["".join("".join(each["text"]) for each in cell["outputs"]) for cell in cells]
    timed = 2  # how many alternatives are looked at depends on the machine
    assert [text for k, text in enumerate(printed) if k != timed] == [
        text for k, text in enumerate(kept) if k != timed
    ]
    assert "sample axis i in 4" in printed[timed]
