"""From the kind of an Op to the kernel that computes it on this machine.

A kernel here takes a Context and the Op's arguments in the Graph's order, and returns a tuple of
tensors. Most are the operator itself; a kernel that torch picks by device is one kind in a Graph
and is resolved here; the optimizer's update runs its body.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from apportion.graph import Body, substitute
from apportion.random import uniform

# Arguments that a Graph leaves out, since they say where and not what.
LEFT_OUT = frozenset(["device", "layout", "pin_memory", "generator", "memory_format"])


@dataclass(slots=True)
class Context:
    """What kernels need beside their arguments: whose random numbers, which step, the optimizer's
    settings now."""

    seed: int
    step: int
    setting: Callable[[Any], float]
    bodies: Sequence[Body] = ()


Kernel = Callable[[Context, Sequence[Any]], tuple[Any, ...]]


@cache
def dtype(name: str) -> torch.dtype:
    """torch's dtype of that name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return found


@cache
def kernel(kind: str) -> Kernel:
    """The kernel of a kind; raises ValueError if torch has no such operator."""
    own = _OWN.get(kind)
    if own is not None:
        return own
    overload = resolve(kind)
    names = [a for a in overload._schema.arguments if a.name not in LEFT_OUT]
    plain = sum(not a.kwarg_only for a in names)
    named = [a.name for a in names[plain:]]
    # Some overloads have an argument that is left out before one that is kept: then all go by name.
    positional = [a.name for a in overload._schema.arguments if not a.kwarg_only][:plain]
    if positional != [a.name for a in names[:plain]]:
        plain, named = 0, [a.name for a in names]

    def call(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
        keywords = dict(zip(named, args[plain:], strict=False)) if named else {}
        result = overload(*args[:plain], **keywords)
        return tuple(result) if isinstance(result, tuple | list) else (result,)

    return call


def resolve(kind: str) -> Any:
    """torch's overload object of a kind."""
    found: Any = torch.ops
    for name in kind.split("."):
        found = getattr(found, name, None) if name.isidentifier() else None
        if found is None:
            raise ValueError(
                f"torch has no operator {kind!r} here; import the library that defines it"
            )
    return found


def _reshape(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    # A part may have other strides than the whole had, so that a view of it may need a copy.
    return (args[0].reshape(args[1]),)


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _on_dense(kind: str) -> Kernel:
    """Kernels that read some inputs as if they were contiguous, whatever their strides say."""

    def call(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
        dense = [a.contiguous() if isinstance(a, torch.Tensor) else a for a in args]
        return tuple(resolve(kind)(*dense))

    return call


def _sdpa(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    q, k, v, dropout, causal, mask, scale = args
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    out, lse = attend(_dense(q), _dense(k), _dense(v), dropout, causal, attn_mask=mask, scale=scale)
    return out, lse


def _sdpa_backward(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    grad, q, k, v, out, lse, dropout, causal, mask, scale = args
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    tensors = [_dense(x) for x in (grad, q, k, v, out)]
    return tuple(backward(*tensors, lse.contiguous(), dropout, causal, attn_mask=mask, scale=scale))


def _random_uniform(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    size, key, kind, *place = args
    where = place[0] if place else [((n, 0, n),) for n in size]
    indices = [_global_index(atoms) for atoms in where]
    return (uniform((context.seed, context.step, key), indices, kind),)


def _global_index(atoms: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    """Global indices along a dimension whose atoms are (factor, low, high)."""
    index = torch.zeros(1, dtype=torch.int64)
    for factor, low, high in atoms:
        index = (index.unsqueeze(-1) * factor + torch.arange(low, high)).reshape(-1)
    return index


def _update(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    number, *tensors = args
    body = context.bodies[number]
    known = list(tensors)
    for op in body.ops:
        values = [substitute(a, known, dtype=dtype, setting=context.setting) for a in op.args]
        known.append(kernel(op.kind)(context, values)[0])
    return tuple(known[k] for k in body.outputs)


_OWN: dict[str, Kernel] = {
    "aten.view.default": _reshape,
    "aten._unsafe_view.default": _reshape,
    "aten.reshape.default": _reshape,
    "aten.native_layer_norm.default": _on_dense("aten.native_layer_norm.default"),
    "aten.native_layer_norm_backward.default": _on_dense("aten.native_layer_norm_backward.default"),
    "apportion.sdpa": _sdpa,
    "apportion.sdpa_backward": _sdpa_backward,
    "apportion.random_uniform": _random_uniform,
    "apportion.update": _update,
}
