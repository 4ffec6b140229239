"""Which kinds of Op torch's compiler makes kernels of its own for, so that they may be fused.

Part of the room machine. A kind of Op or the signature of a call comes in, whether it may be part
of a fused kernel goes out. All others (products, convolutions, attention, scatters, operators of a
user's own) remain calls of a library's kernel.
"""

from __future__ import annotations

import re

POINTWISE = """
    abs add addcdiv addcmul arange bitwise_and bitwise_not bitwise_or bitwise_xor cat ceil clamp
    clamp_max clamp_min clone constant_pad_nd copy cos div elu elu_backward empty eq erf exp expand
    fill floor full full_like ge gelu gelu_backward gt hardsigmoid hardswish hardtanh leaky_relu
    leaky_relu_backward le lerp log log1p logical_and logical_not logical_or lt masked_fill maximum
    minimum mul ne neg new_full new_ones new_zeros ones ones_like pow reciprocal relu repeat roll
    rsqrt rsub scalar_tensor select_backward sigmoid sigmoid_backward sign silu silu_backward sin
    slice_backward softplus softplus_backward sqrt square stack sub tanh tanh_backward threshold
    threshold_backward tril triu where zeros zeros_like _to_copy random_uniform
"""
ROWS = """
    native_layer_norm native_layer_norm_backward _softmax _softmax_backward_data _safe_softmax
    _log_softmax _log_softmax_backward_data nll_loss_backward rms_norm layer_norm row_sum
    row_squares layer_norm_weight
"""
REDUCED = """
    sum mean amax amin var std prod any all channel_sum channel_squares batch_norm
    batch_norm_backward batch_norm_reduce sum_total native_batch_norm native_batch_norm_backward
    avg_pool2d avg_pool_backward max_pool max_pool_backward
"""
WINDOWS = ("max_pool", "avg_pool2d")  # read their input from memory, and leave their results there
SPREAD = ("max_pool_backward", "avg_pool_backward")  # each result from the few that it went into
TWICE = ("batch_norm_whole", "batch_norm_whole_backward")  # statistics first, then everything
FUSIBLE = frozenset((*re.findall(r"\w+", POINTWISE + ROWS + REDUCED), *TWICE))
ELEMENTWISE = frozenset((*re.findall(r"\w+", POINTWISE), *SPREAD))


def fusible(kind: str) -> bool:
    """Whether Ops of this kind may be part of a fused kernel."""
    name = kind.split(".")[1] if "." in kind else kind
    return name in FUSIBLE


def elementwise(kind: str) -> bool:
    """Whether a kernel of this kind can write its result over an input of the same size."""
    return (kind.split(".")[1] if "." in kind else kind) in ELEMENTWISE


def reads_windows(kind: str) -> bool:
    """Whether a kernel of this kind is never part of another one's, because its results read
    windows that overlap."""
    return (kind.split(".")[1] if "." in kind else kind) in WINDOWS


def reads_twice(kind: str) -> bool:
    """Whether a kernel of this kind first needs a statistic of what it then computes on."""
    return kind.rpartition(".")[2] in TWICE


def reduces_rows(signature: str, ratio: float) -> bool:
    """Whether a call that makes one number out of `ratio` goes along the last dimension of its
    first input: then what follows can be computed in the same kernel."""
    shape = re.search(r"\[([\d,]*)", signature)
    sizes = [int(n) for n in shape[1].split(",")] if shape and shape[1] else []
    return bool(sizes) and abs(sizes[-1] - ratio) < 0.5
