"""What state an optimizer keeps of a parameter, and what that state begins with.

Part of capture/. The optimizer's class steps on small real tensors beside the live ones. What it
makes on its first step are the names of its state. If a step from constant first values gives what
the first step gave, these are the first values (Adam: zeros; NAdam: ones); if not, the first step
computes otherwise than later ones (SGD with dampening), and the state is *fresh* until it is done.

An update of one parameter that depends on another parameter's gradient is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from apportion.capture.optimizer_step import IN_GROUP, take_step
from apportion.capture.trace import CaptureError

NUMBER = torch.float64
"""The dtype of state that the optimizer keeps as a Python number."""


@dataclass(frozen=True)
class FirstState:
    """The state that an optimizer makes of a parameter.

    values   the number that each entry begins with; the names are sorted
    numbers  names of those that are Python numbers, each with its type
    kept     entries that are neither tensors nor numbers and never change
    fresh    whether the first step computes otherwise than later ones
    """

    values: dict[str, float]
    numbers: dict[str, type]
    kept: dict[str, Any]
    fresh: bool


def first_state(
    optimizer: torch.optim.Optimizer,
    settings: Mapping[str, Any],
    others: Mapping[str, Any],
    parameter: torch.Tensor,
) -> FirstState:
    """What state the optimizer makes of a parameter that has none.

    settings, others  two sets of settings of the parameter's group, without symbols, which differ
                      in all numbers that may change
    """
    trial = _Trial(optimizer, parameter)
    (state, begun), (_, again) = (trial.from_nothing(settings, seed) for seed in (0, 1))
    begun = {name: value if again.get(name) == value else 0.0 for name, value in begun.items()}
    names = sorted(state)
    numbers = {n: type(state[n]) for n in names if _is_number(state[n])}
    tensors = {n: state[n] for n in names if isinstance(state[n], torch.Tensor)}
    kept = {n: state[n] for n in names if n not in numbers and n not in tensors}
    for name, value in kept.items():
        if not (value is None or isinstance(value, str | bool)):
            raise CaptureError(
                f"{type(optimizer).__name__} keeps {name} as a {type(value).__name__}, which "
                "cannot be captured; state must be tensors and numbers"
            )
    values = {n: begun[n] for n in names if n not in kept}
    fresh = not all(
        trial.equal(used, seed, values, numbers, tensors, kept)
        for used, seed in ((settings, 0), (settings, 1), (others, 2))
    )
    return FirstState(values, numbers, kept, fresh)


def group_numbers(
    optimizer: torch.optim.Optimizer,
    settings: Mapping[str, Any],
    parameter: torch.Tensor,
    state: Mapping[str, Any],
) -> dict[str, type]:
    """The numbers that the optimizer keeps in the parameter's group from step to step, by key.

    Raises CaptureError if the update of a parameter depends on another one's gradient.
    """
    trial = _Trial(optimizer, parameter)
    one, kept = trial.beside(settings, state, 1.0)
    other, also = trial.beside(settings, state, 1000.0)
    equal = kept.keys() == also.keys() and all(_close(kept[key], also[key]) for key in kept)
    if not equal or not torch.equal(one, other):
        raise CaptureError(
            f"{type(optimizer).__name__} updates a parameter by the gradients of others too, which "
            "cannot be captured; switch that off (a limit on the norm of all gradients is "
            "clip_norm of capture) or use another optimizer"
        )
    return {key: int if isinstance(value, int) else float for key, value in kept.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def small_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape of as many dimensions, with few elements."""
    return tuple(min(size, 4) for size in shape)


class _Trial:
    """Steps on small tensors; what they are depends on a seed only."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        self.optimizer = optimizer
        self.shape = small_shape(tuple(parameter.shape))
        self.dtype = torch.complex128 if parameter.is_complex() else torch.float64

    def _pair(self, seed: int, scale: float = 1.0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        made = torch.randn((2, *self.shape), generator=generator, dtype=self.dtype)
        parameter = torch.nn.Parameter(made[0].clone())
        parameter.grad = made[1] * scale
        return parameter

    def _step(self, settings: Mapping[str, Any], parameters: Any, state: Any, seen: Any) -> Any:
        own = {p: {n: v for n, v in each.items() if not n.startswith(IN_GROUP)}
               for p, each in state.items()}  # fmt: skip
        shared = {n.removeprefix(IN_GROUP): v for each in state.values() for n, v in each.items()
                  if n.startswith(IN_GROUP)}  # fmt: skip
        groups = [dict(settings) | shared | {"params": list(parameters)}]
        state = {p: each for p, each in own.items() if each}
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            return take_step(self.optimizer, groups, state, seen)

    def from_nothing(
        self, settings: Mapping[str, Any], seed: int
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """The state after the first step, and the constants it may have begun with."""
        begun: dict[str, float] = {}

        def seen(name: str, value: Any) -> None:
            begun[name] = _constant(value)

        parameter = self._pair(seed)
        state = self._step(settings, [parameter], {}, seen).of(parameter)
        for name in state:
            if name.startswith(IN_GROUP):
                begun[name] = _constant(settings.get(name.removeprefix(IN_GROUP)))
        return state, {name: begun.get(name, 0.0) for name in state}

    def equal(
        self,
        settings: Mapping[str, Any],
        seed: int,
        values: Mapping[str, float],
        numbers: Mapping[str, type],
        tensors: Mapping[str, torch.Tensor],
        kept: Mapping[str, Any],
    ) -> bool:
        """Whether a step from these first values gives what a step from nothing gives."""
        one, other = self._pair(seed), self._pair(seed)
        expected = self._step(settings, [one], {}, _ignore).of(one)
        begin: dict[str, Any] = dict(kept)
        for name, value in values.items():
            like = tensors.get(name)
            begin[name] = numbers[name](value) if like is None else torch.full_like(like, value)
        try:
            found = self._step(settings, [other], {other: begin}, _ignore).of(other)
        except CaptureError:
            return False  # it does not take such a state
        if found.keys() != expected.keys():
            return False
        pairs = [(one.detach(), other.detach()), *((expected[n], found[n]) for n in values)]
        return all(map(_close, *zip(*pairs, strict=True)))

    def beside(
        self, settings: Mapping[str, Any], state: Mapping[str, Any], scale: float
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """A parameter after a step beside another one, whose gradient is scaled; and what changed
        in their group."""
        pair = [self._pair(0), self._pair(1, scale)]
        given = {p: self._like(state) for p in pair} if state else {}
        end = self._step(settings, pair, given, _ignore)
        return pair[0].detach(), end.groups[0]

    def _like(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """State of the small parameter like that of a large one."""
        made: dict[str, Any] = {}
        for name, value in state.items():
            own = isinstance(value, torch.Tensor) and value.dim() > 0
            made[name] = torch.ones(self.shape, dtype=self.dtype) if own else value
            if isinstance(value, torch.Tensor) and not own:
                made[name] = value.detach().clone()
        return made


def _ignore(name: str, value: Any) -> None:
    pass


def _constant(value: Any) -> float:
    """The number that all elements are, or 0."""
    if _is_number(value):
        return float(value)
    if not isinstance(value, torch.Tensor) or not value.numel() or value.is_complex():
        return 0.0
    flat = value.detach().reshape(-1)
    return float(flat[0]) if bool((flat == flat[0]).all()) else 0.0


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        return torch.allclose(a, b, rtol=1e-9, atol=1e-12, equal_nan=True)
    return type(a) is type(b) and bool(abs(a - b) <= 1e-9 * max(abs(a), abs(b)))
