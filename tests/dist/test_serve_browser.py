"""The page of `apportion serve` in a real browser: search, click, keep, pin, two tabs, a closed
one, and a search that is killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, WITHOUT, Tab, browsing

import apportion as ap
from apportion import zoo
from apportion.plan.make_plan import make_plan
from apportion.plan.plan_file import read_plan
from apportion.serve.server import PageServer
from apportion.split.strategy import verify_strategy

pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT), pytest.mark.slow]

# One click at random, as a user's: an operator, one of its cuts, and perhaps one of the buttons.
CLICK = """(async () => {
  const pause = (ms) => new Promise((done) => setTimeout(done, ms));
  const until = async (test) => {  // the first change compiles loops, perhaps on busy cores
    for (let k = 0; !test(); k++) {
      if (k === 7200) throw new Error(`never came: ${test}`);
      await pause(25);
    }
  };
  const any = (list) => list[Math.floor(random() * list.length)];
  const row = any([...document.querySelectorAll("#ops tr")]);
  document.getElementById("op").dataset.op = "";
  row.click();
  await until(() => document.getElementById("op").dataset.op === row.dataset.op);
  const cut = any([...document.querySelectorAll("#changes tr")]);
  const version = document.documentElement.dataset.version;
  if (!cut || random() < 0.2) document.getElementById("pin").click();
  else {
    cut.click();
    await until(() => !document.getElementById("keep").disabled);
    document.getElementById(random() < 0.25 ? "keep-pin" : "keep").click();
  }
  await until(() => document.documentElement.dataset.version !== version);
  return document.getElementById("message").className;
})()"""
RANDOM = "let dice = 7; const random = () => (dice = (dice * 16807) % 2147483647) / 2147483647;"


@pytest.fixture
def server() -> Iterator[PageServer]:
    made = PageServer(0)
    threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield made
    finally:
        made.shutdown()
        made.server_close()


def ready(tab: Tab, address: str) -> None:
    tab.open(address)
    tab.wait("document.documentElement.dataset.ready === 'yes'")


def test_the_page_is_used(tmp_path: Path, server: PageServer) -> None:
    it = zoo.load("gpt2:tiny", meta=True)
    program = ap.capture(it.step, it.model, it.optimizer, it.batch)
    number = server.bench.open("mine", make_plan(program, ap.cluster("4xh100"), "data"))
    with browsing(tmp_path) as browser:
        tab = browser.tab()
        ready(tab, server.address)
        tab.wait("document.querySelectorAll('#ops tr').length > 10", 240)
        tab.evaluate(f"(() => {{ window.random = (() => {{ {RANDOM} return random; }})(); }})()")
        for _ in range(20):
            assert tab.evaluate(CLICK) == "", tab.evaluate("find('message').textContent")
        editor = server.bench.plans[number].editor
        assert editor.version >= 20
        found = read_plan(server.bench.download(number))
        verify_strategy(found.space, found.strategy, 4)
        assert found.strategy == editor.strategy
        _two_tabs(tab, browser.tab(), server, number)
        _searches(tab, server)
        tab.resize(390, 800)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390
        assert tab.errors == []


def _two_tabs(tab: Tab, other: Tab, server: PageServer, number: int) -> None:
    """A second tab sees what the first has done; one that is behind is refused and shown anew;
    nothing depends on a tab that is closed."""
    ready(other, server.address)
    version = server.bench.plans[number].editor.version
    other.wait(f"document.documentElement.dataset.version === '{version}'", 60)
    server.bench.pin(number, {"ops": [0], "version": version})
    other.wait(f"document.documentElement.dataset.version === '{version + 1}'")
    tab.call("Page.bringToFront")
    tab.wait(f"document.documentElement.dataset.version === '{version + 1}'")
    assert other.errors == []
    other.close()
    assert tab.evaluate(CLICK) == ""


def _searches(tab: Tab, server: PageServer) -> None:
    """A search that is killed is said to be; the next one's plan is opened and can be chosen."""
    tab.evaluate("""(() => { find("model").value = "mlp:tiny"; find("cluster").value = "2xh100";
        find("budget").value = "600"; find("method").value = "flexflow";
        find("start").click(); })()""")
    tab.wait("document.querySelector('.search[data-status=running]')")
    search = next(iter(server.bench.searches.values()))
    os.kill(search.pid, signal.SIGKILL)
    tab.wait("document.querySelector('.search[data-status=failed]')")
    assert "signal 9" in tab.evaluate("document.querySelector('.search').textContent")
    tab.evaluate("""(() => { find("budget").value = "1"; find("method").value = "data";
        find("start").click(); })()""")
    tab.wait("document.querySelector('.search[data-status=finished]')", 240)
    tab.wait("document.querySelectorAll('#plans tbody tr').length === 2")
    tab.evaluate("document.querySelectorAll('#plans tbody tr')[1].click()")
    tab.wait("find('plan-title').textContent.includes('mlp:tiny')")
    tab.wait("document.querySelectorAll('#ops tr').length > 3", 240)
