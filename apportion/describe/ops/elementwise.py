"""Pointwise operators, broadcasting included, and those that are pointwise but along one axis.

Every output element depends on the input elements at its place. The first three lists are torch's
operators with the tag `pointwise`, and their backwards, which have no tag.
"""

from __future__ import annotations

import math
from typing import Any

from apportion.describe.descriptions import describe
from apportion.describe.errors import Undescribed
from apportion.describe.language import ALL, Expr, Operand, Output, axes, axis, f, reduce

UNARY = """
abs acos acosh angle asin asinh atan atanh bitwise_not ceil celu clamp clamp_max clamp_min clone
conj_physical _conj_physical contiguous cos cosh deg2rad digamma elu erf erfc erfinv exp exp2 expm1
fill floor frac gelu hardshrink hardsigmoid hardswish hardtanh i0 isfinite isinf isnan isneginf
isposinf leaky_relu lgamma log log10 log1p log2 log_sigmoid logical_not logit mish mvlgamma
nan_to_num neg polygamma positive pow rad2deg reciprocal relu relu6 round rsqrt selu sgn sigmoid
sign signbit silu sin sinc sinh softplus softshrink sqrt square tan tanh threshold trunc
_to_copy copy empty_like full_like ones_like zeros_like
"""

BINARY = """
add addcdiv addcmul atan2 bitwise_and bitwise_or bitwise_xor complex copysign div eq float_power
floor_divide fmax fmin fmod ge gt heaviside hypot igamma igammac ldexp le lerp logaddexp logaddexp2
logical_and logical_or logical_xor lt maximum minimum masked_fill mul ne nextafter polar
_prelu_kernel remainder rsub sub true_divide where xlogy
elu_backward gelu_backward hardshrink_backward hardsigmoid_backward hardswish_backward
hardtanh_backward leaky_relu_backward log_sigmoid_backward logit_backward mish_backward
native_dropout_backward rrelu_with_noise_backward sigmoid_backward silu_backward softplus_backward
softshrink_backward tanh_backward threshold_backward
"""

SPECIAL = """
airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 chebyshev_polynomial_t chebyshev_polynomial_u
chebyshev_polynomial_v chebyshev_polynomial_w entr erfcx hermite_polynomial_h hermite_polynomial_he
i0e i1 i1e laguerre_polynomial_l legendre_polynomial_p log_ndtr modified_bessel_i0
modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 ndtri scaled_modified_bessel_k0
scaled_modified_bessel_k1 shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u
shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w spherical_bessel_j0 xlog1py zeta
"""

INTEGER = "__lshift__ __rshift__ bitwise_left_shift bitwise_right_shift gcd lcm"
SEVERAL_OUTPUTS = "frexp log_sigmoid_forward _prelu_kernel_backward"

ELEMENTWISE = frozenset(
    f"aten.{name}"
    for name in (*(UNARY + BINARY).split(), *(f"special_{name}" for name in SPECIAL.split()))
)


def elementwise(*args: Any, out: tuple[tuple[int, ...], ...]) -> Any:
    """Outputs of the broadcast shape; one that a kernel leaves empty is absent."""
    operands = [arg for arg in args if isinstance(arg, Operand)]

    def element(*i: Any) -> Expr:
        return f("elementwise", *(x.at(i) for x in operands))

    return tuple(element if len(shape) == len(out[0]) else None for shape in out)


describe(
    *sorted(ELEMENTWISE),
    *(f"aten.{name}" for name in (INTEGER + " " + SEVERAL_OUTPUTS).split()),
    *("aten.max.other", "aten.min.other"),
)(elementwise)


@describe("aten.glu")
def glu(x: Any, dim: int) -> Any:
    """The halves of a dimension, multiplied: a part reads its range of both."""
    d = dim % x.ndim
    return lambda *i: f("glu", x[(*i[:d], (ALL(2), i[d]), *i[d + 1 :])])


@describe("aten.glu_backward")
def glu_backward(grad: Any, x: Any, dim: int) -> Any:
    d, i = dim % x.ndim, axes("i", x.ndim)
    half = axis("half")  # a value: the two halves have different derivatives
    both = x[(*i[:d], (ALL(2), i[d]), *i[d + 1 :])]
    dims = (*i[:d], (half, i[d]), *i[d + 1 :])
    return Output.of(dims, f("glu_backward", half, grad[i], both), half=2)


@describe("aten.isin.Tensor_Tensor", "aten.isin.Scalar_Tensor", "aten.isin.Tensor_Scalar")
def isin(element: Any, candidates: Any, unique: Any = False, invert: bool = False) -> Any:
    """True if an element equals one of the candidates; inverted, if it differs from all."""
    if not isinstance(candidates, Operand):
        return lambda *i: f("isin", element[i])
    if math.prod(candidates.shape) == 0:
        raise Undescribed("there is nothing to compare with")
    k = axes("k", candidates.ndim)

    def output(*i: Any) -> Any:
        given = element[i] if isinstance(element, Operand) else element
        equal = f("equal", given, candidates[k])
        return reduce("min" if invert else "max", k, equal) if k else equal

    return output
