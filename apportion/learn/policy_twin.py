"""policy twin: the network of `policy` in torch, for its training.

In: tensors as in place/policy/policy_network.py, the edges of a PolicyGraph, features. Out:
embeddings, and scores of devices at every moment of a placement that was recorded. The same numbers
as the numpy functions give, and their gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from apportion.columns import Floats
from apportion.place import PolicyGraph, pair_weights

Parameters = Mapping[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class TwinGraph:
    """What encoding reads of a graph: for both sides offsets, neighbours and their weights."""

    features: torch.Tensor
    sides: tuple[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor], ...]


def twin_graph(
    graph: PolicyGraph, features: Floats, dtype: torch.dtype = torch.float32
) -> TwinGraph:
    """The graph as torch takes it."""
    before, after = pair_weights(graph)
    sides = tuple(
        (way, torch.from_numpy(start), torch.from_numpy(others),
         torch.from_numpy(weights).to(dtype)[:, None])
        for way, start, others, weights in (
            ("before", graph.before_start, graph.before, before),
            ("after", graph.after_start, graph.after, after),
        )
    )  # fmt: skip
    return TwinGraph(torch.from_numpy(features).to(dtype), sides)


def encode_twin(it: Parameters, graph: TwinGraph) -> torch.Tensor:
    """u x width: an embedding of every unit."""
    h = torch.relu(graph.features @ it["input.weight"] + it["input.bias"])
    rounds = sum(name.endswith(".mix") for name in it)
    for k in range(rounds):
        sides = [h]
        for way, start, others, weights in graph.sides:
            messages = torch.relu(h @ it[f"round{k}.{way}"])[others]
            sides.append(torch.segment_reduce(messages, "max", offsets=start, initial=0.0))
            sides.append(torch.segment_reduce(messages * weights, "sum", offsets=start))
        change = torch.cat(sides, dim=1) @ it[f"round{k}.mix"] + it[f"round{k}.bias"]
        h = h + torch.relu(change)
        h = h / torch.sqrt((h * h).mean(dim=1, keepdim=True) + 1e-6)
    return h


def base_twin(it: Parameters, embedding: torch.Tensor) -> torch.Tensor:
    """u x hidden: what the hidden layer of the head begins with."""
    mean = embedding.mean(dim=0)
    return embedding @ it["head.unit"] + (mean @ it["head.mean"] + it["head.bias"])


def scores_twin(
    it: Parameters, base: torch.Tensor, features: torch.Tensor, is_open: torch.Tensor
) -> torch.Tensor:
    """... x u x k: scores of the devices, minus infinity for those that are not open."""
    hidden = torch.relu(base[..., None, :] + features @ it["head.device"])
    weight = is_open[..., None].to(hidden.dtype)
    context = (hidden * weight).sum(dim=-2) / weight.sum(dim=-2)
    common = context @ it["head.context"] + it["head.last_bias"]
    last = torch.relu(hidden @ it["head.hidden"] + common[..., None, :])
    return (last @ it["head.out"]).masked_fill(~is_open, -np.inf)
