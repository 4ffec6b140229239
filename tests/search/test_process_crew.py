"""Jobs on forked processes: what they tell arrives, and however it ends they have a last word."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from apportion.columns import PATIENCE
from apportion.search.walks.process_crew import Job, Report, SendReport, run_jobs
from apportion.work_clock import work_seconds


def counting(name: str, until: int | None, worth: float = 1.0) -> Job:
    def work(tell: SendReport) -> Iterator[float]:
        count = 0
        try:
            while until is None or count < until:
                count += 1
                yield worth
        finally:
            tell({"name": name, "count": count, "process": os.getpid()})

    return work


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_all_jobs_are_done(workers: int) -> None:
    heard: list[Report] = []
    lost = run_jobs([counting(str(k), 10 * k) for k in range(5)], workers, None, heard.append)
    assert lost == 0
    assert sorted((said["name"], said["count"]) for said in heard) == [
        (str(k), 10 * k) for k in range(5)
    ]
    assert len({said["process"] for said in heard}) == workers


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_time_is_up(workers: int) -> None:
    heard: list[Report] = []
    jobs = [counting("a", None), counting("b", None)]
    run_jobs(jobs, workers, work_seconds() + 1.0, heard.append)
    assert sorted(said["name"] for said in heard) == ["a", "b"]
    assert all(said["count"] > 0 for said in heard)


@pytest.mark.parametrize(("seconds", "compiles"), [(10.0, False), (1000.0, True)])
def test_processes_compile_only_where_much_time_is_left(
    seconds: float, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would compile the same: a search of ten seconds took a minute more."""
    monkeypatch.setattr(PATIENCE, "compile_share", 1.0)  # in a quick run nothing is compiled

    def job(send: SendReport) -> Iterator[float]:
        send({"compiles": math.isfinite(PATIENCE.compile_share)})
        yield 1.0

    reports: list[Report] = []
    assert run_jobs([job, job], 2, work_seconds() + seconds, reports.append) == 0
    assert [report["compiles"] for report in reports] == [compiles, compiles]
    assert math.isfinite(PATIENCE.compile_share)


@pytest.mark.slow
def test_what_is_worth_more_has_more_time() -> None:
    heard: list[Report] = []
    jobs = [counting("a", None, 1.0), counting("b", None, 9.0)]
    run_jobs(jobs, 1, work_seconds() + 0.5, heard.append)
    counts = {said["name"]: said["count"] for said in heard}
    assert counts["b"] > 2 * counts["a"] > 0


def test_a_job_that_wants_to_go_on_keeps_its_turn() -> None:
    order: list[str] = []

    def work(name: str) -> Job:
        def job(tell: SendReport) -> Iterator[float]:
            for k in range(6):
                order.append(name)
                yield 0.0 if k % 3 < 2 else 1.0

        return job

    run_jobs([work("a"), work("b")], 1, None, lambda said: None)
    assert order[:6] == ["a"] * 3 + ["b"] * 3 and sorted(order) == ["a"] * 6 + ["b"] * 6


@pytest.mark.slow
def test_a_job_that_wants_to_go_on_is_ended_in_time() -> None:
    def job(tell: SendReport) -> Iterator[float]:
        while True:
            time.sleep(0.001)
            yield 0.0

    began = work_seconds()
    run_jobs([job, counting("b", 3)], 1, began + 0.2, lambda said: None)
    assert work_seconds() - began < 20


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_lets_them_finish(workers: int) -> None:
    heard: list[Report] = []
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run_jobs([counting("a", None), counting("b", None)], workers, None, heard.append)
    timer.join()
    assert sorted(said["name"] for said in heard) == ["a", "b"]


@pytest.mark.slow
def test_long_words_arrive_whole() -> None:
    def work(tell: SendReport) -> Iterator[float]:
        tell({"long": list(range(300_000))})
        yield 1.0

    heard: list[Report] = []
    run_jobs([work, work], 2, None, heard.append)
    assert [said["long"] for said in heard] == [list(range(300_000))] * 2


@pytest.mark.parametrize("how", ["raises", "is killed"])
def test_a_lost_process_takes_nobody_along(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    def work(tell: SendReport) -> Iterator[float]:
        tell({"name": "lost"})
        yield 1.0
        if how == "raises":
            raise ValueError("no")
        os.kill(os.getpid(), signal.SIGKILL)

    heard: list[Report] = []
    assert run_jobs([work, counting("other", 100)], 2, None, heard.append) == 1
    assert sorted(said["name"] for said in heard) == ["lost", "other"]
    assert ("ValueError('no')" in capfd.readouterr().err) == (how == "raises")
