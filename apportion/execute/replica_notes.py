"""Which copies of a result may differ in their last bits, and why, before anything runs.

Part of the room execute. An Executable comes in, whose tasks have their works (dry_run.py); out go
sentences, none if all copies are sure to be bit-equal.

Every element of the state is computed by one part of one Op, or by that part's replicas, from
inputs that are copies of the same bytes; sums over devices are taken in the same order everywhere.
So copies are bit-equal unless a kernel gives two replicas of a part different results. That happens

    where replicas find an operand in another order in memory (one has a view of a tensor, another
    received it), and the kernel is one that chooses its method by that
    where a kernel on a GPU adds in whatever order its threads come
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from apportion.execute.executable import Executable
from apportion.lower import COMPUTE

# Kernels whose results do not depend on strides: what they compute is rounded once, or not at all.
ROUNDED_ONCE = frozenset(
    {
        "abs", "add", "sub", "mul", "div", "neg", "relu", "sqrt", "reciprocal", "where",
        "maximum", "minimum", "clamp", "threshold_backward", "eq", "ne", "lt", "le", "gt", "ge",
        "floor", "ceil", "round", "sign", "copy", "clone", "_to_copy", "embedding", "gather",
        "index", "index_select", "masked_fill", "cat", "stack", "max_pool2d_with_indices",
        "slice_backward", "select_backward", "constant_pad_nd", "bitwise_and", "bitwise_or",
        "bitwise_xor", "bitwise_not", "logical_not", "argmax", "view", "_unsafe_view",
        "reshape", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "select",
        "slice", "alias", "detach", "split", "split_with_sizes", "unbind", "as_strided",
        "diagonal", "flip", "roll", "repeat", "zeros", "ones", "full", "arange", "zeros_like",
        "ones_like", "full_like", "empty", "empty_like", "scalar_tensor", "fill",
    }
)  # fmt: skip

# Kernels that on a GPU add by atomic operations, so that not even two runs are the same
# (torch.use_deterministic_algorithms lists them).
ANY_ORDER_ON_GPU = frozenset(
    {
        "index_put", "index_add", "scatter_add", "scatter_reduce", "put",
        "embedding_dense_backward", "_embedding_bag_backward",
        "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward",
        "avg_pool3d_backward", "adaptive_avg_pool2d_backward", "_adaptive_avg_pool2d_backward",
        "_adaptive_avg_pool3d_backward", "upsample_bilinear2d_backward",
        "upsample_bicubic2d_backward", "upsample_linear1d_backward",
        "upsample_trilinear3d_backward", "upsample_nearest2d_backward",
        "reflection_pad1d_backward", "reflection_pad2d_backward", "replication_pad2d_backward",
        "grid_sampler_2d_backward", "cumsum", "bincount", "histc", "convolution_backward",
        "ctc_loss_backward", "nll_loss2d_forward", "sdpa_backward", "index_put_impl",
    }
)  # fmt: skip


def replica_notes(executable: Executable, on_gpu: bool) -> tuple[str, ...]:
    """Sentences about copies that may differ; one for each reason."""
    found = []
    if strided := _other_strides(executable):
        found.append(
            "copies of the state may differ in their last bits between devices: "
            f"{_listed(executable, strided)} is computed on several from operands that lie in "
            "memory in different orders"
        )
    if on_gpu and (loose := list(_any_order(executable))):
        found.append(
            "copies of the state may differ in their last bits between devices: "
            f"{_listed(executable, loose)} is computed on several by a kernel of GPUs that adds in "
            "no fixed order"
        )
    return tuple(found)


def _listed(executable: Executable, ops: list[int]) -> str:
    op = executable.graph.ops[ops[0]]
    more = f" and {len(ops) - 1} more" if len(ops) > 1 else ""
    return f"{op.name!r} ({op.kind}){more}"


def _stem(kind: str) -> str:
    return kind.split(".")[1] if "." in kind else kind


def _other_strides(executable: Executable) -> list[int]:
    """Ops with a part whose replicas make different kernel calls."""
    tasks, choices = executable.tasks, executable.strategy.choices
    if not len(executable.work):
        return []
    kinds = [_stem(op.kind) not in ROUNDED_ONCE for op in executable.graph.ops]
    doubtful = np.array(
        [choice.replicas > 1 and kind for choice, kind in zip(choices, kinds, strict=True)]
        + [False]
    )
    count = np.array([choice.count for choice in choices] + [1], np.int64)
    rows = np.flatnonzero((tasks.kind == COMPUTE) & doubtful[tasks.op])
    op, work = tasks.op[rows], executable.work[rows]
    part = tasks.part[rows] % count[op]
    order = np.lexsort((work, part, op))
    op, part, work = op[order], part[order], work[order]
    same = (op[1:] == op[:-1]) & (part[1:] == part[:-1])
    found: list[int] = np.unique(op[1:][same & (work[1:] != work[:-1])]).tolist()
    return found


def _any_order(executable: Executable) -> Iterator[int]:
    for number, op in enumerate(executable.graph.ops):
        if executable.strategy.choices[number].replicas > 1 and _stem(op.kind) in ANY_ORDER_ON_GPU:
            yield number
