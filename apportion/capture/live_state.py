"""LiveState: the user's modules and optimizers behind a step, whatever form they were given in.

Part of capture/. A Module, a sequence or a dict of Modules comes in, and optimizers in the same
forms; out go named parameters and buffers, and the groups of all optimizers, numbered one after the
other. The tensors of a single model have the names they have in it; those of several begin with the
place or the key of theirs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from apportion.capture.discover import FoundObjects, ParameterPlace
from apportion.capture.trace import CaptureError
from apportion.capture.written_tensors import WrittenTensor


@dataclass(frozen=True, eq=False)
class LiveState:
    """The modules of a step, each with what the names of its tensors begin with; parameters that
    are in no module, and the places that refer to such; the optimizers; and tensors in no module
    that the step writes to."""

    modules: tuple[tuple[str, torch.nn.Module], ...]
    loose: tuple[tuple[str, torch.nn.Parameter], ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    places: tuple[ParameterPlace, ...] = ()
    written: tuple[WrittenTensor, ...] = ()

    def parameters(self) -> dict[str, torch.Tensor]:
        """All parameters by name, each once."""
        named = [(b + n, p) for b, m in self.modules for n, p in m.named_parameters()]
        return _each_once([*named, *self.loose])

    def buffers(self) -> dict[str, torch.Tensor]:
        """All buffers by name, each once, and the tensors that the step writes to."""
        named = [(b + n, x) for b, m in self.modules for n, x in m.named_buffers()]
        return _each_once([*named, *((each.name, each.now) for each in self.written)])

    def tensor(self, name: str) -> torch.Tensor:
        """The parameter or buffer of that name; raises ValueError if there is none."""
        for begin, module in self.modules:
            path, _, last = name.removeprefix(begin).rpartition(".")
            if name.startswith(begin):
                with contextlib.suppress(AttributeError, KeyError):
                    found = getattr(_submodule(module, path), last)
                    if isinstance(found, torch.Tensor):
                        return found
        for known, parameter in self.loose:
            if known == name:
                return parameter
        for each in self.written:
            if each.name == name:
                now: torch.Tensor = each.now
                return now
        raise ValueError(f"the model has no parameter or buffer {name!r}")

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """All modules by their paths."""
        for begin, root in self.modules:
            for name, module in root.named_modules():
                yield (begin + name).rstrip("."), module

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, in the order of their numbers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def first_group(self, optimizer: torch.optim.Optimizer) -> int:
        """The number of the optimizer's first group."""
        count = 0
        for each in self.optimizers:
            if each is optimizer:
                return count
            count += len(each.param_groups)
        raise ValueError("the optimizer is none of the step's")

    def optimizer_of(self, parameter: torch.Tensor) -> torch.optim.Optimizer:
        """The optimizer that updates a parameter."""
        if len(self.optimizers) == 1:
            return self.optimizers[0]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if any(p is parameter for p in group["params"]):
                    return optimizer
        raise ValueError("no optimizer holds the parameter")


def live_state(model: Any, optimizer: Any, found: FoundObjects | None = None) -> LiveState:
    """The modules and optimizers that the user gave, and those found in what the step refers to."""
    modules = _modules(model)
    given = {id(m) for _, root in modules for m in root.modules()}
    names = {begin for begin, _ in modules}
    for name, module in () if found is None else found.modules:
        if id(module) in given:
            continue
        given |= {id(m) for m in module.modules()}
        modules.append((_unused(name, names), module))
    held = {id(p) for _, root in modules for p in root.parameters()}
    loose = [(n, p) for n, p in (() if found is None else found.parameters) if id(p) not in held]
    optimizers = list(_flat(optimizer, torch.optim.Optimizer, "optimizer"))
    for each in () if found is None else found.optimizers:
        if not any(each is known for known in optimizers):
            optimizers.append(each)
    places = () if found is None else tuple(found.places)
    return LiveState(tuple(modules), tuple(loose), tuple(optimizers), places)


def _modules(model: Any) -> list[tuple[str, torch.nn.Module]]:
    if isinstance(model, torch.nn.Module):
        return [("", model)]
    if isinstance(model, Mapping):
        keyed = [(f"{key}.", each) for key, each in model.items()]
    elif isinstance(model, Sequence) and not isinstance(model, str):
        keyed = [(f"{place}.", each) for place, each in enumerate(model)]
    else:
        keyed = [("", model)]
    for begin, each in keyed:
        if not isinstance(each, torch.nn.Module):
            what = f" as {begin.rstrip('.')}" if begin else ""
            raise CaptureError(
                f"the model has a {type(each).__name__}{what}; it must be a torch.nn.Module, or a "
                "sequence or dict of such"
            )
    return keyed


def _flat(given: Any, wanted: type, what: str) -> Iterator[Any]:
    if isinstance(given, Mapping):
        given = tuple(given.values())
    for each in given if isinstance(given, Sequence) else (given,):
        if not isinstance(each, wanted):
            raise CaptureError(
                f"the {what} is a {type(each).__name__}; it must be a torch.optim.Optimizer, or a "
                "sequence or dict of such"
            )
        yield each


def _unused(name: str, names: set[str]) -> str:
    begin, number = f"{name}.", 1
    while begin in names:
        number += 1
        begin = f"{name}_{number}."
    names.add(begin)
    return begin


def _each_once(named: Sequence[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in named:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name if name not in found else f"{name}_"] = tensor
    return found


def _submodule(module: torch.nn.Module, path: str) -> torch.nn.Module:
    """The submodule of that path; one may be called as a method of Module is."""
    for name in path.split(".") if path else ():
        module = module._modules[name]  # type: ignore[assignment]
    return module
