"""StepMeter: measures the steps of a Runner, writes their metrics, and warns when they drift.

Part of the room run. A Runner tells it when a step begins and ends and what its loss is; metrics go
to sinks on rank 0. Now and then all ranks compare their steps with the prediction (drift.py), and
if they are off, one step is recorded and a warning says which tasks are.
"""

from __future__ import annotations

import json
import resource
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from apportion.capture import Program, flatten
from apportion.checkpoint import told_by_all
from apportion.execute import Worker
from apportion.plan import Plan
from apportion.run.drift import (
    StepTimes,
    drift_of,
    drift_sentence,
    drifted_ops,
    is_time_to_compare,
)
from apportion.run.step_metrics import MetricSink, StepMetrics
from apportion.simulate import Timeline, measured_timeline

WIDEST = 4  # bytes of the numbers whose rate a device's operations are set beside


class DriftWarning(UserWarning):
    """Steps take another time than predicted."""


@dataclass
class _OpenStep:
    """A step whose metrics are not written yet."""

    number: int
    seconds: Callable[[], float]
    cpu_seconds: float
    loss: Any = None


@dataclass(frozen=True)
class ExpectedStep:
    """What is predicted of a step on this rank: its seconds, the peak of its memory, and of all
    operations that it makes the share of what its device could do in a second; 0 if unknown."""

    seconds: float
    peak_bytes: int
    full_seconds: float = 0.0


class StepMeter:
    """Measures the steps of one rank, and writes them to `sinks`, which are empty where another
    does. Drift is looked for where the plan is known."""

    def __init__(
        self,
        program: Program,
        worker: Worker,
        sinks: Sequence[MetricSink],
        expected: ExpectedStep | None,
        plan: Plan | None = None,
    ) -> None:
        self._plan, self._worker, self._sinks = plan, worker, list(sinks)
        self.samples, self.tokens = batch_counts(program.batch)
        self._expected = expected
        self._times = StepTimes()
        self._open: _OpenStep | None = None
        self._began: Any = None
        self._cpu = 0.0
        self._recording = False
        self._said, self._slowest = 0.0, 0.0
        self.last: StepMetrics | None = None

    @property
    def _cuda(self) -> bool:
        return self._worker.rank.place.startswith("cuda")

    def begin(self) -> None:
        """A step begins."""
        self._cpu = time.process_time()
        if self._cuda:
            self._began = torch.cuda.Event(enable_timing=True)
            self._began.record()
        else:
            self._began = time.perf_counter()

    def end(self, number: int) -> None:
        """The step of that number has been issued."""
        self._write()
        began, used = self._began, time.process_time() - self._cpu
        if self._cuda:
            ended = torch.cuda.Event(enable_timing=True)
            ended.record()
            self._open = _OpenStep(number, lambda: _event_seconds(began, ended), used)
        else:
            took = time.perf_counter() - began
            self._open = _OpenStep(number, lambda: took, used)

    def took(self, number: int, loss: float | None, seconds: float, cpu_seconds: float) -> None:
        """A step that somebody else has timed."""
        self._write()
        self._open = _OpenStep(number, lambda: seconds, cpu_seconds, loss)

    def returned(self, loss: Any) -> None:
        """The loss of the step, which nobody has looked at."""
        if self._open is not None:
            self._open.loss = loss

    def _write(self) -> None:
        """Writes the metrics of the step before."""
        step, self._open = self._open, None
        if step is None:
            return
        seconds = step.seconds()
        self._times.add(seconds)
        if step.loss is None:
            return
        self.last = self._metrics(step, seconds)
        for sink in self._sinks:
            sink.write(self.last)

    def _metrics(self, step: _OpenStep, seconds: float) -> StepMetrics:
        expected, rate = self._expected, 1 / seconds if seconds > 0 else 0.0
        return StepMetrics(
            step=step.number,
            loss=float(step.loss),
            step_seconds=seconds,
            predicted_step_seconds=None if expected is None else expected.seconds,
            samples_per_second=None if self.samples is None else self.samples * rate,
            tokens_per_second=None if self.tokens is None else self.tokens * rate,
            utilisation=self._utilisation(seconds, step.cpu_seconds),
            peak_bytes=self._peak_bytes(),
            predicted_peak_bytes=None if expected is None else expected.peak_bytes,
            place="cuda" if self._cuda else "cpu",
        )

    def _utilisation(self, seconds: float, used: float) -> float | None:
        if seconds <= 0:
            return None
        if not self._cuda:
            return used / (seconds * torch.get_num_threads())
        expected = self._expected
        return expected.full_seconds / seconds if expected and expected.full_seconds else None

    def _peak_bytes(self) -> int:
        if self._cuda:
            return int(torch.cuda.max_memory_allocated())
        return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024

    def flush(self) -> None:
        """Writes what there is of the last step."""
        self._write()

    def close(self) -> None:
        """Nothing is measured any more."""
        self._write()
        for sink in self._sinks:
            sink.close()
        self._sinks.clear()

    # drift

    def compare(self) -> None:
        """Between two steps: all ranks together look whether steps take the time predicted; if not,
        the next one is recorded, and after that a warning says what drifted."""
        if self._expected is None or self._plan is None:
            return
        if self._recording:
            self._recording = False
            self._worker.rank.records = False
            self._warn(timeline_of(self._plan, self._worker))
        elif is_time_to_compare(self._times.taken):
            slowest = max(float(text) for text in told_by_all(repr(self._times.median)))
            off = drift_of(slowest, self._expected.seconds)
            if off is not None and abs(off - self._said) > abs(self._said) * 0.2:
                self._said, self._recording = off, True
                self._slowest = slowest
                self._worker.rank.spans.clear()
                self._worker.rank.records = True

    def _warn(self, line: Timeline) -> None:
        plan, expected = self._plan, self._expected
        assert plan is not None and expected is not None
        ops = drifted_ops(plan.tasks, plan.space.graph, plan.timeline, line)
        if self._worker.rank.device == 0:
            said = drift_sentence(self._said, self._slowest, expected.seconds, ops)
            warnings.warn(said, DriftWarning, stacklevel=2)


def timeline_of(plan: Plan, worker: Worker) -> Timeline:
    """The Timeline of the step that all ranks have recorded last; all of them call it. Clocks of
    different hosts are set by each other at a moment when all ranks have met."""
    own = [list(map(int, span)) for span in worker.rank.spans]
    told_by_all("")  # all leave it at nearly the same moment
    text = json.dumps({"now": worker.rank.clock(), "spans": own})
    found = [json.loads(each) for each in told_by_all(text)]
    shift = [each["now"] - found[0]["now"] for each in found]
    if max(map(abs, shift)) < ONE_CLOCK:
        shift = [0] * len(found)
    ranks = [
        [(task, start - by, end - by) for task, start, end in each["spans"]]
        for each, by in zip(found, shift, strict=True)
    ]
    return measured_timeline(plan.tasks, ranks)


ONE_CLOCK = 1_000_000_000  # nanoseconds: what is less apart is one machine's clock


def expected_step(plan: Plan, device: int, place: str) -> ExpectedStep | None:
    """What a plan predicts of a rank's step; None if it is for devices of another kind than those
    that it runs on."""
    on_cpu = all(each.kind == "cpu" for each in plan.cluster.devices)
    if on_cpu != (place == "cpu"):
        return None
    rate = dict(plan.cluster.devices[device].flops).get(WIDEST, 0.0)
    work = float(plan.tasks.flops[plan.tasks.device == device].sum())
    full = work / rate if rate else 0.0
    return ExpectedStep(plan.predicted.step_seconds, plan.predicted.peak_bytes[device], full)


def batch_counts(batch: Any) -> tuple[int | None, int | None]:
    """How many samples and how many tokens a batch has: the length of its tensors, and the elements
    of the first table of whole numbers; None where that is not to be seen."""
    tensors = [leaf for leaf in flatten(batch).leaves if isinstance(leaf, torch.Tensor)]
    lengths = {tensor.shape[0] for tensor in tensors if tensor.dim()}
    samples = lengths.pop() if len(lengths) == 1 else None
    whole = [t for t in tensors if t.dim() == 2 and t.dtype in (torch.int64, torch.int32)]
    return samples, whole[0].numel() if whole else None


def _event_seconds(began: Any, ended: Any) -> float:
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3
