"""apportion::update: an operator of torch's that stands for an optimizer's update in a trace.

Part of capture/. It takes a parameter, its gradient and its optimizer state, the number of the
parameter, and the number of the call of optimizer.step that it is part of; its results have the
types of the new parameter and state. build_graph.py makes an update Op of the call. On tensors with
data, which nobody trains by, all stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

KIND = "apportion.update.default"

_LIBRARY = torch.library.Library("apportion", "FRAGMENT")
_LIBRARY.define("update(Tensor[] given, int parameter, int step) -> Tensor[]")


def _unchanged(given: Sequence[torch.Tensor], parameter: int, step: int) -> list[torch.Tensor]:
    return [torch.clone(x) for k, x in enumerate(given) if k != 1]


_LIBRARY.impl("update", _unchanged, "CompositeExplicitAutograd")


def update_call(given: Sequence[torch.Tensor], parameter: int, step: int) -> list[torch.Tensor]:
    """The new parameter and state; `given` are the parameter, its gradient and its state."""
    found: list[torch.Tensor] = torch.ops.apportion.update.default(list(given), parameter, step)
    return found
