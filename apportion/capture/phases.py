"""phases: Nodes of a step's own loop -> the same, those after a backward in the phase they serve.

Part of capture/, after decompose/ and before build_graph.py. What autograd makes is marked while it
is recorded. What the user's loop computes by itself is told by what it reads: gradients (clipping,
accumulation) make it backward, updated parameters (averages of them) make it update; with an
autograd node of its own it is another forward.
"""

from __future__ import annotations

from dataclasses import replace

from apportion import graph as g
from apportion.capture.normalise import Node, NormalisedTrace
from apportion.capture.update_call import KIND as UPDATE_CALL


def with_phases(trace: NormalisedTrace) -> NormalisedTrace:
    """The trace with the phases of what follows a backward set right."""
    serves: dict[int, str] = {}
    nodes = []
    for node in trace.nodes:
        new = _with_phase(node, serves)
        if new.site.phase != g.FORWARD:
            serves.update(dict.fromkeys(new.results, new.site.phase))
        nodes.append(new)
    return replace(trace, nodes=tuple(_beside_what_they_serve(nodes)))


def _beside_what_they_serve(nodes: list[Node]) -> list[Node]:
    """What reads neither, but is made after a backward and read only by what does, is as that."""
    first = next((k for k, node in enumerate(nodes) if node.site.phase != g.FORWARD), len(nodes))
    readers: dict[int, set[str]] = {}
    found = list(nodes)
    for k in reversed(range(len(nodes))):
        node = nodes[k]
        served = set().union(*(readers.get(slot, set()) for slot in node.results))
        if k > first and node.site.phase == g.FORWARD and node.site.sequence is None:
            if served == {g.UPDATE}:
                node = replace(node, site=replace(node.site, phase=g.UPDATE))
            elif served and g.FORWARD not in served:
                node = replace(node, site=replace(node.site, phase=g.BACKWARD, sequence=-1))
        found[k] = node
        for slot in g.refs(node.args):
            readers.setdefault(slot, set()).add(node.site.phase)
    return found


def _with_phase(node: Node, serves: dict[int, str]) -> Node:
    if node.kind == UPDATE_CALL or node.site.phase == g.UPDATE:
        return replace(node, site=replace(node.site, phase=g.UPDATE))
    if node.site.phase != g.FORWARD or node.site.sequence is not None:
        return node
    read = {serves[slot] for slot in g.refs(node.args) if slot in serves}
    if g.UPDATE in read:
        return replace(node, site=replace(node.site, phase=g.UPDATE))
    if g.BACKWARD in read:
        return replace(node, site=replace(node.site, phase=g.BACKWARD, sequence=-1))
    return node
