"""colocrl_network: the policy network of ColocRL (Mirhoseini et al., ICML 2017).

In: a vector for every group: which operators it has, how much they put out, and which groups it
exchanges outputs with. Out: a device for each group, one after the other, and the logarithm of
their probability.

One LSTM reads all groups; another one names their devices in the same order. It is given the device
that it named last, and attends to what the first has read. The text says no more; widths, the kind
of attention (products, Luong et al., 2015) and how vectors are written are ours. A vector tells
groups apart by their numbers, so what is learned on one graph says little about another.
"""

from __future__ import annotations

from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from apportion.columns import Floats
from apportion.learn.group_graph import GroupGraph

KINDS = 32  # operators are told apart by a checksum of their name
SIZES = 3
MOST_GROUPS = 160
WIDTH = KINDS + SIZES + 2 * MOST_GROUPS


def group_vectors(graph: GroupGraph) -> Floats:
    """A vector for every group: groups x WIDTH."""
    c, problem = graph.problem.columns, graph.problem
    g = graph.groups
    kinds, sizes = np.zeros((g, KINDS)), np.zeros((g, SIZES))
    number = np.array([crc32(kind.encode()) % KINDS for kind in problem.node_kinds], np.int64)
    np.add.at(kinds, (graph.node_group, number), 1)
    made_by = graph.node_group[c.source]
    np.add.at(sizes[:, 0], made_by, c.nbytes / 1e6)
    np.maximum.at(sizes[:, 1], made_by, c.nbytes / 1e6)
    np.add.at(sizes[:, 2], made_by, 1)
    near = np.zeros((g, 2, MOST_GROUPS))
    near[graph.edges[:, 0], 0, graph.edges[:, 1]] = 1
    near[graph.edges[:, 1], 1, graph.edges[:, 0]] = 1
    return np.hstack([np.log1p(kinds), np.log1p(sizes), near.reshape(g, -1)])


class ColocrlNetwork(nn.Module):
    """Names a device for every group."""

    def __init__(self, devices: int, hidden: int) -> None:
        super().__init__()
        self.devices, self.hidden = devices, hidden
        self.encoder = nn.LSTM(WIDTH, hidden)
        self.named = nn.Embedding(devices + 1, hidden)  # the last is for the first group
        self.decoder = nn.LSTMCell(hidden, hidden)
        self.attention = nn.Linear(hidden, hidden, bias=False)
        self.mix = nn.Linear(2 * hidden, hidden)
        self.head = nn.Linear(hidden, devices)

    def forward(
        self, vectors: Tensor, allowed: Tensor, chances: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Devices (placements x groups) and the log of the probability of each placement. Each of
        `chances` (placements x groups) picks a device by its probability; None: one placement of
        the most probable ones."""
        count = 1 if chances is None else len(chances)
        read, (h, c) = self.encoder(vectors)
        h, c = h.expand(count, -1), c.expand(count, -1)
        keys = self.attention(read).T
        last = torch.full((count,), self.devices)
        total = torch.zeros(count)
        found = []
        for group in range(len(vectors)):
            h, c = self.decoder(self.named(last), (h, c))
            seen = torch.softmax(h @ keys, dim=1) @ read
            scores = self.head(torch.tanh(self.mix(torch.cat([h, seen], dim=1))))
            log = torch.log_softmax(scores.masked_fill(~allowed[group], -torch.inf), dim=1)
            if chances is None:
                last = log.argmax(dim=1)
            else:
                odds = log.detach().double().exp().cumsum(dim=1)
                picked = chances[:, group : group + 1] * odds[:, -1:]
                last = torch.searchsorted(odds, picked, right=True)[:, 0].clamp_(
                    max=self.devices - 1
                )
            total = total + log.gather(1, last.unsqueeze(1))[:, 0]
            found.append(last)
        return torch.stack(found, dim=1), total
