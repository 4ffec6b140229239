"""What all kernels share: their context, their table, and how torch's own are found.

Kernels of the room execute: a Context and arguments come in, a tuple of tensors goes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from apportion.capture import flat_results
from apportion.describe import FROM_HOST_KIND, TO_HOST_KIND
from apportion.graph import Arg, Body, Ref, Setting, substitute

# Arguments that a Graph leaves out, since they say where and not what.
LEFT_OUT = frozenset(["device", "layout", "pin_memory", "generator", "memory_format"])


@dataclass(slots=True)
class Context:
    """What kernels need beside their arguments: whose random numbers, which step, the optimizer's
    settings now. Tensors are made on `device`; where that is meta, they are meant for `like`.

    words  where code is traced or captured once for all steps: the two words of an operator's
           random numbers (capture/counter_random.py) as tensors that are filled at every step
    rates  the same for the learning rate of a parameter group, for kernels that read it as float32
    """

    seed: int
    step: int
    setting: Callable[[Any], float]
    bodies: Sequence[Body] = ()
    device: str = "cpu"
    like: str = "cpu"
    words: Callable[[int], tuple[torch.Tensor, torch.Tensor]] | None = None
    rates: Callable[[int], torch.Tensor] | None = None

    @property
    def cuda(self) -> bool:
        """Whether the kernels of CUDA devices are meant."""
        return (self.like if self.device == "meta" else self.device).startswith("cuda")


Kernel = Callable[[Context, Sequence[Any]], tuple[Any, ...]]


@cache
def dtype(name: str) -> torch.dtype:
    """torch's dtype of that name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return found


@dataclass(frozen=True, slots=True)
class Template:
    """Arguments of a call, with room for what differs between calls.

    tensors  (argument, input) for arguments that are inputs
    others   (argument, what to put there) for those with inputs or settings inside
    """

    fixed: tuple[Any, ...]
    tensors: tuple[tuple[int, int], ...]
    others: tuple[tuple[int, Arg], ...]

    def fill(self, tensors: Sequence[Any], context: Context) -> list[Any]:
        """The arguments of one call."""
        args = list(self.fixed)
        for place, index in self.tensors:
            args[place] = tensors[index]
        for place, arg in self.others:
            args[place] = substitute(arg, tensors, dtype=dtype, setting=context.setting)
        return args


def template(args: Sequence[Arg]) -> Template:
    """What does not change about a call's arguments, worked out once."""
    fixed = tuple(None if _changes(a) else substitute(a, (), dtype=dtype) for a in args)
    tensors = tuple((k, a.index) for k, a in enumerate(args) if isinstance(a, Ref))
    others = tuple((k, a) for k, a in enumerate(args) if _changes(a) and not isinstance(a, Ref))
    return Template(fixed, tensors, others)


def _changes(arg: Arg) -> bool:
    if isinstance(arg, tuple):
        return any(map(_changes, arg))
    return isinstance(arg, Ref | Setting)


OWN: dict[str, Kernel] = {}
"""A registry, which the decorator `own` fills on import: kernels that are not simply the operator
of that name."""


UNTRACEABLE = frozenset(
    [
        *("apportion.mask_index", "apportion.grouped_mm", "apportion.grouped_outer"),
        *(TO_HOST_KIND, FROM_HOST_KIND),
    ]
)
"""Kinds whose kernels look at data, or use the host's memory: a compiler can only call them. The
others make the same operator calls for inputs of the same shapes, strides and dtypes, whatever is
in them; what changes from step to step comes in by `Context.setting` and `Context.step` alone."""


def own(*kinds: str) -> Callable[[Kernel], Kernel]:
    """Registers the decorated function as the kernel of kinds."""

    def register(function: Kernel) -> Kernel:
        OWN.update(dict.fromkeys(kinds, function))
        return function

    return register


def kernel(kind: str) -> Kernel:
    """The kernel of a kind; raises ValueError if torch has no such operator."""
    # A user's operator is looked up anew: its file may be run again, and the old one is gone then.
    return _kernel(kind) if kind.startswith(("aten.", "apportion.")) else _caller(resolve(kind))


@cache
def _kernel(kind: str) -> Kernel:
    own = OWN.get(kind)
    return _caller(resolve(kind)) if own is None else own


@cache
def _caller(overload: Any) -> Kernel:
    names = [a for a in overload._schema.arguments if a.name not in LEFT_OUT]
    plain = sum(not a.kwarg_only for a in names)
    named = [a.name for a in names[plain:]]
    # Some overloads have an argument that is left out before one that is kept: then all go by name.
    positional = [a.name for a in overload._schema.arguments if not a.kwarg_only][:plain]
    if positional != [a.name for a in names[:plain]]:
        plain, named = 0, [a.name for a in names]

    placed = any(a.name == "device" for a in overload._schema.arguments)

    def call(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
        keywords = dict(zip(named, args[plain:], strict=False)) if named else {}
        if placed and context.device != "cpu":
            keywords["device"] = context.device
        result = overload(*args[:plain], **keywords)
        return tuple(flat_results(result))

    return call


def resolve(kind: str) -> Any:
    """torch's overload object of a kind."""
    found: Any = torch.ops
    for name in kind.split("."):
        found = getattr(found, name, None) if name.isidentifier() else None
        if found is None:
            raise ValueError(
                f"torch has no operator {kind!r} here; import the library that defines it"
            )
    return found
