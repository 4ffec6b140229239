"""Capture leaves everything as it was: what the step may change, kept before and put back after.

A step that is captured runs as Python code: modules cache masks, count their calls, set attributes
in hooks; fake tensors, which have no data, must not stay in any of them. `untouched` walks over all
that the step can reach (model, optimizer, batch, and what its function closes over, is bound to or
names as a global), keeps for each object what it consists of, and puts that back afterwards, also
when the capture fails. Nothing is copied but containers: tensors and other things are kept as the
very objects they are, tensors with torch's own count of how often they were written to.

In: the live objects by name. Out, after the capture: which of them the step had changed. A change
that cannot be undone is refused by name.
"""

from __future__ import annotations

import functools
import gc
import random
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from apportion.capture.object_parts import (
    ABSENT,
    DICT,
    FUNCTION,
    GLOBALS,
    METHOD,
    SET,
    TENSOR,
    FrozenState,
    PartsKind,
    parts_of,
)
from apportion.capture.torch_private import FakeTensor, set_version, storage_id
from apportion.capture.trace import CaptureError
from apportion.capture.written_tensors import WrittenTensor
from apportion.collector import older_objects_set_aside, set_aside

_TABLES = ("_parameters", "_buffers", "_modules")  # of a module: parts of no name
_ATOMS = frozenset([
    type(None), bool, int, float, complex, str, bytes, range, slice, type(...), torch.dtype,
    torch.device, torch.Size, torch.layout, torch.memory_format, types.ModuleType,
    types.BuiltinFunctionType, types.GetSetDescriptorType, types.MemberDescriptorType, property,
    types.CodeType, types.FrameType, types.TracebackType, np.dtype,
])  # fmt: skip

Link = tuple[Any, str]
"""The link of what holds a part (None at the root), and the part's name there."""


@dataclass(frozen=True, slots=True, eq=False)
class LiveChange:
    """Something that the step changed and that was put back: its name, what it was and had become,
    how it is read, and how it is made another thing, where that can be done."""

    name: str
    before: Any
    after: Any
    get: Callable[[], Any]
    put: Callable[[Any], None] | None


@dataclass(frozen=True, slots=True, eq=False)
class _KeptPart:
    """One object, what it consisted of, and how that is read and written."""

    held: Any
    link: Link
    kind: PartsKind
    saved: Mapping[Any, Any]


class Snapshot:
    """All that can be reached from some objects, as it was when this was made."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._parts: list[_KeptPart] = []
        self._seen: set[int] = set()
        self._keep: list[Any] = []  # what is looked at, so that no id is used twice
        waiting: list[tuple[Any, Link]] = [(root, (None, name)) for name, root in roots.items()]
        while waiting:
            held, link = waiting.pop()
            if type(held) not in _ATOMS and id(held) not in self._seen:
                self._seen.add(id(held))
                self._keep.append(held)
                waiting.extend(self._look_at(held, link))

    def _look_at(self, held: Any, link: Link) -> Iterator[tuple[Any, Link]]:
        for cls in type(held).__mro__:
            yield cls, (None, cls.__name__)
        for kind in parts_of(held):
            saved = kind.read(held)
            self._parts.append(_KeptPart(held, link, kind, saved))
            place = None if kind in (FUNCTION, GLOBALS, METHOD) else link
            for key, each in saved.items():
                if type(each) not in _ATOMS:
                    yield each, (place, _shown_key(key))
                if kind in (DICT, SET) and type(key) not in _ATOMS:
                    yield key, (place, _shown_key(key))

    def changes(self) -> Iterator[LiveChange]:
        """What is another now."""
        for part in self._parts:
            now = part.kind.read(part.held)
            if not _same(part.saved, now):
                for key in {**part.saved, **now}:
                    before, after = part.saved.get(key, ABSENT), now.get(key, ABSENT)
                    if not _is_same(before, after):
                        name = _shown((part.link, _shown_key(key)))
                        put = part.kind.put and functools.partial(part.kind.put, part.held, key)
                        get = functools.partial(_part, part, key)
                        yield LiveChange(name, before, after, get, put)

    def restore(self) -> tuple[LiveChange, ...]:
        """Puts everything back; returns what had changed. Raises CaptureError, by name, for what
        cannot be put back."""
        changed = tuple(self.changes())
        if not changed:
            return ()
        for part in self._parts:
            if not _same(part.saved, part.kind.read(part.held)):
                try:
                    part.kind.write(part.held, part.saved)
                except Exception as error:
                    raise _cannot_undo(_shown(part.link), str(error)) from None
        for left in self.changes():
            raise _cannot_undo(left.name, "it does not take its former value")
        return changed

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, int | None]]:
        """All tensors, each with its name and how often it had been written to."""
        for part in self._parts:
            if part.kind is TENSOR:
                yield _shown(part.link), part.held, part.saved.get("version")

    @contextmanager
    def replaced(self, tensors: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """A context in which other tensors are in the place of those with the given ids, wherever
        something that can be changed refers to one, by itself or in a tuple; but for the groups of
        optimizers."""
        done: list[tuple[_KeptPart, Any, Any, Any]] = []
        try:
            for part in self._parts:
                if part.kind.put is None or part.link[1] == "params":
                    continue
                now: Mapping[Any, Any] | None = None
                for key, each in part.saved.items():
                    other = _with_others(each, tensors)
                    if other is not each:
                        now = part.kind.read(part.held) if now is None else now
                        if now.get(key) is each:
                            part.kind.put(part.held, key, other)
                            done.append((part, key, each, other))
            yield
        finally:
            for part, key, each, other in reversed(done):
                if part.kind.put is not None and part.kind.read(part.held).get(key) is other:
                    part.kind.put(part.held, key, each)


def _part(part: _KeptPart, key: Any) -> Any:
    return part.kind.read(part.held).get(key)


def _with_others(held: Any, tensors: Mapping[int, torch.Tensor]) -> Any:
    """A tensor's replacement, a weak reference to it, or a tuple with such; anything else as it
    is."""
    if isinstance(held, torch.Tensor):
        return tensors.get(id(held), held)
    if type(held) is weakref.ref:
        other = tensors.get(id(held()))
        return held if other is None else weakref.ref(other)
    # classes of the user's may count and iterate in ways of their own
    if isinstance(held, tuple) and tuple.__len__(held) < 1000:
        own = list(tuple.__iter__(held))
        new = [_with_others(each, tensors) for each in own]
        if any(a is not b for a, b in zip(new, own, strict=True)):
            return type(held)(*new) if hasattr(held, "_fields") else tuple(new)
    return held


def _cannot_undo(name: str, why: str) -> CaptureError:
    return CaptureError(
        f"the step changes {name}, which capture cannot undo ({why}); keep it out of the step"
    )


def _same(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> bool:
    """Whether both have the same keys in the same order, and the same objects under them."""
    return len(before) == len(after) and all(
        _is_same(a, b) and _is_same(x, y)
        for (a, x), (b, y) in zip(before.items(), after.items(), strict=True)
    )


def _is_same(before: Any, after: Any) -> bool:
    """Whether this is one object; numbers, texts and tuples of them have no identity."""
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if type(before) is tuple:
        return len(before) == len(after) and all(map(_is_same, before, after))
    if type(before) is FrozenState:
        return bool(before.shown == after.shown)
    return type(before) in (int, float, str, bytes) and bool(before == after)


def _shown_key(key: Any) -> str:
    return key if isinstance(key, str) else str(key) if isinstance(key, int) else "item"


def _shown(link: Link | None) -> str:
    names: list[str] = []
    while link is not None:
        link, name = link
        if name and name not in _TABLES:
            names.append(name)
    return ".".join(reversed(names))


# what is no object of the user's


def _set_deterministic(wanted: bool) -> None:
    """Only where it differs, because the setting's own function loads torch's compiler."""
    if torch.are_deterministic_algorithms_enabled() != wanted:
        torch.use_deterministic_algorithms(wanted)


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (random.getstate, random.setstate),
    (lambda: np.random.get_state(legacy=False), np.random.set_state),
    (torch.get_rng_state, torch.set_rng_state),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.are_deterministic_algorithms_enabled, _set_deterministic),
)
"""Random numbers and settings that belong to the whole process, and how each is put back."""


Caches = dict[int, tuple[Any, int]]
"""Functions that remember results, by id, and how many each has computed."""


class _CacheFinder:
    """Finds all functions that remember results. What is of their class refers to it, and to look
    for that takes half as long as to look at all objects; so it is done again only when one that
    was found is gone, or more refer to the class."""

    def __init__(self) -> None:
        self._kind = functools._lru_cache_wrapper
        self._found: list[weakref.ref[Any]] = []
        self._references = 0

    def __call__(self) -> Caches:
        """All of them, and how many results each has computed."""
        found = [cache for each in self._found if (cache := each()) is not None]
        if len(found) < len(self._found) or sys.getrefcount(self._kind) != self._references:
            known = set(map(id, found))  # some are set aside, where nobody sees who refers to what
            more = (x for x in gc.get_referrers(self._kind) if type(x) is self._kind)
            found += [cache for cache in more if id(cache) not in known]
            self._found = [weakref.ref(cache) for cache in found]
            self._references = sys.getrefcount(self._kind)
        return _counted(found)


_caches = _CacheFinder()


def _counted(caches: Iterable[Any]) -> Caches:
    return {id(cache): (cache, cache.cache_info().misses) for cache in caches}


def _clear_caches(before: Caches, later: Caches) -> None:
    """Empties those that have since remembered a fake tensor: of the ones that there were, which
    may be set aside by now, and of those that came later."""
    both = (cache for cache, _ in (before | later).values())
    for key, (cache, misses) in _counted(both).items():
        if misses != before.get(key, (None, 0))[1] and _holds_fake(cache):
            cache.cache_clear()


def _holds_fake(cache: Any) -> bool:
    """Whether a fake tensor is among the remembered results, or in a container that is."""
    seen: set[int] = set()
    level: list[Any] = gc.get_referents(cache)
    for _ in range(6):
        if any(type(each) is FakeTensor for each in level):
            return True
        seen.update(map(id, level))
        inner = gc.get_referents(*filter(_is_container, level))
        level = [each for each in inner if id(each) not in seen]
    return False


def _is_container(held: Any) -> bool:
    return type(held) in (dict, list, tuple) or type(held).__name__ == "_lru_list_elem"


Memories = dict[int, list[weakref.ref[torch.Tensor]]]


def _memories_of(objects: Iterable[Any]) -> Memories:
    """The memories of all tensors among some objects. Some of these are garbage that is not
    collected yet; once they are, their memory may be another tensor's."""
    kinds, found = _subclasses(torch.Tensor), Memories()
    for each in [x for x in objects if type(x) in kinds]:
        if each.layout is torch.strided:
            with suppress(RuntimeError, NotImplementedError):  # some have no memory
                found.setdefault(storage_id(each), []).append(weakref.ref(each))
    return found


def _subclasses(kind: type) -> set[type]:
    """A class and all that inherit from it; asking each of many objects takes far longer."""
    return {kind}.union(*map(_subclasses, kind.__subclasses__()))


class LiveObjects:
    """All that a step may change, as it was when this was made: what can be reached from the roots,
    random numbers, settings, and functions that remember results. `memories` are those of all
    tensors that there were; None: of those that are set aside."""

    def __init__(self, roots: Mapping[str, Any], caches: Caches, memories: Memories | None) -> None:
        self._settings = [(put, get()) for get, put in _SETTINGS]
        self._caches, self._memories = caches, memories
        self._later_caches: Caches = {}
        self._snapshot = Snapshot(roots)

    def had(self, tensor: torch.Tensor) -> bool:
        """Whether there was a tensor with this memory before, anywhere, and still is. They are
        looked for when this is first asked: that takes longer than most captures, of which few
        ask."""
        if self._memories is None:
            self._later_caches = _caches()
            self._memories = _memories_of(set_aside())
        owners = self._memories.get(storage_id(tensor), ())
        return any(owner() is not None for owner in owners)

    def changes(self) -> tuple[LiveChange, ...]:
        """What can be reached from the roots and is another now."""
        return tuple(self._snapshot.changes())

    def drawn_from(self) -> list[str]:
        """Whose random numbers were drawn since, of those who have one generator for all."""
        python, numpy = self._settings[0][1], self._settings[1][1]
        drawn = [random.getstate() != python, str(np.random.get_state(legacy=False)) != str(numpy)]
        return [n for n, d in zip(("Python's random", "numpy.random"), drawn, strict=True) if d]

    def named(
        self, tensors: Sequence[torch.Tensor], taken: Collection[str]
    ) -> tuple[WrittenTensor, ...]:
        """The tensors with these memories that can be reached, by names that are not taken; none if
        one of them cannot be, or by several, or needs a gradient."""
        memories = {storage_id(tensor) for tensor in tensors}
        found: dict[str, torch.Tensor] = {}
        for name, tensor, _ in self._snapshot.tensors():
            if tensor.layout is torch.strided and storage_id(tensor) in memories:
                if tensor.requires_grad or not name:
                    return ()
                while name in found or name in taken:
                    name += "_"
                found[name] = tensor
        owners = {storage_id(tensor) for tensor in found.values()}
        if not len(owners) == len(found) == len(memories):
            return ()
        return tuple(WrittenTensor(name, tensor) for name, tensor in found.items())

    def forget_writes(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sets torch's counts of writes to these memories back, where nothing was written because
        the writing operators were only recorded."""
        memories = {storage_id(tensor) for tensor in tensors}
        for _, tensor, version in self._snapshot.tensors():
            if version is not None and storage_id(tensor) in memories:
                set_version(tensor, version)

    def replaced(self, tensors: Mapping[int, torch.Tensor]) -> AbstractContextManager[None]:
        """A context in which other tensors are in the place of those with the given ids."""
        return self._snapshot.replaced(tensors)

    def restore(self) -> None:
        """Puts everything back; raises CaptureError, by name, for what cannot be put back."""
        for put, value in self._settings:
            put(value)
        if self._caches:
            _clear_caches(self._caches, self._later_caches | _caches())
        self._snapshot.restore()


@contextmanager
def untouched(roots: Mapping[str, Any], fakes: bool = True) -> Iterator[LiveObjects]:
    """A context after which all that can be reached from the roots, random numbers and torch's
    settings are as before; raises CaptureError, by name, for what cannot be put back. Without
    `fakes` the step runs on real tensors there."""
    with ExitStack() as stack:
        caches, memories = Caches(), None if fakes else Memories()
        if fakes:
            caches = _caches()
            if gc.get_freeze_count():  # by the program: they stay so, and new ones are beside them
                memories = _memories_of(gc.get_objects())
            stack.enter_context(older_objects_set_aside())
        live = LiveObjects(roots, caches, memories)
        try:
            yield live
        finally:
            live.restore()
