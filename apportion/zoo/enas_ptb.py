"""Language models with a recurrent cell drawn from ENAS's search space, one for each `graph`.

Re-created after the paper: no cell that ENAS found, and none of Placeto's graphs, which are drawn
from the same space. A cell has `nodes` nodes. The first reads the token and the state, every other
one an earlier node; each mixes what it reads with an activation of it, by a highway gate:

    c = sigmoid(h W_c),  h' = c * f(h W_h) + (1 - c) * h,   f one of tanh, ReLU, sigmoid, identity

The mean of the nodes that no other reads is the new state. Unrolled over fewer steps than ENAS's 35
by default, so that a graph is captured in seconds. Without dropout.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor, nn

from apportion.zoo.rnn import Batch
from apportion.zoo.rnn import step as step

ABOUT = "a recurrent language model drawn from ENAS's space, unrolled: cross-entropy, SGD"
SOURCE = "re-created after Pham et al., ICML 2018 (ENAS), as used by Addanki et al., NeurIPS 2019"

ACTIVATIONS = (torch.tanh, torch.relu, torch.sigmoid, nn.Identity())


@dataclass(frozen=True, slots=True)
class Settings:
    """`graph` says which cell is drawn; it has `hidden` units and is unrolled over `steps`
    tokens."""

    graph: int = 1
    nodes: int = 12
    hidden: int = 748
    steps: int = 10
    vocab: int = 10000
    batch: int = 64


TINY = Settings(graph=1, nodes=3, hidden=6, steps=3, vocab=11, batch=5)


class DrawnRecurrentCell(nn.Module):
    """Token and state (batch, hidden) to the next state.

    before       for each node after the first the one that it reads
    activations  for each node which of ACTIVATIONS
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        draw, nodes = Random(settings.graph), settings.nodes
        self.before = tuple(draw.randrange(k) for k in range(1, nodes))
        self.activations = tuple(draw.randrange(len(ACTIVATIONS)) for _ in range(nodes))
        hidden = settings.hidden
        self.input = nn.Linear(hidden, 2 * hidden)
        self.state = nn.Linear(hidden, 2 * hidden, bias=False)
        self.inner = nn.ModuleList(nn.Linear(hidden, 2 * hidden) for _ in self.before)
        self.loose = tuple(k for k in range(nodes) if k not in self.before)

    def _mix(self, node: int, both: Tensor, h: Tensor) -> Tensor:
        gate, new = both.chunk(2, dim=1)
        new = ACTIVATIONS[self.activations[node]](new)
        return h + torch.sigmoid(gate) * (new - h)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        made = [self._mix(0, self.input(x) + self.state(h), h)]
        for node, (source, layer) in enumerate(zip(self.before, self.inner, strict=True), 1):
            made.append(self._mix(node, layer(made[source]), made[source]))
        total = made[self.loose[0]]
        for node in self.loose[1:]:
            total = total + made[node]
        return total / len(self.loose)


class DrawnLanguageModel(nn.Module):
    """Tokens (batch, steps) to logits (batch, steps, vocab)."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.tokens = nn.Embedding(settings.vocab, settings.hidden)
        self.cell = DrawnRecurrentCell(settings)
        self.head = nn.Linear(settings.hidden, settings.vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        xs = self.tokens(tokens).unbind(1)
        state, shown = torch.zeros_like(xs[0]), []
        for x in xs:
            state = self.cell(x, state)
            shown.append(state)
        logits: Tensor = self.head(torch.stack(shown, dim=1))
        return logits


def build(settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """Model, optimizer and one batch, from torch's current random state; the cell itself is drawn
    by `graph` alone."""
    model = DrawnLanguageModel(settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    text = torch.randint(settings.vocab, (settings.batch, settings.steps + 1))
    return model, optimizer, (text[:, :-1].contiguous(), text[:, 1:].contiguous())
