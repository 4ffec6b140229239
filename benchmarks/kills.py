"""What a killed training run leaves: random kills, and every run goes on as if nothing had been.

    python benchmarks/kills.py --count 100
    python benchmarks/kills.py --count 100 --first 25 --last 50 --reference undisturbed/

A small GPT trains in float64 on some ranks and saves every few steps, started by `apportion run`
or by torchrun with restarts. At random moments, in the midst of steps or of a save, one process is
killed, ended or stopped: a rank, torchrun's agent, or the command itself. A rank whose main thread
runs computes, one whose main thread sleeps waits for a message: so moments are chosen. Half of the
jobs have replicas of the state (data), half have it divided (fsdp). After each kill

- what is left of the job goes on by itself, or ends, with a sentence where one can be said;
- when it has ended, no process is left and nothing in the temporary folder (but what torchrun
  leaves there, `torchelastic_*`, if it is killed itself); every checkpoint on the disk is equal to
  that of a run that nobody disturbed, and none that was there before is lost;
- the same command, if it has ended, goes on from the last checkpoint. The next kill comes when it
  has saved again, until the job has made all its steps.

At the end of a job all losses are those of the undisturbed run, and the folder has checkpoints and
nothing else. Every process of a job is known by its environment.

Stopped processes: a rank that stays stopped ends the job, which is restarted; the command or the
agent is let go on after a second, as after Ctrl-Z.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from apportion.checkpoint.chunks import whole_chunk
from apportion.checkpoint.folder import checkpoints_in
from apportion.checkpoint.stored import open_checkpoint, read_tensors

EXAMPLE = Path(__file__).parent.parent / "examples" / "nanogpt.py"
BIN = Path(sys.executable).parent
STEPS, EVERY = 300, 5
RESTARTS = 30
PATIENCE = 4.0  # seconds that a stopped rank is waited for
SHUTDOWN = 3.0  # seconds that torchrun gives a rank to end before it kills it
ANSWER = 600.0  # seconds that `apportion run` waits for its ranks, their start included
SHORT_ANSWER = 60.0  # the same, if a rank is to be stopped
RECOVERY = 400.0  # seconds to be at work again after a kill
LIMIT = 600.0  # seconds for the rest of a job
STOPPED_SECONDS = 1.0
SAVING_SECONDS = 0.02  # a kill comes within so many of a save's beginning
OF_TORCH = ("torchelastic_", "torchinductor_")  # what torch leaves in the temporary folder
MARK = "APPORTION_KILLS"  # in the environment of everything that a job starts
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Kill:
    """One kill: of which job, what, by which signal, and when."""

    job: str
    target: str
    signal: str
    moment: str


@dataclass
class Outcome:
    """What came of it; `wrong` are sentences about what should not be. `ended`: the command did,
    and was started again; else the job went on by itself."""

    kill: Kill
    number: int
    plan: str
    ranks: int
    seconds: float = 0.0
    ended: bool = False
    checkpoint: int = 0
    said: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


KILLS = [
    Kill(job, target, kind, moment)
    for job, targets in (("torchrun", ("rank", "agent")), ("run", ("rank", "parent")))
    for target in targets
    for kind in ("SIGKILL", "SIGTERM", "SIGSTOP")
    for moment in ("save", "compute", "exchange")
]
PLANS = ("data", "fsdp")
LETTERS = {"compute": "R", "exchange": "S"}  # of a rank's main thread at that moment


@cache
def shutdown_timeout() -> list[str]:
    """What tells torchrun how long a rank may take to end, if this torch's can be told."""
    told = subprocess.run([BIN / "torchrun", "--help"], capture_output=True, text=True).stdout
    return ["--shutdown-timeout", f"{SHUTDOWN:g}"] if "--shutdown-timeout" in told else []


# jobs


class Job:
    """Commands that train into a folder, one after the other until one has succeeded."""

    def __init__(self, kind: str, folder: Path, plan: Path, name: str) -> None:
        self.kind, self.folder, self.plan = kind, folder, plan
        self.save, self.name = folder / "run", name
        self.ranks = int(plan.stem)
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.losses: dict[int, list[float]] = {}
        self.process: subprocess.Popen[str] | None = None
        self.starts = 0
        self.answer = ANSWER
        self.wrong: list[str] = []

    def start(self, answer: float = ANSWER) -> None:
        """Starts the command, for the first time or again."""
        self.starts += 1
        self.answer = answer
        out, err = (open(self._file(end), "w") for end in ("out", "err"))  # noqa: SIM115
        environment = dict(os.environ, OMP_NUM_THREADS="1", TMPDIR=str(self.temporary))
        environment[MARK] = self.name
        self.process = subprocess.Popen(
            self._command(answer), stdout=out, stderr=err, env=environment, cwd=self.folder,
            text=True, start_new_session=True,
        )  # fmt: skip
        out.close()
        err.close()

    def _file(self, end: str) -> Path:
        return self.folder / f"{self.starts}.{end}"

    def _command(self, answer: float) -> list[str]:
        if self.kind == "torchrun":
            return [
                str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(self.ranks),
                "--max-restarts", str(RESTARTS), *shutdown_timeout(),
                str(EXAMPLE), str(self.plan), str(self.save), "--double",
                "--steps", str(STEPS), "--save-every", str(EVERY), "--patience", str(PATIENCE),
            ]  # fmt: skip
        last = self.last_step()
        more = ["--resume", str(self.save)] if last else []
        return [
            str(BIN / "apportion"), "run", f"{EXAMPLE}:make_double", "--plan", str(self.plan),
            "--steps", str(STEPS - last), "--save", str(self.save), "--save-every", str(EVERY),
            "--timeout", str(answer), "--json", *more,
        ]  # fmt: skip

    def last_step(self) -> int:
        """The step of the last checkpoint, by its name; 0 if there is none."""
        found = [0]
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.save):
                if name.startswith("step-"):
                    found.append(int(name.removeprefix("step-").partition(".")[0]))
        return max(found)

    def ended(self) -> bool:
        """Whether the command has ended."""
        return self.process is not None and self.process.poll() is not None

    def done(self) -> bool:
        """Whether all steps are made and saved."""
        return self.last_step() == STEPS

    def status(self) -> int:
        """That of a command that has ended; its output is read."""
        assert self.process is not None
        self._read_losses()
        return self.process.wait()

    def _read_losses(self) -> None:
        """Losses by step; after a restart the last steps are made again, from a checkpoint that
        lies no more than one save behind."""
        text = self._file("out").read_text()
        if self.kind == "run":
            facts = json.loads(text) if text.strip() else {"losses": []}
            found = list(enumerate(facts["losses"], facts.get("first_step", 0)))
        else:
            lines = [line.split() for line in text.splitlines()]
            found = [(int(w[1]), float(w[3])) for w in lines if len(w) == 4 and w[0] == "step"]
        before: int | None = None
        for number, loss in found:
            self.losses.setdefault(number, []).append(loss)
            if before is not None and number != before + 1:
                least = before // EVERY * EVERY - EVERY
                if number % EVERY or not least <= number <= before + 1:
                    self.wrong.append(f"step {number} came after step {before}")
            before = number

    def said(self) -> list[str]:
        """The sentences of the running or last command."""
        lines = self._file("err").read_text().splitlines()
        found = [line for line in lines if line.startswith("apportion: ")]
        if self.kind == "run" and any("Traceback" in line for line in lines):
            found.append("Traceback")
        return found

    def last_words(self) -> str:
        """The end of what the command has said."""
        return self._file("err").read_text()[-500:]

    def left_files(self) -> list[str]:
        """What is in the temporary folder and not torch's own."""
        return [p.name for p in self.temporary.iterdir() if not p.name.startswith(OF_TORCH)]

    def processes(self) -> list[int]:
        """All processes that the job has started, by their environment."""
        wanted, found = f"{MARK}={self.name}".encode(), []
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                try:
                    if wanted in (path / "environ").read_bytes().split(b"\0"):
                        found.append(int(path.name))
                except OSError:
                    continue
        return [pid for pid in found if state(pid) not in "ZX"]

    def target(self, what: str, rng: random.Random) -> int:
        """The process to be killed."""
        assert self.process is not None
        if what in ("agent", "parent"):
            return self.process.pid
        ranks = until(lambda: self._ranks() if len(self._ranks()) == self.ranks else [])
        return int(rng.choice(ranks))

    def _ranks(self) -> list[int]:
        """The ranks: children of torchrun; of a command, those that its server of processes has
        forked."""
        assert self.process is not None
        below = children(self.process.pid)
        if self.kind == "torchrun":
            return below
        return [pid for each in below for pid in children(each)]


def children(pid: int) -> list[int]:
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def state(pid: int) -> str:
    """The kernel's letter for what a process does; X for one that is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def until(what: Callable[[], Any], seconds: float = RECOVERY) -> Any:
    """The first true answer."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.001)
    raise TimeoutError(f"nothing within {seconds:g} s")


# one job, and its kills


def attempt(
    kills: list[tuple[int, Kill]], reference: Reference, seed: int, tell: Callable[[Outcome], None]
) -> tuple[int, list[str]]:
    """Trains one job and kills, in turn, as long as it lasts; how many kills there were, and what
    was wrong at its end."""
    rng = random.Random(seed)
    kind = kills[0][1].job
    with tempfile.TemporaryDirectory(prefix="kills-", dir="/tmp") as name:
        folder = Path(name)
        shutil.copytree(reference.folder / "plans", folder / "plans")
        method = rng.choice(PLANS)
        plan = folder / "plans" / method / f"{reference.ranks}.json"
        job = Job(kind, folder, plan, f"{os.getpid()}-{seed}")
        count = 0
        try:
            job.start(answer_for(kills[0][1]))
            for number, kill in kills:
                outcome = Outcome(kill, number, method, job.ranks)
                following = kills[count + 1][1] if count + 1 < len(kills) else None
                if answer_for(kill) < job.answer:  # it has survived, and waits for too long
                    break
                if not one_kill(job, outcome, following, reference, rng):
                    break
                count += 1
                tell(outcome)
            finish(job)
            judge(job, reference)
        except TimeoutError as error:
            job.wrong.append(f"{error}: {job.last_words()}")
        finally:
            if left := settle(job):
                job.wrong.append(f"{len(left)} processes are left")
        return count, job.wrong


def one_kill(
    job: Job, outcome: Outcome, following: Kill | None, reference: Reference, rng: random.Random
) -> bool:
    """Waits for the moment, kills, and waits until the job is at work again; False if it has made
    all its steps before."""
    kill, wrong = outcome.kill, outcome.wrong
    moment(job, kill.moment, rng)
    tries = 1
    while job.ended() and not job.done():  # a slow machine: its time was over before
        until(lambda: not job.processes())
        if job.status() == 0 or tries > 3 or not any("did not answer" in s for s in job.said()):
            raise TimeoutError("the job ended before it was disturbed")
        job.start(answer_for(kill) * 2**tries)
        tries += 1
        moment(job, kill.moment, rng)
    if job.done() or job.ended():
        return False
    began = time.monotonic()
    outcome.checkpoint = job.last_step()
    struck = strike(job, kill, rng)
    if not struck:
        return False
    reached = job.last_step()  # it may have saved while the moment was waited for
    until(lambda: job.ended() or job.last_step() > reached + EVERY, RECOVERY)
    if job.ended():
        outcome.ended = job.status() != 0
        until(lambda: not job.processes(), RECOVERY)
        if left := job.left_files():
            wrong.append(f"temporary files are left: {left}")
    outcome.said = job.said()
    if "Traceback" in outcome.said:
        wrong.append("a traceback")
    if outcome.ended and job.kind == "run" and kill.signal != "SIGKILL" and not outcome.said:
        wrong.append("it ended without a sentence")
    if outcome.ended and kill.target == "rank" and not outcome.said:
        wrong.append("nobody names the rank")
    if job.last_step() < outcome.checkpoint:
        wrong.append(f"the checkpoint of step {outcome.checkpoint} is lost")
    if outcome.ended:
        for each in checkpoints_in(job.save):
            wrong += differences(each.path, reference.state(job.kind, each.record.step))
        job.start(ANSWER if following is None else answer_for(following))
    outcome.seconds = time.monotonic() - began
    return True


def answer_for(kill: Kill) -> float:
    """How long the command waits for its ranks: less if one of them will be stopped."""
    return SHORT_ANSWER if (kill.signal, kill.target) == ("SIGSTOP", "rank") else ANSWER


def moment(job: Job, when: str, rng: random.Random) -> None:
    """Waits for the time to kill: while files are being written, or some time within steps; the
    rest of the wait, for a rank that computes or waits, is in `strike`."""
    first = job.last_step()
    wanted = first + EVERY * rng.randrange(1, 4)
    until(lambda: job.ended() or job.last_step() >= min(wanted, STEPS))
    if when == "save":
        until(lambda: job.ended() or any(job.save.glob(".saving-*")))
        time.sleep(rng.random() * SAVING_SECONDS)
    else:
        time.sleep(rng.random() * 0.2)


def strike(job: Job, kill: Kill, rng: random.Random) -> bool:
    """Kills; False if it has ended by itself meanwhile."""
    try:
        pid = job.target(kill.target, rng)
        if letter := LETTERS.get(kill.moment):
            seen = pid if kill.target == "rank" else job.target("rank", rng)
            until(lambda: state(seen) in (letter, "X"), 20.0)
        os.kill(pid, getattr(signal, kill.signal))
    except (ProcessLookupError, TimeoutError):
        return False
    if kill.signal == "SIGSTOP" and kill.target != "rank":
        time.sleep(STOPPED_SECONDS)
        os.kill(pid, signal.SIGCONT)
    return True


def finish(job: Job) -> None:
    """Lets the job make its last steps."""
    until(job.ended, LIMIT)
    if job.status() != 0:
        raise TimeoutError("the job failed at its end")
    until(lambda: not job.processes(), RECOVERY)


def judge(job: Job, reference: Reference) -> None:
    """What must hold at the end of a job."""
    wrong = job.wrong
    missing = [n for n in range(STEPS) if n not in job.losses] if job.kind == "torchrun" else []
    if missing:
        wrong.append(f"steps {missing[:5]} were not made")
    for number, losses in job.losses.items():
        for loss in losses:
            if abs(loss - reference.losses[job.kind][number]) > TOLERANCE:
                wrong.append(f"step {number} has the loss {loss}")
    names = sorted(path.name for path in job.save.iterdir())
    found = checkpoints_in(job.save)
    if names != sorted(each.path.name for each in found):
        wrong.append(f"the folder has {names}")
    if left := job.left_files():
        wrong.append(f"temporary files are left: {left}")
    if not job.done():
        wrong.append("the last checkpoint is not that of the last step")
    for each in found:
        wrong += differences(each.path, reference.state(job.kind, each.record.step))


def settle(job: Job) -> list[int]:
    """The processes that are left when they have had some time to end; they are ended."""
    deadline = time.monotonic() + 120
    while (left := job.processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


# what an undisturbed run is


def whole(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    stored = open_checkpoint(path)
    stored.check_bytes(0, 1)
    found = {key: torch.empty(t.shape, dtype=t.dtype) for key, t in stored.tensors.items()}
    read_tensors(stored, {key: [(whole_chunk(t.shape), t)] for key, t in found.items()})
    return found


def differences(path: Path, true: dict[str, torch.Tensor]) -> Iterator[str]:
    """What a checkpoint has otherwise than it should."""
    found = whole(path)
    if found.keys() != true.keys():
        yield f"{path.name} has other tensors"
        return
    for key, tensor in found.items():
        apart = float((tensor - true[key]).abs().max()) if tensor.numel() else 0.0
        if not apart <= TOLERANCE:
            yield f"{path.name}: {key} differs by {apart:.1e}"


class Reference:
    """Undisturbed runs of both kinds of jobs, with all their checkpoints."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks
        self.losses: dict[str, dict[int, float]] = {}
        self._known: dict[tuple[str, int], dict[str, torch.Tensor]] = {}

    def make(self) -> None:
        """Runs them, unless the folder has them."""
        if (known := self.folder / "losses.json").exists():
            found = json.loads(known.read_text())
            self.losses = {k: {int(n): x for n, x in each.items()} for k, each in found.items()}
            return
        plans = self.folder / "plans"
        plans.mkdir(parents=True)
        for method in PLANS:
            subprocess.run(
                [BIN / "apportion", "plan", f"{EXAMPLE}:make_double", "--cluster",
                 f"local:{self.ranks}", "--devices", f"{self.ranks}", "--method", method,
                 "--no-calibrate", "--out", plans / method],
                check=True, capture_output=True,
            )  # fmt: skip
        for kind in ("torchrun", "run"):
            folder = self.folder / kind
            folder.mkdir()
            job = Job(
                kind, folder, plans / PLANS[0] / f"{self.ranks}.json", f"{os.getpid()}-{kind}"
            )
            job.start()
            kept = self.folder / f"kept-{kind}"
            kept.mkdir()
            while job.process is not None and job.process.poll() is None:
                self._keep(job.save, kept)
                time.sleep(0.005)
            if job.status() != 0:
                raise RuntimeError(f"the undisturbed run failed: {job.last_words()}")
            self._keep(job.save, kept)
            missing = [
                n for n in range(EVERY, STEPS + 1, EVERY) if not (kept / f"step-{n}").exists()
            ]
            if missing:
                raise RuntimeError(
                    f"checkpoints went before they were copied: {missing}; try again"
                )
            self.losses[kind] = {n: losses[0] for n, losses in job.losses.items()}
        known.write_text(json.dumps(self.losses))

    def _keep(self, run: Path, kept: Path) -> None:
        """Copies checkpoints before they are removed."""
        for each in checkpoints_in(run):
            target = kept / each.path.name
            if not target.exists():
                try:
                    shutil.copytree(each.path, target)
                except OSError:
                    shutil.rmtree(target, ignore_errors=True)

    def state(self, kind: str, step: int) -> dict[str, torch.Tensor]:
        if (kind, step) not in self._known:
            self._known[kind, step] = whole(self.folder / f"kept-{kind}" / f"step-{step}")
        return self._known[kind, step]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="go on with this one")
    parser.add_argument("--last", type=int, help="end before this one")
    parser.add_argument("--chain", type=int, default=8, help="at most so many kills of one job")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no job after so many")
    parser.add_argument("--reference", type=Path, help="keep undisturbed runs in this folder")
    parser.add_argument("--out", type=Path, help="JSON lines, one a kill; those are not repeated")
    given = parser.parse_args()
    rng = random.Random(given.seed)
    kills = [KILLS[k % len(KILLS)] for k in range(given.count)]
    rng.shuffle(kills)
    part = list(enumerate(kills))[given.first : given.last]
    if given.out and given.out.exists():
        known = {json.loads(line)["number"] for line in given.out.read_text().splitlines()}
        part = [each for each in part if each[0] not in known]
    counts: Counter[str] = Counter()

    def tell(outcome: Outcome) -> None:
        kill = outcome.kill
        counts["wrong" if outcome.wrong else "right"] += 1
        counts[kill.moment] += 1
        what = "ended, started again" if outcome.ended else "went on by itself"
        print(f"{outcome.number:3} {kill.job:8} {outcome.plan:4} {kill.target:6} {kill.signal:7} "
              f"{kill.moment:8} after step {outcome.checkpoint:3}: {what} ({outcome.seconds:.1f} s)"
              f"{'; WRONG: ' + '; '.join(outcome.wrong) if outcome.wrong else ''}",
              flush=True)  # fmt: skip
        if given.out:
            with given.out.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")

    with tempfile.TemporaryDirectory(prefix="kills-reference-") as name:
        reference = Reference(given.reference or Path(name), given.ranks)
        reference.make()
        ends = time.monotonic() + given.seconds
        for kind in ("torchrun", "run"):
            left = [(number, kill) for number, kill in part if kill.job == kind]
            while left and time.monotonic() < ends:
                seed = given.seed * 100_000 + left[0][0]
                made, wrong = attempt(left[: given.chain], reference, seed, tell)
                left = left[made:]
                counts["jobs"] += 1
                for text in wrong:
                    print(f"WRONG at the end of the job: {text}", flush=True)
                    counts["wrong jobs"] += 1
                if not made:
                    counts["jobs without a kill"] += 1
    print(dict(counts))
    return 1 if counts["wrong"] or counts["wrong jobs"] else 0


if __name__ == "__main__":
    sys.exit(main())
