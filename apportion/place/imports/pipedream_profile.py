"""pipedream_profile: the text profiles of PipeDream (msr-fiddle/pipedream, profiles/*/graph.txt).

In: the text of a file. Out: an ImportedGraph.

    node1 -- Conv2d(3, 64) -- forward_compute_time=9.7, backward_compute_time=4.5,
             activation_size=411041792.0, parameter_size=37632.000 [-- stage_id=0]     (one line)
    <tab>node1 -- node2                                                                an edge

Times are milliseconds, sizes bytes; an activation of several parts has a list, [1.0; 2.0]. A layer
becomes a forward node and a backward node ("node1" and "node1 backward") of one colocation class.
The backward node reads what the forward one made and the gradients of those who read it, and makes
a gradient for every layer that it reads from, as large as that one's activation. Gradients go back
as far as there are layers with a backward time: not to inputs, and nowhere if no layer has one.

Forward nodes hold activations and parameters, backward nodes as much again for the gradients, which
is how the authors of the fiddle format have read these files. A transfer takes bytes / 1 GB/s, what
PipeDream's planner takes unless told. Stages, where a file has them, are its own split. The files
do not say how many devices there are: 4 unless told.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from apportion.graph import ImportedCosts
from apportion.place.imports.imported_graph import (
    ACCELERATOR,
    ImportedGraph,
    ImportedNode,
    build_graph,
    checked_bytes,
    checked_time,
    stage_names,
)

PIPEDREAM = "pipedream"
BYTES_PER_MS = 1e6
USUAL_DEVICES = 4
_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_STAGE = re.compile(r"stage_id=(\d{1,4})", re.ASCII)


@dataclass(frozen=True, slots=True)
class ProfiledLayer:
    """A line of the file."""

    name: str
    operator: str
    forward: float  # ms
    backward: float  # ms
    activation: int  # bytes
    parameters: int  # bytes
    stage: int | None


def read_pipedream(text: str, name: str) -> ImportedGraph:
    """The graph in a text; ValueError, in one sentence, if there is none."""
    layers: dict[str, ProfiledLayer] = {}
    edges: dict[tuple[str, str], int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        words = line.strip().split(" -- ")
        if line[0] in "\t " and len(words) == 2:
            edges.setdefault((words[0], words[1]), number)
            continue
        layer = _layer(words, number)
        if layer.name in layers:
            raise ValueError(f"two nodes have the id {layer.name} (line {number})")
        layers[layer.name] = layer
    if not layers:
        raise ValueError("the graph has no nodes")
    for ends, number in edges.items():
        for end in ends:
            if end not in layers:
                raise ValueError(f"the edge on line {number} names node {end}, which is not there")
    graph = build_graph(_nodes(list(layers.values()), list(edges)))
    stages = [(it.name, it.stage) for it in layers.values() if it.stage is not None]
    count = max([USUAL_DEVICES, *(stage + 1 for _, stage in stages)])
    return ImportedGraph(name, PIPEDREAM, graph, "ms", count, split=stage_names(stages))


def _layer(words: list[str], number: int) -> ProfiledLayer:
    facts = dict(part.split("=", 1) for part in words[2].split(", ")) if _is_layer(words) else {}
    if tuple(facts) != _FIELDS:
        raise ValueError(f"line {number} is neither a layer with its four figures nor an edge")
    name = words[0]
    forward, backward = (
        checked_time(_number(facts[key], f"the {key} of {name}"), f"the {key} of {name}")
        for key in _FIELDS[:2]
    )
    parts = facts["activation_size"].strip("[]").split(";")
    what = f"the activation_size of {name}"
    activation = sum(checked_bytes(_number(part, what), what) for part in parts)
    what = f"the parameter_size of {name}"
    parameters = checked_bytes(_number(facts["parameter_size"], what), what)
    stage = _STAGE.fullmatch(words[3]) if len(words) == 4 else None
    if len(words) > 4 or (len(words) == 4 and stage is None):
        raise ValueError(f"line {number} ends in {words[-1][:40]!r}, which is not a stage")
    at = int(stage[1]) if stage else None
    return ProfiledLayer(name, words[1], forward, backward, activation, parameters, at)


def _is_layer(words: list[str]) -> bool:
    return len(words) >= 3 and all("=" in part for part in words[2].split(", "))


def _number(word: str, what: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"{what} is {word.strip()[:40]!r}, not a number") from None


def _nodes(layers: list[ProfiledLayer], edges: list[tuple[str, str]]) -> list[ImportedNode]:
    """Forward nodes in the order of the file, then backward nodes in the opposite order."""
    at = {layer.name: index for index, layer in enumerate(layers)}
    reads: list[list[int]] = [[] for _ in layers]
    readers: list[list[int]] = [[] for _ in layers]
    for source, target in edges:
        reads[at[target]].append(at[source])
        readers[at[source]].append(at[target])
    wanted = _with_gradient(layers, readers)
    backward = [index for index in reversed(range(len(layers))) if wanted[index]]
    twin = {index: len(layers) + rank for rank, index in enumerate(backward)}
    nodes = []
    for index, layer in enumerate(layers):
        own = [twin[index]] if index in twin else []
        size, name = layer.activation, layer.name
        costs = _costs(layer, layer.forward, size if readers[index] else 0)
        kind = re.match(r"\w*", layer.operator, re.ASCII)
        kinds = (kind[0] if kind else "") or "imported"
        outputs = [(size, [*readers[index], *own])]
        nodes.append(ImportedNode(name, kinds, costs, outputs, False, layer.operator))
    for index in backward:
        layer = layers[index]
        gradients = [(layers[i].activation, [twin[i]]) for i in reads[index] if i in twin]
        costs = _costs(layer, layer.backward, sum(size for size, _ in gradients))
        name, kinds = f"{layer.name} backward", nodes[index].kind
        nodes.append(ImportedNode(name, kinds, costs, gradients, True, layer.operator, index))
    return nodes


def _with_gradient(layers: list[ProfiledLayer], readers: list[list[int]]) -> list[bool]:
    """Whether gradients reach a layer: it, or one that it depends on, has a backward time."""
    wanted = [layer.backward > 0 for layer in layers]
    ahead = [index for index, does in enumerate(wanted) if does]
    while ahead:
        for reader in readers[ahead.pop()]:
            if not wanted[reader]:
                wanted[reader] = True
                ahead.append(reader)
    return wanted


def _costs(layer: ProfiledLayer, time: float, sent: int) -> ImportedCosts:
    held = layer.activation + layer.parameters
    return ImportedCosts(((ACCELERATOR, time),), sent / BYTES_PER_MS, held, layer.name)
