"""discover: the modules, parameters and optimizers that a step refers to without being given them.

Part of capture/. A function comes in; out go the objects behind its free variables, its defaults,
the globals that its code names, the arguments of a partial and the attributes of the object that it
is a method of, each under its variable's name: a criterion with parameters, a teacher, an average
of the model, a second optimizer. Functions of the user's that are found so are looked into as well.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from apportion.capture.loss_scale import LossScale

_OTHERS = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(os.__file__).parent) + os.sep,
    str(Path(__file__).parent.parent) + os.sep,
    "<frozen",
)
_DEEPEST = 4  # functions that call functions, and lists in lists


@dataclass(frozen=True)
class ParameterPlace:
    """Where a parameter outside of all modules is referred to: `put` refers to another there."""

    parameter: torch.nn.Parameter
    put: Callable[[Any], None]


@dataclass
class FoundObjects:
    """What was found, in the order in which it was, each with its name."""

    modules: list[tuple[str, torch.nn.Module]] = field(default_factory=list)
    parameters: list[tuple[str, torch.nn.Parameter]] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    places: list[ParameterPlace] = field(default_factory=list)


@dataclass(frozen=True)
class _Reference:
    """A name that code refers to, what it stands for, and how to let it stand for another."""

    name: str
    thing: Any
    put: Callable[[Any], None]


def discover(step: Any, *given: Any) -> FoundObjects:
    """What the step refers to; and what the given objects do, which may be optimizers that hold
    another one."""
    found = FoundObjects()
    seen: set[int] = set()
    for reference in (*_references(step), *_own_cells(step)):
        _look(reference, found, seen, 0)
    for each in given:
        for name, inner in _attributes(each):
            if isinstance(inner, torch.optim.Optimizer):
                _look(_Reference(name, inner, _nowhere), found, seen, 0)
    return found


def holds_another(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has another one inside, whose steps it makes its own of."""
    return any(isinstance(x, torch.optim.Optimizer) for _, x in _attributes(optimizer))


def _look(at: _Reference, found: FoundObjects, seen: set[int], depth: int) -> None:
    thing = at.thing
    if isinstance(thing, torch.nn.Parameter):
        if id(thing) not in seen:
            found.parameters.append((at.name, thing))
        found.places.append(ParameterPlace(thing, at.put))
        seen.add(id(thing))
        return
    if id(thing) in seen or depth > _DEEPEST or isinstance(thing, type):
        return
    seen.add(id(thing))
    if isinstance(thing, torch.nn.Module):
        found.modules.append((at.name, thing))
    elif isinstance(thing, torch.amp.GradScaler):
        if thing.is_enabled():
            found.modules.append((at.name, LossScale(thing)))
    elif isinstance(thing, torch.optim.Optimizer):
        found.optimizers.append(thing)
        for name, inner in _attributes(thing):
            if isinstance(inner, torch.optim.Optimizer):
                _look(_Reference(name, inner, _nowhere), found, seen, depth + 1)
    elif isinstance(thing, list | tuple | Mapping):
        for reference in _items(at.name, thing):
            _look(reference, found, seen, depth + 1)
    elif isinstance(thing, FunctionType | MethodType | functools.partial):
        for reference in _references(thing):
            _look(reference, found, seen, depth + 1)
    elif _is_users_object(thing):
        for name in list(vars(thing)):
            inner = vars(thing)[name]
            put = functools.partial(setattr, thing, name)
            path = name if at.name == "self" else f"{at.name}.{name}"
            _look(_Reference(path, inner, put), found, seen, depth + 1)


def _items(name: str, container: Any) -> Iterator[_Reference]:
    """The members of a container; those of a long one of plain things are not looked at."""
    pairs = container.items() if isinstance(container, Mapping) else enumerate(container)
    for number, (key, each) in enumerate(pairs):
        if number > 1000:
            return
        put = _nowhere if isinstance(container, tuple) else functools.partial(_set, container, key)
        yield _Reference(f"{name}.{key}", each, put)


def _references(function: Any) -> Iterator[_Reference]:
    """What a function refers to."""
    if isinstance(function, functools.partial):
        yield from _references(function.func)
        for number, each in enumerate(function.args):
            yield _Reference(f"argument{number}", each, _nowhere)
        for name, each in function.keywords.items():
            yield _Reference(name, each, functools.partial(_set, function.keywords, name))
        return
    if isinstance(function, MethodType):
        yield _Reference("self", function.__self__, _nowhere)
        function = function.__func__
    if not isinstance(function, FunctionType):
        if callable(function) and _is_users_object(function):
            yield _Reference("self", function, _nowhere)
            yield from _references(type(function).__call__)
        return
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        yield from _references(wrapped)
    if not _is_users(function.__code__):
        return
    yield from _cells(function)
    yield from _defaults(function)
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            put = functools.partial(_set, function.__globals__, name)
            yield _Reference(name, function.__globals__[name], put)


def _own_cells(step: Any) -> Iterator[_Reference]:
    """What a step closes over that is one of ours or of a library."""
    if isinstance(step, FunctionType) and not _is_users(step.__code__):
        yield from _cells(step)


def _cells(function: FunctionType) -> Iterator[_Reference]:
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        try:
            thing = cell.cell_contents
        except ValueError:  # not bound yet
            continue
        yield _Reference(name, thing, functools.partial(setattr, cell, "cell_contents"))


def _defaults(function: FunctionType) -> Iterator[_Reference]:
    values = function.__defaults__ or ()
    names = list(inspect.signature(function).parameters)
    code = function.__code__
    for name, each in zip(names[code.co_argcount - len(values) :], values, strict=False):
        yield _Reference(name, each, _nowhere)
    keywords = function.__kwdefaults__ or {}
    for name, each in keywords.items():
        yield _Reference(name, each, functools.partial(_set, keywords, name))


def _global_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(thing, "__dict__", {}).items()


def _is_users(code: CodeType) -> bool:
    """Whether code is of the user's own files: not of a library, nor of ours."""
    return not code.co_filename.startswith(_OTHERS) and "site-packages" not in code.co_filename


def _is_users_object(thing: Any) -> bool:
    """Whether an object is one of a class that the user wrote in Python."""
    methods = (f for f in vars(type(thing)).values() if isinstance(f, FunctionType))
    first = next(methods, None)
    return hasattr(thing, "__dict__") and first is not None and _is_users(first.__code__)


def _nowhere(_: Any) -> None:
    """For places that cannot refer to another object."""


def _set(container: Any, key: Any, thing: Any) -> None:
    container[key] = thing
