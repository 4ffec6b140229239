"""Three hosts, one of which is lost: training goes on with two, and the result is the same.

    python benchmarks/hosts.py

Three network namespaces stand for hosts, each on a cable of 1 Gbit/s to a switch. The links are
measured by `apportion calibrate --hosts`, plans for three hosts and for two are made for what was
measured, and examples/nanogpt.py trains in float64 under torchrun. In the midst of it the cable of
the third host is cut, and everything on that host is killed: nobody is told. The two that are left
notice, start again from the last checkpoint, under the plan for two, and do the rest.

The losses must be those of one rank that nobody disturbed. All the while it is noted who listens
where: nobody but at the address of their own host's cable. Needs what benchmarks/namespaces.py
needs.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from namespaces import INTERFACE, Cable, Machine, switched, why_not

EXAMPLE = Path(__file__).parent.parent / "examples" / "nanogpt.py"
BIN = Path(sys.executable).parent
HOSTS, EVERY, PORT = 3, 10, 29400
GIGABIT = Cable(rate=125e6, burst=64_000)
ENVIRONMENT = dict(os.environ, OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")
TOLERANCE = 1e-9
LIMIT = 400.0


class Hosts:
    """Jobs on all hosts, and who was seen to listen where."""

    def __init__(self, machines: list[Machine], folder: Path) -> None:
        self.machines, self.folder = machines, folder
        self.listening: set[tuple[str, str]] = set()

    def start(self, name: str, nodes: str, *command: str | Path) -> list[subprocess.Popen[str]]:
        """Starts torchrun on each host; what it says goes into a file of that name."""
        started = []
        for number, machine in enumerate(self.machines):
            with (
                (self.folder / f"{name}-{number}.out").open("w") as out,
                (self.folder / f"{name}-{number}.err").open("w") as err,
            ):
                agent = [
                    str(BIN / "torchrun"), "--rdzv-backend", "apportion", "--rdzv-endpoint",
                    f"{self.machines[0].address}:{PORT}", "--rdzv-id", name, "--nnodes", nodes,
                    "--nproc-per-node", "1", "--local-addr", machine.address, "--max-restarts", "3",
                    "--rdzv-conf", "last_call_timeout=5",
                ]  # fmt: skip
                started.append(
                    machine.start(
                        [*agent, *map(str, command)], env=ENVIRONMENT, cwd=self.folder,
                        stdout=out, stderr=err,
                    )
                )  # fmt: skip
        return started

    def look(self) -> None:
        """Notes who listens."""
        for machine in self.machines:
            for address, _ in machine.listening():
                self.listening.add((machine.address, address))

    def wait(self, processes: list[subprocess.Popen[str]], deadline: float) -> list[int]:
        """The exit statuses."""
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline:
                raise TimeoutError("the hosts did not end")
            self.look()
            time.sleep(0.05)
        return [process.returncode for process in processes]

    def lose(self, number: int) -> None:
        """Cuts a host's cable, then kills all that is on it but what holds the namespace."""
        machine = self.machines[number]
        machine.call("ip", "link", "set", INTERFACE, "down")
        there = os.readlink(f"/proc/{machine.holder}/ns/net")
        for path in Path("/proc").iterdir():
            if path.name.isdigit() and int(path.name) != machine.holder:
                try:
                    if os.readlink(path / "ns" / "net") == there:
                        os.kill(int(path.name), signal.SIGKILL)
                except OSError:
                    continue


def losses(path: Path) -> dict[int, list[float]]:
    """The losses that a job has printed, by step."""
    found: dict[int, list[float]] = {}
    for line in path.read_text().splitlines():
        words = line.split()
        if len(words) == 4 and words[0] == "step":
            found.setdefault(int(words[1]), []).append(float(words[3]))
    return found


def undisturbed(folder: Path, steps: int) -> dict[int, list[float]]:
    """The same training on one rank of this machine."""
    out = folder / "alone.out"
    with out.open("w") as file:
        subprocess.run(
            [BIN / "torchrun", "--standalone", EXAMPLE, "single", folder / "alone", "--double",
             "--steps", str(steps), "--save-every", str(steps)],
            stdout=file, env=ENVIRONMENT, cwd=folder, check=True,
        )  # fmt: skip
    return losses(out)


def measured(hosts: Hosts) -> Path:
    """The cluster file of the hosts."""
    out = hosts.folder / "hosts.toml"
    job = hosts.start(
        "measure", str(HOSTS), "--no-python", BIN / "apportion", "calibrate", "--hosts",
        "--interface", INTERFACE, "--out", out,
    )  # fmt: skip
    if any(hosts.wait(job, time.monotonic() + LIMIT)):
        raise RuntimeError((hosts.folder / "measure-0.err").read_text()[-2000:])
    return out


def trained(hosts: Hosts, steps: int) -> dict[int, list[float]]:
    """Plans for three hosts and for two, trains, and loses a host on the way; what was printed."""
    book, run = hosts.folder / "book", hosts.folder / "run"
    made = subprocess.run(
        [BIN / "apportion", "plan", f"{EXAMPLE}:make_double", "--cluster", measured(hosts),
         "--devices", "3,2", "--method", "fsdp", "--out", book],
        check=True, capture_output=True, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    print(made.stdout.strip())
    job = hosts.start(
        "train", f"{HOSTS - 1}:{HOSTS}", EXAMPLE, book, run, "--double", "--steps", str(steps),
        "--save-every", str(EVERY), "--patience", "8", "--interface", INTERFACE,
    )  # fmt: skip
    deadline = time.monotonic() + LIMIT
    while not (run / f"step-{2 * EVERY}").exists():
        if time.monotonic() > deadline or any(process.poll() is not None for process in job):
            raise RuntimeError((hosts.folder / "train-0.err").read_text()[-2000:])
        hosts.look()
        time.sleep(0.01)
    began = time.monotonic()
    hosts.lose(HOSTS - 1)
    statuses = hosts.wait(job[:-1], deadline)
    print(f"after the loss {time.monotonic() - began:.0f} s to the end, statuses {statuses}")
    said = (hosts.folder / "train-0.err").read_text().splitlines()
    print("\n".join(line for line in said if line.startswith("apportion: ")))
    found: dict[int, list[float]] = {}
    for number in range(HOSTS):
        for step, values in losses(hosts.folder / f"train-{number}.out").items():
            found.setdefault(step, []).extend(values)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    if reason := why_not():
        print(reason)
        return 2
    with tempfile.TemporaryDirectory(prefix="hosts-") as name, switched(HOSTS, GIGABIT) as machines:
        folder = Path(name)
        hosts = Hosts(machines, folder)
        found = trained(hosts, given.steps)
        expected = undisturbed(folder, given.steps)
        print((folder / "hosts.toml").read_text())
    worst = max(abs(v - expected[n][0]) for n, values in found.items() for v in values)
    again = sum(len(values) - 1 for values in found.values())
    beyond = sorted(pair for pair in hosts.listening if pair[0] != pair[1])
    print(
        f"{len(found)} of {given.steps} steps, {again} of them twice, worst difference {worst:.1e}"
    )
    print(f"listening: {sorted(hosts.listening)}; beyond the cable: {beyond or 'nobody'}")
    right = len(found) == given.steps and again and worst <= TOLERANCE and not beyond
    print("equal" if right else "WRONG")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
