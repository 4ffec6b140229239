"""Ranks of torchrun jobs that are killed, stopped, or gone with their host: the job goes on.

benchmarks/kills.py kills at random, a hundred times.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "nanogpt.py"
BIN = Path(sys.executable).parent
ENVIRONMENT = dict(os.environ, OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plans for two ranks; one for three is found when it is needed."""
    path = tmp_path_factory.mktemp("plans") / "book"
    subprocess.run(
        [BIN / "apportion", "plan", f"{EXAMPLE}:make_double", "--cluster", "local:2", "--devices",
         "2", "--method", "data", "--no-calibrate", "--out", path],
        check=True, capture_output=True,
    )  # fmt: skip
    return path


def losses(text: str) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 4 and words[0] == "step":
            found.setdefault(int(words[1]), []).append(float(words[3]))
    return found


def rank_of(pid: int) -> str:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((e[5:].decode() for e in entries if e.startswith(b"RANK=")), "")


def test_a_killed_rank_and_another_number_of_them(book: Path, tmp_path: Path) -> None:
    """Three ranks, by a plan that the book does not have; one is killed while a checkpoint is being
    written. The job goes on, and what it ends with two ranks go on from."""
    plans, run = tmp_path / "book", tmp_path / "run"
    shutil.copytree(book, plans)
    command = [BIN / "torchrun", "--standalone", "--max-restarts", "1", "--nproc-per-node"]
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        job = subprocess.Popen(
            [*command, "3", EXAMPLE, plans, run, "--steps", "30", "--save-every", "3", "--double"],
            stdout=out, stderr=err, env=ENVIRONMENT, start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + 120
        while not ((run / "step-6").exists() and any(run.glob(".saving-*"))):
            assert time.monotonic() < deadline and job.poll() is None, (
                tmp_path / "err"
            ).read_text()
            time.sleep(0.001)
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        (victim,) = [int(pid) for pid in children if rank_of(int(pid)) == "1"]
        os.kill(victim, 9)
        assert job.wait(120) == 0
    assert sorted(path.name for path in run.iterdir()) == ["step-24", "step-27", "step-30"]
    said = (tmp_path / "err").read_text()
    assert "has no plan for 3 devices, so that one is searched for" in said
    assert (plans / "3.json").exists()
    again = subprocess.run(
        [*command, "2", EXAMPLE, plans, run, "--steps", "33", "--double"],
        capture_output=True, text=True, env=ENVIRONMENT, timeout=120, check=True,
    )  # fmt: skip
    undisturbed = subprocess.run(
        [*command, "2", EXAMPLE, plans, tmp_path / "other", "--steps", "30", "--double"],
        capture_output=True, text=True, env=ENVIRONMENT, timeout=120, check=True,
    )  # fmt: skip
    expected = losses(undisturbed.stdout)
    found = losses((tmp_path / "out").read_text())
    assert found.keys() == expected.keys()
    for number, each in found.items():
        assert each == pytest.approx([expected[number][0]] * len(each), rel=1e-9)
    assert sorted(losses(again.stdout)) == [30, 31, 32]


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import namespaces

    if reason := namespaces.why_not():
        pytest.skip(reason)
    with namespaces.switched(2, namespaces.Cable(rate=125e6, burst=64_000)) as machines:
        yield machines


def test_hosts_are_measured_and_listen_where_they_are_told(
    hosts: list[Any], tmp_path: Path
) -> None:
    """Two namespaces as hosts, 1 Gbit/s between them."""
    from namespaces import INTERFACE

    from apportion.machine.cluster import cluster

    out = tmp_path / "hosts.toml"
    started = [
        host.start(
            [BIN / "torchrun", "--rdzv-backend", "apportion", "--rdzv-endpoint",
             f"{hosts[0].address}:29400", "--rdzv-id", "job", "--nnodes", "2",
             "--nproc-per-node", "1", "--local-addr", host.address, "--no-python",
             BIN / "apportion", "calibrate", "--hosts", "--interface", INTERFACE, "--out", out],
            env=ENVIRONMENT, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for host in hosts
    ]  # fmt: skip
    listening: set[tuple[str, str]] = set()
    deadline = time.monotonic() + 120
    while any(process.poll() is None for process in started):
        assert time.monotonic() < deadline
        for host in hosts:
            listening |= {(host.address, address) for address, _ in host.listening()}
        time.sleep(0.05)
    ends = [process.communicate() for process in started]
    assert [process.returncode for process in started] == [0, 0], ends
    assert listening and all(own == address for own, address in listening)
    place = cluster(str(out))
    assert len(place.devices) == 2 and len(place.hosts) == 2
    slowest = min(place.links[link].bandwidth for link in place.routes[0][1])
    assert 50e6 < slowest < 130e6
