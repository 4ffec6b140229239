"""Descriptions of operators, one file per family. Importing this package registers them all."""

from apportion.ops import (
    attention,
    elementwise,
    factory,
    index,
    loss,
    matmul,
    norm,
    reduction,
    update,
    view,
)

__all__ = [
    "attention",
    "elementwise",
    "factory",
    "index",
    "loss",
    "matmul",
    "norm",
    "reduction",
    "update",
    "view",
]
