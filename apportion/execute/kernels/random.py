"""Random numbers by global index.

Kernels of the room execute: a Context and arguments come in, a tuple of tensors goes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from apportion.capture import key_words, uniform_of_words
from apportion.execute.device_random import uniform_on_cuda
from apportion.execute.host_random import uniform_on_host, uniform_room
from apportion.execute.kernels.base import Context, own


@own("apportion.random_uniform")
def _random_uniform(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    size, key, kind, *place = args
    where = place[0] if place else tuple(((n, 0, n),) for n in size)
    if context.words is None:
        if context.device == "meta":
            return (uniform_room(size, kind, "meta").to(kind),)
        words = key_words((context.seed, context.step, key))
        if context.cuda:
            return (uniform_on_cuda(*words, where, kind, context.device),)
        return (uniform_on_host(*words, where, kind),)
    indices = [global_index(atoms, context.device) for atoms in where]
    return (uniform_of_words(*context.words(key), indices, kind),)


def global_index(atoms: Sequence[tuple[int, int, int]], device: str) -> torch.Tensor:
    """Global indices along a dimension whose atoms are (factor, low, high)."""
    index = torch.zeros(1, dtype=torch.int64, device=device)
    for factor, low, high in atoms:
        places = torch.arange(low, high, device=device)
        index = (index.unsqueeze(-1) * factor + places).reshape(-1)
    return index
