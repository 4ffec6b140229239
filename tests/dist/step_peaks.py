"""Runs a training program as a rank, and prints what each of its steps held at most, in bytes of
tensors.

    torchrun --nproc-per-node 2 step_peaks.py train.py --steps 4

That is what the process held at most by the kernel's count, less what it held when the step began,
and the bytes of all tensors that there were then. (The allocator's own events do not do: gloo frees
what a collective has read in threads of its own, which the profiler does not hear of.) So that the
kernel's count is that of tensors, all but small ones are mapped for themselves. A step begins when
gradients are dropped. Linux only.
"""

from __future__ import annotations

import ctypes
import gc
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

M_MMAP_THRESHOLD, MAPPED = -3, 16384  # malloc maps what is larger, and gives it back at once


def held(line: str) -> int:
    """A line of the kernel's count of this process's memory, in bytes."""
    rows = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(row.split()[1]) for row in rows if row.startswith(f"{line}:"))


def tensor_bytes() -> int:
    """The bytes of all tensors that Python knows of."""
    found = {}
    for some in gc.get_objects():
        if issubclass(type(some), torch.Tensor):
            storage = getattr(some, "_local_tensor", some).untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


class StepPeaks:
    """Prints the peak of a step when the next one begins."""

    def __init__(self, begin: Any) -> None:
        self.begin, self.before = begin, 0

    def __call__(self, optimizer: Any, *args: Any, **settings: Any) -> None:
        if self.before:
            print(json.dumps({"peak": held("VmHWM") - self.before}), flush=True)
        self.begin(optimizer, *args, **settings)
        gc.collect()
        self.before = held("VmRSS") - tensor_bytes()
        Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED)
    peaks = StepPeaks(torch.optim.AdamW.zero_grad)
    torch.optim.AdamW.zero_grad = lambda *args, **given: peaks(*args, **given)  # type: ignore
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
