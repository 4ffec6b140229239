"""SearchProcess: a search that runs beside the server, can be watched, stopped, and may die.

Part of the room serve. A request comes in; a process (search_worker.py) runs it and says how far it
is, and its Plan is read from the file that it leaves.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from apportion.checked import brief

STARTS = "from apportion.serve.search_worker import main; main()"
RUNNING, FINISHED, FAILED, STOPPED = "running", "finished", "failed", "stopped"
MOST_ROWS = 60  # methods of which the best is shown
MOST_LINE = 1 << 16
PATIENCE = 10.0  # seconds for a process that was killed to be gone


class SearchProcess:
    """A search. `status` is running, finished, failed or stopped; `says` where it stands; `best`
    the best plan of each method so far."""

    def __init__(
        self,
        name: str,
        request: dict[str, Any],
        folder: Path,
        done: Callable[[SearchProcess], None],
    ) -> None:
        self.name, self.out = name, folder / "plan.json"
        self.status, self.says, self.error = RUNNING, "starting", ""
        self.best: dict[str, dict[str, Any]] = {}
        self.began, self.ended = time.monotonic(), 0.0
        self._done = done
        self._log = (folder / "log.txt").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", STARTS],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            start_new_session=True, cwd=folder,
        )  # fmt: skip
        assert self._process.stdin is not None
        line = json.dumps(request | {"out": str(self.out)}) + "\n"
        with contextlib.suppress(OSError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        threading.Thread(target=self._reap, daemon=True).start()

    @property
    def pid(self) -> int:
        """The process, for whoever wants to see it."""
        return self._process.pid

    def stop(self) -> None:
        """Ends the search and all that it has started."""
        if self.status == RUNNING:
            self.status = STOPPED
        self._kill()
        self._listener.join(PATIENCE)

    def _kill(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Ends walks that have outlived their search, and hold the pipe open."""
        self._process.wait()
        self._kill()

    def _listen(self) -> None:
        out = self._process.stdout
        assert self._process.stdin is not None and out is not None
        finished = False
        for line in iter(lambda: out.readline(MOST_LINE), b""):
            with contextlib.suppress(ValueError):
                finished = self._heard(json.loads(line)) or finished
        code = self._process.wait()
        for pipe in (self._process.stdin, out, self._log):
            with contextlib.suppress(OSError):
                pipe.close()
        if self.status == RUNNING and finished:
            try:
                self._done(self)
                self.status = FINISHED
            except (ValueError, OSError) as error:
                self.status, self.error = FAILED, brief(str(error), 400)
        elif self.status == RUNNING:
            self.status = FAILED
            how = f"by signal {-code}" if code < 0 else f"with status {code}"
            self.error = self.error or f"its process has ended {how}"
        self.ended = time.monotonic()

    def _heard(self, told: dict[str, Any]) -> bool:
        """Takes note of a line; whether it is the last one of a search that is done."""
        if "error" in told:
            self.error = brief(told["error"], 400)
        if "state" in told:
            self.says = brief(told["state"], 200)
        if "step_seconds" in told:
            known = self.best.get(told["method"])
            rank = (not told["fits"], told["step_seconds"])
            if len(self.best) < MOST_ROWS and (
                known is None or rank < (not known["fits"], known["step_seconds"])
            ):
                self.best[told["method"]] = told
        return bool(told.get("done"))

    def facts(self) -> dict[str, Any]:
        """What the page shows of it."""
        rows = sorted(self.best.values(), key=lambda row: (not row["fits"], row["step_seconds"]))
        passed = (self.ended or time.monotonic()) - self.began
        return {
            "name": self.name, "status": self.status, "says": self.says, "error": self.error,
            "seconds": passed, "best": rows, "pid": self.pid,
        }  # fmt: skip
