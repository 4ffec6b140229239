"""Convolutions measured in the memory order that torch's compiler gives them: channels last.

Part of the room run. An Executable and its Storage come in; for every distinct convolution of
images (forward, and gradients) goes out a KernelMeasurement: seconds on this machine's CUDA device,
and the most bytes that it takes beside its operands and results.

Generated code keeps images in order NCHW, which a library first turns around; the compiler keeps
them in NHWC (execute/torch_compiler.py), and turns around what a forward convolution reads by
kernels of its own (that of a batch is counted with the convolution). A backward one gets weights,
and images that are the batch itself, as they are, and the library turns around what it must. A bias
is added in the kernel that follows.

Each call finds cold caches, as it mostly does in a step, and a device that was busy before it, so
that the host's time does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from apportion.execute import Context, Executable, kernel, padded
from apportion.lower import COMPUTE, Storage
from apportion.machine import KernelMeasurement, kind_of_signature
from apportion.run.task_clock import sleep

FORWARD = "aten.convolution.default"
BACKWARD = "apportion.conv_backward_"
BIAS = 2  # argument of a forward convolution
CALLS, AHEAD, FLUSHED = 7, 5e-3, 128 << 20  # seconds to be ahead; bytes written between calls
LEAST = 1e-6  # seconds of a call
SMALL = 64  # channels


def image_convolutions(executable: Executable, storage: Storage) -> dict[str, int]:
    """A task for each distinct convolution of images; none if the compiler would leave their order
    alone in a step with these."""
    found: dict[str, int] = {}
    for task, kind in enumerate(executable.kind):
        work = storage.work[task] if kind == COMPUTE else -1
        if work < 0 or storage.works[work] in found:
            continue
        name = kind_of_signature(storage.works[work])
        if (name == FORWARD or name.startswith(BACKWARD)) and _is_image(executable, task):
            found[storage.works[work]] = task
    forward = [task for text, task in found.items() if kind_of_signature(text) == FORWARD]
    return found if turns_images(_weights(executable, forward)) else {}


def turns_images(weights: Iterable[tuple[tuple[int, ...], int]]) -> bool:
    """Whether torch's compiler puts images in order NHWC where convolutions have these weights and
    groups: its own rule (`GraphLowering.decide_layout_opt`), for a whole step."""
    small = True
    for (out, into, *window), groups in weights:
        if (groups > 1 and into > 1) or (2 * out <= into and window[0] > 1):
            return False
        small &= out <= SMALL and into <= SMALL
    return not small


def measured_channels_last(
    executable: Executable, storage: Storage, place: str = "cuda"
) -> dict[str, KernelMeasurement]:
    """Every distinct convolution of images, measured on a CUDA device."""
    tasks, found = executable.tasks, {}
    for text, task in image_convolutions(executable, storage).items():
        call = channels_last_call(executable, task, place)
        workspace = _workspace(call)
        seconds = _seconds(channels_last_call(executable, task, place, turning=True), place)
        found[text] = KernelMeasurement(
            float(f"{max(seconds, LEAST):.4g}"), float(tasks.flops[task]), int(tasks.nbytes[task]),
            int(tasks.itemsize[task]), workspace,
        )  # fmt: skip
        del call
    return found


def channels_last_call(
    executable: Executable, task: int, place: str, turning: bool = False
) -> Callable[[], Any]:
    """A call of a convolution on operands of its own, in the order that they have in compiled
    code; `turning`: it also turns around a batch that a forward one reads."""
    work = executable.computes[task]
    forward = work.op.kind == FORWARD
    context = Context(0, 0, lambda _: 0.0, executable.graph.bodies, place, place)
    made = []
    for slot in work.ins:
        spec = executable.slots[slot]
        x = torch.randn(spec.shape, device=place).to(spec.dtype)
        turned = x.dim() == 4 and (forward or executable.graph.producer[spec.value] is not None)
        made.append(x.contiguous(memory_format=torch.channels_last) if turned else x)
    given = list(work.args.fill(padded(made, work.part), context))
    if forward:
        given[BIAS] = None
    run = kernel(work.op.kind)
    given_batch = executable.graph.producer[executable.slots[work.ins[0]].value] is None
    if not (turning and forward and given_batch):
        return lambda: run(context, given)
    batch, *others = given
    batch = batch.contiguous()
    return lambda: run(context, (batch.contiguous(memory_format=torch.channels_last), *others))


def _is_image(executable: Executable, task: int) -> bool:
    slots = executable.computes[task].ins
    return min(slots) >= 0 and len(executable.slots[slots[0]].shape) == 4


def _weights(executable: Executable, tasks: list[int]) -> Iterator[tuple[tuple[int, ...], int]]:
    for task in tasks:
        work = executable.computes[task]
        groups = work.part.args[-1]
        assert isinstance(groups, int)
        yield executable.slots[work.ins[1]].shape, groups


def _seconds(call: Callable[[], Any], place: str) -> float:
    """The median over calls, of the device's time between events, less what those take."""
    flushed = torch.empty(FLUSHED, dtype=torch.uint8, device=place)
    call()
    torch.cuda.synchronize()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(CALLS)]
    sleep(AHEAD)
    for first, second, third in events:
        flushed.zero_()
        first.record()
        second.record()
        call()
        third.record()
    torch.cuda.synchronize()
    each = [(b.elapsed_time(c) - a.elapsed_time(b)) / 1e3 for a, b, c in events]
    return float(np.median(each))


def _workspace(call: Callable[[], Any]) -> int:
    """Bytes taken while it runs, beside what it leaves."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del kept
    return int(found)
