"""What changes from step to step, as tensors at fixed addresses: words and learning rates.

Part of the room execute. The keys of random operators come in, tensors of their words
(capture/counter_random.py) go out; parameter groups come in, their rates go out. `fill` writes
those of another step into the same memory, so that code that was traced or recorded once draws new
numbers and follows a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from apportion.capture import word_table


def words_tensor(seed: int, step: int, operators: Sequence[int], place: str) -> torch.Tensor:
    """A row of two int32 words for each operator, on the device `place`; does not wait for it."""
    return _on(torch.from_numpy(word_table(seed, step, operators)), place)


def _on(tensor: torch.Tensor, place: str) -> torch.Tensor:
    return tensor if place == "cpu" else tensor.pin_memory().to(place, non_blocking=True)


class StepWords:
    """Tables of words, each at an address of its own, for the step that `fill` named last."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.now = (0, 0)  # seed and step
        self.tables: dict[tuple[int, ...], torch.Tensor] = {}
        self.room: torch.Tensor | None = None  # that all tables are views of

    def __call__(self, operator: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The two words of one operator."""
        row = self.table((operator,))[0]
        return row[0], row[1]

    def table(self, operators: tuple[int, ...]) -> torch.Tensor:
        """A row for each operator."""
        found = self.tables.get(operators)
        if found is None:
            found = self.tables[operators] = words_tensor(*self.now, operators, self.place)
            self.room = None
        return found

    def settle(self) -> None:
        """Puts all tables next to each other, for the last time before addresses matter."""
        if self.tables and self.room is None:
            self.room = torch.cat(list(self.tables.values()))
            rows = self.room.split([len(table) for table in self.tables.values()])
            self.tables = dict(zip(self.tables, rows, strict=True))

    def fill(self, seed: int, step: int) -> None:
        """Makes the words those of a step."""
        self.now = (seed, step)
        if self.room is not None:
            every = [operator for operators in self.tables for operator in operators]
            self.room.copy_(words_tensor(seed, step, every, self.place), non_blocking=True)
        else:
            for operators, table in self.tables.items():
                table.copy_(words_tensor(seed, step, operators, self.place), non_blocking=True)


class StepRates:
    """The learning rate of each parameter group that was asked for, in float32."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.values: dict[int, float] = {}
        self.rates: dict[int, torch.Tensor] = {}
        self.setting: Callable[[Any], float] = _nobody

    def __call__(self, group: int) -> torch.Tensor:
        """The rate of a group."""
        if group not in self.rates:
            self.values[group] = self.setting(("get", group, "lr"))
            rate = torch.tensor(self.values[group], dtype=torch.float32)
            self.rates[group] = _on(rate, self.place)
        return self.rates[group]

    def fill(self, setting: Callable[[Any], float]) -> None:
        """Makes the rates those that an optimizer has now."""
        self.setting = setting
        for group, rate in self.rates.items():
            value = setting(("get", group, "lr"))
            if value != self.values[group]:
                self.values[group] = value
                new = torch.tensor(value, dtype=torch.float32)
                rate.copy_(_on(new, self.place), non_blocking=True)


def _nobody(expression: Any) -> float:
    raise AssertionError("rates are filled before they are read")
