"""placeto_network: the policy network of Placeto (Addanki et al., NeurIPS 2019).

In: the features of all groups in some states of an episode, and the group that each state is about.
Out: a score for each device. Widths are those of the published code: embeddings are as wide as the
features, 5 + devices. So a network belongs to one number of devices, and to any graph.

    e     each group by itself
    up    8 rounds: e + what the groups that it reads from say of themselves, and so on
    down  the same from those that read from it
    y     up and down
    z     y of the group in question, and what its ancestors, its descendants and all others say

What several groups say is a sum, before and after which a small network transforms it. Columns are
numbers x groups x states: few numbers, many states, which is what products of matrices like.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from apportion.learn.group_graph import GroupGraph
from apportion.learn.placeto_episode import OWN_FEATURES

ROUNDS = 8


class GraphMasks(NamedTuple):
    """Who listens to whom, of one graph."""

    parents: Tensor  # gd x gd, sparse: sums over the groups that each reads from, for d numbers
    children: Tensor
    has_parents: Tensor  # 1 x g x 1
    has_children: Tensor
    ancestors: Tensor  # g x g: column v has 1 for what is summed for group v
    descendants: Tensor
    others: Tensor


def graph_masks(graph: GroupGraph) -> GraphMasks:
    """The masks of a graph."""
    g, (source, target) = graph.groups, torch.from_numpy(graph.edges).T
    width = OWN_FEATURES + graph.devices
    before = graph.ancestors
    others = ~(before | before.T | np.eye(g, dtype=bool))
    return GraphMasks(
        _sums(target, source, g, width),
        _sums(source, target, g, width),
        _some(target, g),
        _some(source, g),
        *(torch.from_numpy(mask.copy()).float() for mask in (before.T, before, others)),
    )


def _sums(listener: Tensor, speaker: Tensor, groups: int, width: int) -> Tensor:
    rows = torch.arange(width)[:, None] * groups
    places = torch.stack([(rows + listener).flatten(), (rows + speaker).flatten()])
    return torch.sparse_coo_tensor(
        places,
        torch.ones(places.shape[1]),
        (groups * width, groups * width),
        check_invariants=False,
    ).coalesce()


def _some(ends: Tensor, groups: int) -> Tensor:
    return (torch.bincount(ends, minlength=groups) > 0).float().reshape(1, -1, 1)


class Linear(nn.Module):
    """A linear layer on columns, weights after Glorot, no bias at first."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(narrow, wide)))
        self.bias = nn.Parameter(torch.zeros(narrow, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, self.weight, x)


def feed_forward(widths: list[int]) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(widths):
        layers += [Linear(wide, narrow), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers[:-1])


class Aggregation(nn.Module):
    """What a set of groups says: relu(g(sum over the set of relu(f(x))))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.each = feed_forward([width] * 3)
        self.all = feed_forward([width] * 3)

    def over_edges(self, x: Tensor, sums: Tensor) -> Tensor:
        """For every group and state the sum over the groups that `sums` names."""
        width, _, states = x.shape
        said = torch.relu_(self.each(x.reshape(width, -1))).reshape(-1, states)
        heard = torch.sparse.mm(sums, said).reshape(width, -1)
        return torch.relu_(self.all(heard)).reshape(x.shape)

    def over_sets(self, y: Tensor, sets: Tensor) -> Tensor:
        """For every state the sum over its set: width x states, of sets groups x states."""
        said = torch.relu_(self.each(y.reshape(len(y), -1))).reshape(y.shape)
        return torch.relu_(self.all((said * sets).sum(dim=1)))


class PlacetoNetwork(nn.Module):
    """Scores of devices for the current group of each state."""

    def __init__(self, devices: int, rounds: int = ROUNDS) -> None:
        super().__init__()
        d = OWN_FEATURES + devices
        self.rounds = rounds
        self.own = feed_forward([d] * 4)
        self.up, self.down = Aggregation(d), Aggregation(d)
        self.ancestors, self.descendants, self.others = (Aggregation(2 * d) for _ in range(3))
        self.head = feed_forward([8 * d, 16 * d, 8 * d, devices])

    def embed(self, features: Tensor, masks: GraphMasks) -> Tensor:
        """Embeddings (2d x groups x states) of features (d x groups x states)."""
        e = self.own(features.reshape(len(features), -1)).reshape(features.shape)
        up = down = e
        for _ in range(self.rounds):
            up = e + masks.has_parents * self.up.over_edges(up, masks.parents)
            down = e + masks.has_children * self.down.over_edges(down, masks.children)
        return torch.cat([up, down])

    def forward(self, features: Tensor, current: Tensor, masks: GraphMasks) -> Tensor:
        """Scores (devices x states) for the group `current` of each state."""
        y = self.embed(features, masks)
        z = torch.cat(
            [
                self.ancestors.over_sets(y, masks.ancestors[:, current]),
                self.descendants.over_sets(y, masks.descendants[:, current]),
                self.others.over_sets(y, masks.others[:, current]),
                y[:, current, torch.arange(len(current))],
            ]
        )
        scores: Tensor = self.head(z)
        return scores
