"""StepWords: the words of a step's random numbers as tensors at fixed addresses.

Part of the room execute. The keys of random operators come in, tensors of their words
(capture/counter_random.py) go out; `fill` writes those of another step into the same memory, so
that code that was traced or captured once draws new numbers at every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apportion.capture import word_table


def words_tensor(seed: int, step: int, operators: Sequence[int], place: str) -> torch.Tensor:
    """A row of two int32 words for each operator, on the device `place`; does not wait for it."""
    table = torch.from_numpy(word_table(seed, step, operators))
    if place == "cpu":
        return table
    return table.pin_memory().to(place, non_blocking=True)


class StepWords:
    """Tables of words, each at an address of its own, for the step that `fill` named last."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.now = (0, 0)  # seed and step
        self.tables: dict[tuple[int, ...], torch.Tensor] = {}

    def __call__(self, operator: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The two words of one operator."""
        (row,) = self.table((operator,))
        return row[0], row[1]

    def table(self, operators: tuple[int, ...]) -> torch.Tensor:
        """A row for each operator."""
        found = self.tables.get(operators)
        if found is None:
            found = self.tables[operators] = words_tensor(*self.now, operators, self.place)
        return found

    def fill(self, seed: int, step: int) -> None:
        """Makes the words those of a step."""
        self.now = (seed, step)
        if not self.tables:
            return
        every = [operator for operators in self.tables for operator in operators]
        rows = words_tensor(seed, step, every, self.place)
        for table, own in zip(
            self.tables.values(), rows.split([len(t) for t in self.tables.values()]), strict=True
        ):
            table.copy_(own)
