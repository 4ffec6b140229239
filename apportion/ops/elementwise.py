"""Pointwise operators, broadcasting included.

Every output element depends on the input elements at its place.
"""

from __future__ import annotations

from typing import Any

from apportion.tdl import Operand, describe, f

UNARY = """
abs acos acosh asin asinh atan atanh bitwise_not ceil clamp clamp_max clamp_min clone contiguous cos
cosh deg2rad digamma elu erf erfc erfinv exp exp2 expm1 fill floor frac gelu hardsigmoid hardswish
hardtanh isinf isnan leaky_relu lgamma log log10 log1p log2 log_sigmoid logical_not logit mish
nan_to_num neg positive pow rad2deg reciprocal relu relu6 round rsqrt selu sgn sigmoid sign signbit
silu sin sinc sinh softplus sqrt square tan tanh threshold trunc
_to_copy copy empty_like full_like ones_like zeros_like
"""

BINARY = """
add addcdiv addcmul atan2 bitwise_and bitwise_or bitwise_xor copysign div eq floor_divide fmax fmin
fmod ge gt heaviside hypot le lerp logaddexp logaddexp2 logical_and logical_or logical_xor lt
maximum minimum masked_fill mul ne nextafter remainder rsub sub where xlogy
elu_backward gelu_backward hardsigmoid_backward hardswish_backward hardtanh_backward
leaky_relu_backward log_sigmoid_backward logit_backward mish_backward native_dropout_backward
sigmoid_backward silu_backward softplus_backward tanh_backward threshold_backward
"""

ELEMENTWISE = frozenset(f"aten.{name}" for name in (UNARY + BINARY).split())


def elementwise(*args: Any) -> Any:
    """One output of the broadcast shape."""
    operands = [arg for arg in args if isinstance(arg, Operand)]
    return lambda *i: f("elementwise", *(x.at(i) for x in operands))


describe(*sorted(ELEMENTWISE))(elementwise)
