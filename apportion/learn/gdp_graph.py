"""GdpGraph: a PlacementProblem as GDP's network reads it: features of units, neighbours, an order.

In: a PlacementProblem. Out: torch tensors. Nothing here depends on how nodes or units are numbered,
except the order in which units are handed to the placer.

GDP's features of an operator are its type, the shape of its output and the numbers of adjacent
operators (arXiv 1910.01578). Types are hashed into `TYPES` columns; for shapes we have bytes;
numbers of neighbours would tie a policy to one numbering, so that degrees and places along the
longest paths stand for them. A unit has the sums over its nodes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from apportion.columns import Bools, Floats, compiled
from apportion.place import NEVER, PlacementColumns, PlacementProblem

FEATURES_VERSION = 1
TYPES = 64  # columns that operator types are hashed into
NUMBERS = 16  # the other columns
FEATURES = TYPES + NUMBERS


@dataclass(frozen=True, eq=False)
class GdpGraph:
    """u units of one problem, or of several beside each other. Neighbours are those that a unit
    reads from and that read from it."""

    features: torch.Tensor  # u x FEATURES
    neighbour: torch.Tensor  # units, grouped by the unit whose neighbours they are
    neighbour_start: torch.Tensor  # u + 1: offsets into neighbour
    order: torch.Tensor  # u: units in the order in which the placer reads them
    allowed: torch.Tensor  # u x k
    sizes: tuple[int, ...]  # units of each problem

    def to(self, device: str) -> GdpGraph:
        """The same on another device of torch."""
        return GdpGraph(
            self.features.to(device), self.neighbour.to(device), self.neighbour_start.to(device),
            self.order.to(device), self.allowed.to(device), self.sizes,
        )  # fmt: skip


def gdp_graph(problem: PlacementProblem) -> GdpGraph:
    """What the network sees of a problem."""
    pairs, _ = problem.unit_edges
    both = np.unique(np.concatenate([pairs, pairs[:, ::-1]]), axis=0)
    start = np.searchsorted(both[:, 0], np.arange(problem.units + 1))
    first = np.full(problem.units, len(problem.columns.unit))
    np.minimum.at(first, problem.columns.unit, np.arange(len(problem.columns.unit)))
    return GdpGraph(
        torch.from_numpy(unit_features(problem).astype(np.float32)),
        torch.from_numpy(np.ascontiguousarray(both[:, 1])),
        torch.from_numpy(start.astype(np.int64)),
        torch.from_numpy(np.argsort(first, kind="stable")),
        torch.from_numpy(np.asarray(problem.columns.allowed, bool)),
        (problem.units,),
    )


def side_by_side(graphs: Sequence[GdpGraph]) -> GdpGraph:
    """Graphs as one: the network takes them in one pass, and none sees anything of another."""
    sizes = [size for graph in graphs for size in graph.sizes]
    first = np.cumsum([0, *(len(graph.order) for graph in graphs)])
    edge = np.cumsum([0, *(len(graph.neighbour) for graph in graphs)])
    most = max(graph.allowed.shape[1] for graph in graphs)
    starts = [g.neighbour_start[:-1] + int(at) for g, at in zip(graphs, edge, strict=False)]
    return GdpGraph(
        torch.cat([graph.features for graph in graphs]),
        torch.cat([g.neighbour + int(at) for g, at in zip(graphs, first, strict=False)]),
        torch.cat([*starts, torch.tensor([int(edge[-1])])]),
        torch.cat([g.order + int(at) for g, at in zip(graphs, first, strict=False)]),
        torch.cat([_wider(graph.allowed, most) for graph in graphs]),
        tuple(sizes),
    )


def _wider(allowed: torch.Tensor, devices: int) -> torch.Tensor:
    return torch.nn.functional.pad(allowed, (0, devices - allowed.shape[1]), value=False)


def unit_features(problem: PlacementProblem) -> Floats:
    """u x FEATURES: shares of operator types, then times, bytes, degrees and positions, less their
    means over the graph and in its standard deviations: policies carry over to other machines and
    batches."""
    c, u = problem.columns, problem.units
    nodes = np.bincount(c.unit, minlength=u).astype(float)
    hashes = {kind: zlib.crc32(kind.encode()) % TYPES for kind in set(problem.node_kinds)}
    kind = np.array([hashes[kind] for kind in problem.node_kinds], np.int64)
    types = np.bincount(c.unit * TYPES + kind, minlength=u * TYPES).reshape(u, TYPES)

    runs = c.duration < NEVER
    took = np.where(runs, c.duration, 0).sum(axis=1) / np.maximum(runs.sum(axis=1), 1)
    forward = np.bincount(c.unit, took * (c.backward == 0), u)
    backward = np.bincount(c.unit, took * (c.backward != 0), u)
    average = max(took.sum() / u, 1e-12)
    fastest = np.bincount(c.unit, np.where(runs, c.duration, NEVER).min(axis=1), u)
    resident = np.bincount(c.unit, c.resident, u)
    made = np.bincount(c.unit[c.source], c.nbytes, u)
    largest = np.zeros(u)
    np.maximum.at(largest, c.unit[c.source], c.nbytes)
    readers = np.repeat(np.arange(len(c.source)), np.diff(c.reader_start))
    read = np.bincount(c.unit[c.reader], c.nbytes[readers], u)
    pairs, _ = problem.unit_edges
    begin, length = longest_paths(c, took)
    first, last = np.full(u, np.inf), np.zeros(u)
    np.minimum.at(first, c.unit, begin[:, 0])
    np.maximum.at(last, c.unit, begin[:, 0])
    depth, near, far = np.full((3, u), np.inf)
    np.minimum.at(depth, c.unit, begin[:, 1])
    state = np.array([kind == "state" for kind in problem.node_kinds])
    counts = (c.backward == 0) & ~state
    ends = shortest_paths(c, counts)[counts]
    np.minimum.at(near, c.unit[counts], ends[:, 0])
    np.minimum.at(far, c.unit[counts], ends[:, 1])
    numbers = [
        np.log1p(forward / average),
        np.log1p(backward / average),
        fastest / np.maximum(forward + backward, 1e-12),
        np.log2(1 + made) / 32,
        np.log2(1 + largest) / 32,
        np.log2(1 + read) / 32,
        np.log2(1 + resident) / 32,
        np.log1p(resident * u / max(resident.sum(), 1.0)),
        np.log1p(np.bincount(pairs[:, 1], minlength=u)),
        np.log1p(np.bincount(pairs[:, 0], minlength=u)),
        first / max(length[0], 1e-12),
        last / max(length[0], 1e-12),
        depth / max(length[1], 1.0),
        np.log1p(nodes),
        np.log1p(np.where(np.isfinite(near), near, 0)),
        np.log1p(np.where(np.isfinite(far), far, 0)),
    ]
    table = np.stack(numbers, axis=1)
    table = (table - table.mean(axis=0)) / np.maximum(table.std(axis=0), 1e-3)
    return np.concatenate([types / nodes[:, None], table], axis=1)


@compiled
def longest_paths(c: PlacementColumns, took: Floats) -> tuple[Floats, Floats]:
    """n x 2: the longest path that ends before each node, in ticks and in nodes; and the longest of
    all, ticks and nodes."""
    n = len(c.unit)
    begin, longest = np.zeros((n, 2)), np.zeros(2)
    for node in range(n):
        ticks, count = begin[node, 0] + took[node], begin[node, 1] + 1.0
        longest[0], longest[1] = max(longest[0], ticks), max(longest[1], count)
        begins, ends = c.output_start[node], c.output_start[node + 1]
        for at in range(c.reader_start[begins], c.reader_start[ends]):
            reader = c.reader[at]
            begin[reader, 0] = max(begin[reader, 0], ticks)
            begin[reader, 1] = max(begin[reader, 1], count)
    return begin, longest


@compiled
def shortest_paths(c: PlacementColumns, counts: Bools) -> Floats:
    """n x 2: the fewest nodes from where the graph begins, and to where it ends, along nodes that
    count; 0 for others. In an unrolled recurrent network, whose longest paths run along time, these
    tell layers apart."""
    n = len(c.unit)
    found = np.full((n, 2), np.inf)
    for node in range(n):
        if not counts[node]:
            continue
        if found[node, 0] == np.inf:
            found[node, 0] = 0.0
        begins, ends = c.output_start[node], c.output_start[node + 1]
        for at in range(c.reader_start[begins], c.reader_start[ends]):
            reader = c.reader[at]
            found[reader, 0] = min(found[reader, 0], found[node, 0] + 1.0)
    for node in range(n - 1, -1, -1):
        if not counts[node]:
            found[node, 0], found[node, 1] = 0.0, 0.0
            continue
        begins, ends = c.output_start[node], c.output_start[node + 1]
        for at in range(c.reader_start[begins], c.reader_start[ends]):
            reader = c.reader[at]
            if counts[reader]:
                found[node, 1] = min(found[node, 1], found[reader, 1] + 1.0)
        if found[node, 1] == np.inf:
            found[node, 1] = 0.0
    return found
