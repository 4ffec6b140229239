"""A real browser for tests: headless Chromium, spoken to over a pipe (the DevTools protocol)."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), None)
WITHOUT = f"no browser to open pages with: none of {', '.join(NAMES)}"
PATIENCE = 60.0


def _out_of_the_way(number: int) -> int:
    """The same open file under a number that no other needs."""
    other = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(number)
    return other


class Tab:
    """A page of the browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self.session = browser, session
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        return self.browser.call(method, self.session, **parameters)

    def open(self, address: str) -> None:
        """Opens a page and waits until it is loaded."""
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """What an expression gives, as plain data; promises are waited for."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = PATIENCE) -> None:
        """Waits until an expression is true."""
        ends = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < ends, f"{condition} was not true within {seconds:g} s"
            time.sleep(0.05)

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip

    def picture(self, path: Path) -> None:
        """The whole page as a PNG."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        self.call("Page.close")


class Browser:
    """A running browser."""

    def __init__(self, folder: Path) -> None:
        from_us, to_browser = map(_out_of_the_way, os.pipe())
        from_browser, to_us = map(_out_of_the_way, os.pipe())

        def hand_over() -> None:  # where Chromium looks for its pipes
            os.dup2(from_us, 3)
            os.dup2(to_us, 4)

        options = [
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-sync", "--mute-audio", "--password-store=basic"),
            *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
            *("--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}"),
        ]
        self.process = subprocess.Popen(
            [str(CHROMIUM), *options, "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            preexec_fn=hand_over, pass_fds=(3, 4),
        )  # fmt: skip
        os.close(from_us)
        os.close(to_us)
        self.send, self.receive = to_browser, from_browser
        self.unread, self.number = b"", 0
        self.tabs: dict[str, Tab] = {}

    def call(self, method: str, session: str = "", **parameters: Any) -> Any:
        self.number += 1
        request = {"id": self.number, "method": method, "params": parameters}
        if session:
            request["sessionId"] = session
        os.write(self.send, json.dumps(request).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)

    def _next(self) -> Any:
        while b"\0" not in self.unread:
            more = os.read(self.receive, 1 << 20)
            assert more, "the browser has ended"
            self.unread += more
        line, _, self.unread = self.unread.partition(b"\0")
        return json.loads(line)

    def _note(self, event: Any) -> None:
        """Keeps what goes wrong in a page."""
        tab = self.tabs.get(event.get("sessionId", ""))
        if tab is None:
            return
        if event["method"] == "Runtime.exceptionThrown":
            tab.errors.append(json.dumps(event["params"]["exceptionDetails"])[:2000])
        if event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            tab.errors.append(json.dumps(event["params"]["entry"])[:2000])

    def tab(self) -> Tab:
        """A new, empty page."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        made = Tab.__new__(Tab)
        self.tabs[session] = made
        made.__init__(self, session)  # type: ignore[misc]
        return made


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """A browser for as long as the block lasts."""
    browser = Browser(folder)
    try:
        yield browser
    finally:
        os.close(browser.send)
        os.close(browser.receive)
        browser.process.terminate()
        try:
            browser.process.wait(10)
        except subprocess.TimeoutExpired:
            browser.process.kill()
            browser.process.wait()
