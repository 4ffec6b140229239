"""A gradient that is the sum of several products, one for every use of a parameter -> one Op.

A pass of capture/decompose/ over all Nodes, after the rules. The parts of the Op are then added
once and not once per use. docs/design/006-gradient-totals.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from apportion import graph as g
from apportion.capture.normalise import Node
from apportion.capture.trace import TensorType

MM_TOTAL, SUM_TOTAL = "apportion.mm_total", "apportion.sum_total"

_ADD, _MM, _SUM = "aten.add.Tensor", "aten.mm.default", "aten.sum.dim_IntList"


def totals(
    nodes: list[Node], types: Sequence[TensorType], outputs: Sequence[int | None]
) -> list[Node]:
    """The Nodes, sums of alike products and sums made one Node each."""
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
    root: int, made: dict[int, Node], uses: Counter[int], types: Sequence[TensorType]
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
    types: Sequence[TensorType],
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


def _alike(tensors: Sequence[Any], types: Sequence[TensorType]) -> bool:
    return len({types[t.index] for t in tensors}) == 1
