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

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from apportion import graph as g
from apportion.rewrite import Node, Rewritten, live
from apportion.trace import Site, Type, dtype_name

CONV_BACKWARD_INPUT = "apportion.conv_backward_input"
CONV_BACKWARD_WEIGHT = "apportion.conv_backward_weight"
CHANNEL_SUM, CHANNEL_SQUARES = "apportion.channel_sum", "apportion.channel_squares"
BATCH_NORM, BATCH_NORM_BACKWARD = "apportion.batch_norm", "apportion.batch_norm_backward"
BATCH_NORM_REDUCE = "apportion.batch_norm_reduce"
MM_TOTAL, SUM_TOTAL = "apportion.mm_total", "apportion.sum_total"

_ADD, _MM, _SUM = "aten.add.Tensor", "aten.mm.default", "aten.sum.dim_IntList"
_BATCH_NORMS = frozenset(
    f"aten.{name}"
    for name in (
        "native_batch_norm.default",
        "_native_batch_norm_legit.default",
        "_native_batch_norm_legit.no_stats",
        "_native_batch_norm_legit_functional.default",
    )
)


def decompose(rewritten: Rewritten) -> Rewritten:
    """Applies all rules of this file."""
    types = list(rewritten.types)
    statistics: dict[int, _Statistics] = {}
    nodes: list[Node] = []
    for node in rewritten.nodes:
        make = _Maker(types, node.site)
        if node.kind == "aten.convolution_backward.default":
            nodes += _convolution_backward(node, make)
        elif node.kind in _BATCH_NORMS:
            nodes += _batch_norm(node, make, statistics)
        elif node.kind == "aten.native_batch_norm_backward.default":
            nodes += _batch_norm_backward(node, make, statistics)
        else:
            nodes.append(node)
    nodes = _totals(nodes, types, rewritten.outputs)
    return Rewritten(tuple(live(nodes, rewritten.outputs)), tuple(types), rewritten.outputs)


class _Maker:
    """Nodes in the place of one, and slots for what they make."""

    def __init__(self, types: list[Type], site: Site) -> None:
        self.types, self.site = types, site
        self.nodes: list[Node] = []

    def slot(self, like: Type) -> int:
        """A new slot."""
        self.types.append(like)
        return len(self.types) - 1

    def op(self, kind: str, *args: Any, out: Type | int) -> g.Ref:
        """A Node with one result: a new slot of a type, or a given one."""
        slot = out if isinstance(out, int) else self.slot(out)
        self.nodes.append(Node(kind, args, (slot,), self.site))
        return g.Ref(slot)

    def cast(self, source: g.Ref, slot: int) -> None:
        """Makes `slot`, which may have another dtype, from a Ref."""
        dtype = g.Dtype(dtype_name(self.types[slot][1]))
        self.op("aten._to_copy.default", source, dtype, False, out=slot)


# Convolutions


def _convolution_backward(node: Node, make: _Maker) -> list[Node]:
    grad, x, weight, _, stride, padding, dilation, transposed, _, groups, _ = node.args
    if transposed:
        return [node]
    assert isinstance(x, g.Ref) and isinstance(weight, g.Ref)
    for_input, for_weight, for_bias = (*node.outputs, None, None)[:3]
    settings = (stride, padding, dilation, groups)
    shapes = make.types[x.index][0], make.types[weight.index][0]
    if for_input is not None:
        make.op(CONV_BACKWARD_INPUT, grad, weight, shapes[0], *settings, out=for_input)
    if for_weight is not None:
        make.op(CONV_BACKWARD_WEIGHT, grad, x, shapes[1], *settings, out=for_weight)
    if for_bias is not None:
        dims = (0, *range(2, len(shapes[0])))
        make.op(_SUM, grad, dims, False, None, out=for_bias)
    return make.nodes


# Batch norm


@dataclass(frozen=True, slots=True)
class _Statistics:
    """What the forward pass of a batch norm found: sum and squares, over `count` elements."""

    total: g.Ref
    squares: g.Ref
    count: int
    type: Type


def _batch_norm(node: Node, make: _Maker, found: dict[int, _Statistics]) -> list[Node]:
    x, weight, bias, *rest = node.args
    running = rest[:2] if len(rest) == 5 else [None, None]
    training, momentum, eps = rest[-3:]
    if not training:
        return [node]
    assert isinstance(x, g.Ref)
    shape, dtype = make.types[x.index]
    kind = ((shape[1],), torch.promote_types(dtype, torch.float32))  # halves are added as singles
    count = math.prod(shape) // shape[1]
    total = make.op(CHANNEL_SUM, x, out=kind)
    squares = make.op(CHANNEL_SQUARES, x, total, count, out=kind)
    result, mean, invstd, *after = node.outputs
    if result is not None:
        make.op(BATCH_NORM, x, total, squares, weight, bias, count, eps, out=result)
    if mean is not None:
        found[mean] = _Statistics(total, squares, count, kind)
        make.cast(make.op("aten.div.Scalar", total, count, out=kind), mean)
    if invstd is not None:  # as the mean, for whoever reads it; our backward does not
        variance = make.op("aten.div.Scalar", squares, count, out=kind)
        shifted = make.op("aten.add.Scalar", variance, eps, 1, out=kind)
        make.cast(make.op("aten.rsqrt.default", shifted, out=kind), invstd)
    divisors = count, max(count - 1, 1)
    for old, new, value, divisor in zip(running, after, (total, squares), divisors, strict=False):
        if old is not None and new is not None:
            _running(make, old, new, value, momentum, divisor)
    return make.nodes


def _running(make: _Maker, old: Any, new: int, total: g.Ref, momentum: Any, divisor: int) -> None:
    """The running statistic after the step: (1 - momentum) * before + momentum * total /
    divisor."""
    kind = make.types[new] = make.types[old.index]  # torch's fake kernel widens halves here
    kept = make.op("aten.mul.Scalar", old, 1 - momentum, out=kind)
    wide = (kind[0], make.types[total.index][1])
    if kind == wide:
        make.op(_ADD, kept, total, momentum / divisor, out=new)
    else:
        make.cast(make.op(_ADD, kept, total, momentum / divisor, out=wide), new)


def _batch_norm_backward(node: Node, make: _Maker, found: dict[int, _Statistics]) -> list[Node]:
    grad, x, weight, _, _, mean, _, training, eps, _ = node.args
    known = found.get(mean.index) if training and isinstance(mean, g.Ref) else None
    if known is None:
        return [node]
    for_input, for_weight, for_bias = (*node.outputs, None, None)[:3]
    statistics = (known.total, known.squares)
    sums = []
    for slot in (for_bias, for_weight):
        plain = slot is not None and make.types[slot] == known.type
        sums.append(slot if plain and slot is not None else make.slot(known.type))
    args = (grad, x, *statistics, known.count, eps)
    make.nodes.append(Node(BATCH_NORM_REDUCE, args, tuple(sums), make.site))
    for made, slot in zip(sums, (for_bias, for_weight), strict=True):
        if slot is not None and slot != made:
            make.cast(g.Ref(made), slot)
    if for_input is not None:
        given = (*statistics, weight, *map(g.Ref, sums), known.count, eps)
        make.op(BATCH_NORM_BACKWARD, grad, x, *given, out=for_input)
    return make.nodes


# Gradients of parameters that are used several times


def _totals(nodes: list[Node], types: Sequence[Type], outputs: Sequence[int | None]) -> list[Node]:
    made = {slot: node for node in nodes for slot in node.results}
    uses = Counter(slot for node in nodes for slot in g.refs(node.args))
    uses.update(slot for slot in outputs if slot is not None)
    totals: dict[int, Node] = {}
    for slot in outputs:
        if slot is not None and slot in made:
            leaves = [made.get(leaf) for leaf in _leaves(slot, made, uses, types)]
            total = _total(slot, leaves, made, uses, types)
            if total is not None:
                totals[slot] = total
    return [totals.get(node.results[0], node) if node.results else node for node in nodes]


def _leaves(
    root: int, made: dict[int, Node], uses: Counter[int], types: Sequence[Type]
) -> list[int]:
    """The slots whose sum a slot is, in the order in which they are added."""
    found, rest = [], [root]
    while rest:
        slot = rest.pop()
        terms = _terms(made.get(slot)) if slot == root or uses[slot] == 1 else ()
        if len(terms) == 2 and all(types[t] == types[root] for t in terms):
            rest += reversed(terms)
        else:
            found.append(slot)
    return found


def _terms(node: Node | None) -> tuple[int, ...]:
    if node is None or node.kind != _ADD or node.args[2] != 1:
        return ()
    return tuple(a.index for a in node.args[:2] if isinstance(a, g.Ref))


def _total(
    slot: int,
    leaves: list[Node | None],
    made: dict[int, Node],
    uses: Counter[int],
    types: Sequence[Type],
) -> Node | None:
    """The one Node that stands for a sum of alike products or sums; None if they are not alike."""
    known = [node for node in leaves if node is not None and uses[node.results[0]] == 1]
    if len(known) < max(len(leaves), 2):
        return None
    if all(node.kind == _MM for node in known):
        args = tuple(zip(*(node.args for node in known), strict=True))
        if all(_alike(factors, types) for factors in args):
            return replace(known[-1], kind=MM_TOTAL, args=args, outputs=(slot,))
        return None
    sums = [_sum_behind(node, made, uses) for node in known]
    terms = [node.args for node in sums if node is not None]
    if len(terms) < len(known) or len({args[1:] for args in terms}) > 1 or terms[0][3] is not None:
        return None
    tensors = tuple(args[0] for args in terms)
    dims, shape = terms[0][1], types[slot][0]
    assert isinstance(tensors[0], g.Ref)
    rest = [n for d, n in enumerate(types[tensors[0].index][0]) if d not in dims]  # type: ignore[operator]
    if not _alike(tensors, types) or tuple(rest) != shape:
        return None
    return replace(known[-1], kind=SUM_TOTAL, args=(tensors, dims), outputs=(slot,))


def _sum_behind(node: Node, made: dict[int, Node], uses: Counter[int]) -> Node | None:
    """The sum that a Node is, or that it is a view of."""
    if node.kind == "aten.view.default" and isinstance(node.args[0], g.Ref):
        source = node.args[0].index
        node = made.get(source, node) if uses[source] == 1 else node
    return node if node.kind == _SUM and isinstance(node.args[1], tuple) else None


def _alike(tensors: Sequence[Any], types: Sequence[Type]) -> bool:
    return len({types[t.index] for t in tensors}) == 1
