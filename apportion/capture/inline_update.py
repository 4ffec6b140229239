"""Updates that are not elementwise, as ordinary operators of the step.

Part of capture/. An update with reductions or matrix products (Adafactor's means of rows, Lamb's
norms, Muon's iterations) cannot be cut as one operator. Its operators are put into the step, in the
phase update, with Settings as arguments; they are cut by their own descriptions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from apportion import graph as g
from apportion.capture.normalise import Node, NormalisedTrace
from apportion.capture.trace import CallSite, TensorType
from apportion.capture.update_nodes import UpdateNodes


def inline_updates(
    trace: NormalisedTrace,
    kind: str,
    update_of: Callable[[Node], tuple[UpdateNodes, CallSite] | None],
) -> NormalisedTrace:
    """The trace with the operators of updates in the place of Nodes of a kind, whose first argument
    are the parameter, its gradient and its state; `update_of` is None for those that stay."""
    types = list(trace.types)
    nodes: list[Node] = []
    for node in trace.nodes:
        found = update_of(node) if node.kind == kind else None
        if found is None:
            nodes.append(node)
        else:
            update, site = found
            given = list(g.refs(node.args[0]))
            nodes += inline_update(update, given, node.outputs, types, site)
    return NormalisedTrace(tuple(nodes), tuple(types), trace.outputs)


def inline_update(
    update: UpdateNodes,
    inputs: Sequence[int],
    outputs: Sequence[int | None],
    types: list[TensorType],
    site: CallSite,
) -> list[Node]:
    """The Nodes of an update whose inputs and results are these slots. New slots are added to
    `types`."""
    slots = dict(enumerate(inputs))
    wanted = {
        made: slot
        for made, slot in zip(update.outputs, outputs, strict=True)
        if made >= update.inputs and slot is not None
    }
    nodes = []
    for node in update.nodes:
        args = g.substitute(node.args, {k: g.Ref(s) for k, s in slots.items()})
        for made in node.outputs:
            if made is None:
                continue
            slots[made] = wanted.get(made, len(types))
            if made not in wanted:
                types.append(update.types[made])
        results = tuple(None if made is None else slots[made] for made in node.outputs)
        nodes.append(Node(node.kind, args, results, site))
    for made, slot in zip(update.outputs, outputs, strict=True):
        if slot is not None and slots[made] != slot:  # unchanged, or the same as another result
            nodes.append(Node("aten.clone.default", (g.Ref(slots[made]),), (slot,), site))
    return nodes
