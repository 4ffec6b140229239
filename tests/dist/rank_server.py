"""Starts programs on several ranks as torchrun does, from one process that has imported torch.

Each line of standard input is a job: a program, its arguments, its folder, its environment, and how
many ranks; none for a program that knows of none. Ranks are forked, so that none of them spends
seconds on importing what all of them use. What they say goes to files; the answer is a line with
their exit statuses.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path
from typing import Any

PRELOADED = ("torch.distributed", "apportion.zoo", "apportion.run.runner", "apportion.cli.main")


def serve() -> dict[str, Any] | None:
    """Answers jobs to the end; in a forked rank, what it is to run."""
    for line in sys.stdin:
        job = json.loads(line)
        for name in (*PRELOADED, *job["modules"]):
            importlib.import_module(name)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        ranks = []
        for rank in range(max(job["ranks"], 1)):
            if not (pid := os.fork()):
                return job | {"rank": rank, "port": port}
            ranks.append(pid)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        print(json.dumps(statuses), flush=True)
    return None


def become(job: dict[str, Any]) -> None:
    """The process of a rank, up to the moment at which its program begins."""
    folder, rank = Path(job["folder"]), job["rank"]
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{job['said']}.{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.alarm(job["seconds"])  # ends a rank that hangs
    os.environ.clear()
    os.environ.update(job["environment"], OMP_NUM_THREADS="1")
    if size := job["ranks"]:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ.update({name: str(value) for name, value in ranks.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]))
    os.chdir(folder)
    sys.argv = [job["program"], *job["arguments"]]
    sys.path[0] = str(Path(job["program"]).resolve().parent)


if __name__ == "__main__":
    if mine := serve():
        become(mine)
        runpy.run_path(mine["program"], run_name="__main__")
