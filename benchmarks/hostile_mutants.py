"""Mutants of files: a tree of data with something changed, or a file's bytes.

Part of benchmarks/hostile_files.py, which judges what comes of them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

ESCAPES = "\x1b[31mred\x1b[0m [bold]x[/bold] \u202e"


class Raw:
    """A piece of text that stands in JSON as it is."""

    def __init__(self, text: str) -> None:
        self.text = text


ODD: list[Any] = [
    *(0, 1, -1, 2, 7, 255, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 10**30),
    *(0.5, -0.5, 1e-300, 1e300, -1e300, 3.0, True, False, None, "", "x", "0", "1e3"),
    *(Raw("1e999"), Raw("-1e999"), Raw("NaN"), Raw("Infinity"), Raw("9" * 400), Raw("9" * 5000)),
    *(ESCAPES, "\ud800", "a" * 400_000, "\u0000", "../../etc/passwd", "aten.mm.default"),
    *([], {}, [[]], [0], {"ref": 0}, {"float": "nan"}, {"complex": "1j"}, {"setting": ["get"]}),
    *(Raw("[" * 500 + "]" * 500), Raw("[" * 100_000 + "]" * 100_000)),
]


# Trees


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of everything in a tree of lists and mappings."""
    yield path
    if isinstance(tree, dict):
        for key, item in tree.items():
            yield from places(item, (*path, key))
    elif isinstance(tree, list):
        for key, item in enumerate(tree):
            yield from places(item, (*path, key))


def random_place(tree: Any, rng: Random) -> tuple[Any, ...]:
    """A path, every depth about as likely: lists of thousands do not hide what is above them."""
    path: list[Any] = []
    while isinstance(tree, dict | list) and tree and (not path or rng.random() < 0.8):
        key = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
        path.append(key)
        tree = tree[key]
    return tuple(path)


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def with_item(tree: Any, path: tuple[Any, ...], item: Any) -> Any:
    if not path:
        return item
    at(tree, path[:-1])[path[-1]] = item
    return tree


def mutated_tree(tree: Any, rng: Random) -> Any:
    """The tree with one thing changed."""
    path = random_place(tree, rng)
    if not path:
        return rng.choice(ODD)
    item, parent = at(tree, path), at(tree, path[:-1])
    kind = rng.randrange(9)
    if kind <= 2:
        return with_item(tree, path, copy.deepcopy(rng.choice(ODD)))
    if kind == 3:
        del parent[path[-1]]
    elif kind == 4 and isinstance(parent, list):
        parent.insert(path[-1], copy.deepcopy(item))
    elif kind == 5 and isinstance(item, int | float) and not isinstance(item, bool):
        change = rng.choice([-item, item + 1, item - 1, item * 10**6, item / 3, item * 1e290])
        return with_item(tree, path, change)
    elif kind == 6:
        other = random_place(tree, rng)
        if other and other[: len(path)] != path and path[: len(other)] != other:
            one, two = at(tree, path), at(tree, other)
            with_item(tree, path, copy.deepcopy(two))
            return with_item(tree, other, copy.deepcopy(one))
    elif kind == 7 and isinstance(parent, dict):
        parent[rng.choice(["x", ESCAPES, "", "a" * 400_000])] = parent.pop(path[-1])
    elif isinstance(item, list):
        return with_item(tree, path, item[: rng.randrange(len(item) + 1)])
    elif isinstance(item, str):
        return with_item(tree, path, item + rng.choice([" ", "x", ESCAPES, "\n"]))
    return tree


def dumped(tree: Any) -> bytes:
    """The tree as JSON, with pieces that stand in it as they are."""
    pieces: list[str] = []

    def plain(item: Any) -> Any:
        if isinstance(item, Raw):
            pieces.append(item.text)
            return f"@@{len(pieces) - 1}@@"
        if isinstance(item, dict):
            return {key: plain(each) for key, each in item.items()}
        return [plain(each) for each in item] if isinstance(item, list | tuple) else item

    text = json.dumps(plain(tree))
    for number, piece in enumerate(pieces):
        text = text.replace(f'"@@{number}@@"', piece)
    return text.encode("utf-8", "surrogatepass")


def mutated_bytes(text: bytes, rng: Random) -> bytes:
    """The file with bytes lost, changed or added."""
    where = rng.randrange(len(text) + 1)
    kind = rng.randrange(7)
    if kind == 0:
        return text[:where]
    if kind == 1:
        return text[:where] + bytes(rng.randrange(256) for _ in range(4)) + text[where + 4 :]
    if kind == 2:
        return text + text
    if kind == 3:
        return b"\xef\xbb\xbf" + text
    if kind == 4:
        return text.decode("utf-8", "replace").encode("utf-16")
    if kind == 5:
        return text[:where] + text[where + rng.randrange(200) :]
    return rng.choice([b"", b"null", b"[]", b"{}", b"\0" * 100, b"[" * 200_000, b"\x80\x04N."])


# Kinds of file


@dataclass(frozen=True)
class FileKind:
    """A good file, how mutants of it are made, and what is done with one that is taken."""

    name: str
    good: tuple[bytes, ...]
    mutant: Callable[[bytes, Random], bytes]
    read: Callable[[Path], Any]
    use: Callable[[Any, Path, Random], None]
    suffix: str = "file"


def json_mutant(text: bytes, rng: Random) -> bytes:
    if rng.random() < 0.15:
        return mutated_bytes(text, rng)
    tree = json.loads(text)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        if not isinstance(tree, dict | list):
            break
        tree = mutated_tree(tree, rng)
    return dumped(tree)


def tensors_mutant(data: bytes, rng: Random, seal: Callable[[bytes], bytes] = bytes) -> bytes:
    """A safetensors file whose header is changed as JSON, or whose bytes are. What apportion says
    in it is JSON within JSON, and may be sealed."""
    if rng.random() < 0.3:
        return mutated_bytes(data, rng)
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    if rng.random() < 0.6:
        said = mutated_tree(json.loads(header["__metadata__"]["apportion"]), rng)
        text = seal(dumped(said)).decode("utf-8", "replace")
        header["__metadata__"]["apportion"] = text
        made = json.dumps(header).encode()
    else:
        made = dumped(mutated_tree(header, rng))
    length = len(made) if rng.random() < 0.9 else rng.choice([0, 2**63, 2**32, len(made) + 5])
    return length.to_bytes(8, "little") + made + data[8 + size :]
