"""Samples from PyTorch's own operator database: its entries, forward and backward, call by call.

One of the two sources of Samples for verify/; the other is own_samples/.
`torch.testing._internal.common_methods_invocations.op_db` gives inputs to nearly every function of
torch. Each is run under a dispatch mode below autograd, so that the operators of its backward are
seen too; every distinct functional operator call becomes a Sample with its real inputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from apportion.capture import flat_results, flatten_arguments, functional_twin, torch_private
from apportion.verify.sample import Sample

_LARGEST = 1 << 20  # elements; larger ones in the database only test memory allocators
_DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)


def resolve_overload(packet: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The overload that a call of a packet of overloads runs; None if it fails."""
    mode = _FirstCallMode()
    with mode:
        _quietly(lambda: packet(*args, **kwargs))
    return mode.found


class _FirstCallMode(torch_private.TorchDispatchMode):
    """Remembers the first operator that is called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or func
        return func(*args, **(kwargs or {}))


def entries() -> list[Any]:
    """All entries of the database; raises ValueError if what it needs is not installed."""
    try:
        return torch_private.operator_database()
    except ImportError as missing:
        raise ValueError(
            f"PyTorch's operator database needs the package {missing.name!r}: "
            f"pip install {missing.name}"
        ) from None


def entry_name(entry: Any) -> str:
    """The entry's name, with its variant: the database has several entries of one name."""
    variant = entry.variant_test_name
    return f"{entry.name}.{variant}" if variant else str(entry.name)


def samples_of_entry(entry: Any, limit: int = 12, seed: int = 0) -> Iterator[Sample]:
    """The distinct operator calls of an entry's first samples, forward and backward."""
    seen: set[str] = set()
    dtype = next((d for d in _DTYPES if entry.supports_dtype(d, "cpu")), None)
    if dtype is None:
        return
    torch.manual_seed(seed)
    grads = bool(entry.supports_autograd and dtype.is_floating_point)
    samples = torch_private.samples_of(entry, dtype, grads)
    for _ in range(limit):
        sample = _quietly(lambda: next(samples, None))
        if sample is None:
            return
        mode = _SampleRecorder()
        _quietly(lambda: _run(mode, entry, sample, grads))  # noqa: B023
        for found in mode.found:
            if found.key not in seen:
                seen.add(found.key)
                yield found


def _quietly(function: Callable[[], Any]) -> Any:
    """The function's result; None if the database's own code fails on this machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return function()
        except Exception:  # a sample for another device, or a dtype the kernel does not have
            return None


def _run(mode: _SampleRecorder, entry: Any, sample: Any, grads: bool) -> None:
    with mode:
        result = entry(sample.input, *sample.args, **sample.kwargs)
        if not grads:
            return
        result = sample.output_process_fn_grad(result)
        outs = [x for x in flat_results(result) if isinstance(x, torch.Tensor) and x.requires_grad]
        held = flatten_arguments((sample.input, *sample.args), sample.kwargs)[2]
        leaves = [x for x in held if x.requires_grad]
        if outs and leaves:
            with torch_private.without_modes():
                directions = [torch.randn_like(x) for x in outs]
            torch.autograd.grad(outs, leaves, directions, allow_unused=True)


class _SampleRecorder(torch_private.TorchDispatchMode):
    """Records every functional operator call with copies of its inputs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Sample] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = functional_twin(func) if torch_private.schema(func).is_mutable else func
        # Our own stand-ins for copy_ and fill_ are plain elementwise operators.
        if isinstance(target, torch_private.OpOverload) and func.namespace == "aten":
            self._keep(target, args, kwargs)
        return func(*args, **kwargs)

    def _keep(self, target: Any, args: Any, kwargs: Any) -> None:
        kwargs = {k: v for k, v in kwargs.items() if k not in ("generator", "device", "layout")}
        held, named, tensors = flatten_arguments(args, kwargs)
        if any(t.layout is not torch.strided or t.numel() > _LARGEST for t in tensors):
            return
        if any(r.type.kind() == "TensorType" or "List" in r.type.kind()
               for r in torch_private.schema(target).returns):  # fmt: skip
            copies = tuple(t.detach().clone() for t in tensors)
            self.found.append(Sample(target, held, named, copies))
