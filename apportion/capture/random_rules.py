"""torch's random operators by ours: what capture/ records in their place, and runs eagerly.

Every random operator of torch has a rule in `RANDOM_RULES` that makes its result from uniform
numbers (counter_random.py). The rules run in two places: while a step is recorded (record.py),
where each uniform draw becomes an Op of the Graph, and under `CounterRandom`, the single-device
reference, where it becomes numbers. Both number the draws in the same order, so that both draw the
same.

    normal = sqrt(-2 log(1 - uniform)) cos(2 pi uniform'), after Box and Muller
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from apportion.capture.counter_random import computing_dtype, uniform_tensor
from apportion.capture.grouped_product import GROUPED_MM, grouped_mm
from apportion.capture.torch_private import TorchDispatchMode

_BISECTIONS = 40  # enough for a Poisson mean of 10**11

aten = torch.ops.aten


class UniformSource(Protocol):
    """Where a rule's uniform numbers come from, and how it overwrites a tensor."""

    def uniform(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...

    def assign(self, target: torch.Tensor, value: torch.Tensor) -> torch.Tensor: ...


Rule = TypeVar("Rule", bound=Callable[..., Any])
RANDOM_RULES: dict[Any, Callable[..., Any]] = {}
"""The rule of each overload: a registry that the decorators below fill while this file is loaded.
A rule takes a UniformSource and then the operator's arguments."""


def _rule(*overloads: Any) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RANDOM_RULES.update(dict.fromkeys(overloads, function))
        return function

    return register


def _floating(dtype: torch.dtype | None) -> torch.dtype:
    return torch.get_default_dtype() if dtype is None else dtype


def _normal(source: UniformSource, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    radius = (1.0 - source.uniform(size, computing_dtype(dtype))).log().mul(-2.0).sqrt()
    angle = source.uniform(size, computing_dtype(dtype)) * (2.0 * math.pi)
    value = radius * angle.cos()
    return value if value.dtype == dtype else value.to(dtype)


def _uniform_values(source: UniformSource, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    value = source.uniform(size, computing_dtype(dtype))
    return value if value.dtype == dtype else value.to(dtype)


@_rule(aten.rand.default, aten.rand.generator)
def _rand(s: UniformSource, size: Sequence[int], dtype: Any = None, **_: Any) -> torch.Tensor:
    return _uniform_values(s, size, _floating(dtype))


@_rule(aten.randn.default, aten.randn.generator)
def _randn(s: UniformSource, size: Sequence[int], dtype: Any = None, **_: Any) -> torch.Tensor:
    return _normal(s, size, _floating(dtype))


@_rule(aten.rand_like.default, aten.rand_like.generator)
def _rand_like(s: UniformSource, x: torch.Tensor, dtype: Any = None, **_: Any) -> torch.Tensor:
    return _uniform_values(s, x.shape, dtype or x.dtype)


@_rule(aten.randn_like.default, aten.randn_like.generator)
def _randn_like(s: UniformSource, x: torch.Tensor, dtype: Any = None, **_: Any) -> torch.Tensor:
    return _normal(s, x.shape, dtype or x.dtype)


# Distributions that overwrite a tensor, or give a new one of its shape: `uniform_` and `uniform`


def _overwriting(*overloads: str) -> Callable[[Rule], Rule]:
    """Registers a function (source, tensor, ...) -> values for both forms of operators."""

    def register(function: Rule) -> Rule:
        def values(s: UniformSource, x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
            named.pop("generator", None)
            found: torch.Tensor = function(s, x, *args, **named)
            return found if found.dtype == x.dtype else found.to(x.dtype)

        def overwrite(s: UniformSource, x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
            return s.assign(x, values(s, x, *args, **named))

        for overload in overloads:
            name, _, form = overload.partition(".")
            RANDOM_RULES[getattr(getattr(aten, f"{name}_"), form or "default")] = overwrite
            RANDOM_RULES[getattr(getattr(aten, name), form or "default")] = values
        return function

    return register


@_overwriting("uniform")
def _uniform(
    s: UniformSource, x: torch.Tensor, low: float = 0.0, high: float = 1.0
) -> torch.Tensor:
    value = _uniform_values(s, x.shape, x.dtype)
    return value if (low, high) == (0.0, 1.0) else value * (high - low) + low


@_overwriting("exponential")
def _exponential(s: UniformSource, x: torch.Tensor, lambd: float = 1.0) -> torch.Tensor:
    return (1.0 - _uniform_values(s, x.shape, computing_dtype(x.dtype))).log() / -lambd


@_overwriting("cauchy")
def _cauchy(
    s: UniformSource, x: torch.Tensor, median: float = 0.0, sigma: float = 1.0
) -> torch.Tensor:
    return (
        math.pi * (_uniform_values(s, x.shape, computing_dtype(x.dtype)) - 0.5)
    ).tan() * sigma + median


@_overwriting("log_normal")
def _log_normal(
    s: UniformSource, x: torch.Tensor, mean: float = 1.0, std: float = 2.0
) -> torch.Tensor:
    return (_normal(s, x.shape, computing_dtype(x.dtype)) * std + mean).exp()


@_overwriting("geometric")
def _geometric(s: UniformSource, x: torch.Tensor, p: float) -> torch.Tensor:
    """The number of the first success, from 1."""
    failed = (1.0 - s.uniform(x.shape, torch.float64)).log() / math.log1p(-p)
    return failed.floor() + 1.0


@_overwriting("random")
def _random(s: UniformSource, x: torch.Tensor) -> torch.Tensor:
    return _integers(s, x.shape, 0, _largest(x.dtype) + 1)


@_overwriting("random.to")
def _random_to(s: UniformSource, x: torch.Tensor, to: int) -> torch.Tensor:
    return _integers(s, x.shape, 0, to)


@_overwriting("random.from")
def _random_from(s: UniformSource, x: torch.Tensor, low: int, to: int | None) -> torch.Tensor:
    return _integers(s, x.shape, low, _largest(x.dtype) + 1 if to is None else to)


@_overwriting("bernoulli.Tensor")
def _bernoulli_tensor(s: UniformSource, x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return torch.lt(s.uniform(x.shape, torch.float32), p)


@_rule(aten.bernoulli_.float)
def _bernoulli_(s: UniformSource, x: torch.Tensor, p: float = 0.5, **_: Any) -> torch.Tensor:
    return s.assign(x, _bernoulli_of(s, x, p))


@_rule(aten.bernoulli.p)
def _bernoulli_of(s: UniformSource, x: torch.Tensor, p: float = 0.5, **_: Any) -> torch.Tensor:
    return torch.lt(s.uniform(x.shape, torch.float32), p).to(x.dtype)


@_rule(aten.bernoulli.default)
def _bernoulli(s: UniformSource, p: torch.Tensor, **_: Any) -> torch.Tensor:
    return torch.lt(s.uniform(p.shape, torch.float32), p).to(p.dtype)


@_rule(aten.normal_functional.default)
def _normal_functional(
    s: UniformSource, x: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: Any
) -> torch.Tensor:
    return _normal(s, x.shape, x.dtype) * std + mean


@_rule(aten.normal_.default)
def _normal_(
    s: UniformSource, x: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: Any
) -> torch.Tensor:
    return s.assign(x, _normal_functional(s, x, mean, std))


@_rule(aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor)
def _normal_around(s: UniformSource, mean: Any, std: Any = 1.0, **_: Any) -> torch.Tensor:
    tensors = [x for x in (mean, std) if isinstance(x, torch.Tensor)]
    size = torch.broadcast_shapes(*(x.shape for x in tensors))
    found: torch.Tensor = _normal(s, size, tensors[0].dtype) * std + mean
    return found


@_rule(aten.normal.float_float)
def _normal_of_size(
    s: UniformSource, mean: float, std: float, size: Sequence[int], dtype: Any = None, **_: Any
) -> torch.Tensor:
    return _normal(s, size, _floating(dtype)) * std + mean


# Whole numbers


def _uniform_48_bits(s: UniformSource, size: Sequence[int]) -> torch.Tensor:
    """Numbers in [0, 1) of 48 bits, in float64."""
    return s.uniform(size, torch.float64) + s.uniform(size, torch.float64) * 2.0**-24


def _integers(s: UniformSource, size: Sequence[int], low: int, high: int) -> torch.Tensor:
    """Whole numbers in [low, high), int64. Ranges of more than 2**48 leave numbers out."""
    draw = s.uniform(size, torch.float64) if high - low <= 1 << 12 else _uniform_48_bits(s, size)
    return (draw * float(high - low)).floor().to(torch.int64) + low


def _largest(dtype: torch.dtype) -> int:
    """The largest whole number that random_ draws for a dtype."""
    if dtype.is_floating_point:
        return round(2 / torch.finfo(dtype).eps)
    return 1 if dtype == torch.bool else min(torch.iinfo(dtype).max, (1 << 62) - 1)


@_rule(aten.randint.default, aten.randint.generator)
def _randint(
    s: UniformSource, high: int, size: Sequence[int], dtype: Any = torch.int64, **_: Any
) -> torch.Tensor:
    return _randint_low(s, 0, high, size, dtype)


@_rule(aten.randint.low, aten.randint.low_generator)
def _randint_low(
    s: UniformSource, low: int, high: int, size: Sequence[int], dtype: Any = torch.int64, **_: Any
) -> torch.Tensor:
    value = _integers(s, size, low, high)
    return value if dtype in (None, torch.int64) else value.to(dtype)


@_rule(aten.randint_like.default, aten.randint_like.generator)
def _randint_like(
    s: UniformSource, x: torch.Tensor, high: int, dtype: Any = None, **_: Any
) -> torch.Tensor:
    return _randint_low(s, 0, high, x.shape, dtype or x.dtype)


@_rule(aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype)
def _randint_like_low(
    s: UniformSource, x: torch.Tensor, low: int, high: int, dtype: Any = None, **_: Any
) -> torch.Tensor:
    return _randint_low(s, low, high, x.shape, dtype or x.dtype)


@_rule(aten.randperm.default, aten.randperm.generator)
def _randperm(s: UniformSource, n: int, dtype: Any = torch.int64, **_: Any) -> torch.Tensor:
    order = torch.sort(_uniform_48_bits(s, (n,)), stable=True).indices
    return order if dtype in (None, torch.int64) else order.to(dtype)


@_rule(aten.multinomial.default)
def _multinomial(
    s: UniformSource, weights: torch.Tensor, count: int, replacement: bool = False, **_: Any
) -> torch.Tensor:
    """With replacement by the inverse of the sums of weights; without, the classes that are first
    in a race of exponential clocks, whose rates are the weights."""
    wide = weights.to(torch.float64)
    if replacement:
        sums = wide.cumsum(-1)
        draw = _uniform_48_bits(s, (*weights.shape[:-1], count)) * sums[..., -1:]
        return torch.searchsorted(sums, draw, right=True).clamp(max=weights.shape[-1] - 1)
    times = (1.0 - _uniform_48_bits(s, weights.shape)).log() / -wide
    return torch.topk(times, count, dim=-1, largest=False).indices


@_rule(aten.poisson.default)
def _poisson(s: UniformSource, rate: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """The smallest whole number whose cumulative probability exceeds the draw, by bisection."""
    mean, draw = rate.to(torch.float64), s.uniform(rate.shape, torch.float64)
    low, high = torch.zeros_like(mean), (mean + 12.0 * mean.sqrt() + 24.0).ceil()
    for _step in range(_BISECTIONS):
        middle = ((low + high) * 0.5).floor()
        below = torch.special.gammaincc(middle + 1.0, mean) <= draw
        low, high = torch.where(below, middle + 1.0, low), torch.where(below, high, middle)
    return low.to(rate.dtype)


# Dropout


@_rule(aten.native_dropout.default)
def _native_dropout(s: UniformSource, x: torch.Tensor, p: float, train: bool | None) -> Any:
    if train is False or p == 0.0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = s.uniform(x.shape, torch.float32) < 1.0 - p
    return x * mask * (0.0 if p == 1.0 else 1.0 / (1.0 - p)), mask


@_rule(aten.rrelu_with_noise_functional.default)
def _rrelu_functional(
    s: UniformSource, x: torch.Tensor, noise: torch.Tensor, lower: float = 0.125,
    upper: float = 1 / 3, training: bool = False, *_: Any, **__: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2), noise.clone()
    slope = _uniform_values(s, x.shape, x.dtype) * (upper - lower) + lower
    slope = torch.where(x <= 0, slope, torch.ones_like(x))
    return x * slope, slope


@_rule(aten.rrelu_with_noise.default)
def _rrelu(
    s: UniformSource, x: torch.Tensor, noise: torch.Tensor, *args: Any, **named: Any
) -> torch.Tensor:
    value, slope = _rrelu_functional(s, x, noise, *args, **named)
    s.assign(noise, slope)
    return value


@_rule(aten.rrelu_with_noise_.default)
def _rrelu_(
    s: UniformSource, x: torch.Tensor, noise: torch.Tensor, *args: Any, **named: Any
) -> torch.Tensor:
    return s.assign(x, _rrelu(s, x, noise, *args, **named))


class DrawNumbering:
    """Numbers draws in call order; a draw that activation checkpointing repeats keeps its number.

    Checkpointing rewinds torch's generator before it recomputes, so what the generator yields at a
    draw tells whether that draw was seen before. Use inside `torch.random.fork_rng`.
    """

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        torch.default_generator.manual_seed(0)

    def next(self) -> int:
        """The operator number of the draw at hand."""
        mark = torch.empty((), dtype=torch.int64).random_(generator=torch.default_generator)
        return self._seen.setdefault(int(mark), len(self._seen))


class CounterRandom(TorchDispatchMode):
    """Runs eager PyTorch with the random operators of step `step` replaced by ours."""

    def __init__(self, seed: int, step: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed, self._step, self._numbering = seed, step, DrawNumbering()
        self._device: torch.device | None = None

    def uniform(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return uniform_tensor(
            (self._seed, self._step, self._numbering.next()), size, dtype, self._device
        )

    def assign(self, target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return target.copy_(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = RANDOM_RULES.get(func)
        if func is GROUPED_MM:
            return grouped_mm(*args, **(kwargs or {}))
        if rule is None:
            return func(*args, **(kwargs or {}))
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        self._device = tensors[0].device if tensors else (kwargs or {}).get("device")
        return rule(self, *args, **(kwargs or {}))
