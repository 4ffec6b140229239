"""PlacetoPolicy: what Placeto has learned so far, and the file that keeps it.

In: weights, and whatever training needs to go on as if it had not stopped. Out: a policy file of
kind "placeto", and the policy again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apportion.columns import Floats
from apportion.learn.adam import AdamMoments, Weights, flat, no_moments
from apportion.learn.placeto_network import ROUNDS, PlacetoNetwork
from apportion.place import read_policy, write_policy

KIND = "placeto"
FEATURES = 1  # version


@dataclass(frozen=True)
class PlacetoSettings:
    """How Placeto learns. Rounds, rates, clip, the first weight of entropy and the length of the
    baseline are those of the published code.

    parallel  episodes of one update; their gradients are added up
    rate      of Adam, at first and at the end, linear in between
    scale     of returns in the loss, which are in multiples of the step on one device: they differ
              between episodes by about a hundredth, and the entropy begins with a weight of 1
    entropy   its weight, at first and at the end, with a constant ratio in between
    updates   over so many the baseline is the mean
    begin     the placement that episodes begin with: "fixed" is one at random, the same for all of
              a graph, "fresh" another one each, "one-device", "best" the best one so far
    """

    rounds: int = ROUNDS
    parallel: int = 1
    rate: tuple[float, float] = (1e-3, 1e-4)
    scale: float = 300.0
    entropy: tuple[float, float] = (1.0, 0.03)
    updates: int = 10
    clip: float = 1.25
    visits: int = 1
    begin: str = "fixed"


@dataclass(frozen=True, eq=False)
class PlacetoPolicy:
    """A policy for one number of devices.

    history   for each graph in training the returns at every time step, of the latest updates
    progress  how much of the training is over, from 0 to 1
    """

    devices: int
    weights: Weights
    settings: PlacetoSettings
    moments: AdamMoments
    seed: int = 0
    episodes: int = 0
    evaluations: int = 0
    progress: float = 0.0
    history: Mapping[int, Floats] = field(default_factory=dict)
    trained_on: tuple[str, ...] = ()
    interrupted: bool = False


def new_policy(devices: int, seed: int, settings: PlacetoSettings) -> PlacetoPolicy:
    """A policy that has learned nothing."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = PlacetoNetwork(devices, settings.rounds)
    weights = {name: tensor.numpy() for name, tensor in network.state_dict().items()}
    return PlacetoPolicy(
        devices, weights, settings, no_moments(len(flat(weights))), seed=seed
    )  # fmt: skip


def network_of(policy: PlacetoPolicy) -> PlacetoNetwork:
    """The network with the weights of a policy."""
    with torch.random.fork_rng(devices=[]):
        network = PlacetoNetwork(policy.devices, policy.settings.rounds)
    network.load_state_dict({n: torch.from_numpy(np.array(w)) for n, w in policy.weights.items()})
    return network


def save_placeto(
    path: Path, policy: PlacetoPolicy, figures: Mapping[str, float] | None = None
) -> None:
    """Write a policy with all that training needs to go on."""
    tensors: dict[str, Any] = {f"network.{name}": w for name, w in policy.weights.items()}
    tensors["adam.mean"], tensors["adam.square"] = policy.moments.mean, policy.moments.square
    for graph, rows in policy.history.items():
        tensors[f"history.{graph}"] = rows
    facts = {
        "features_version": FEATURES,
        "devices": policy.devices,
        "settings": asdict(policy.settings),
        "steps": policy.moments.steps,
        "seed": policy.seed,
        "episodes": policy.episodes,
        "evaluations": policy.evaluations,
        "progress": policy.progress,
        "trained_on": list(policy.trained_on),
        "figures": dict(figures or {}),
    }
    write_policy(path, KIND, tensors, facts)


def load_placeto(path: Path) -> PlacetoPolicy:
    """The policy of a file. Raises ValueError, naming it, if it has none of Placeto's."""
    kept = read_policy(path, KIND)
    facts, tensors = kept.facts, kept.tensors
    try:
        if facts["features_version"] != FEATURES:
            raise ValueError(f"its features are of version {facts['features_version']}")
        chosen: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in facts["settings"].items()
        }
        settings = PlacetoSettings(**chosen)
        found = new_policy(int(facts["devices"]), int(facts["seed"]), settings)
        weights = {name: tensors[f"network.{name}"] for name in found.weights}
        if any(weights[name].shape != w.shape for name, w in found.weights.items()):
            raise ValueError("its tensors do not have the shapes of such a network")
        moments = AdamMoments(int(facts["steps"]), tensors["adam.mean"], tensors["adam.square"])
        if not moments.mean.shape == moments.square.shape == found.moments.mean.shape:
            raise ValueError("its moments do not have the shape of its weights")
        return PlacetoPolicy(
            devices=found.devices,
            weights=weights,
            settings=settings,
            moments=moments,
            seed=found.seed,
            episodes=int(facts["episodes"]),
            evaluations=int(facts["evaluations"]),
            progress=float(facts["progress"]),
            history={
                int(name.removeprefix("history.")): rows
                for name, rows in tensors.items()
                if name.startswith("history.")
            },
            trained_on=tuple(map(str, facts["trained_on"])),
        )
    except KeyError as error:
        raise ValueError(f"{path} is no whole policy of Placeto: it lacks {error}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no policy of Placeto: {error}") from None
