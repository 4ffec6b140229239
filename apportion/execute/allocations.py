"""What kernels allocate while they run, beside their inputs and results.

This module belongs to the room execute. Calls on tensors without data come in, bytes go out.
`AllocationTracker` watches the calls. Kernels whose real storage or workspace is larger than their
result are listed in `EXTRA_BYTES`, with how the figures were found.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from apportion.collector import uncollected

_HALF = (torch.float16, torch.bfloat16)


class AllocationTracker(TorchDispatchMode):
    """Counts the bytes of the storages that are made while it is active, and their peak."""

    def __init__(self, threads: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.threads = threads
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if _is_tensor(x)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if _is_tensor(x) and x.untyped_storage()._cdata not in given:
                storage = x.untyped_storage()
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.alive = {k: (ref, n) for k, (ref, n) in self.alive.items() if not ref.expired()}
        name = str(func)
        if name == "aten.native_batch_norm.default" and not args[5]:
            for x in result[1:]:  # really empty when the statistics are given
                self.alive.pop(x.untyped_storage()._cdata, None)
        workspace = self._workspace(func, name, args, kwargs or {}, result)
        if name in LARGER_STORAGE and (kept := LARGER_STORAGE[name](args)):
            storage = result.untyped_storage()
            self.alive[storage._cdata] = (StorageWeakRef(storage), kept)
        self.peak = max(self.peak, sum(n for _, n in self.alive.values()) + workspace)
        return result

    def _workspace(
        self, func: Any, name: str, args: Any, kwargs: dict[str, Any], result: Any
    ) -> int:
        """Bytes that a kernel takes while it runs on this machine's CPU; elsewhere unknown, 0."""
        if self.threads is None:
            return 0
        if name in MEASURED_KINDS or (name in HALF_PRODUCTS and args[0].dtype in _HALF):
            return _measured_workspace(func, args, kwargs, result)
        return EXTRA_BYTES[name](args, result, self.threads, **kwargs) if name in EXTRA_BYTES else 0

    def nbytes(self, tensor: torch.Tensor) -> int:
        """Bytes of a tensor's storage."""
        storage = tensor.untyped_storage()
        known = self.alive.get(storage._cdata)
        return known[1] if known else int(storage.nbytes())


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


# Kernels that take more than their result, found by comparing every call of the zoo's models, in
# float32 and float64, with the allocator's events (torch 2.13, CPU). Bytes beside inputs and
# results.


def _scalar(args: Any, result: Any, threads: int, **named: Any) -> int:
    """A number becomes a tensor of its own type, then of the computation's."""
    tensors = [a for a in args if _is_tensor(a)]
    number = next((a for a in args if isinstance(a, int | float) and not _is_tensor(a)), None)
    if number is None or len(tensors) > 1:  # the number is a factor of the other tensor
        return _converted(args, result, threads)
    x = tensors[0]
    kind = x.dtype if x.is_floating_point() or isinstance(number, int) else torch.float32
    kind = _real(kind, result)
    own = {bool: torch.bool, int: torch.int64, float: torch.float64}[type(number)]
    converted = 0 if x.dtype == kind else int(x.numel() * kind.itemsize)
    return int(own.itemsize) + (0 if own == kind else int(kind.itemsize)) + converted


def _real(kind: torch.dtype, result: Any) -> torch.dtype:
    """The type that is computed in: that of the result where whole numbers give fractions."""
    whole = not (kind.is_floating_point or kind.is_complex)
    return result.dtype if whole and result.is_floating_point() else kind


def _converted(args: Any, result: Any, threads: int, **named: Any) -> int:
    """Operands of several types are converted to one that can hold them all, whole."""
    tensors = [a for a in args if _is_tensor(a)]
    kind = functools.reduce(torch.promote_types, _deciding(tensors))
    kind = _real(kind, result)
    return sum(int(x.numel() * kind.itemsize) for x in tensors if x.dtype != kind)


def _deciding(tensors: Any) -> list[torch.dtype]:
    """The types of the operands that decide about the common one: a scalar's does only if it is of
    another sort, such as floating beside whole numbers."""
    sorts = [(x.is_complex(), x.is_floating_point(), x.dtype != torch.bool) for x in tensors]
    full = [sort for sort, x in zip(sorts, tensors, strict=True) if x.dim()]
    return [
        x.dtype
        for x, sort in zip(tensors, sorts, strict=True)
        if x.dim() or not full or sort > max(full)
    ]


def _where(args: Any, result: Any, threads: int, **named: Any) -> int:
    return _converted(args[1:], result, threads)


def _mean(args: Any, result: Any, threads: int, **named: Any) -> int:
    if args[0].dtype in _HALF:  # in float32
        return int(args[0].numel() * 4) + int(result.numel() * 4) * (result.dtype in _HALF)
    return 8 + int(result.dtype.itemsize)


def _sum(args: Any, result: Any, threads: int, **named: Any) -> int:
    """A sum in another precision converts its input first."""
    return 0 if result.dtype == args[0].dtype else int(args[0].numel() * result.dtype.itemsize)


def _mse_loss(args: Any, result: Any, threads: int, **named: Any) -> int:
    """The differences, squared, beside the storage of the result, which is as large."""
    if args[2:] and args[2] == 0:
        return 0
    mean = 0 if args[2:] and args[2] == 2 else _mean(args, result, threads)
    return int(args[0].nbytes) + mean


def _safe_softmax(args: Any, result: Any, threads: int, **named: Any) -> int:
    """Which elements and which rows are masked, and a zero."""
    rows = result.numel() // max(result.shape[args[1]], 1) if result.dim() else 1
    return int(result.numel() + rows + result.dtype.itemsize)


def _layer_norm_backward(args: Any, result: Any, threads: int, **named: Any) -> int:
    """Two rows of partial sums per thread."""
    width = 1
    for n in args[2]:
        width *= n
    wanted = any(args[7][1:])
    return int(2 * threads * width * args[1].dtype.itemsize) if wanted else 0


def _blocks(queries: int, keys: int) -> tuple[int, int]:
    rows = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(rows, queries), min(512, keys)


def _attention(args: Any, result: Any, threads: int, **named: Any) -> int:
    """Per thread a block of scores, its maxima and sums, and a block of results."""
    rows, columns = _blocks(args[0].shape[2], args[1].shape[2])
    wide = max(int(args[0].dtype.itemsize), 4)
    return int(threads * (rows * columns + 2 * rows + rows * args[0].shape[3]) * wide)


def _attention_backward(args: Any, result: Any, threads: int, **named: Any) -> int:
    """Per thread two blocks of scores and a row of sums."""
    rows, columns = _blocks(args[1].shape[2], args[2].shape[2])
    wide = max(int(args[1].dtype.itemsize), 4)
    return int(threads * (2 * rows * columns + rows) * wide)


SCALAR = [
    "add",
    "sub",
    "mul",
    "div",
    "rsub",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "remainder",
    "pow",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "bitwise_left_shift",
    "bitwise_right_shift",
    "add_",
    "sub_",
    "mul_",
    "div_",
    "bitwise_and_",
    "bitwise_or_",
    "bitwise_xor_",
    "bitwise_left_shift_",
    "bitwise_right_shift_",
]

CONVERTING = ["maximum.default", "minimum.default", "pow.Tensor_Tensor", "atan2.default"]

EXTRA_BYTES: dict[str, Callable[..., int]] = {
    "aten.sum.dim_IntList": _sum,
    "aten.sum.default": _sum,
    **dict.fromkeys((f"aten.{name}" for name in CONVERTING), _converted),
    "aten.where.self": _where,
    **dict.fromkeys(
        (f"aten.{name}.{overload}" for name in SCALAR for overload in ("Scalar", "Tensor")),
        _scalar,
    ),
    "aten.mean.default": _mean,
    "aten.mean.dim": _mean,
    "aten.mse_loss.default": _mse_loss,
    "aten._safe_softmax.default": _safe_softmax,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward,
}

HALF_PRODUCTS = frozenset(
    [
        "aten.mm.default",
        "aten.bmm.default",
        "aten.addmm.default",
        "aten.baddbmm.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
    ]
)
"""Products that put operands in half precision into an order of their own first, if the processor
has instructions for them; each distinct call is measured too."""

# Kernels that choose among algorithms by shape: each distinct call is measured once on this
# machine.
MEASURED_KINDS = frozenset(
    [
        "aten.convolution.default",
        "aten.convolution_backward.default",
        "aten.native_batch_norm.default",
        "aten._native_batch_norm_legit.no_stats",
        "aten._native_batch_norm_legit_functional.default",
        "aten.native_batch_norm_backward.default",
        "aten.max_pool2d_with_indices.default",
        "aten.max_pool2d_with_indices_backward.default",
        "aten.avg_pool2d.default",
        "aten.avg_pool2d_backward.default",
        "aten.max_pool3d_with_indices.default",
        "aten.max_pool3d_with_indices_backward.default",
        "aten.avg_pool3d.default",
        "aten.avg_pool3d_backward.default",
    ]
)
MEASURE_UP_TO = 1 << 26  # bytes of operands; beyond, a bound is used and nothing runs
_workspaces: dict[str, int] = {}
"""A cache for the whole process: each distinct call is measured once, which takes milliseconds."""


def _measured_workspace(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Workspace of a call by the allocator's events, on tensors of zeros of the same strides."""
    tensors = [x for x in tree_leaves((args, kwargs, result)) if _is_tensor(x)]
    size = int(sum(x.nbytes for x in tensors))
    if size > MEASURE_UP_TO:
        return 2 * size  # seen: at most one, for operands and results put into another order
    key = f"{torch.get_num_threads()} {func} {tree_map(_signature, (args, kwargs))}"
    if key not in _workspaces:
        real_args, real_kwargs = tree_map(_zeros, (args, kwargs))
        with (
            _disable_current_modes(),
            uncollected(),  # what was garbage before would count as freed by this call
            memory_profile() as profile,
        ):
            made = func(*real_args, **real_kwargs)
        kept = sum(x.untyped_storage().nbytes() for x in tree_leaves(made) if _is_tensor(x))
        _workspaces[key] = max(allocated_peak(profile) - kept, 0)
    return _workspaces[key]


def _signature(x: Any) -> Any:
    return (tuple(x.shape), x.stride(), x.dtype) if _is_tensor(x) else x


def _zeros(x: Any) -> Any:
    if not _is_tensor(x):
        return x
    with _disable_current_modes():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).zero_()


def memory_profile() -> torch.profiler.profile:
    """A profile of the allocator's events. torch's profiler writes lines about itself to standard
    error unless this is set before the first one."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    return torch.profiler.profile(profile_memory=True, acc_events=True)


def allocated_peak(profile: Any, from_ns: int = 0) -> int:
    """Peak of live bytes by the allocator's events in a profile, from a time on."""
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        if event.start_ns() >= from_ns:
            peak = max(peak, total)
    return peak


# Results whose storage is larger than they are.
LARGER_STORAGE: dict[str, Callable[[Any], int]] = {
    "aten.mse_loss.default": lambda args: 0 if args[2:] and args[2] == 0 else int(args[0].nbytes),
}
