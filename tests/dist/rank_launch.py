"""Programs on several ranks, without torchrun: see rank_server.py, which starts them."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Launch = Callable[..., str]
"""`RankServer.run`."""


class RankServer:
    """A process that has imported torch, started when a program is first run."""

    def __init__(self, said: Path) -> None:
        self._said, self._numbers = said, itertools.count()
        self._process: subprocess.Popen[str] | None = None

    def run(
        self,
        program: Path | str,
        *arguments: object,
        ranks: int = 2,
        folder: Path | None = None,
        environment: Mapping[str, str] = os.environ,
        modules: Sequence[str] = (),
        seconds: int = 200,
    ) -> str:
        """What a program prints, rank by rank; 0 ranks are one process that knows of none. Modules
        are imported before ranks are made. All ranks must end well, and in time."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, Path(__file__).with_name("rank_server.py")],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        into, count = self._said / str(next(self._numbers)), max(ranks, 1)
        job = {
            "program": str(program), "arguments": list(map(str, arguments)), "ranks": ranks,
            "folder": str(folder or Path.cwd()), "environment": dict(environment),
            "modules": list(modules), "seconds": seconds, "said": str(into),
        }  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that starts ranks has ended"
        out, err = (
            [Path(f"{into}.{rank}.{end}").read_text() for rank in range(count)]
            for end in ("out", "err")
        )
        assert json.loads(answer) == [0] * count, "\n".join(err)
        return "".join(out)

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            self._process.communicate("", timeout=30)
