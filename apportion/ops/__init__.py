"""Descriptions of operators, one file per family. Importing this package registers them all."""

from apportion.ops import (
    attention,
    conv,
    elementwise,
    factory,
    index,
    loss,
    matmul,
    norm,
    pool,
    reduction,
    update,
    view,
)

__all__ = [
    "attention",
    "conv",
    "elementwise",
    "factory",
    "index",
    "loss",
    "matmul",
    "norm",
    "pool",
    "reduction",
    "update",
    "view",
]
