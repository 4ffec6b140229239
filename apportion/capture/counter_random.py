"""Random numbers that can be split: a hash of (seed, step, operator) and the *global* index.

    word(i, j, ..) = mix(second ^ .. mix(mix(first + spread(0, i)) + spread(1, j)) ..)
    uniform        = (word >> 8) * 2**-24, in [0, 1), the same number in every dtype
    normal         = sqrt(-2 log(1 - uniform)) cos(2 pi uniform'), after Box and Muller

`first` and `second` are hashes of the key; `mix` is the 32-bit finaliser "lowbias32" in wrapping
int32 arithmetic. Any box of a tensor is bit-equal to the slice of the whole, because no element
depends on another. torch's own generators cannot be sliced, so torch's random operators are
replaced (`RULES`), both in a captured graph and in the single-device reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
_GOLDEN = 0x9E3779B9
_LOW_PRECISION = (torch.float16, torch.bfloat16)
_BISECTIONS = 40  # enough for a Poisson mean of 10**11

aten = torch.ops.aten


def uniform(
    key: tuple[int, int, int],
    indices: Sequence[torch.Tensor],
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Numbers in [0, 1) for the box whose global indices along dim d are `indices[d]` (1-D int64).

    key is (seed, step, operator). The result's shape is the lengths of the indices.
    """
    first, second = _words(key)
    device = indices[0].device if indices else None
    word = torch.full((), _signed(first), dtype=torch.int32, device=device)
    for dim, index in enumerate(indices):
        word = _mix(word.unsqueeze(-1) + _spread(dim, index))
    word = _mix(word.bitwise_xor(_signed(second)))
    return (
        word.bitwise_right_shift_(8)
        .bitwise_and_(0xFFFFFF)
        .to(_wide(dtype))
        .mul_(2.0**-24)
        .to(dtype)
    )


def whole(
    key: tuple[int, int, int], size: Sequence[int], dtype: torch.dtype, device: Any = None
) -> torch.Tensor:
    """`uniform` for the whole tensor of that size."""
    return uniform(key, [torch.arange(n, device=device) for n in size], dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _LOW_PRECISION else dtype


def _spread(dim: int, index: torch.Tensor) -> torch.Tensor:
    """A well-mixed word per index; plain multiples would make rows shifted copies of each other."""
    odd = _signed(2 * _mix_int(dim + 1) + 1)
    return _mix(index.to(torch.int32) * odd + dim)


def _mix(word: torch.Tensor) -> torch.Tensor:
    """Mixes a fresh int32 tensor in place."""
    word = word.bitwise_xor_((word >> 16).bitwise_and_(0xFFFF))
    word = word.mul_(_signed(_MULTIPLIERS[0]))
    word = word.bitwise_xor_((word >> 15).bitwise_and_(0x1FFFF))
    word = word.mul_(_signed(_MULTIPLIERS[1]))
    return word.bitwise_xor_((word >> 16).bitwise_and_(0xFFFF))


def _mix_int(word: int) -> int:
    word &= 0xFFFFFFFF
    word = (word ^ (word >> 16)) * _MULTIPLIERS[0] & 0xFFFFFFFF
    word = (word ^ (word >> 15)) * _MULTIPLIERS[1] & 0xFFFFFFFF
    return word ^ (word >> 16)


def _words(key: tuple[int, int, int]) -> tuple[int, int]:
    """Two 32-bit words from the key, so that a collision of one does not repeat a mask."""
    words = [_GOLDEN, ~_GOLDEN]
    for part in key:
        for half in (part & 0xFFFFFFFF, part >> 32 & 0xFFFFFFFF):
            words = [_mix_int(words[0] + half), _mix_int((words[1] ^ half) + _GOLDEN)]
    return words[0], words[1]


def _signed(word: int) -> int:
    return (word + 0x80000000 & 0xFFFFFFFF) - 0x80000000


# torch's random operators, by ours


class Source(Protocol):
    """Where a rule's uniform numbers come from, and how it overwrites a tensor."""

    def uniform(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...

    def assign(self, target: torch.Tensor, value: torch.Tensor) -> torch.Tensor: ...


Rule = TypeVar("Rule", bound=Callable[..., Any])
RULES: dict[Any, Callable[..., Any]] = {}


def _rule(*overloads: Any) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(overloads, function))
        return function

    return register


def _floating(dtype: torch.dtype | None) -> torch.dtype:
    return torch.get_default_dtype() if dtype is None else dtype


def _normal(source: Source, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    radius = (1.0 - source.uniform(size, _wide(dtype))).log().mul(-2.0).sqrt()
    angle = source.uniform(size, _wide(dtype)) * (2.0 * math.pi)
    value = radius * angle.cos()
    return value if value.dtype == dtype else value.to(dtype)


def _drawn(source: Source, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    value = source.uniform(size, _wide(dtype))
    return value if value.dtype == dtype else value.to(dtype)


@_rule(aten.rand.default, aten.rand.generator)
def _rand(s: Source, size: Sequence[int], dtype: Any = None, **_: Any) -> torch.Tensor:
    return _drawn(s, size, _floating(dtype))


@_rule(aten.randn.default, aten.randn.generator)
def _randn(s: Source, size: Sequence[int], dtype: Any = None, **_: Any) -> torch.Tensor:
    return _normal(s, size, _floating(dtype))


@_rule(aten.rand_like.default, aten.rand_like.generator)
def _rand_like(s: Source, x: torch.Tensor, dtype: Any = None, **_: Any) -> torch.Tensor:
    return _drawn(s, x.shape, dtype or x.dtype)


@_rule(aten.randn_like.default, aten.randn_like.generator)
def _randn_like(s: Source, x: torch.Tensor, dtype: Any = None, **_: Any) -> torch.Tensor:
    return _normal(s, x.shape, dtype or x.dtype)


# Distributions that overwrite a tensor, or give a new one of its shape: `uniform_` and `uniform`


def _overwriting(*overloads: str) -> Callable[[Rule], Rule]:
    """Registers a function (source, tensor, ...) -> values for both forms of operators."""

    def register(function: Rule) -> Rule:
        def values(s: Source, x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
            named.pop("generator", None)
            found: torch.Tensor = function(s, x, *args, **named)
            return found if found.dtype == x.dtype else found.to(x.dtype)

        def overwrite(s: Source, x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
            return s.assign(x, values(s, x, *args, **named))

        for overload in overloads:
            name, _, form = overload.partition(".")
            RULES[getattr(getattr(aten, f"{name}_"), form or "default")] = overwrite
            RULES[getattr(getattr(aten, name), form or "default")] = values
        return function

    return register


@_overwriting("uniform")
def _uniform(s: Source, x: torch.Tensor, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    value = _drawn(s, x.shape, x.dtype)
    return value if (low, high) == (0.0, 1.0) else value * (high - low) + low


@_overwriting("exponential")
def _exponential(s: Source, x: torch.Tensor, lambd: float = 1.0) -> torch.Tensor:
    return (1.0 - _drawn(s, x.shape, _wide(x.dtype))).log() / -lambd


@_overwriting("cauchy")
def _cauchy(s: Source, x: torch.Tensor, median: float = 0.0, sigma: float = 1.0) -> torch.Tensor:
    return (math.pi * (_drawn(s, x.shape, _wide(x.dtype)) - 0.5)).tan() * sigma + median


@_overwriting("log_normal")
def _log_normal(s: Source, x: torch.Tensor, mean: float = 1.0, std: float = 2.0) -> torch.Tensor:
    return (_normal(s, x.shape, _wide(x.dtype)) * std + mean).exp()


@_overwriting("geometric")
def _geometric(s: Source, x: torch.Tensor, p: float) -> torch.Tensor:
    """The number of the first success, from 1."""
    failed = (1.0 - s.uniform(x.shape, torch.float64)).log() / math.log1p(-p)
    return failed.floor() + 1.0


@_overwriting("random")
def _random(s: Source, x: torch.Tensor) -> torch.Tensor:
    return _integers(s, x.shape, 0, _largest(x.dtype) + 1)


@_overwriting("random.to")
def _random_to(s: Source, x: torch.Tensor, to: int) -> torch.Tensor:
    return _integers(s, x.shape, 0, to)


@_overwriting("random.from")
def _random_from(s: Source, x: torch.Tensor, low: int, to: int | None) -> torch.Tensor:
    return _integers(s, x.shape, low, _largest(x.dtype) + 1 if to is None else to)


@_overwriting("bernoulli.Tensor")
def _bernoulli_tensor(s: Source, x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return torch.lt(s.uniform(x.shape, torch.float32), p)


@_rule(aten.bernoulli_.float)
def _bernoulli_(s: Source, x: torch.Tensor, p: float = 0.5, **_: Any) -> torch.Tensor:
    return s.assign(x, _bernoulli_of(s, x, p))


@_rule(aten.bernoulli.p)
def _bernoulli_of(s: Source, x: torch.Tensor, p: float = 0.5, **_: Any) -> torch.Tensor:
    return torch.lt(s.uniform(x.shape, torch.float32), p).to(x.dtype)


@_rule(aten.bernoulli.default)
def _bernoulli(s: Source, p: torch.Tensor, **_: Any) -> torch.Tensor:
    return torch.lt(s.uniform(p.shape, torch.float32), p).to(p.dtype)


@_rule(aten.normal_functional.default)
def _normal_functional(
    s: Source, x: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: Any
) -> torch.Tensor:
    return _normal(s, x.shape, x.dtype) * std + mean


@_rule(aten.normal_.default)
def _normal_(
    s: Source, x: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: Any
) -> torch.Tensor:
    return s.assign(x, _normal_functional(s, x, mean, std))


@_rule(aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor)
def _normal_around(s: Source, mean: Any, std: Any = 1.0, **_: Any) -> torch.Tensor:
    tensors = [x for x in (mean, std) if isinstance(x, torch.Tensor)]
    size = torch.broadcast_shapes(*(x.shape for x in tensors))
    found: torch.Tensor = _normal(s, size, tensors[0].dtype) * std + mean
    return found


@_rule(aten.normal.float_float)
def _normal_of_size(
    s: Source, mean: float, std: float, size: Sequence[int], dtype: Any = None, **_: Any
) -> torch.Tensor:
    return _normal(s, size, _floating(dtype)) * std + mean


# Whole numbers


def _fine(s: Source, size: Sequence[int]) -> torch.Tensor:
    """Numbers in [0, 1) of 48 bits, in float64."""
    return s.uniform(size, torch.float64) + s.uniform(size, torch.float64) * 2.0**-24


def _integers(s: Source, size: Sequence[int], low: int, high: int) -> torch.Tensor:
    """Whole numbers in [low, high), int64. Ranges of more than 2**48 leave numbers out."""
    draw = s.uniform(size, torch.float64) if high - low <= 1 << 12 else _fine(s, size)
    return (draw * float(high - low)).floor().to(torch.int64) + low


def _largest(dtype: torch.dtype) -> int:
    """The largest whole number that random_ draws for a dtype."""
    if dtype.is_floating_point:
        return round(2 / torch.finfo(dtype).eps)
    return 1 if dtype == torch.bool else min(torch.iinfo(dtype).max, (1 << 62) - 1)


@_rule(aten.randint.default, aten.randint.generator)
def _randint(
    s: Source, high: int, size: Sequence[int], dtype: Any = torch.int64, **_: Any
) -> torch.Tensor:
    return _randint_low(s, 0, high, size, dtype)


@_rule(aten.randint.low, aten.randint.low_generator)
def _randint_low(
    s: Source, low: int, high: int, size: Sequence[int], dtype: Any = torch.int64, **_: Any
) -> torch.Tensor:
    value = _integers(s, size, low, high)
    return value if dtype in (None, torch.int64) else value.to(dtype)


@_rule(aten.randint_like.default, aten.randint_like.generator)
def _randint_like(
    s: Source, x: torch.Tensor, high: int, dtype: Any = None, **_: Any
) -> torch.Tensor:
    return _randint_low(s, 0, high, x.shape, dtype or x.dtype)


@_rule(aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype)
def _randint_like_low(
    s: Source, x: torch.Tensor, low: int, high: int, dtype: Any = None, **_: Any
) -> torch.Tensor:
    return _randint_low(s, low, high, x.shape, dtype or x.dtype)


@_rule(aten.randperm.default, aten.randperm.generator)
def _randperm(s: Source, n: int, dtype: Any = torch.int64, **_: Any) -> torch.Tensor:
    order = torch.sort(_fine(s, (n,)), stable=True).indices
    return order if dtype in (None, torch.int64) else order.to(dtype)


@_rule(aten.multinomial.default)
def _multinomial(
    s: Source, weights: torch.Tensor, count: int, replacement: bool = False, **_: Any
) -> torch.Tensor:
    """With replacement by the inverse of the sums of weights; without, the classes that are first
    in a race of exponential clocks, whose rates are the weights."""
    wide = weights.to(torch.float64)
    if replacement:
        sums = wide.cumsum(-1)
        draw = _fine(s, (*weights.shape[:-1], count)) * sums[..., -1:]
        return torch.searchsorted(sums, draw, right=True).clamp(max=weights.shape[-1] - 1)
    times = (1.0 - _fine(s, weights.shape)).log() / -wide
    return torch.topk(times, count, dim=-1, largest=False).indices


@_rule(aten.poisson.default)
def _poisson(s: Source, rate: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
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
def _native_dropout(s: Source, x: torch.Tensor, p: float, train: bool | None) -> Any:
    if train is False or p == 0.0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = s.uniform(x.shape, torch.float32) < 1.0 - p
    return x * mask * (0.0 if p == 1.0 else 1.0 / (1.0 - p)), mask


@_rule(aten.rrelu_with_noise_functional.default)
def _rrelu_functional(
    s: Source, x: torch.Tensor, noise: torch.Tensor, lower: float = 0.125, upper: float = 1 / 3,
    training: bool = False, *_: Any, **__: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2), noise.clone()
    slope = _drawn(s, x.shape, x.dtype) * (upper - lower) + lower
    slope = torch.where(x <= 0, slope, torch.ones_like(x))
    return x * slope, slope


@_rule(aten.rrelu_with_noise.default)
def _rrelu(
    s: Source, x: torch.Tensor, noise: torch.Tensor, *args: Any, **named: Any
) -> torch.Tensor:
    value, slope = _rrelu_functional(s, x, noise, *args, **named)
    s.assign(noise, slope)
    return value


@_rule(aten.rrelu_with_noise_.default)
def _rrelu_(
    s: Source, x: torch.Tensor, noise: torch.Tensor, *args: Any, **named: Any
) -> torch.Tensor:
    return s.assign(x, _rrelu(s, x, noise, *args, **named))


class Numbering:
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
        self._seed, self._step, self._numbering = seed, step, Numbering()
        self._device: torch.device | None = None

    def uniform(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return whole((self._seed, self._step, self._numbering.next()), size, dtype, self._device)

    def assign(self, target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return target.copy_(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = RULES.get(func)
        if rule is None:
            return func(*args, **(kwargs or {}))
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        self._device = tensors[0].device if tensors else (kwargs or {}).get("device")
        return rule(self, *args, **(kwargs or {}))
