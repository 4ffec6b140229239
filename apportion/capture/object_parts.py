"""The parts of objects that a step may change: how each kind of object is read and set back.

A part of capture/. In: any object. Out: the kinds of its parts (attributes, items, cells, a
generator's position, how often a tensor was written to), each with a function that reads them by
key, one that writes them back, and, where that can be done, one that replaces one of them.
"""

from __future__ import annotations

import functools
import itertools
import logging
import random
import sys
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from apportion.capture.user_line import is_own_file

ABSENT = object()


@dataclass(frozen=True, slots=True)
class PartsKind:
    """How the parts of objects of one kind are read, by key, and put back; `put` is how one of them
    is replaced, where that can be done."""

    read: Callable[[Any], Mapping[Any, Any]]
    write: Callable[[Any, Mapping[Any, Any]], None]
    put: Callable[[Any, Any, Any], None] | None = None


def _write_dict(held: Any, saved: Mapping[Any, Any]) -> None:
    plain: Any = OrderedDict if isinstance(held, OrderedDict) else dict
    plain.clear(held)
    for key, each in saved.items():
        plain.__setitem__(held, key, each)


def _write_attributes(held: Any, saved: Mapping[Any, Any]) -> None:
    held.__dict__.clear()
    held.__dict__.update(saved)


def _slot_names(held: Any) -> list[str]:
    names: list[str] = []
    for cls in type(held).__mro__:
        own = cls.__dict__.get("__slots__", ())
        names += [own] if isinstance(own, str) else list(own)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _read_slots(held: Any) -> Mapping[Any, Any]:
    return {name: getattr(held, name) for name in _slot_names(held) if hasattr(held, name)}


def _write_slots(held: Any, saved: Mapping[Any, Any]) -> None:
    for name in _slot_names(held):
        if name in saved:
            object.__setattr__(held, name, saved[name])
        elif hasattr(held, name):
            object.__delattr__(held, name)


def _write_set(held: Any, saved: Mapping[Any, Any]) -> None:
    held.clear()
    held.update(saved)


def _write_list(held: Any, saved: Mapping[Any, Any]) -> None:
    list.__setitem__(held, slice(None), list(saved.values()))


def _write_deque(held: Any, saved: Mapping[Any, Any]) -> None:
    held.clear()
    held.extend(saved.values())


def _read_cell(held: Any) -> Mapping[Any, Any]:
    try:
        return {"": held.cell_contents}
    except ValueError:
        return {}


def _write_cell(held: Any, saved: Mapping[Any, Any]) -> None:
    if saved:
        held.cell_contents = saved[""]
    else:
        del held.cell_contents


def _read_tensor(held: Any) -> Mapping[Any, Any]:
    found = {"requires_grad": held.requires_grad, "grad": None}
    if held.is_leaf:
        found["grad"] = held.grad
    if not held.is_inference():
        found["version"] = held._version
    return found


def _write_tensor(held: Any, saved: Mapping[Any, Any]) -> None:
    if saved.get("version") != _read_tensor(held).get("version"):
        raise ValueError("its elements were written to")
    if held.is_leaf:
        held.requires_grad_(saved["requires_grad"])
        held.grad = saved["grad"]


def _read_function(held: Any) -> Mapping[Any, Any]:
    cells = zip(held.__code__.co_freevars, held.__closure__ or (), strict=True)
    return dict(cells) | {"defaults": held.__defaults__, "keyword defaults": held.__kwdefaults__}


def _read_globals(held: Any) -> Mapping[Any, Any]:
    """The globals that the code of a function names, absent ones too: it may make them."""
    space = held.__globals__
    return {name: space.get(name, ABSENT) for name in _names_in(held.__code__)}


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _write_globals(held: Any, saved: Mapping[Any, Any]) -> None:
    for name, each in saved.items():
        if each is not ABSENT:
            held.__globals__[name] = each
        else:
            held.__globals__.pop(name, None)


def _read_class(held: Any) -> Mapping[Any, Any]:
    own = vars(held).items()
    return {k: v for k, v in own if not k.startswith("__") and k != "_abc_impl"}


def _write_class(held: Any, saved: Mapping[Any, Any]) -> None:
    now = _read_class(held)
    for name in now.keys() - saved.keys():
        type.__delattr__(held, name)
    for name, each in saved.items():
        if now.get(name, ABSENT) is not each:
            type.__setattr__(held, name, each)


def _nothing(held: Any, saved: Mapping[Any, Any]) -> None:
    raise ValueError("there is no way to set it back")


class FrozenState:
    """The state of a generator of NumPy's, which is compared by what it shows."""

    def __init__(self, value: Any) -> None:
        self.value = value
        with np.printoptions(threshold=sys.maxsize):
            self.shown = repr(value)


def _put_item(held: Any, key: Any, each: Any) -> None:
    if isinstance(held, OrderedDict):
        OrderedDict.__setitem__(held, key, each)
    elif isinstance(held, dict):
        dict.__setitem__(held, key, each)
    else:
        held[key] = each


def _put_default(held: Any, key: Any, each: Any) -> None:
    if key == "defaults":
        held.__defaults__ = each


def _write_function(held: Any, saved: Mapping[Any, Any]) -> None:
    held.__defaults__, held.__kwdefaults__ = saved["defaults"], saved["keyword defaults"]


def _read_iterator(held: Any) -> Mapping[Any, Any]:
    state = held.__reduce__()
    return {"position": state[2] if len(state) > 2 else None}


def _read_generator(held: Any) -> Mapping[Any, Any]:
    frame = held.gi_frame
    found = {} if frame is None else dict(frame.f_locals)
    return {"position": -1 if frame is None else frame.f_lasti} | found


DICT = PartsKind(lambda x: dict(dict.items(x)), _write_dict, _put_item)
_LIST = PartsKind(lambda x: dict(enumerate(list.__iter__(x))), _write_list, _put_item)
_TUPLE = PartsKind(lambda x: dict(enumerate(tuple.__iter__(x))), _nothing)
_FROZEN_SET = PartsKind(lambda x: dict(enumerate(x)), _nothing)
SET = PartsKind(lambda x: dict.fromkeys(x), _write_set)
_DEQUE = PartsKind(lambda x: dict(enumerate(x)), _write_deque, _put_item)
_ATTRIBUTES = PartsKind(
    lambda x: dict(x.__dict__), _write_attributes, lambda x, k, v: _put_item(x.__dict__, k, v)
)
_SLOTS = PartsKind(_read_slots, _write_slots, object.__setattr__)
_CELL = PartsKind(_read_cell, _write_cell, lambda x, k, v: setattr(x, "cell_contents", v))
TENSOR = PartsKind(_read_tensor, _write_tensor)
FUNCTION = PartsKind(_read_function, _write_function, _put_default)
GLOBALS = PartsKind(_read_globals, _write_globals, lambda x, k, v: _put_item(x.__globals__, k, v))
_CLASS = PartsKind(_read_class, _write_class)
METHOD = PartsKind(lambda x: {"self": x.__self__, "function": x.__func__}, _nothing)
_ITERATOR = PartsKind(_read_iterator, lambda x, s: x.__setstate__(s["position"]))
_COUNT = PartsKind(lambda x: {"position": repr(x)}, _nothing)
_YIELDING = PartsKind(_read_generator, _nothing)
_PARTIAL = PartsKind(lambda x: {"func": x.func, "args": x.args, "keywords": x.keywords}, _nothing)
_ARRAY = PartsKind(lambda x: {"elements": x.tobytes()}, lambda x, s: _fill(x, s["elements"]))
_RANDOM = PartsKind(lambda x: {"state": x.getstate()}, lambda x, s: x.setstate(s["state"]))
_GENERATOR = PartsKind(
    lambda x: {"state": bytes(x.get_state().numpy())},
    lambda x, s: x.set_state(torch.frombuffer(bytearray(s["state"]), dtype=torch.uint8)),
)
_NUMPY_RANDOM = PartsKind(
    lambda x: {"state": FrozenState(x.bit_generator.state)},
    lambda x, s: setattr(x.bit_generator, "state", s["state"].value),
)


_NUMPY_OLD_RANDOM = PartsKind(
    lambda x: {"state": FrozenState(x.get_state(legacy=False))},
    lambda x, s: x.set_state(s["state"].value),
)


def _fill(array: Any, elements: bytes) -> None:
    array[...] = np.frombuffer(elements, dtype=array.dtype).reshape(array.shape)


def parts_of(held: Any) -> list[PartsKind]:
    """How an object is read and written; nothing for what has no parts that can change."""
    for cls, kind in _BUILT_IN:
        if isinstance(held, cls):
            own = [_ATTRIBUTES] if hasattr(held, "__dict__") else []
            return [kind, *own, *([_SLOTS] if _slot_names(held) else [])]
    if isinstance(held, types.FunctionType):
        named = [GLOBALS] if is_own_file(held.__code__.co_filename) else []
        return [FUNCTION, *named]
    if isinstance(held, type):
        return [_CLASS] if _is_own_class(held) else []
    if isinstance(held, np.ndarray):
        return [_ARRAY] if held.nbytes <= _LARGE and not held.dtype.hasobject else []
    if isinstance(held, _CLOSED):
        return []
    kinds = [_ATTRIBUTES] if isinstance(getattr(held, "__dict__", None), dict) else []
    return [*kinds, *([_SLOTS] if _slot_names(held) else [])]


def _is_own_class(cls: type) -> bool:
    if cls.__module__ == "__main__":
        return True
    return is_own_file(getattr(sys.modules.get(cls.__module__), "__file__", None) or "<frozen")


_LARGE = 1 << 24  # bytes of an array of NumPy's, beyond which nobody's step writes to it
_CLOSED = (logging.Logger, logging.Handler, threading.Thread)
"""What a step may write to and nobody takes back."""
_BUILT_IN: tuple[tuple[type, PartsKind], ...] = (
    (torch.Tensor, TENSOR),
    (dict, DICT),
    (list, _LIST),
    (tuple, _TUPLE),
    (set, SET),
    (frozenset, _FROZEN_SET),
    (deque, _DEQUE),
    (types.CellType, _CELL),
    (types.MethodType, METHOD),
    (functools.partial, _PARTIAL),
    (random.Random, _RANDOM),
    (type(iter([])), _ITERATOR),
    (type(iter(())), _ITERATOR),
    (type(iter(range(0))), _ITERATOR),
    (itertools.count, _COUNT),
    (types.GeneratorType, _YIELDING),
    (torch.Generator, _GENERATOR),
    (np.random.Generator, _NUMPY_RANDOM),
    (np.random.RandomState, _NUMPY_OLD_RANDOM),
)
