"""Updates that are not elementwise, as ordinary operators of the step.

Part of capture/. An update with reductions or matrix products (Adafactor's means of rows, Lamb's
norms, Muon's iterations) cannot be cut as one operator. Its operators are put into the step, in the
phase update, with Settings as arguments; they are cut by their own descriptions.

So is the update of parameters that an optimizer updates together (a limit on the norm of all their
gradients): all of it stands where the first of them is updated, since the gradients are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from apportion import graph as g
from apportion.capture.normalise import Node, NormalisedTrace
from apportion.capture.optimizer import UpdateTemplates
from apportion.capture.trace import CallSite, TensorType
from apportion.capture.update_call import KIND
from apportion.capture.update_nodes import UpdateNodes


@dataclass(frozen=True)
class _UpdateCall:
    """The update of one parameter in a trace."""

    node: Node
    name: str
    group: int
    parameter: torch.Tensor

    @property
    def given(self) -> list[int]:
        """The slots of the parameter, its gradient and its state."""
        return list(g.refs(self.node.args[0]))

    @property
    def site(self) -> CallSite:
        return CallSite(g.UPDATE, module=self.name.rpartition(".")[0])


def inlined_updates(
    trace: NormalisedTrace,
    parameters: Mapping[str, torch.Tensor],
    trained: Mapping[str, int],
    templates: UpdateTemplates,
) -> NormalisedTrace:
    """The trace with operators in the place of updates that are not elementwise or are joint;
    `trained` are the groups of parameters."""
    names = list(parameters)

    def call_of(node: Node) -> _UpdateCall:
        number = node.args[1]
        assert isinstance(number, int)
        name = names[number]
        return _UpdateCall(node, name, trained[name], parameters[name])

    calls = [call_of(node) for node in trace.nodes if node.kind == KIND]
    together: dict[Any, list[_UpdateCall]] = {}
    for call in calls:
        optimizer = templates.joint(call.group, call.parameter)
        key = (id(optimizer), call.node.args[2]) if optimizer else (id(call),)
        together.setdefault(key, []).append(call)
    by_first = {id(each[0].node): each for each in together.values()}
    types = list(trace.types)
    nodes: list[Node] = []
    for node in trace.nodes:
        if node.kind != KIND:
            nodes.append(node)
        elif id(node) in by_first:
            nodes += _nodes_of(by_first[id(node)], templates, types)
    return NormalisedTrace(tuple(nodes), tuple(types), trace.outputs)


def _nodes_of(
    calls: Sequence[_UpdateCall], templates: UpdateTemplates, types: list[TensorType]
) -> list[Node]:
    first = calls[0]
    if templates.joint(first.group, first.parameter) is None:
        update = templates.inline(templates.body(first.group, first.parameter))
        if update is None:
            return [first.node]
        return inline_update(update, first.given, first.node.outputs, types, first.site)
    update = templates.joint_update([(call.group, call.parameter) for call in calls])
    given = [slot for call in calls for slot in call.given]
    outputs = [slot for call in calls for slot in call.node.outputs]
    nodes = inline_update(update, given, outputs, types, CallSite(g.UPDATE))
    owners = {slot: k for k, call in enumerate(calls) for slot in (*call.given, *call.node.results)}
    return _with_sites(nodes, owners, [call.site for call in calls])


def _with_sites(
    nodes: Sequence[Node], owners: Mapping[int, int], sites: Sequence[CallSite]
) -> list[Node]:
    """The Nodes of a joint update, each with the site of the parameter that it is for: all that it
    is computed from is that parameter's, or all that is computed from it."""
    read: dict[int | None, frozenset[int]] = {s: frozenset([k]) for s, k in owners.items()}
    for node in nodes:
        of = frozenset().union(*(read.get(slot, frozenset()) for slot in g.refs(node.args)))
        read |= dict.fromkeys((s for s in node.outputs if s is not None), of)
    leads: dict[int, frozenset[int]] = {s: frozenset([k]) for s, k in owners.items()}
    found = []
    for node in reversed(nodes):
        made = [slot for slot in node.outputs if slot is not None]
        to = frozenset().union(*(leads.get(slot, frozenset()) for slot in made))
        for slot in g.refs(node.args):
            leads[slot] = leads.get(slot, frozenset()) | to
        alone = next((x for x in (to, read[made[0]]) if len(x) == 1), None)
        found.append(node if alone is None else replace(node, site=sites[next(iter(alone))]))
    return found[::-1]


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
