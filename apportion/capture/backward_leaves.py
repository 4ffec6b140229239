"""The leaves of an autograd graph: the tensors that a backward gives gradients to.

Part of capture/. The tensors that backward begins at come in; out go all leaves that they were
computed from, parameters and others that require a gradient, in the order in which they are met.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_REENTRANT = "CheckpointFunctionBackward"


@dataclass(frozen=True)
class BackwardLeaves:
    """The leaves, and whether the backward runs another one inside, as reentrant activation
    checkpointing does: then there may be more, and all must accumulate."""

    leaves: list[torch.Tensor]
    reentrant: bool


def backward_leaves(roots: Sequence[torch.Tensor]) -> BackwardLeaves:
    """The leaves that the roots depend on."""
    found: dict[int, torch.Tensor] = {id(r): r for r in roots if r.is_leaf and r.requires_grad}
    seen: set[Any] = set()
    rest: list[Any] = [root.grad_fn for root in roots]
    reentrant = False
    while rest:
        node = rest.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        reentrant = reentrant or type(node).__name__ == _REENTRANT
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            found[id(leaf)] = leaf
        rest += [following for following, _ in node.next_functions]
    return BackwardLeaves(list(found.values()), reentrant)
