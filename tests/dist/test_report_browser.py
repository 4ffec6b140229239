"""The report opens in a real browser: drawn whole, without errors and without the network."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from browser import CHROMIUM, WITHOUT, browsing

import apportion as ap
from apportion import zoo
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import MethodFigures, Plan, PlanTrial
from apportion.show import report
from apportion.simulate.timeline import MEASURED, timeline

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT)

HOSTILE = "</script><script>throw 1</script><img src=x onerror='throw 2'>"

# Uses everything that can be used; `used` is set at the end, from what the page then shows.
USE = """
const find = (id) => document.getElementById(id), lanes = find("lanes"), art = find("lanes-canvas");
const fire = (target, event) => target.dispatchEvent(event);
const box = art.getBoundingClientRect();
for (const id of ["zoom-in", "zoom-out", "zoom-all", "zoom-in", "expand"]) find(id).click();
for (const key of ["ArrowLeft", "ArrowRight", "+", "-", "0"])
  fire(lanes, new KeyboardEvent("keydown", { key }));
for (const deltaY of [-300, 100])
  fire(art, new WheelEvent("wheel", { deltaY, ctrlKey: true, clientX: box.left + 400 }));
for (let y = 0; y < box.height; y += 5)
  for (let x = 0; x < box.width; x += 25)
    fire(art, new PointerEvent("pointermove", { clientX: box.left + x, clientY: box.top + y }));
fire(art, new MouseEvent("dblclick", { clientX: box.left + 300, clientY: box.top + 34 }));
for (const id of ["memory-canvas", "overview"]) {
  const at = find(id).getBoundingClientRect();
  for (let x = 0; x < at.width; x += 9)
    fire(find(id), new PointerEvent("pointermove", { clientX: at.left + x, clientY: at.top + 9 }));
}
fire(find("memory-list"), new KeyboardEvent("keydown", { key: "ArrowDown" }));
for (const id of ["colour-by", "order", "phase", "source"])
  for (const option of [...find(id).options].reverse()) {
    find(id).value = option.value;
    fire(find(id), new Event("change"));
  }
find("search").value = "mm backward";
fire(find("search"), new Event("input"));
setTimeout(() => {
  document.documentElement.dataset.used = find("found").textContent;
}, 600);
"""


def made(method: str) -> Plan:
    it = zoo.load("gpt2:tiny")
    program = ap.capture(it.step, it.model, it.optimizer, it.batch, clip_norm=it.clip_norm)
    return make_plan(program, ap.cluster("local:3"), method, seed=3)


def opened(page: Path, folder: Path) -> str:
    """The page's DOM after it has drawn itself; fails on anything in the browser's console."""
    options = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--enable-logging=stderr", "--v=0", "--virtual-time-budget=4000", "--dump-dom"),
        *("--window-size=1280,900", f"--user-data-dir={folder / 'profile'}"),
    ]
    done = subprocess.run(
        [str(CHROMIUM), *options, page.as_uri()], capture_output=True, text=True, timeout=120
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    assert done.stdout, done.stderr
    return done.stdout


def root_of(dom: str) -> str:
    found = re.search(r"<html[^>]*>", dom)
    assert found is not None
    return found[0]


@pytest.mark.parametrize("method", ["single", "data", "random"])
def test_a_report_draws_itself(method: str, tmp_path: Path) -> None:
    path = tmp_path / "p.html"
    made(method).report(path)
    text = path.read_text()
    assert "http://" not in text and "https://" not in text
    dom = opened(path, tmp_path)
    assert 'data-ready="yes"' in root_of(dom)
    assert f"by {method}" in dom and "aria-expanded" in dom


def test_a_report_draws_the_search(tmp_path: Path) -> None:
    path, plain = tmp_path / "p.html", replace(made("data"), curve=())
    plain.report(path)
    assert 'id="search-section" aria-labelledby="search-title" hidden' in opened(path, tmp_path)
    trials = (PlanTrial("data", 0.5, 0.75, False), PlanTrial(HOSTILE, 0.625, 0.25, True))
    curve = ((0.0, 0.75), (1.5, 0.5), (1.75, 0.25))
    found = replace(plain, curve=curve, search_seconds=4.0, figures={"proposals": 12345.0})
    replace(found, measured=trials).report(path)
    dom = opened(path, tmp_path)
    assert 'data-ready="yes"' in root_of(dom)
    assert "from 750 ms to 250 ms" in dom and "500 ms a step after 1.50 s" in dom
    (drawn,) = re.findall(r'<path class="best" d="M([^"]*)"', dom)
    assert drawn.count("H") == 3 and drawn.count("V") == 2
    assert "proposals: 12,345" in dom and "<td>kept</td>" in dom and "<img" not in dom


def test_a_report_can_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With texts that look like markup, a measured step, and tasks merged into slices."""
    plan = made("random")
    graph = replace(
        plan.graph,
        ops=tuple(replace(op, name=op.name + HOSTILE, line=HOSTILE) for op in plan.graph.ops),
    )
    start, end = plan.timeline.start_ns, plan.timeline.end_ns
    measured = timeline(plan.tasks, 3 * start, 3 * end, source=MEASURED)
    monkeypatch.setattr(report, "MAX_SLICES", 500)
    text = report.page(replace(plan, graph=graph, model=HOSTILE), measured)
    path = tmp_path / "p.html"
    path.write_text(text.replace("</body>", f"<script>{USE}</script></body>"))
    dom = opened(path, tmp_path)
    assert 'data-ready="yes"' in root_of(dom)
    assert re.search(r'data-used="[1-9]\d* operators"', root_of(dom)), root_of(dom)
    assert "are merged, which leaves" in dom
    assert "<img" not in dom


PHONE = 390


def test_a_phone_shows_the_report_without_scrolling_sideways(tmp_path: Path) -> None:
    """With devices that are alike, drawn once and each by itself, and long names."""
    it = zoo.load("gpt2:tiny,batch=8", meta=True)
    program = ap.capture(it.step, it.model, it.optimizer, it.batch, clip_norm=it.clip_norm)
    plan = make_plan(program, ap.cluster("8xh100"), "data", 0.0)
    rows = tuple(MethodFigures(name, 0.5, 10**9, 10**8, True) for name in ("data", "x" * 200))
    notes = ("a note with " + "a_very_long_word_" * 20, "another one")
    page = tmp_path / "p.html"
    replace(plan, model="m" * 300, tried=rows, notes=notes).report(page)
    with browsing(tmp_path) as browser:
        tab = browser.tab()
        for width in (PHONE, 1280):
            tab.resize(width, 800)
            tab.open(page.as_uri())
            tab.wait("document.documentElement.dataset.ready === 'yes'")
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            groups = "document.querySelectorAll('#devices tbody tr').length"
            assert tab.evaluate(groups) == 1
            tab.evaluate("document.getElementById('every').click()")
            assert tab.evaluate(groups) == 8
            assert tab.evaluate("document.querySelectorAll('#memory-list .choice').length") == 8
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            text = tab.evaluate("document.getElementById('summary').innerText")
            assert "another one" in text and "Model FLOPs utilisation" in text
            assert tab.evaluate("document.querySelectorAll('#tried tbody tr').length") == 2
            nodes = tab.evaluate("document.querySelectorAll('#graph-picture .node').length")
            assert nodes == len(report.gather(plan, [plan.timeline])["graph"]["name"])
            tab.evaluate("document.querySelector('#graph-picture .node').dispatchEvent("
                         "new MouseEvent('click', {bubbles: true}))")  # fmt: skip
            assert tab.evaluate("document.getElementById('search').value")
            assert tab.errors == []


CARD = """[...document.querySelectorAll('#cards > *')].map((card) => card.textContent)
  .find((text) => text.includes('Devices compute'))"""
ROWS = """[...document.querySelectorAll('#devices tbody tr')]
  .map((row) => parseFloat(row.children[5].textContent))"""


def test_what_devices_compute_is_the_mean_of_their_rows(tmp_path: Path) -> None:
    """With devices that do not do the same."""
    page = tmp_path / "p.html"
    made("op-placement").report(page)
    with browsing(tmp_path) as browser:
        tab = browser.tab()
        tab.open(page.as_uri())
        tab.wait("document.documentElement.dataset.ready === 'yes'")
        rows = tab.evaluate(ROWS)
        said = re.search(r"Devices compute(\d+\.?\d*)%", tab.evaluate(CARD))
        assert len(set(rows)) > 1 and len(rows) == 3 and said is not None
        assert float(said[1]) == pytest.approx(sum(rows) / 3, abs=1.0)  # each is rounded
