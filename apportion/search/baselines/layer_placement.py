"""layer_placement: where a person would put the layers of a network, whole.

In: a step as a PlacementProblem (place/imports/captured.py), and its Graph. Out: the problem with
`expert`.

Recurrent networks have each layer, with all its steps, on one device, the devices in turn, as Wu et
al. (2016) place GNMT. Of other networks each device has a run of consecutive layers, balanced by
how long they take and how fast the device is. The kind of network is seen as in expert.py. Placers
begin with it, and the placer `expert` is it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from apportion.columns import Ints
from apportion.graph import Graph
from apportion.place import PlacementProblem, op_of_node
from apportion.search.baselines.expert import WeightUses, recurrent_layers
from apportion.search.baselines.op_placement import layers

LAYERS_EACH = 4  # at least so many layers for each device, where modules nest deeply enough


def with_layers_as_expert(captured: PlacementProblem, graph: Graph) -> PlacementProblem:
    """The problem with the placement of whole layers as its expert's."""
    devices, columns = len(captured.devices), captured.columns
    weights = WeightUses(graph)
    if weights.recurrent:
        layer = np.array(recurrent_layers(weights), np.int64)
        place = np.arange(int(layer.max(initial=0)) + 1) % devices
    else:
        names = layers(graph, LAYERS_EACH * devices)
        number = {name: k for k, name in enumerate(dict.fromkeys(names))}
        layer = np.array([number[name] for name in names], np.int64)
        place = _runs(captured, layer)
    op = op_of_node(captured, len(graph.ops))
    unit_layer = np.zeros(captured.units, np.int64)
    for node in np.flatnonzero(op >= 0)[::-1]:  # what remains is that of a unit's first Op
        unit_layer[columns.unit[node]] = layer[op[node]]
    found = place[unit_layer]
    allowed = columns.allowed[np.arange(captured.units), found]
    return replace(captured, expert=np.where(allowed, found, columns.allowed.argmax(axis=1)))


def _runs(captured: PlacementProblem, layer: Ints) -> Ints:
    """The device of each layer: that within whose share of the time its middle is."""
    duration = captured.columns.duration[-len(layer) :].astype(float)
    seconds = np.bincount(layer, duration.min(axis=1))
    speed = 1 / np.maximum(duration.sum(axis=0), 1.0)
    ends = np.cumsum(speed) / speed.sum() * seconds.sum()
    middle = np.cumsum(seconds) - seconds / 2
    return np.minimum(np.searchsorted(ends, middle, side="right"), len(ends) - 1).astype(np.int64)
