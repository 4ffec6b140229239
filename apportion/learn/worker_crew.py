"""worker crew: processes that each know the same problems and do tasks on them.

In: files of problems, a function of (problem, shared numbers, task). Out: results in the order of
tasks, whichever process did them. With one worker everything happens in this process.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from apportion.place import PlacementProblem, load_problem
from apportion.process_start import away_from_working_directory

Work = Callable[[PlacementProblem, Any, Any], Any]


class WorkerCrew:
    """Use as a context; `do` may be called again and again. A task has its problem's number as
    `problem`."""

    def __init__(self, problems: Sequence[Path], jobs: int) -> None:
        self.own = [load_problem(path) for path in problems]
        self.sizes = [problem.units for problem in self.own]
        self.pipes: list[Connection] = []
        self.workers: list[multiprocessing.process.BaseProcess] = []
        if jobs > 1:
            context = multiprocessing.get_context("spawn")
            for _ in range(jobs):
                ours, theirs = context.Pipe()
                worker = context.Process(target=_serve, args=(theirs, list(problems)), daemon=True)
                with away_from_working_directory():
                    worker.start()
                theirs.close()
                self.pipes.append(ours)
                self.workers.append(worker)

    def __enter__(self) -> WorkerCrew:
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in self.pipes:
            pipe.close()
        for worker in self.workers:
            worker.join(5)
            if worker.is_alive():
                worker.terminate()

    def do(self, work: Work, shared: Any, tasks: Sequence[Any]) -> list[Any]:
        """The result of every task. Raises what a task raised."""
        if not self.pipes:
            return [work(self.own[task.problem], shared, task) for task in tasks]
        results: list[Any] = [None] * len(tasks)
        # Long tasks first, so that no process is still busy when all others wait.
        left = sorted(range(len(tasks)), key=lambda k: self.sizes[tasks[k].problem])
        for pipe in self.pipes:
            pipe.send(("shared", work, shared))
        busy = {pipe: left.pop() for pipe in self.pipes[: len(tasks)] if left}
        for pipe, number in busy.items():
            pipe.send(("task", number, tasks[number]))
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                try:
                    number, result, error = ready.recv()
                except (EOFError, OSError):
                    raise RuntimeError("a process of the training has ended unexpectedly") from None
                if error is not None:
                    raise error
                results[number] = result
                del busy[ready]
                if left:
                    busy[ready] = left.pop()
                    ready.send(("task", busy[ready], tasks[busy[ready]]))
        return results


def _serve(pipe: Connection, paths: list[Path]) -> None:
    """What a process of the crew does until its pipe closes."""
    import torch

    torch.set_num_threads(1)
    problems = [load_problem(path) for path in paths]
    work: Work | None = None
    shared: Any = None
    while True:
        try:
            kind, first, second = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        if kind == "shared":
            work, shared = first, second
            continue
        assert work is not None
        try:
            pipe.send((first, work(problems[second.problem], shared, second), None))
        except KeyboardInterrupt:
            return
        except Exception as error:
            pipe.send((first, None, error))
