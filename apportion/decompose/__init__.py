"""Nodes -> Nodes: operators that can be cut in more ways than the ones torch runs.

- convolution_backward becomes one Op per gradient: apportion.conv_backward_input,
  apportion.conv_backward_weight, and a sum for the bias. They are cut along different axes.
- Batch norm in training becomes its statistics (apportion.channel_sum, apportion.channel_squares)
  and what is pointwise once they are known (apportion.batch_norm); its backward two sums
  (apportion.batch_norm_reduce) and apportion.batch_norm_backward. docs/design/005-batch-norm.md.
- A gradient that is the sum of several products, one for every use of the parameter, becomes one
  Op, apportion.mm_total (apportion.sum_total for biases): then its parts are added once and not
  once per use. docs/design/006-gradient-totals.md.
"""

from __future__ import annotations

from typing import Any

from apportion.decompose import batch_norm, conv
from apportion.decompose.base import RULES, Maker
from apportion.decompose.totals import totals
from apportion.rewrite import Node, Rewritten, live

__all__ = ["batch_norm", "conv", "decompose"]


def decompose(rewritten: Rewritten) -> Rewritten:
    """Applies all rules of this package."""
    types = list(rewritten.types)
    notes: dict[int, Any] = {}
    nodes: list[Node] = []
    for node in rewritten.nodes:
        rule = RULES.get(node.kind)
        nodes += [node] if rule is None else rule(node, Maker(types, node.site, notes))
    nodes = totals(nodes, types, rewritten.outputs)
    return Rewritten(tuple(live(nodes, rewritten.outputs)), tuple(types), rewritten.outputs)
