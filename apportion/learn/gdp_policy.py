"""GdpPolicy: what GDP has learned. gdp.py trains and applies it, gdp_file.py keeps it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from apportion.learn.best_placement import BestPlacement
from apportion.learn.gdp_network import GdpNetwork


@dataclass(frozen=True, eq=False)
class GdpPolicy:
    """A policy, and what resuming its training needs. `searches` are those of the last training."""

    network: GdpNetwork
    moments: dict[str, torch.Tensor]  # Adam's
    random_state: torch.Tensor
    updates: int
    trained_on: tuple[str, ...]
    searches: tuple[BestPlacement, ...] = ()
    interrupted: bool = False
