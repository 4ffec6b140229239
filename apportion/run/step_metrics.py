"""StepMetrics: what a person wants to see of each training step, and where it is written.

Part of the room run. What a rank measures of a step comes in; rank 0 writes a line for people, JSON
lines or TensorBoard's files:

    step 12  loss 3.210402  27.4 ms (26.1 predicted)  1,168 samples/s  37,376 tokens/s  cores 96%

Nothing waits for the device because of it: a line is written when the next step has been issued.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from apportion.quantity import format_quantity

PRINT, TENSORBOARD = "print", "tensorboard:"


@dataclass(frozen=True)
class StepMetrics:
    """One step of one rank.

    step_seconds           from its begin to its end on this rank's device
    predicted_step_seconds what the plan says; None if it is for other devices than it runs on
    samples_per_second, tokens_per_second   of all ranks; None if the batch does not tell
    utilisation            on a CPU the share of the rank's cores that was used; on a GPU the
                           operations of the step beside what the device could do; None if unknown
    peak_bytes             the most that was held: on a CPU by the process, on a GPU by tensors
    """

    step: int
    loss: float
    step_seconds: float
    predicted_step_seconds: float | None
    samples_per_second: float | None
    tokens_per_second: float | None
    utilisation: float | None
    peak_bytes: int
    predicted_peak_bytes: int | None
    place: str = "cpu"

    def line(self) -> str:
        """The step in one line."""
        parts = [
            f"step {self.step}",
            f"loss {self.loss:.6f}",
            format_quantity(self.step_seconds, "s"),
        ]
        if self.predicted_step_seconds is not None:
            parts[-1] += f" ({format_quantity(self.predicted_step_seconds, 's')} predicted)"
        if self.samples_per_second is not None:
            parts.append(f"{self.samples_per_second:,.0f} samples/s")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if self.utilisation is not None:
            name = "cores" if self.place == "cpu" else "MFU"
            parts.append(f"{name} {self.utilisation:.0%}")
        parts.append(f"peak {format_quantity(self.peak_bytes, 'B')}")
        return "  ".join(parts)

    def facts(self) -> dict[str, Any]:
        """The step as JSON has it; null for what is not a number."""
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        }


class MetricSink(Protocol):
    """Where metrics are written."""

    def write(self, metrics: StepMetrics) -> None:
        """Writes those of one step."""

    def close(self) -> None:
        """Nothing comes any more."""


class _PrintedLines:
    """Lines for people."""

    def write(self, metrics: StepMetrics) -> None:
        print(metrics.line(), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is open."""


class _JsonLines:
    """Lines for programs, each added to a file when it comes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.touch()
        except OSError as error:
            raise ValueError(f"cannot write metrics to {path}: {error.strerror}") from None

    def write(self, metrics: StepMetrics) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics.facts()) + "\n")

    def close(self) -> None:
        """Nothing is open."""


class _TensorBoard:
    """Event files of TensorBoard."""

    def __init__(self, folder: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError(
                "metrics for TensorBoard need the package tensorboard: "
                "pip install 'apportion[tensorboard]'"
            ) from None
        self._writer: Any = SummaryWriter(folder)

    def write(self, metrics: StepMetrics) -> None:
        for key, value in metrics.facts().items():
            if isinstance(value, int | float) and key != "step":
                self._writer.add_scalar(f"train/{key}", value, metrics.step)

    def close(self) -> None:
        self._writer.close()


def open_sink(name: str | Path) -> MetricSink:
    """Where metrics of that name go: "print" to stderr, "tensorboard:DIR", or a file for JSON
    lines, which are added to it. Raises ValueError if that cannot be."""
    text = str(name)
    if text == PRINT:
        return _PrintedLines()
    if text.startswith(TENSORBOARD):
        return _TensorBoard(text.removeprefix(TENSORBOARD))
    if not text.endswith((".jsonl", ".json")):
        raise ValueError(
            f"metrics {text!r} are neither 'print', nor 'tensorboard:DIR', nor a file of JSON "
            "lines that ends in .jsonl"
        )
    return _JsonLines(Path(text))


def open_sinks(names: str | Path | Sequence[str | Path] | None) -> list[MetricSink]:
    """One for each name."""
    if names is None:
        return []
    return [open_sink(each) for each in ([names] if isinstance(names, str | Path) else names)]
