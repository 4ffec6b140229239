"""A batch as a flat list of leaves, and a batch of the same build with other leaves.

capture/ traces a step on a batch whose tensors are fake, run/ feeds the tensors of other batches
to the same Graph, and the reference casts them; all do it by `flatten`. A batch comes in: tensors
in lists, tuples, dicts, any other Mapping (what tokenizers and collators return), dataclasses,
namedtuples, types registered with torch's pytree, and objects that keep them as attributes. Out
goes a FlatBatch: the leaves, a name for each (`batch.x.0`) and a function that rebuilds the batch.

What cannot be seen into is refused by name, because a tensor that is missed would become a constant
of the Graph.
"""

from __future__ import annotations

import copy
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch

from apportion.capture.torch_private import pytree
from apportion.capture.trace import CaptureError

Path = tuple[Any, ...]
"""The keys, indices and attributes that lead to a part of a batch."""

_SEQUENCE, _MAPPING = "sequence", "mapping"
_WHOLE = (
    torch.Tensor, type(None), bool, int, float, complex, str, bytes, type, torch.dtype,
    torch.device, torch.layout, torch.memory_format, torch.Size, torch.Generator, torch.nn.Module,
    Enum, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
    weakref.ReferenceType,
)  # fmt: skip
"""What is a leaf by itself, though some of it has parts."""


@dataclass(frozen=True, eq=False)
class FlatBatch:
    """A batch taken apart.

    leaves   tensors and what else is in it, in order
    paths    how each leaf is reached
    form     the kind of every part that was opened, by its path: lists and tuples are alike, and so
             are all Mappings
    rebuild  a batch like this one, of as many other leaves; the given batch stays as it is
    """

    leaves: tuple[Any, ...]
    paths: tuple[Path, ...]
    form: Mapping[Path, str]
    rebuild: Callable[[Sequence[Any]], Any]

    @property
    def names(self) -> tuple[str, ...]:
        """`batch.x.0` for the first item of what the batch has under x."""
        return tuple(map(shown_path, self.paths))

    @property
    def tensors(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """Position, name and tensor of every leaf that is one."""
        for position, (name, leaf) in enumerate(zip(self.names, self.leaves, strict=True)):
            if isinstance(leaf, torch.Tensor):
                yield position, name, leaf

    def in_order_of(self, captured: FlatBatch) -> tuple[Any, ...]:
        """The leaves in the order that another batch has them; raises ValueError, naming what
        differs, unless both are of one build. Keys may come in another order."""
        if self.form != captured.form or set(self.paths) != set(captured.paths):
            raise ValueError(_differing(self, captured))
        found = dict(zip(self.paths, self.leaves, strict=True))
        return tuple(found[path] for path in captured.paths)


def flatten(batch: Any) -> FlatBatch:
    """The batch taken apart; raises CaptureError, by its name in the batch, for a part that nobody
    can see into."""
    form: dict[Path, str] = {}
    found = list(_open(batch, (), set(), form))
    leaves = tuple(leaf for _, leaf in found)

    def rebuild(new: Sequence[Any]) -> Any:
        if len(new) != len(leaves):
            raise ValueError(f"the batch has {len(leaves)} leaves, and {len(new)} are given")
        return _rebuilt(batch, leaves, new)

    return FlatBatch(leaves, tuple(path for path, _ in found), form, rebuild)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """A batch like this one with the function's results in the place of its tensors."""
    flat = flatten(batch)
    return flat.rebuild([function(x) if isinstance(x, torch.Tensor) else x for x in flat.leaves])


def shown_path(path: Path) -> str:
    """`batch.x.0`."""
    return ".".join(["batch", *map(str, path)])


def _differing(given: FlatBatch, captured: FlatBatch) -> str:
    has = {*given.form, *given.paths}
    had = {*captured.form, *captured.paths}
    missing = [shown_path(path) for path in (*captured.paths, *captured.form) if path not in has]
    added = [shown_path(path) for path in (*given.paths, *given.form) if path not in had]
    other = [p for p in had & has if captured.form.get(p, "") != given.form.get(p, "")]
    parts = [
        *([f"it lacks {', '.join(missing)}"] if missing else []),
        *([f"it also has {', '.join(added)}"] if added else []),
        *(f"{shown_path(p)} is a {_kind(given, p)}, not a {_kind(captured, p)}" for p in other),
    ]
    return (
        "the batch has another structure than the one that the step was captured with: "
        + "; ".join(parts)
        + "; give every batch the same structure or capture again"
    )


def _kind(flat: FlatBatch, path: Path) -> str:
    if path in flat.form:
        return flat.form[path]
    return type(flat.leaves[flat.paths.index(path)]).__name__


def _open(
    part: Any, path: Path, inside: set[int], form: dict[Path, str]
) -> Iterator[tuple[Path, Any]]:
    """The leaves of a part; `inside` has the ids of what is open now, which an object that knows
    its parent leads back to."""
    parts = _parts(part, path)
    if parts is None:
        yield path, part
        return
    if id(part) in inside:
        return
    form[path] = _form(part)
    for key, each in parts:
        yield from _open(each, (*path, key), {*inside, id(part)}, form)


def _form(part: Any) -> str:
    if isinstance(part, Mapping):
        return _MAPPING
    if isinstance(part, list | tuple) and not hasattr(part, "_fields"):
        return _SEQUENCE
    return type(part).__name__


def _parts(part: Any, path: Path) -> list[tuple[Any, Any]] | None:
    """The parts of a container with their keys; None for a leaf."""
    if isinstance(part, _WHOLE):
        return None
    _refuse_closed(part, path)
    if isinstance(part, Mapping):
        return [(key, part[key]) for key in part]
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return list(zip(part._fields, part, strict=True))
    if type(part) in pytree.SUPPORTED_NODES:
        return _registered_parts(part)
    if isinstance(part, list | tuple):
        return list(enumerate(part))
    if any(isinstance(each, torch.Tensor | np.ndarray) for each in _contents(part, set())):
        return list(_attributes(part).items())
    return None


def _registered_parts(part: Any) -> list[tuple[Any, Any]]:
    node = pytree.SUPPORTED_NODES[type(part)]
    if node.flatten_with_keys_fn is None:
        return list(enumerate(node.flatten_fn(part)[0]))
    keyed = node.flatten_with_keys_fn(part)[0]
    return [
        (getattr(k, "key", getattr(k, "idx", getattr(k, "name", k))), each) for k, each in keyed
    ]


def _refuse_closed(part: Any, path: Path) -> None:
    """Raises CaptureError for what holds values that no tensor can stand for."""
    if isinstance(part, np.ndarray):
        raise CaptureError(
            f"{shown_path(path)} is a NumPy array, which would be fixed as it is now; make it a "
            'tensor with torch.from_numpy (a tokenizer: return_tensors="pt") or leave it out'
        )
    if isinstance(part, Iterator):
        raise CaptureError(
            f"{shown_path(path)} is a {type(part).__name__}, which can be read only once; give the "
            "step a list of what it yields"
        )
    if isinstance(part, set | frozenset) and any(isinstance(x, torch.Tensor) for x in part):
        raise CaptureError(
            f"{shown_path(path)} is a set of tensors, which has no order; give the step a list"
        )


def _contents(part: Any, seen: set[int]) -> Iterator[Any]:
    """Everything in a container, at any depth, that is no container itself."""
    if id(part) in seen:
        return
    seen.add(id(part))
    inner: Iterable[Any]
    if isinstance(part, _WHOLE):
        inner = ()
    elif isinstance(part, dict):
        inner = (*part.keys(), *part.values())
    elif isinstance(part, list | tuple | set | frozenset | deque):
        inner = part
    else:
        inner = _attributes(part).values()
    empty = True
    for each in inner:
        empty = False
        yield from _contents(each, seen)
    if empty:
        yield part


def _attributes(part: Any) -> dict[str, Any]:
    """The attributes of an object, as they are kept."""
    names = [
        name
        for cls in type(part).__mro__
        for own in (cls.__dict__.get("__slots__", ()),)
        for name in ((own,) if isinstance(own, str) else own)
        if name not in ("__dict__", "__weakref__") and hasattr(part, name)
    ]
    return {name: getattr(part, name) for name in names} | dict(getattr(part, "__dict__", {}))


# rebuilding


def _rebuilt(batch: Any, leaves: Sequence[Any], new: Sequence[Any]) -> Any:
    """A copy of the batch with other leaves; raises CaptureError if it does not have them."""
    made = _filled(_copy_of(batch), iter(new), (), set())
    for given, expected in ((batch, leaves), (made, new)):
        found = [leaf for _, leaf in _open(given, (), set(), {})]
        same = len(found) == len(expected) and all(
            a is b or not isinstance(b, torch.Tensor) for a, b in zip(found, expected, strict=True)
        )
        if not same:
            raise CaptureError(
                f"the batch is a {type(batch).__name__} that does not give back the tensors that "
                "are put into it; give the step a dict or a list"
            )
    return made


def _copy_of(batch: Any) -> Any:
    """A copy that shares with the batch only what is no container."""
    memo = {id(each): each for each in _contents(batch, set()) if not _is_empty(each)}
    try:
        return copy.deepcopy(batch, memo)
    except Exception as error:
        why = (str(error).strip().splitlines() or [""])[0]
        raise CaptureError(
            f"the batch is a {type(batch).__name__}, which cannot be copied ({why}); give the step "
            "its tensors in a dict"
        ) from None


def _is_empty(part: Any) -> bool:
    """Whether this is a container that has nothing yet."""
    return isinstance(part, dict | list | set | deque)


def _filled(part: Any, leaves: Iterator[Any], path: Path, inside: set[int]) -> Any:
    """A copied part with the next leaves in the place of its own."""
    parts = _parts(part, path)
    if parts is None:
        return next(leaves)
    if id(part) in inside:
        return part
    within = {*inside, id(part)}
    new = {key: _filled(each, leaves, (*path, key), within) for key, each in parts}
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return type(part)(*new.values())
    if type(part) is tuple:
        return tuple(new.values())
    if type(part) in pytree.SUPPORTED_NODES and not isinstance(part, Mapping | list):
        node = pytree.SUPPORTED_NODES[type(part)]
        return node.unflatten_fn(list(new.values()), node.flatten_fn(part)[1])
    try:
        return _with_parts(part, new)
    except Exception as error:
        raise CaptureError(
            f"{shown_path(path)} is a {type(part).__name__}, whose contents cannot be replaced "
            f"({error}); give the step a dict or a list"
        ) from None


def _with_parts(part: Any, new: Mapping[Any, Any]) -> Any:
    if isinstance(part, Mapping):
        for key, each in new.items():
            if part[key] is not each:
                part[key] = each  # type: ignore[index]
    elif isinstance(part, list):
        part[:] = new.values()
    elif isinstance(part, tuple):
        return type(part)(new.values())
    else:
        for name, each in new.items():
            object.__setattr__(part, name, each)
    return part
