"""policy network: the learned part of `policy`, as numbers and as functions of them, without torch.

In: a PolicyGraph and the features of its units. Out: an embedding of every unit, by a few rounds of
messages between units that exchange outputs, and what the scores of devices begin with.

    h = relu(features W + b)
    each round: h = norm(h + relu([h, max and mean before, max and mean after] M + b))

where the maximum is over relu(h B) of neighbours on that side and the mean is weighted by what they
exchange; norm divides by the root of the mean square. A device's score for a unit is a small
network of the unit's embedding, the mean embedding, and features of the device at that moment
(policy_decode.py), so that there may be any number of devices. learn/policy_twin.py is the same in
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from apportion.columns import Floats, Ints, compiled
from apportion.place.policy.policy_features import FEATURES_VERSION, UNIT_FEATURES, PolicyGraph
from apportion.place.policy.policy_file import PolicyFile, read_policy, write_policy

KIND = "policy"
DEVICE_FEATURES = 22
WIDTH, ROUNDS, HIDDEN, LAST = 40, 4, 64, 32
SHIPPED = Path(__file__).parent / "policies" / "policy.safetensors"


class PolicyHead(NamedTuple):  # numba reads it
    """What scores devices, in policy_decode.py."""

    device: Floats  # DEVICE_FEATURES x HIDDEN
    hidden: Floats  # HIDDEN x LAST
    context: Floats  # HIDDEN x LAST: of the mean over devices
    bias: Floats  # LAST
    out: Floats  # LAST


@dataclass(frozen=True, eq=False)
class PolicyNetwork:
    """A learned policy: its tensors by name (`tensor_shapes`), and what is known of it."""

    tensors: Mapping[str, Floats]
    facts: Mapping[str, Any]

    @property
    def head(self) -> PolicyHead:
        it = self.tensors
        return PolicyHead(
            it["head.device"], it["head.hidden"], it["head.context"], it["head.last_bias"],
            it["head.out"],
        )  # fmt: skip


def tensor_shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of a network."""
    shapes: dict[str, tuple[int, ...]] = {
        "input.weight": (UNIT_FEATURES, WIDTH),
        "input.bias": (WIDTH,),
    }
    for k in range(ROUNDS):
        shapes[f"round{k}.before"] = (WIDTH, WIDTH)
        shapes[f"round{k}.after"] = (WIDTH, WIDTH)
        shapes[f"round{k}.mix"] = (5 * WIDTH, WIDTH)
        shapes[f"round{k}.bias"] = (WIDTH,)
    shapes["head.unit"] = (WIDTH, HIDDEN)
    shapes["head.mean"] = (WIDTH, HIDDEN)
    shapes["head.device"] = (DEVICE_FEATURES, HIDDEN)
    shapes["head.bias"] = (HIDDEN,)
    shapes["head.hidden"] = (HIDDEN, LAST)
    shapes["head.context"] = (HIDDEN, LAST)
    shapes["head.last_bias"] = (LAST,)
    shapes["head.out"] = (LAST,)
    return shapes


def new_network(seed: int = 0) -> PolicyNetwork:
    """A network that has learned nothing: weights uniform as Glorot's, no biases."""
    random = np.random.default_rng(seed)
    tensors: dict[str, Floats] = {}
    for name, shape in tensor_shapes().items():
        if name.endswith("bias"):
            tensors[name] = np.zeros(shape)
        else:
            most = np.sqrt(6 / (shape[0] + (shape[1] if len(shape) > 1 else 1)))
            drawn = random.uniform(-most, most, shape).astype(np.float32)
            tensors[name] = drawn.astype(np.float64)
    return PolicyNetwork(tensors, {"features": FEATURES_VERSION, "trained_on": []})


def save_network(path: Path, network: PolicyNetwork) -> None:
    """Write a network as a policy file, in single precision."""
    small = {name: tensor.astype(np.float32) for name, tensor in network.tensors.items()}
    write_policy(path, KIND, small, {**network.facts, "features": FEATURES_VERSION})


def load_network(path: Path) -> PolicyNetwork:
    """The network in a policy file."""
    return network_of(read_policy(path, KIND, tensor_shapes()), path)


def network_of(file: PolicyFile, path: Path) -> PolicyNetwork:
    """The network that a policy file has, if its features are those of this release."""
    if file.facts.get("features") != FEATURES_VERSION:
        raise ValueError(
            f"{path} has learned features of version {file.facts.get('features')!r}; this release "
            f"has version {FEATURES_VERSION}: train it again"
        )
    tensors = {name: plain_tensor(tensor) for name, tensor in file.tensors.items()}
    return PolicyNetwork(tensors, file.facts)


def plain_tensor(tensor: npt.NDArray[Any]) -> Floats:
    """The tensor as compiled code takes it."""
    return np.ascontiguousarray(tensor, np.float64)


def shipped_network() -> PolicyNetwork:
    """The network that comes with the package."""
    return load_network(SHIPPED)


def encode(network: PolicyNetwork, graph: PolicyGraph, features: Floats) -> Floats:
    """u x WIDTH: an embedding of every unit."""
    it = network.tensors
    before, after = pair_weights(graph)
    h = np.maximum(features @ it["input.weight"] + it["input.bias"], 0)
    for k in range(ROUNDS):
        sides = [h]
        for way, start, others, weights in (
            ("before", graph.before_start, graph.before, before),
            ("after", graph.after_start, graph.after, after),
        ):
            messages = np.maximum(h @ it[f"round{k}.{way}"], 0)
            sides += pool(messages, start, others, weights)
        change = np.concatenate(sides, axis=1) @ it[f"round{k}.mix"] + it[f"round{k}.bias"]
        h = h + np.maximum(change, 0)
        h = h / np.sqrt((h * h).mean(axis=1, keepdims=True) + 1e-6)
    return h


def first_scores(network: PolicyNetwork, embedding: Floats) -> Floats:
    """u x HIDDEN: what the hidden layer of the head begins with, for every unit."""
    it = network.tensors
    mean = embedding.mean(axis=0) if len(embedding) else np.zeros(WIDTH)
    found: Floats = embedding @ it["head.unit"] + (mean @ it["head.mean"] + it["head.bias"])
    return found


def pair_weights(graph: PolicyGraph) -> tuple[Floats, Floats]:
    """For every neighbour before and after a unit its share in what the unit exchanges there."""
    k = len(graph.limit)
    pairs = max(k * (k - 1), 1)
    lag, pace = graph.lag.sum() / pairs, graph.pace.sum() / pairs
    found = []
    for start, sends, count in (
        (graph.before_start, graph.before_sends, graph.before_count),
        (graph.after_start, graph.after_sends, graph.after_count),
    ):
        cost = sends * pace + count * lag + 1e-9
        rows = np.repeat(np.arange(len(start) - 1), np.diff(start))
        found.append(cost / np.bincount(rows, cost, len(start) - 1)[rows])
    return found[0], found[1]


def _pool_by_rows(
    messages: Floats, start: Ints, others: Ints, weights: Floats
) -> tuple[Floats, Floats]:
    """What `pool` does, a unit at a time."""
    most, mean = np.zeros_like(messages), np.zeros_like(messages)
    for unit in range(len(start) - 1):
        here = slice(start[unit], start[unit + 1])
        if here.stop > here.start:
            rows = messages[others[here]]
            most[unit] = rows.max(axis=0)
            mean[unit] = (rows * weights[here, None]).sum(axis=0)
    return most, mean


@compiled(plain=_pool_by_rows)
def pool(messages: Floats, start: Ints, others: Ints, weights: Floats) -> tuple[Floats, Floats]:
    """For every unit the maximum and the weighted mean of its neighbours' messages, which are not
    negative; nothing where it has none."""
    most, mean = np.zeros_like(messages), np.zeros_like(messages)
    for unit in range(len(start) - 1):
        for at in range(start[unit], start[unit + 1]):
            other, weight = others[at], weights[at]
            for j in range(messages.shape[1]):
                most[unit, j] = max(most[unit, j], messages[other, j])
                mean[unit, j] += weight * messages[other, j]
    return most, mean
