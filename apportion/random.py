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
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
_GOLDEN = 0x9E3779B9
_LOW_PRECISION = (torch.float16, torch.bfloat16)

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


Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}


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


@_rule(aten.rand.default)
def _rand(s: Source, size: Sequence[int], dtype: Any = None, **_: Any) -> torch.Tensor:
    return _drawn(s, size, _floating(dtype))


@_rule(aten.randn.default)
def _randn(s: Source, size: Sequence[int], dtype: Any = None, **_: Any) -> torch.Tensor:
    return _normal(s, size, _floating(dtype))


@_rule(aten.rand_like.default)
def _rand_like(s: Source, x: torch.Tensor, dtype: Any = None, **_: Any) -> torch.Tensor:
    return _drawn(s, x.shape, dtype or x.dtype)


@_rule(aten.randn_like.default)
def _randn_like(s: Source, x: torch.Tensor, dtype: Any = None, **_: Any) -> torch.Tensor:
    return _normal(s, x.shape, dtype or x.dtype)


@_rule(aten.uniform_.default)
def _uniform_(
    s: Source, x: torch.Tensor, low: float = 0.0, high: float = 1.0, **_: Any
) -> torch.Tensor:
    value = _drawn(s, x.shape, x.dtype)
    return s.assign(x, value if (low, high) == (0.0, 1.0) else value * (high - low) + low)


@_rule(aten.normal_.default)
def _normal_(
    s: Source, x: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: Any
) -> torch.Tensor:
    return s.assign(x, _normal(s, x.shape, x.dtype) * std + mean)


@_rule(aten.exponential_.default)
def _exponential_(s: Source, x: torch.Tensor, rate: float = 1.0, **_: Any) -> torch.Tensor:
    return s.assign(x, ((1.0 - _drawn(s, x.shape, _wide(x.dtype))).log() / -rate).to(x.dtype))


@_rule(aten.bernoulli_.float, aten.bernoulli_.Tensor)
def _bernoulli_(s: Source, x: torch.Tensor, p: Any = 0.5, **_: Any) -> torch.Tensor:
    return s.assign(x, (s.uniform(x.shape, torch.float32) < p).to(x.dtype))


@_rule(aten.bernoulli.default)
def _bernoulli(s: Source, p: torch.Tensor, **_: Any) -> torch.Tensor:
    return torch.lt(s.uniform(p.shape, torch.float32), p).to(p.dtype)


@_rule(aten.bernoulli.p, aten.bernoulli.Tensor)
def _bernoulli_of(s: Source, x: torch.Tensor, p: Any = 0.5, **_: Any) -> torch.Tensor:
    return torch.lt(s.uniform(x.shape, torch.float32), p).to(x.dtype)


@_rule(aten.native_dropout.default)
def _native_dropout(s: Source, x: torch.Tensor, p: float, train: bool | None) -> Any:
    if train is False or p == 0.0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = s.uniform(x.shape, torch.float32) < 1.0 - p
    return x * mask * (0.0 if p == 1.0 else 1.0 / (1.0 - p)), mask


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
