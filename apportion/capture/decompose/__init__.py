"""decompose: Nodes -> Nodes, operators that can be cut in more ways than the ones torch runs.

The third station of capture/, after record.py and normalise.py and before build_graph.py.

- convolution_backward becomes one Op per gradient: apportion.conv_backward_input,
  apportion.conv_backward_weight, and a sum for the bias. They are cut along different axes.
  Transposed convolutions become apportion.conv_transpose, which is told the size of its result.
- Pools that must know where in the plane a window lies become ours that are told that:
  decompose/pool.py.
- Batch norm in training becomes its statistics (apportion.channel_sum, apportion.channel_squares)
  and what is pointwise once they are known (apportion.batch_norm); its backward two sums
  (apportion.batch_norm_reduce) and apportion.batch_norm_backward. docs/design/005-batch-norm.md.
- Operators that read or write at places given by data (embedding, gather, index, scatter, ...)
  become ours that know which range of the indexed dimension they hold: decompose/index.py.
- A gradient that is the sum of several products, one for every use of the parameter, becomes one
  Op, apportion.mm_total (apportion.sum_total for biases): then its parts are added once and not
  once per use. docs/design/006-gradient-totals.md.
- Slices, selections and diagonals put into a larger tensor (slice_backward, select_scatter,
  diag_embed, ...) become ours that take a place outside of a part: apportion.slice_place and
  others. Copies of views become views; squeeze names its dims.
- A euclidean norm becomes the root of a sum (apportion.square_sum), whose parts add up. CTC is told
  how wide its alignments are (apportion.ctc_loss), which a part cannot know.
- Products of groups of rows, the experts of a mixture, become ours that know where groups start
  and where rows begin: decompose/grouped.py.
- Operators on lists of tensors become one Op per tensor.
"""

from __future__ import annotations

from typing import Any

from apportion.capture.decompose import (
    batch_norm,
    conv,
    foreach,
    grouped,
    index,
    pool,
    reduction,
    view,
)
from apportion.capture.decompose.base import DECOMPOSITIONS, NodeBuilder
from apportion.capture.decompose.totals import totals
from apportion.capture.normalise import Node, NormalisedTrace, live_nodes

__all__ = [
    "batch_norm",
    "conv",
    "decompose",
    "foreach",
    "grouped",
    "index",
    "pool",
    "reduction",
    "view",
]


def decompose(trace: NormalisedTrace) -> NormalisedTrace:
    """Applies all rules of this package."""
    types = list(trace.types)
    notes: dict[int, Any] = {}
    nodes: list[Node] = []
    for node in trace.nodes:
        rule = DECOMPOSITIONS.get(node.kind)
        nodes += [node] if rule is None else rule(node, NodeBuilder(types, node.site, notes))
    nodes = totals(nodes, types, trace.outputs)
    return NormalisedTrace(tuple(live_nodes(nodes, trace.outputs)), tuple(types), trace.outputs)
