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

from apportion.graph import Body, refs, substitute
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
    device: str = "cpu"


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

    placed = any(a.name == "device" for a in overload._schema.arguments)

    def call(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
        keywords = dict(zip(named, args[plain:], strict=False)) if named else {}
        if placed and context.device != "cpu":
            keywords["device"] = context.device
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
        result = resolve(kind)(*dense)
        return tuple(result) if isinstance(result, tuple) else (result,)

    return call


def _multiply(kind: str) -> Kernel:
    """Products: an operand in which neither of the last two dimensions is dense is copied by
    BLAS."""

    def call(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
        return (resolve(kind)(*(_for_blas(a) for a in args[:3]), **_weights(args)),)

    return call


def _weights(args: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(("beta", "alpha"), args[3:], strict=False))


def _for_blas(x: Any) -> Any:
    if not isinstance(x, torch.Tensor) or x.dim() < 2 or _blas_stride(x):
        return x
    return x.contiguous()


def _blas_stride(x: torch.Tensor) -> bool:
    rows, columns = x.shape[-2:]
    a, b = x.stride()[-2:]
    return (b == 1 and a >= max(1, columns)) or (a == 1 and b >= max(1, rows))


def _sdpa(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    q, k, v, dropout, causal, mask, scale = args
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    out, lse = attend(_dense(q), _dense(k), _dense(v), dropout, causal, attn_mask=mask, scale=scale)
    return out, lse


def _sdpa_backward(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    grad, q, k, v, out, lse, dropout, causal, mask, scale = args
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    # The kernel wants the gradient dense as [batch, position, head, width].
    grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
    tensors = [grad, *(_dense(x) for x in (q, k, v, out))]
    return tuple(backward(*tensors, lse.contiguous(), dropout, causal, attn_mask=mask, scale=scale))


def _random_uniform(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    size, key, kind, *place = args
    where = place[0] if place else [((n, 0, n),) for n in size]
    indices = [_global_index(atoms, context.device) for atoms in where]
    return (uniform((context.seed, context.step, key), indices, kind),)


def _global_index(atoms: Sequence[tuple[int, int, int]], device: str) -> torch.Tensor:
    """Global indices along a dimension whose atoms are (factor, low, high)."""
    index = torch.zeros(1, dtype=torch.int64, device=device)
    for factor, low, high in atoms:
        places = torch.arange(low, high, device=device)
        index = (index.unsqueeze(-1) * factor + places).reshape(-1)
    return index


def _update(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    number, *tensors = args
    body = context.bodies[number]
    last = _last_uses(body)
    known: list[Any] = list(tensors)
    for place, op in enumerate(body.ops, start=body.inputs):
        values = [substitute(a, known, dtype=dtype, setting=context.setting) for a in op.args]
        known.append(kernel(op.kind)(context, values)[0])
        del values
        for used in last.get(place, ()):
            known[used] = None
    return tuple(known[k] for k in body.outputs)


@cache
def _last_uses(body: Body) -> dict[int, tuple[int, ...]]:
    """For each result's place the results that nobody reads after it is computed."""
    last: dict[int, int] = {}
    for place, op in enumerate(body.ops, start=body.inputs):
        last[place] = place
        last |= dict.fromkeys(refs(op.args), place)
    found: dict[int, tuple[int, ...]] = {}
    for result, place in last.items():
        if result >= body.inputs and result not in body.outputs:
            found[place] = (*found.get(place, ()), result)
    return found


def _conv_backward_input(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    grad, weight, size, stride, padding, dilation, groups = args
    return _conv_backward(grad, _shaped(grad, size), weight, stride, padding, dilation, groups, 0)


def _conv_backward_weight(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    grad, x, size, stride, padding, dilation, groups = args
    return _conv_backward(grad, x, _shaped(grad, size), stride, padding, dilation, groups, 1)


def _conv_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, stride: Any, padding: Any,
    dilation: Any, groups: int, wanted: int,
) -> tuple[Any, ...]:  # fmt: skip
    none = [0] * (grad.dim() - 2)
    mask = [k == wanted for k in range(3)]
    backward = torch.ops.aten.convolution_backward.default
    found = backward(grad, x, weight, None, stride, padding, dilation, False, none, groups, mask)
    return (found[wanted],)


def _shaped(like: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """A tensor that is asked for its shape only; one element of memory."""
    return like.new_empty(1).expand(tuple(size))


def _channel_sum(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    (x,) = args
    return (_per_channel_total(x),)


def _channel_squares(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, total, count = args
    away = x - _per_channel(total / count, x)
    return (_per_channel_total(away.square_()),)


def _batch_norm(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, total, squares, weight, bias, count, eps = args
    normalise = torch.ops.aten.native_batch_norm.default  # with statistics given: pointwise
    weight, bias = (None if t is None else t.to(total.dtype) for t in (weight, bias))
    # On dense tensors only: other strides take another kernel, and replicas must be bit-equal.
    x = x.contiguous()
    found = normalise(x, weight, bias, total / count, squares / count, False, 0.0, eps)
    return (found[0],)


def _batch_norm_reduce(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    grad, x, total, squares, count, eps = args
    mean, invstd = total / count, (squares / count + eps).rsqrt()
    away = x - _per_channel(mean, x)
    return _per_channel_total(grad), _per_channel_total(away.mul_(grad)) * invstd


def _batch_norm_backward(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    grad, x, total, squares, weight, sum_grad, sum_normalised, count, eps = args
    invstd = (squares / count + eps).rsqrt()
    scale = invstd if weight is None else invstd * weight
    found = x - _per_channel(total / count, x)
    found = found.mul_(_per_channel(invstd * sum_normalised / -count, x)).add_(grad)
    found = found.sub_(_per_channel(sum_grad / count, x)).mul_(_per_channel(scale, x))
    return (found.to(grad.dtype),)


def _per_channel_total(x: torch.Tensor) -> torch.Tensor:
    """The sum of all but channels, added in double like torch's own statistics, plane by plane."""
    kind = torch.promote_types(x.dtype, torch.float32)
    x = x.contiguous()  # so that the order of additions does not depend on strides
    planes = x.sum(tuple(range(2, x.dim())), dtype=kind) if x.dim() > 2 else x
    return planes.sum(0, dtype=torch.float64).to(kind)


def _per_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One number per channel, to be broadcast over `x`."""
    return values.reshape(-1, *[1] * (x.dim() - 2))


def _mm_total(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    lefts, rights = args
    total = torch.mm(lefts[0], rights[0])
    for left, right in zip(lefts[1:], rights[1:], strict=True):
        total.addmm_(left, right)
    return (total,)


def _sum_total(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    tensors, dims = args
    total = tensors[0].sum(dims)
    for tensor in tensors[1:]:
        total += tensor.sum(dims)
    return (total,)


_READ_AS_DENSE = (
    "aten.native_layer_norm.default",
    "aten.native_layer_norm_backward.default",
    "aten._softmax.default",
    "aten._softmax_backward_data.default",
    "aten._log_softmax.default",
    "aten._log_softmax_backward_data.default",
    "aten._safe_softmax.default",
    "aten.embedding_dense_backward.default",
    "aten.nll_loss_forward.default",
    "aten.nll_loss_backward.default",
    "aten.mse_loss.default",
)
_PRODUCTS = ("aten.mm.default", "aten.bmm.default", "aten.addmm.default", "aten.baddbmm.default")

_OWN: dict[str, Kernel] = {
    "aten.view.default": _reshape,
    "aten._unsafe_view.default": _reshape,
    "aten.reshape.default": _reshape,
    **{kind: _on_dense(kind) for kind in _READ_AS_DENSE},
    **{kind: _multiply(kind) for kind in _PRODUCTS},
    "apportion.sdpa": _sdpa,
    "apportion.sdpa_backward": _sdpa_backward,
    "apportion.random_uniform": _random_uniform,
    "apportion.update": _update,
    "apportion.conv_backward_input": _conv_backward_input,
    "apportion.conv_backward_weight": _conv_backward_weight,
    "apportion.channel_sum": _channel_sum,
    "apportion.channel_squares": _channel_squares,
    "apportion.batch_norm": _batch_norm,
    "apportion.batch_norm_reduce": _batch_norm_reduce,
    "apportion.batch_norm_backward": _batch_norm_backward,
    "apportion.mm_total": _mm_total,
    "apportion.sum_total": _sum_total,
}
