"""Updates that are not elementwise, as ordinary operators of the step.

Part of capture/. An update with reductions or matrix products (Adafactor's means of rows, Lamb's
norms, Muon's iterations) cannot be cut as one operator. Its operators are put into the step, in the
phase update, with Settings as arguments; they are cut by their own descriptions.
"""

from __future__ import annotations

from collections.abc import Sequence

from apportion import graph as g
from apportion.capture.normalise import Node
from apportion.capture.trace import CallSite, TensorType
from apportion.capture.update_nodes import UpdateNodes


def inline_update(
    update: UpdateNodes, inputs: Sequence[int], types: list[TensorType], site: CallSite
) -> tuple[list[Node], list[int]]:
    """The Nodes of an update whose inputs are these slots, and the slots of its results. New slots
    are added to `types`. Every result is a slot of its own."""
    slots = dict(enumerate(inputs))
    nodes = []
    for node in update.nodes:
        args = g.substitute(node.args, {k: g.Ref(s) for k, s in slots.items()})
        outputs: list[int | None] = []
        for made in node.outputs:
            outputs.append(None if made is None else len(types))
            if made is not None:
                slots[made] = len(types)
                types.append(update.types[made])
        nodes.append(Node(node.kind, args, tuple(outputs), site))
    results: list[int] = []
    for made in update.outputs:
        slot = slots[made]
        if slot in inputs or slot in results:
            types.append(update.types[made])
            nodes.append(Node("aten.clone.default", (g.Ref(slot),), (len(types) - 1,), site))
            slot = len(types) - 1
        results.append(slot)
    return nodes, results
