"""What a divided step returns: the loss and other scalars, in the form of what the user's returns.

Part of the room run. A Program and a rank's Worker come in; after a step, the object that the
user's step would return goes out, on every rank, with scalars that nobody waits for until they are
looked at (pending_loss.py). Scalars beside the loss are state that the step only writes, so each is
where the plan leaves that state.
"""

from __future__ import annotations

from typing import Any

import torch

from apportion.capture import Program
from apportion.execute import Worker
from apportion.run.pending_loss import LossSharing


class ReturnedResults:
    """One rank's side of what its steps return."""

    def __init__(self, program: Program, worker: Worker) -> None:
        self._rank, self._results = worker.rank, program.results
        executable = worker.rank.executable
        how = (worker.rank.device, worker.backends)
        self._loss = LossSharing(executable, executable.loss_slots, *how)
        self.loss: torch.Tensor | None = None  # of the last step
        self._slots: dict[str, list[int]] = {}
        for name, value in program.returned.items():
            if value is not None:
                held = [s for s in executable.begin if executable.slots[s].value == value]
                self._slots[name] = held
        self._shared = {n: LossSharing(executable, s, *how) for n, s in self._slots.items()}

    def everywhere(self, loss: torch.Tensor | None) -> Any:
        """What the step that is over returns; `loss` where it is here."""
        shared, results = self._loss.everywhere(loss), self._results
        self.loss = shared
        if results is None or not results.names:
            return shared
        scalars = {name: self._shared[name].everywhere(self._own(name)) for name in self._slots}
        return results.filled(lambda k: scalars.get(results.names[k], shared))

    def _own(self, name: str) -> torch.Tensor | None:
        tensors = self._rank.tensors
        held = next((tensors[s] for s in self._slots[name] if s in tensors), None)
        return None if held is None else held.detach().clone()
