"""gdp_file: a GdpPolicy in a file, with all that resuming its training needs.

In: a GdpPolicy, or a path. Out: a policy file (place/policy/policy_file.py) of kind `gdp`, or the
policy again, the same bit for bit.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from apportion.learn.gdp_graph import FEATURES_VERSION
from apportion.learn.gdp_network import GdpNetwork, GdpShape
from apportion.learn.gdp_policy import GdpPolicy
from apportion.place import read_policy, write_policy

KIND = "gdp"
RANDOM = "random"
ADAM = "adam."


def save_gdp(path: Path, policy: GdpPolicy, figures: dict[str, Any] | None = None) -> None:
    """Write a policy; `figures` are whatever is worth knowing about it."""
    tensors = {name: tensor.numpy() for name, tensor in policy.network.state_dict().items()}
    tensors |= {ADAM + name: tensor.numpy() for name, tensor in policy.moments.items()}
    tensors[RANDOM] = policy.random_state.numpy()
    facts = {
        "features_version": FEATURES_VERSION,
        "shape": asdict(policy.network.shape),
        "updates": policy.updates,
        "trained_on": list(policy.trained_on),
        "figures": figures or {},
    }
    write_policy(path, KIND, tensors, facts)


def load_gdp(path: Path) -> GdpPolicy:
    """The policy of a file. Raises ValueError, in one sentence, if it holds none."""
    file = read_policy(path, KIND)
    if file.facts.get("features_version") != FEATURES_VERSION:
        raise ValueError(
            f"{path} was trained on features of version {file.facts.get('features_version')!r}; "
            f"this release has version {FEATURES_VERSION}"
        )
    try:
        shape = GdpShape(**file.facts["shape"])
        updates, trained_on = int(file.facts["updates"]), tuple(file.facts["trained_on"])
        tensors = {name: torch.from_numpy(tensor) for name, tensor in file.tensors.items()}
        random_state = tensors.pop(RANDOM)
        moments = {
            name.removeprefix(ADAM): tensors.pop(name)
            for name in list(tensors)
            if name.startswith(ADAM)
        }
        network = GdpNetwork(shape)
        network.load_state_dict(tensors)
        torch.Generator().set_state(random_state)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"{path} holds no policy of GDP that can be used: {first}") from None
    return GdpPolicy(network, moments, random_state, updates, trained_on)
