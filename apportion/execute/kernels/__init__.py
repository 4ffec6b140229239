"""From the kind of an Op to the kernel that computes it on this machine.

A kernel here takes a Context and the Op's arguments in the Graph's order, and returns a tuple of
tensors. Most are the operator itself; a kernel that torch picks by device is one kind in a Graph
and is resolved here; the optimizer's update runs its body. One file per family.
"""

from apportion.execute.kernels import (
    attention,
    conv,
    dense,
    factory,
    grouped,
    host_kernels,
    index,
    loss,
    matmul,
    norm,
    opened,
    pool,
    random,
    reduction,
    update,
    view,
)
from apportion.execute.kernels.base import (
    LEFT_OUT,
    Context,
    Kernel,
    Template,
    dtype,
    kernel,
    resolve,
    template,
)

__all__ = [
    "LEFT_OUT",
    "Context",
    "Kernel",
    "Template",
    "attention",
    "conv",
    "dense",
    "dtype",
    "factory",
    "grouped",
    "host_kernels",
    "index",
    "kernel",
    "loss",
    "matmul",
    "norm",
    "opened",
    "pool",
    "random",
    "reduction",
    "resolve",
    "template",
    "update",
    "view",
]
