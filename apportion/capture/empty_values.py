"""Nodes without tensors that have no elements: what is made of nothing is known beforehand.

A step of capture/ between normalise.py and decompose/. Programs make tensors without elements: the
keys of an empty cache, a slice of no rows. Nobody needs to compute or to move them. A Node whose
inputs are all empty gives the same every time (the sum of nothing is 0) and becomes a full; a cat
leaves empty parts out; writing nothing into a tensor, or adding a product over nothing, leaves it
as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from apportion import graph as g
from apportion.capture.normalise import DROPPED, Node, NormalisedTrace, live_nodes
from apportion.capture.torch_private import schema
from apportion.capture.trace import TensorType, dtype_name, flat_results

_FULL, _CAT, _EXPAND = "aten.full.default", "aten.cat.default", "aten.expand.default"
_WRITES = tuple(
    f"aten.{name}."
    for name in (
        "index_put", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy",
        "slice_scatter", "select_scatter", "masked_scatter",
    )
)  # fmt: skip
_PRODUCTS = ("aten.addmm.default", "aten.baddbmm.default", "aten.addbmm.default",
             "aten.addmv.default")  # fmt: skip


def without_empty(trace: NormalisedTrace) -> NormalisedTrace:
    """The trace in which no Node reads a tensor without elements, as far as that can be."""
    slots = (s for node in trace.nodes for s in (*g.refs(node.args), *node.results))
    if not any(_is_empty(trace.types[slot]) for slot in slots):
        return trace
    rewrite = _Rewrite(trace.types)
    nodes = [new for node in trace.nodes for new in rewrite.node(node)]
    outputs = tuple(None if s is None else rewrite.renamed.get(s, s) for s in trace.outputs)
    return NormalisedTrace(tuple(live_nodes(nodes, outputs)), trace.types, outputs)


@dataclass
class _Rewrite:
    """The slots that stand for others so far."""

    types: tuple[TensorType, ...]
    renamed: dict[int, int] = field(default_factory=dict)

    def node(self, node: Node) -> list[Node]:
        """The Nodes in the place of one."""
        slots = {slot: g.Ref(self.renamed.get(slot, slot)) for slot in g.refs(node.args)}
        node = replace(node, args=g.substitute(node.args, slots))
        read = list(g.refs(node.args))
        empty = [slot for slot in read if _is_empty(self.types[slot])]
        if read and all(_is_empty(self.types[slot]) for slot in node.results):
            return [self._full(node, slot, 0) for slot in node.results]
        if not empty:
            return [node]
        if len(empty) == len(read):
            return self._made_of_nothing(node)
        if node.kind == _CAT:
            kept = tuple(x for x in _parts(node) if not _is_empty(self.types[x.index]))
            return [replace(node, args=(kept, *node.args[1:]))]
        first = node.args[0]
        whole = isinstance(first, g.Ref) and first.index not in empty and len(node.results) == 1
        if whole and isinstance(first, g.Ref):
            return self._as_before(node, first)
        return [node]

    def _as_before(self, node: Node, first: g.Ref) -> list[Node]:
        """A Node that leaves its first argument as it is."""
        (result,) = node.results
        shape = self.types[result][0]
        if node.kind.startswith(_WRITES) and self.types[first.index] == self.types[result]:
            self.renamed[result] = first.index
            return []
        if node.kind in _PRODUCTS and node.args[3] == 1:
            if self.types[first.index][0] == shape:
                self.renamed[result] = first.index
                return []
            return [replace(node, kind=_EXPAND, args=(first, shape, False))]
        return [node]

    def _made_of_nothing(self, node: Node) -> list[Node]:
        """A full for every result, where all its elements are one number."""
        made = []
        for slot, value in zip(node.outputs, self._values(node), strict=False):
            if slot is None:
                continue
            shape, dtype = self.types[slot]
            if value is None or tuple(value.shape) != shape or value.dtype != dtype:
                return [node]
            number = _one_number(value)
            if number is None:
                return [node]
            made.append(self._full(node, slot, number))
        return made or [node]

    def _full(self, node: Node, slot: int, number: int | float | bool) -> Node:
        shape, dtype = self.types[slot]
        args = (shape, number, g.Dtype(dtype_name(dtype)))
        return replace(node, kind=_FULL, args=args, outputs=(slot,))

    def _values(self, node: Node) -> list[Any]:
        """What the operator gives for tensors without elements."""
        tensors = {
            slot: torch.empty(self.types[slot][0], dtype=self.types[slot][1])
            for slot in g.refs(node.args)
        }
        namespace, name, form = node.kind.split(".") if node.kind.count(".") == 2 else ("", "", "")
        target = getattr(getattr(getattr(torch.ops, namespace or "aten"), name, None), form, None)
        if namespace != "aten" or target is None:
            return []
        args = g.substitute(node.args, tensors, dtype=lambda each: getattr(torch, each))
        names = [a for a in schema(target).arguments if a.name not in DROPPED]
        plain = [x for x, a in zip(args, names, strict=False) if not a.kwarg_only]
        named = {a.name: x for x, a in zip(args, names, strict=False) if a.kwarg_only}
        try:
            return list(flat_results(target(*plain, **named)))
        except (RuntimeError, IndexError, TypeError, NotImplementedError):
            return []


def _is_empty(kind: TensorType) -> bool:
    return math.prod(kind[0]) == 0


def _parts(node: Node) -> tuple[g.Ref, ...]:
    parts = node.args[0]
    assert isinstance(parts, tuple)
    return tuple(x for x in parts if isinstance(x, g.Ref))


def _one_number(tensor: torch.Tensor) -> int | float | bool | None:
    """The number that all elements are; 0 where there are none, None where they differ."""
    if tensor.numel() == 0:
        return 0
    first = tensor.flatten()[0]
    number: Any = first.item()
    if isinstance(number, complex):
        return None
    alike = torch.equal(tensor, first.expand(tensor.shape)) or bool(tensor.isnan().all())
    found: int | float | bool = number
    return found if alike else None
