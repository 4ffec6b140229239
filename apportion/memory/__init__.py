"""memory: decisions about the Graph that trade time for memory.

In: a Graph, and which of its Ops are recomputed. Out: a Graph in which they are Ops of the backward
too, and a Strategy for it. No torch.
Read recompute.py first (the Graph), then carry_strategy.py (a Strategy for it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apportion.faces import lazy_face

if TYPE_CHECKING:
    pass

lazy_face(__name__)
