"""policy file: what a learned placer has learned, as one file.

In: a kind (`policy`, `placeto`, `gdp`, ...), tensors by name, and facts: what it was trained on,
the version of its features, figures. Out: a safetensors file whose header has kind and facts as
JSON; and all of that again from such a file.

Nothing in a file is executed. One that is malformed, cut short, of another kind or with numbers
that are not finite is refused in a sentence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from apportion.checked import brief, check_plain, parse_json
from apportion.files import open_atomic

VERSION = 1  # of the header
HEADER = "apportion"  # the one entry of a file's metadata; more would be in no fixed order

Tensors = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, eq=False)
class PolicyFile:
    """A learned placer, as it is kept: facts are what JSON can say."""

    kind: str
    tensors: dict[str, npt.NDArray[Any]]
    facts: dict[str, Any]


def write_policy(path: Path, kind: str, tensors: Tensors, facts: Mapping[str, Any]) -> None:
    """Write a policy, whole or not at all. Raises ValueError for tensors that a reader would
    refuse, and for facts that JSON cannot say."""
    from safetensors.numpy import save

    columns = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    if wrong := _not_finite(columns):
        raise ValueError(f"tensor {wrong!r} of a {kind} policy has numbers that are not finite")
    try:
        said = json.dumps(
            {"version": VERSION, "kind": kind, "facts": dict(facts)},
            allow_nan=False,
            sort_keys=True,
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"facts of a {kind} policy are no JSON: {error}") from None
    with open_atomic(Path(path)) as file:
        file.write(save(columns, metadata={HEADER: said}))


def read_policy(
    path: Path, kind: str | None = None, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> PolicyFile:
    """What a file says. With `kind` or `shapes` (of every tensor, by name; -1 is any size) it has
    to be that."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="np") as file:
            metadata = file.metadata() or {}
            tensors = {name: np.array(file.get_tensor(name)) for name in sorted(file.keys())}
    except FileNotFoundError:
        raise ValueError(f"there is no policy file {path}") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    except (SafetensorError, TypeError, ValueError, AttributeError, KeyError) as error:
        raise ValueError(f"{path} is no safetensors file: {brief(str(error), 200)}") from None
    said, facts = _header(path, metadata)
    if kind is not None and said != kind:
        raise ValueError(f"{path} is a policy of kind {brief(said)!r}, not {kind!r}")
    if wrong := _not_finite(tensors):
        raise ValueError(f"{path}: tensor {brief(wrong)!r} has numbers that are not finite")
    if shapes is not None:
        _check_shapes(path, tensors, shapes)
    return PolicyFile(said, tensors, facts)


def _header(path: Path, metadata: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """Kind and facts."""
    if HEADER not in metadata:
        raise ValueError(f"{path} has tensors but is no policy: its header has no {HEADER!r}")
    try:
        said = parse_json(metadata[HEADER])
    except ValueError:
        raise ValueError(f"{path}: its header is no JSON") from None
    if not isinstance(said, dict) or not isinstance(said.get("kind"), str):
        raise ValueError(f"{path}: its header does not say what kind of policy it is")
    if said.get("version") != VERSION:
        version = brief(said.get("version"))
        raise ValueError(f"{path} is of version {version}; this release reads version {VERSION}")
    if not isinstance(said.get("facts"), dict):
        raise ValueError(f"{path}: its header has no facts")
    try:
        check_plain(said, "its header")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return said["kind"], said["facts"]


def _not_finite(tensors: Tensors) -> str | None:
    """The first tensor with a number that is not finite."""
    for name, tensor in tensors.items():
        if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
            return name
    return None


def _check_shapes(path: Path, tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        if name not in tensors:
            raise ValueError(f"{path} has no tensor {name!r}")
        found = tensors[name].shape
        if len(found) != len(shape) or any(
            have != want for have, want in zip(found, shape, strict=True) if want != -1
        ):
            raise ValueError(f"{path}: tensor {name!r} has shape {brief(found)}, not {shape}")
    if extra := sorted(set(tensors) - set(shapes)):
        raise ValueError(f"{path} has a tensor {brief(extra[0])!r} that no such policy has")
