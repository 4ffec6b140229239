"""What state an optimizer keeps of a parameter, and what that state begins with.

Part of capture/. The optimizer's class steps on small real tensors beside the live ones. What it
makes on its first step are the names of its state. If a step from constant first values gives what
the first step gave, these are the first values (Adam: zeros; NAdam: ones); if not, the first step
computes otherwise than later ones (SGD with dampening), and the state is *fresh* until it is done.

An update that depends on another parameter or its gradient is *joint*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from apportion.capture.optimizer_step import (
    IN_GROUP,
    StepEnd,
    is_shared,
    kept_elsewhere,
    take_step,
)
from apportion.capture.state_tree import flat_state
from apportion.capture.step_tables import is_table
from apportion.capture.trace import CaptureError

NUMBER = torch.float64
"""The dtype of state that the optimizer keeps as a Python number."""
STEPS = 8  # in which an optimizer shows what it keeps for several parameters
TABLE_STEPS = 24  # in which a table comes round


@dataclass(frozen=True)
class FirstState:
    """The state that an optimizer makes of a parameter.

    values   the number that each entry begins with; the names are sorted
    numbers  names of those that are Python numbers, each with its type
    kept     entries that are neither tensors nor numbers and never change
    fresh    whether the first step computes otherwise than later ones
    made     shared state that the first step makes
    """

    values: dict[str, float]
    numbers: dict[str, type]
    kept: dict[str, Any]
    fresh: bool
    made: tuple[str, ...] = ()


def first_state(
    optimizer: torch.optim.Optimizer,
    settings: Mapping[str, Any],
    others: Mapping[str, Any],
    parameter: torch.Tensor,
    shared: Mapping[str, Any],
    later: Mapping[str, type] | None = None,
    tables: frozenset[str] = frozenset(),
) -> FirstState:
    """What state the optimizer makes of a parameter that has none.

    settings, others  two sets of settings of the parameter's group, without symbols, which differ
                      in all numbers that may change
    shared            the state that it shares with others, as it is now
    later             the types of numbers that it may share on a later step
    tables            what it notes only in order not to compute it again
    """
    trial = _Trial(optimizer, parameter, tables)
    (state, begun), (_, again) = (trial.from_nothing(settings, shared, seed) for seed in (0, 1))
    begun = {name: value if again.get(name) == value else 0.0 for name, value in begun.items()}
    made = tuple(name for name in sorted(state) if is_shared(name) and name not in shared)
    state = {name: kind(0) for name, kind in (later or {}).items()} | state
    names = sorted(state)
    numbers = {n: type(state[n]) for n in names if _is_number(state[n])}
    tensors = {n: state[n] for n in names if isinstance(state[n], torch.Tensor)}
    kept = {n: state[n] for n in names if n not in numbers and n not in tensors}
    for name, value in kept.items():
        if not is_kept(value):
            raise CaptureError(
                f"{type(optimizer).__name__} keeps {name} as a {type(value).__name__}, which "
                "cannot be captured; state must be tensors and numbers"
            )
    values = {n: begun.get(n, 0.0) for n in names if n not in kept}
    fresh = not all(
        trial.equal(used, seed, values, numbers, tensors, kept)
        for used, seed in ((settings, 0), (settings, 1), (others, 2))
    )
    return FirstState(values, numbers, kept, fresh, made)


def is_kept(value: Any) -> bool:
    """Whether an entry of state is one that can only stay as it is."""
    return value is None or isinstance(value, str | bool) or value in ([], (), {})


@dataclass(frozen=True)
class SharedState:
    """What an optimizer keeps for several parameters.

    numbers  the types of the numbers that it keeps in a group, or for itself, by name
    joint    whether the update of a parameter depends on another one
    tables   what it notes only in order not to compute it again
    """

    numbers: dict[str, type]
    joint: bool
    tables: frozenset[str]


def shared_state(
    optimizer: torch.optim.Optimizer,
    settings: Mapping[str, Any],
    parameter: torch.Tensor,
    state: Mapping[str, Any],
) -> SharedState:
    """What the optimizer keeps for several parameters from step to step."""
    trial = _Trial(optimizer, parameter)
    one = trial.beside(settings, state)
    tables = frozenset(n for n, value in one.shared.items() if is_table(value))
    if tables:
        blank = _Trial(optimizer, parameter, tables)
        noted = trial.beside(settings, state, steps=TABLE_STEPS)
        if not noted.without(tables).equals(blank.beside(settings, state, steps=TABLE_STEPS)):
            raise kept_elsewhere(type(optimizer).__name__, sorted(tables))
        trial, one = blank, blank.beside(settings, state)
    joint = not all(one.equals(trial.beside(settings, state, **other)) for other in _OTHERS)
    found: dict[str, type] = {
        n: int if isinstance(value, int) else float for n, value in one.shared.items()
    }
    return SharedState(found, joint, tables)


@dataclass(frozen=True)
class _TrialEnd:
    """A parameter after some steps, and all state shared with others that any of them changed."""

    parameter: torch.Tensor
    shared: dict[str, Any]

    def without(self, names: frozenset[str]) -> _TrialEnd:
        return _TrialEnd(self.parameter, {n: v for n, v in self.shared.items() if n not in names})

    def equals(self, other: _TrialEnd) -> bool:
        return (
            torch.equal(self.parameter, other.parameter)
            and self.shared.keys() == other.shared.keys()
            and all(_close(value, other.shared[name]) for name, value in self.shared.items())
        )


# what another parameter may be that must not matter
_OTHERS: tuple[dict[str, Any], ...] = (
    {"gradient": 1e3}, {"gradient": 1e9}, {"gradient": 0.0}, {"parameter": 1e3}, {"alone": True},
)  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def small_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape of as many dimensions, with few elements."""
    return tuple(min(size, 4) for size in shape)


class _Trial:
    """Steps on small tensors; what they are depends on a seed only."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameter: torch.Tensor,
        tables: frozenset[str] = frozenset(),
    ) -> None:
        self.optimizer, self.tables = optimizer, tables
        self.shape = small_shape(tuple(parameter.shape))
        self.dtype = torch.complex128 if parameter.is_complex() else torch.float64

    def _pair(self, seed: int, own: float = 1.0, gradient: float = 1.0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        made = torch.randn((2, *self.shape), generator=generator, dtype=self.dtype)
        parameter = torch.nn.Parameter(made[0] * own)
        parameter.grad = made[1] * gradient
        return parameter

    def _step(
        self,
        settings: Mapping[str, Any],
        parameters: Sequence[torch.Tensor],
        state: Mapping[Any, Mapping[str, Any]],
        seen: Callable[[str, Any], None] = lambda name, value: None,
    ) -> StepEnd:
        own = {p: {n: v for n, v in each.items() if not is_shared(n)} for p, each in state.items()}
        shared = {n: v for each in state.values() for n, v in each.items() if is_shared(n)}
        numbers = {n.removeprefix(IN_GROUP): v for n, v in shared.items() if n.startswith(IN_GROUP)}
        groups = [dict(settings) | numbers | {"params": list(parameters)}]
        rest = {n: v for n, v in shared.items() if not n.startswith(IN_GROUP)}
        own = {p: each for p, each in own.items() if each}
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            return take_step(self.optimizer, groups, own, seen, rest, self.tables)

    def from_nothing(
        self, settings: Mapping[str, Any], shared: Mapping[str, Any], seed: int
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """The state after the first step, and the constants it may have begun with."""
        begun = {name: _constant(value) for name, value in shared.items()}

        def seen(name: str, value: Any) -> None:
            for entry, each in flat_state({name: value}).items():
                begun[entry] = _constant(each)

        parameter = self._pair(seed)
        end = self._step(settings, [parameter], {parameter: shared}, seen)
        state = end.of(parameter, given=shared)
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
        shared = [name for name in values if is_shared(name)]
        expected = self._step(settings, [one], {}).of(one, given=shared)
        begin: dict[str, Any] = dict(kept)
        for name, value in values.items():
            like = tensors.get(name)
            begin[name] = numbers[name](value) if like is None else torch.full_like(like, value)
        try:
            found = self._step(settings, [other], {other: begin}).of(other, given=shared)
        except CaptureError:
            return False  # it does not take such a state
        if found.keys() != expected.keys():
            return False
        pairs = [(one.detach(), other.detach()), *((expected[n], found[n]) for n in values)]
        return all(map(_close, *zip(*pairs, strict=True)))

    def beside(
        self,
        settings: Mapping[str, Any],
        state: Mapping[str, Any],
        parameter: float = 1.0,
        gradient: float = 1.0,
        alone: bool = False,
        steps: int = STEPS,
    ) -> _TrialEnd:
        """A parameter after some steps beside another one, which is scaled or left out."""
        pair = [self._pair(0), self._pair(1, parameter, gradient)][: 1 if alone else 2]
        given: Any = {p: self._like(state) for p in pair} if state else {}
        shared: dict[str, Any] = {}
        for _ in range(steps):
            end = self._step(settings, pair, given)
            shared = {n: end.groups[0][n] for n in (*shared, *end.changed[0])}
            given = {p: end.of(p, given=shared) for p in pair}
        return _TrialEnd(pair[0].detach(), shared)

    def _like(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """State of the small parameter like that of a large one."""
        made: dict[str, Any] = {}
        for name, value in flat_state(state).items():
            own = isinstance(value, torch.Tensor) and value.dim() > 0
            made[name] = torch.ones(self.shape, dtype=self.dtype) if own else value
            if isinstance(value, torch.Tensor) and not own:
                made[name] = value.detach().clone()
        return made


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
