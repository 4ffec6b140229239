"""GDP's network: an embedding of the graph by GraphSAGE, and a placer by Transformer-XL.

In: a GdpGraph. Out: for every unit the logits of its devices, all at once (arXiv 1910.01578).

    embedding   h_N(v) = max over neighbours u of sigmoid(W h_u + b)      element by element
                h_v    = relu(dense(concat(h_v, h_N(v)))); at the end less its mean
    placer      x[l+1] = layer[l](c(x[0]) * x[l]),  x[0] = h              superposition
                c      = a dense layer, the same at every depth
    head        a linear layer, one output for each device

torch_geometric's SAGEConv with max pooling projects neighbours through ReLU; GDP's formula has a
sigmoid, so the layer is written here.

The placer reads units in segments. A unit attends to its own segment and to the `memory` units
before it, whose inputs *to the same layer* are taken as they were, without gradient. There are no
positions: the embedding says where in the graph a unit is. Since a layer needs nothing of the
segment before but its own input there, all segments of a layer are computed at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from apportion.learn.gdp_graph import FEATURES, GdpGraph

IMPOSSIBLE = -1e9  # the logit of a device that cannot run the unit


@dataclass(frozen=True, slots=True)
class GdpShape:
    """Sizes of the network. GDP does not print them; these are near those that its successor GO
    is remembered to have (papers' figures: 2 + 2 layers of width 64, 3 heads, segments of 128)."""

    devices: int
    width: int = 64
    graph_layers: int = 2
    placer_layers: int = 2
    heads: int = 4
    segment: int = 128
    memory: int = 128
    superposition: bool = True


@dataclass(frozen=True, eq=False)
class SegmentSlots:
    """Where units stand in segments: every graph begins a segment of its own, and what is left of
    its last one is filled with its last unit, which nobody sees there."""

    shape: tuple[int, int, int]  # segments, length of each, slots of memory
    unit: torch.Tensor  # segments * length: the unit in each slot
    slot: torch.Tensor  # u: the slot of each unit
    seen: torch.Tensor  # segments x (memory + length): which slots a segment attends to


def slots_of(graph: GdpGraph, shape: GdpShape) -> SegmentSlots:
    """The segments of a graph, or of graphs side by side."""
    length = min(shape.segment, max(graph.sizes))
    counts = [-(-size // length) for size in graph.sizes]
    memory = min(shape.memory, length * max(counts))
    at, start, end, first = [], [], [], 0
    for size, count in zip(graph.sizes, counts, strict=True):
        at.append(first + torch.arange(count * length).clamp(max=size - 1))
        begin = sum(map(len, at[:-1]))
        start += [begin] * count
        end += [begin + size] * count
        first += size
    device = graph.order.device
    place = torch.cat(at).to(device)  # in the order of the placer
    is_own = torch.ones(len(place), dtype=torch.bool, device=device)
    is_own[1:] = place[1:] != place[:-1]
    slot = torch.empty_like(graph.order)
    slot[graph.order] = torch.nonzero(is_own)[:, 0]
    reach = torch.arange(-memory, length, device=device)
    every = torch.arange(sum(counts), device=device)[:, None] * length + reach
    starts, ends = (torch.tensor(row, device=device)[:, None] for row in (start, end))
    seen = (every >= starts) & (every < ends)
    return SegmentSlots((sum(counts), length, memory), graph.order[place], slot, seen)


class SageLayer(nn.Module):
    """One round of GraphSAGE with max pooling."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, width)
        self.combine = nn.Linear(2 * width, width)
        nn.init.xavier_normal_(self.project.weight, gain=2.0)
        nn.init.zeros_(self.project.bias)
        _begin_relu(self.combine)

    def forward(self, h: torch.Tensor, graph: GdpGraph) -> torch.Tensor:
        projected = torch.sigmoid(self.project(h))[graph.neighbour]
        pooled = torch.segment_reduce(
            projected, "max", offsets=graph.neighbour_start, axis=0, initial=0.0
        )  # 0 where there is no neighbour, which is below any sigmoid
        return functional.relu(self.combine(torch.cat([h, pooled], dim=1)))


def _begin_relu(linear: nn.Linear) -> None:
    """First weights of a layer before ReLU. torch's own would leave all units almost alike after
    the embedding, and a policy that treats all alike is a stationary point, since devices are
    interchangeable."""
    nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
    nn.init.zeros_(linear.bias)


class PlacerLayer(nn.Module):
    """A layer of attention over a segment and the memory before it."""

    def __init__(self, shape: GdpShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.width
        self.before_attention = nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.join = nn.Linear(width, width)
        self.before_dense = nn.LayerNorm(width)
        self.dense = nn.Sequential(
            nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor, slots: SegmentSlots) -> torch.Tensor:
        """segments * length x width, to the same."""
        x = x + self.join(self.attend(x, slots))
        out: torch.Tensor = x + self.dense(self.before_dense(x))
        return out

    def attend(self, x: torch.Tensor, slots: SegmentSlots) -> torch.Tensor:
        """What each unit gathers from its segment and from the memory before that. The weights
        that make keys and values get a gradient from both, remembered inputs get none."""
        width, (segments, length, memory) = x.shape[1], slots.shape
        normal = self.before_attention(x)
        q = self.query(normal).view(segments, length, width)
        kv = self.key_value(normal).view(segments, length, 2 * width)
        if memory:
            remembered = self.key_value(self.before_attention(x.detach()))
            padded = functional.pad(remembered, (0, 0, memory, 0))
            windows = padded.unfold(0, memory, length)[:segments].transpose(1, 2)
            kv = torch.cat([windows, kv], dim=1)
        k, v = kv.chunk(2, dim=-1)
        heads = self.shape.heads
        gathered = functional.scaled_dot_product_attention(
            _by_head(q, heads),
            _by_head(k, heads),
            _by_head(v, heads),
            attn_mask=slots.seen[:, None, None, :],
        )
        return gathered.transpose(1, 2).reshape(segments * length, width)


def _by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    segments, length, width = x.shape
    return x.reshape(segments, length, heads, width // heads).transpose(1, 2)


class GdpNetwork(nn.Module):
    """Embedding, placer and head. Tied to a number of devices; of problems with fewer, the outputs
    beyond them are impossible."""

    def __init__(self, shape: GdpShape, seed: int = 0) -> None:
        super().__init__()
        if shape.width % shape.heads:
            raise ValueError(f"a width of {shape.width} does not divide into {shape.heads} heads")
        self.shape = shape
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.enter = nn.Linear(FEATURES, shape.width)
            self.rounds = nn.ModuleList(SageLayer(shape.width) for _ in range(shape.graph_layers))
            self.condition = nn.Linear(shape.width, shape.width) if shape.superposition else None
            self.layers = nn.ModuleList(PlacerLayer(shape) for _ in range(shape.placer_layers))
            self.leave = nn.LayerNorm(shape.width)
            self.head = nn.Linear(shape.width, shape.devices)
            _begin_relu(self.enter)
            nn.init.zeros_(self.head.bias)
            if self.condition is not None:
                nn.init.ones_(self.condition.bias)  # the product begins near x[l] itself

    def embed(self, graph: GdpGraph) -> torch.Tensor:
        """u x width: what the graph is around each unit, less the mean over its graph. (The mean is
        ours: what all units share says nothing about which of them belong together.)"""
        h = functional.relu(self.enter(graph.features))
        for layer in self.rounds:
            h = layer(h, graph)
        sizes = torch.tensor(graph.sizes, device=h.device)
        mean = torch.segment_reduce(h, "mean", lengths=sizes, axis=0)
        return h - mean.repeat_interleave(sizes, dim=0, output_size=len(h))

    def forward(self, graph: GdpGraph, slots: SegmentSlots | None = None) -> torch.Tensor:
        """u x devices: logits, those of impossible devices very low. `slots` are the graph's, where
        they are known already."""
        slots = slots or slots_of(graph, self.shape)
        h = self.embed(graph)[slots.unit]
        x = h
        c = None if self.condition is None else self.condition(h)
        for layer in self.layers:
            x = layer(x if c is None else c * x, slots)
        logits = self.head(self.leave(x))[slots.slot]
        allowed = functional.pad(
            graph.allowed, (0, self.shape.devices - graph.allowed.shape[1]), value=False
        )
        masked: torch.Tensor = logits.masked_fill(~allowed, IMPOSSIBLE)
        return masked
