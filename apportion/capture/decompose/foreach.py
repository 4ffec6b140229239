"""Operators on lists of tensors -> one Op per position of the lists: each has axes of its own.

Rules of capture/decompose/: _foreach_add becomes add, _foreach_norm the root of a sum of powers,
and so on; a fused optimizer becomes one call per parameter; the check of a loss scale one per
gradient, each of which continues what the one before has found.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from apportion import graph as g
from apportion.capture import torch_private
from apportion.capture.decompose.base import NodeBuilder, rule
from apportion.capture.normalise import DROPPED, Node

UNSCALE = "aten._amp_foreach_non_finite_check_and_unscale.default"

_UNARY = """
abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg
reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc clone copy max mm
"""
_ARITHMETIC = ("add", "sub", "mul", "div")
_PLAIN = {
    **{f"{name}.default": f"{name}.default" for name in _UNARY.split()},
    "zero.default": "zeros_like.default",
    **{f"{name}.{form}": f"{name}.Tensor" for name in _ARITHMETIC for form in ("List", "Tensor")},
    **{f"{name}.Scalar": f"{name}.Scalar" for name in (*_ARITHMETIC, "lerp")},
    **{f"{name}.Scalar": f"{name}.default" for name in ("clamp_max", "clamp_min")},
    **{f"{name}.Scalar": f"{name}.default" for name in ("addcmul", "addcdiv")},
    **{f"{name}.List": f"{name}.Tensor" for name in ("clamp_max", "clamp_min", "lerp")},
    **{f"{name}.List": f"{name}.default" for name in ("maximum", "minimum")},
    "maximum.Scalar": "clamp_min.default",
    "minimum.Scalar": "clamp_max.default",
    "pow.List": "pow.Tensor_Tensor",
    "pow.Scalar": "pow.Tensor_Scalar",
    "pow.ScalarAndTensor": "pow.Scalar",
}
"""The operator of one tensor, by the name behind `_foreach_`."""
_PLAIN |= {f"{k}List": v for k, v in _PLAIN.items() if k.endswith(".Scalar")}

_FUSED = tuple(
    f"aten._fused_{name}.{form}"
    for name, form in itertools.product(
        ("adam", "adamw", "sgd", "adagrad"), ("default", "tensor_lr")
    )
)


@rule(*(f"aten._foreach_{name}" for name in _PLAIN))
def _foreach(node: Node, make: NodeBuilder) -> list[Node]:
    name = _PLAIN[node.kind.removeprefix("aten._foreach_")]
    for position, slot in enumerate(node.outputs):
        args = [_item(arg, position) for arg in node.args]
        make.nodes.append(Node(f"aten.{name}", _completed(name, args), (slot,), make.site))
    return make.nodes


@rule("aten._foreach_addcmul.Tensor", "aten._foreach_addcdiv.Tensor")
def _scaled_products(node: Node, make: NodeBuilder) -> list[Node]:
    """The factors are the elements of one tensor."""
    factors, kind = node.args[3], node.kind.replace("_foreach_", "").replace("Tensor", "default")
    assert isinstance(factors, g.Ref)
    scalar = ((), make.types[factors.index][1])
    for position, slot in enumerate(node.outputs):
        x, left, right = (_item(arg, position) for arg in node.args[:3])
        factor = make.op("aten.select.int", factors, 0, position, out=scalar)
        scaled = make.op("aten.mul.Tensor", left, factor, out=make.types[left.index])
        make.nodes.append(Node(kind, (x, scaled, right, 1), (slot,), make.site))
    return make.nodes


@rule("aten._foreach_powsum.Scalar")
def _power_sums(node: Node, make: NodeBuilder) -> list[Node]:
    tensors, power, dtype = node.args
    assert isinstance(tensors, tuple)
    for tensor, slot in zip(tensors, node.outputs, strict=True):
        assert isinstance(tensor, g.Ref) and slot is not None
        _power_sum(make, tensor, power, dtype, slot)
    return make.nodes


@rule("aten._foreach_norm.Scalar")
def _norms(node: Node, make: NodeBuilder) -> list[Node]:
    """Roots of sums of powers, since parts of a sum can be added; half precision would overflow,
    so its norms, like sums and maxima of sizes, are one operator."""
    tensors, power, dtype = node.args
    assert isinstance(tensors, tuple) and isinstance(power, int | float)
    for tensor, slot in zip(tensors, node.outputs, strict=True):
        assert isinstance(tensor, g.Ref) and slot is not None
        like = make.types[tensor.index]
        if power not in (0, 1, math.inf, -math.inf) and like[1] in (torch.float32, torch.float64):
            total = _power_sum(make, tensor, power, dtype, make.slot(make.types[slot]))
            make.op("aten.pow.Tensor_Scalar", total, 1.0 / power, out=slot)
        else:
            make.op("aten.linalg_vector_norm.default", tensor, power, None, False, dtype, out=slot)
    return make.nodes


def _power_sum(make: NodeBuilder, tensor: g.Ref, power: Any, dtype: Any, slot: int) -> g.Ref:
    like = make.types[tensor.index]
    away = tensor if power == 2 else make.op("aten.abs.default", tensor, out=like)
    raised = make.op("aten.pow.Tensor_Scalar", away, power, out=like)
    return make.op("aten.sum.default", raised, dtype, out=slot)


def _item(arg: Any, position: int) -> Any:
    return arg[position] if isinstance(arg, tuple) else arg


def _completed(name: str, args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments, with the operator's defaults behind."""
    packet, _, overload = name.partition(".")
    schema = torch_private.schema(getattr(getattr(torch.ops.aten, packet), overload))
    kept = [a for a in schema.arguments if a.name not in DROPPED]
    return (*args, *(a.default_value for a in kept[len(args) :]))


@rule(*_FUSED)
def _fused(node: Node, make: NodeBuilder) -> list[Node]:
    count = len(node.args[0]) if isinstance(node.args[0], tuple) else 1
    return [
        Node(node.kind, _at(node.args, position), node.outputs[position::count], node.site)
        for position in range(count)
    ]


def _at(args: tuple[Any, ...], position: int) -> tuple[Any, ...]:
    """The arguments with lists of one item; a list that is empty stays so."""
    return tuple(a[position : position + 1] if isinstance(a, tuple) else a for a in args)


@rule(UNSCALE)
def _unscale(node: Node, make: NodeBuilder) -> list[Node]:
    tensors, found, scale = node.args
    *scaled, last = node.outputs
    assert isinstance(tensors, tuple) and isinstance(found, g.Ref) and last is not None
    for position, (tensor, slot) in enumerate(zip(tensors, scaled, strict=True)):
        after = last if position == len(scaled) - 1 else make.slot(make.types[last])
        make.nodes.append(Node(UNSCALE, ((tensor,), found, scale), (slot, after), make.site))
        found = g.Ref(after)
    return make.nodes or [node]
