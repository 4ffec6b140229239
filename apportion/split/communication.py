"""Communication: when a step's gradients travel, and whether the next step waits for all of them.

A part of split/: a decision of a Strategy, which lower/coalesce.py and late_tasks.py carry out.

    wfbp  wait-free backpropagation: gradients travel while the backward pass goes on, and the step
          ends when all parameters are new
    p3    the next step begins meanwhile: its forward pass waits for each parameter where it first
          reads it. What the backward pass makes last is read first, so only a share of the bytes
          (`early`) is sent as it is made; the rest follows in the order in which it is read
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WFBP, P3 = "wfbp", "p3"
POLICIES = (WFBP, P3)


@dataclass(frozen=True, slots=True)
class Communication:
    """A policy, and the share of gradients' bytes that is sent in the order in which it is made."""

    policy: str = WFBP
    early: float = 1.0

    @property
    def across(self) -> bool:
        """Whether a step begins before the updates of the last one are done."""
        return self.policy == P3

    def to_json(self) -> dict[str, Any]:
        return {"policy": self.policy, "early": self.early}


WITHIN = Communication()


def read_communication(data: Any) -> Communication:
    """The Communication that `to_json` wrote; ValueError if it is none."""
    if data is None:
        return WITHIN
    try:
        found = Communication(str(data["policy"]), float(data["early"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"a communication has a policy and a share that is early, not {data!r}"
        ) from error
    if found.policy not in POLICIES or not 0 <= found.early <= 1:
        raise ValueError(
            f"a communication is one of {', '.join(POLICIES)}, with an early share of 0 to 1, "
            f"not {data!r}"
        )
    return found
