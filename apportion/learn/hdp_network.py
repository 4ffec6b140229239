"""HDP's network: a grouper that puts operators into groups, and a placer that gives groups devices.

In: what HDP sees of each unit. Out: a group for every unit and a device for every group, drawn,
with their log-probabilities (Mirhoseini et al., ICLR 2018; sizes and quirks of its release).

    grouper  two linear layers with nothing between them; a group for every unit, drawn
    groups   counts of edges to and from every group, a histogram of operator types and summed
             shapes, divided by the largest of the row + 1. In the release the shapes are added onto
             the first 25 columns of the histogram (`overlap`)
    placer   an LSTM in both directions over the groups, and one that decodes with Bahdanau's
             attention and is told the device before
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from apportion.place import PlacementProblem

SHAPE_WIDTH = 25  # 5 outputs of 5 sizes
ADJACENT = 20  # 10 neighbours, each with its direction
OPERATOR = 1 + SHAPE_WIDTH + ADJACENT


@dataclass(frozen=True, slots=True)
class HdpShape:
    """Sizes, and the release's overlap."""

    devices: int
    groups: int
    types: int  # columns of the histogram
    hidden: int = 512  # of the decoder; half of it each way in the encoder
    grouper: int = 64
    overlap: bool = True

    @property
    def group_width(self) -> int:
        """Numbers that describe a group."""
        return 2 * self.groups + self.types + (0 if self.overlap else SHAPE_WIDTH)


@dataclass(frozen=True, eq=False)
class HdpGraph:
    """u units of one problem, as HDP sees them."""

    operators: torch.Tensor  # u x OPERATOR
    type_counts: torch.Tensor  # u x types
    shapes: torch.Tensor  # u x SHAPE_WIDTH, not negative
    edges: torch.Tensor  # pairs (unit, unit that reads from it)

    def to(self, device: str) -> HdpGraph:
        """The same on another device of torch."""
        return HdpGraph(
            self.operators.to(device),
            self.type_counts.to(device),
            self.shapes.to(device),
            self.edges.to(device),
        )


def hdp_graph(problem: PlacementProblem) -> HdpGraph:
    """What HDP sees of a problem. Of shapes only bytes are known: log2 of the bytes of up to five
    outputs, each in the first of its five sizes. Numbers of types and of neighbours are divided
    by how many there are, which the release does not do."""
    c, u = problem.columns, problem.units
    kinds = {kind: at for at, kind in enumerate(sorted(set(problem.node_kinds)))}
    counts = np.zeros((u, max(len(kinds), SHAPE_WIDTH)), np.float32)
    shapes = np.full((u, SHAPE_WIDTH), -1.0, np.float32)
    operators = np.zeros((u, OPERATOR), np.float32)
    outputs, reached = [0] * u, [False] * u
    for node in range(len(c.unit)):
        unit, kind = int(c.unit[node]), kinds[problem.node_kinds[node]]
        counts[unit, kind] += 1
        if not reached[unit]:  # the type of a unit is that of its first node
            operators[unit, 0], reached[unit] = kind / len(kinds), True
        for output in range(c.output_start[node], c.output_start[node + 1]):
            if outputs[unit] < 5:
                shapes[unit, 5 * outputs[unit]] = np.log2(1.0 + c.nbytes[output]) / 32
                outputs[unit] += 1
    pairs, _ = problem.unit_edges
    near: list[list[float]] = [[] for _ in range(u)]
    for one, other in pairs.tolist():
        near[one] += [other / u, 1.0]
        near[other] += [one / u, -1.0]
    for unit, row in enumerate(near):
        kept = row[:ADJACENT]
        operators[unit, 1 + SHAPE_WIDTH : 1 + SHAPE_WIDTH + len(kept)] = kept
    operators[:, 1 : 1 + SHAPE_WIDTH] = shapes
    parts = (operators, counts, np.maximum(shapes, 0), np.ascontiguousarray(pairs))
    return HdpGraph(*(torch.from_numpy(part) for part in parts))


def group_vectors(shape: HdpShape, graph: HdpGraph, group: torch.Tensor) -> torch.Tensor:
    """groups x group_width: what the placer sees of each group."""
    count = shape.groups
    ends = group[graph.edges]
    edges = torch.bincount(ends[:, 0] * count + ends[:, 1], minlength=count * count)
    matrix = edges.view(count, count).to(graph.operators)
    member = torch.zeros(count, len(group), device=group.device)
    member[group, torch.arange(len(group), device=group.device)] = 1.0
    types, shapes = member @ graph.type_counts, member @ graph.shapes
    if shape.overlap:
        types[:, :SHAPE_WIDTH] += shapes
        rows = torch.cat([matrix, matrix.T, types], dim=1)
    else:
        rows = torch.cat([matrix, matrix.T, types, shapes], dim=1)
    return rows / (rows.amax(dim=1, keepdim=True) + 1)


class HdpNetwork(nn.Module):
    """Grouper and placer of one graph: both are tied to its numbers of groups and devices."""

    def __init__(self, shape: HdpShape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        hidden = shape.hidden
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Linear(OPERATOR, shape.grouper)
            self.second = nn.Linear(shape.grouper, shape.groups)
            self.encoder = nn.LSTM(
                shape.group_width, hidden // 2, bidirectional=True, batch_first=True
            )
            self.decoder = nn.LSTMCell(2 * hidden, hidden)
            self.device = nn.Embedding(shape.devices + 1, hidden)  # the last: nothing before
            self.memory = nn.Linear(hidden, hidden, bias=False)
            self.query = nn.Linear(hidden, hidden, bias=False)
            self.attend = nn.Linear(hidden, 1, bias=False)
            self.leave = nn.Linear(2 * hidden, shape.devices)

    def group_logits(self, graph: HdpGraph) -> torch.Tensor:
        """u x groups."""
        logits: torch.Tensor = self.second(self.first(graph.operators))
        return logits

    def place(
        self, vectors: torch.Tensor, random: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A device for every group (groups), drawn, and the log-probability of all of them. Logits
        are squashed by tanh, as in the release: no device is ever out of the question."""
        seen, (state, cell) = self.encoder(vectors[None])
        keys = self.memory(seen[0])
        h, c = state.reshape(1, -1), cell.reshape(1, -1)
        before = torch.tensor([self.shape.devices], device=vectors.device)
        context = torch.zeros_like(h)
        devices, chances = [], []
        draws = torch.rand(len(vectors), generator=random)
        for draw in draws.tolist():
            told = torch.cat([self.device(before), context], dim=1)
            h, c = self.decoder(told, (h, c))
            weights = self.attend(torch.tanh(keys + self.query(h))).softmax(dim=0)
            context = weights.T @ seen[0]
            logits = torch.tanh(self.leave(torch.cat([h, context], dim=1)))
            scores = functional.log_softmax(logits, dim=1)[0]
            sums = scores.detach().exp().cumsum(dim=0)
            before = (sums < draw * sums[-1]).sum().reshape(1)
            devices.append(before)
            chances.append(scores[before[0]])
        return torch.cat(devices), torch.stack(chances).sum()
