"""The updates of all optimizers of a step, their groups numbered one after the other.

Part of capture/. optimizer.py makes the templates; here they are those of a LiveState: the k-th
group of the second optimizer has the number of the first one's groups plus k, in `Setting`
expressions, recipes and fixed settings alike.
"""

from __future__ import annotations

from apportion.capture import optimizer as updates
from apportion.capture.live_state import LiveState
from apportion.capture.torch_private import FakeTensorMode


class AllUpdateTemplates(updates.UpdateTemplates):
    """The updates of all optimizers; asked with the numbers of groups over all optimizers."""

    def __init__(self, live: LiveState, mode: FakeTensorMode) -> None:
        super().__init__(live.optimizers, mode)


def check_all_fixed(live: LiveState, fixed: tuple[updates.FixedSetting, ...]) -> None:
    """Raises ValueError if a setting that shaped a captured update has changed."""
    updates.check_fixed(live.optimizers, fixed)
