"""Descriptions of torch's operators, one file per family, in the language of describe/.

Importing this package registers them all. Read matmul.py first.
"""

from apportion.describe.ops import (
    attention,
    conv,
    elementwise,
    embedding,
    factory,
    grouped,
    index,
    join,
    linalg,
    loss,
    matmul,
    norm,
    opened,
    pad,
    pool,
    reduction,
    resample,
    scatter,
    slice,
    sort,
    update,
    view,
)

__all__ = [
    "attention",
    "conv",
    "elementwise",
    "embedding",
    "factory",
    "grouped",
    "index",
    "join",
    "linalg",
    "loss",
    "matmul",
    "norm",
    "opened",
    "pad",
    "pool",
    "reduction",
    "resample",
    "scatter",
    "slice",
    "sort",
    "update",
    "view",
]
