"""What capture might have touched, before and after: an independent comparison.

`snapshot` walks live objects (modules, optimizers, batches, what a step's closure holds) and the
random states, and keeps for everything a fingerprint under a path; `differences` names the paths
that are no longer the same. Tensors are compared by their bytes and by which object they are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

DEPTH = 8
# What PyTorch itself keeps count of, and what means nothing.
IGNORED = {"_zero_grad_profile_name", "_hook_for_profile", "_patched_step_function"}


def snapshot(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Fingerprints by path."""
    found: dict[str, Any] = {}
    seen: dict[int, str] = {}
    for name, each in objects.items():
        _walk(each, name, found, seen, DEPTH)
    found["torch random state"] = hash(torch.get_rng_state().numpy().tobytes())
    found["Python random state"] = hash(random.getstate())
    state = np.random.get_state(legacy=True)
    found["NumPy random state"] = hash((state[0], state[1].tobytes(), *state[2:]))
    found["default dtype"] = torch.get_default_dtype()
    found["grad mode"] = torch.is_grad_enabled()
    return found


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The paths that differ, a sentence each."""
    told = []
    for path in [*before, *(p for p in after if p not in before)]:
        if path not in after:
            told.append(f"{path} is gone")
        elif path not in before:
            told.append(f"{path} is new: {_shown(after[path])}")
        elif before[path] != after[path]:
            told.append(f"{path} was {_shown(before[path])} and is {_shown(after[path])}")
    return told


def _shown(fingerprint: Any) -> str:
    return str(fingerprint)[:120]


def _walk(value: Any, path: str, found: dict[str, Any], seen: dict[int, str], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        _tensor(value, path, found, seen)
        return
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype)):
        found[path] = (type(value).__name__, repr(value))
        return
    if id(value) in seen:
        found[path] = ("same as", seen[id(value)])
        return
    seen[id(value)] = path
    if depth == 0 or isinstance(value, (type, torch.Generator)):
        found[path] = (type(value).__name__, id(value))
        return
    if isinstance(value, Mapping):
        found[path] = (type(value).__name__, len(value))
        for key in list(value):
            name = repr(key) if isinstance(key, (str, int, tuple)) else f"<{seen.get(id(key))}>"
            _walk(value[key], f"{path}[{name}]", found, seen, depth - 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        found[path] = (type(value).__name__, sum(1 for _ in value.__class__.__iter__(value)))
        if not isinstance(value, (set, frozenset)):
            for number, item in enumerate(value):
                _walk(item, f"{path}[{number}]", found, seen, depth - 1)
    elif callable(value) and hasattr(value, "__code__"):
        found[path] = ("function", id(value))
        _function(value, path, found, seen, depth)
    else:
        found[path] = (type(value).__name__, id(value))
    _attributes(value, path, found, seen, depth)


def _attributes(
    value: Any, path: str, found: dict[str, Any], seen: dict[int, str], depth: int
) -> None:
    """The attributes of an object, for a module all of its tables."""
    if isinstance(value, np.ndarray):
        found[path] = ("array", hashlib.sha1(value.tobytes()).hexdigest()[:12])
        return
    if dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            _walk(getattr(value, each.name, None), f"{path}.{each.name}", found, seen, depth - 1)
        return
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or type(value).__module__ == "builtins":
        return
    deeper = depth if isinstance(value, torch.nn.Module) else depth - 1
    for key, each in list(attributes.items()):
        if key not in IGNORED:
            _walk(each, f"{path}.{key}", found, seen, deeper)


def _function(
    value: Any, path: str, found: dict[str, Any], seen: dict[int, str], depth: int
) -> None:
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
    for name, cell in cells:
        try:
            _walk(cell.cell_contents, f"{path}<{name}>", found, seen, depth - 1)
        except ValueError:  # an empty cell
            continue


def _tensor(value: torch.Tensor, path: str, found: dict[str, Any], seen: dict[int, str]) -> None:
    kind = type(value).__name__
    if "Fake" in kind or "Functional" in kind:
        found[path] = (kind, tuple(value.shape))
        return
    seen[id(value)] = path
    found[path] = (
        kind, id(value), tuple(value.shape), str(value.dtype), value.requires_grad, _bytes(value),
        None if value.grad_fn is None else type(value.grad_fn).__name__,
        len(value._backward_hooks or ()),
    )  # fmt: skip
    if value.is_leaf and value.grad is not None:
        _tensor(value.grad, f"{path}.grad", found, seen)


def _bytes(value: torch.Tensor) -> str:
    if value.is_meta or value.layout != torch.strided:
        return str(value.layout)
    dense = value.detach().contiguous().reshape(-1)
    if dense.dtype in (torch.bfloat16, torch.float16):
        dense = dense.view(torch.int16)
    return hashlib.sha1(dense.cpu().resolve_conj().numpy().tobytes()).hexdigest()[:12]
