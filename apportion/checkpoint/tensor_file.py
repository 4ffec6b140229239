"""Files of tensors in the safetensors format, written without a copy and read with care.

Part of the room checkpoint. Tensors come in with their keys, and a file goes out; or a file comes
in, and what its header says goes out. A file may hold parts of tensors: where each begins in the
whole tensor is in the header under the key that torch's own HuggingFaceStorageReader looks for, so
that it can read these files too.

The header is JSON, which the safetensors library checks against the length of the file; nothing in
such a file can be executed.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from apportion.checked import brief, parse_json
from apportion.checkpoint.chunks import Chunk

SHARDING_INFO, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""The keys of torch.distributed.checkpoint for where the tensors of a file begin."""
SUFFIX = ".safetensors"
_ALIGNED = 8  # bytes; the header ends at a multiple of it
_PIECE = 1 << 24  # bytes that are written at once

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A Chunk of the tensor `key` in a file."""

    key: str
    chunk: Chunk
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class FileFacts:
    """How long a file is, and the checksum of its bytes."""

    nbytes: int
    crc32: int


def write_tensors(
    path: Path,
    tensors: Sequence[tuple[StoredChunk, torch.Tensor]],
    notes: Mapping[str, str] | None = None,
    sharded: bool = True,
) -> FileFacts:
    """Writes dense tensors on the CPU to a file, and waits until it is on the disk. Unless all are
    whole ones it is `sharded`. Raises OSError, and ValueError for a dtype that the format does not
    have."""
    ordered = sorted(tensors, key=lambda each: -each[0].dtype.itemsize)  # so that all are aligned
    header = _header([stored for stored, _ in ordered], dict(notes or {}), sharded)
    with path.open("wb", buffering=0) as file:
        crc = _write(file, header, 0)
        for _, tensor in ordered:
            if tensor.numel():
                flat = tensor.detach().reshape(-1).view(torch.uint8).numpy()
                crc = _write(file, flat.data, crc)
        os.fsync(file.fileno())
        return FileFacts(file.tell(), crc)


def _write(file: Any, content: Any, crc: int) -> int:
    """Writes all of it; returns the checksum of the file so far."""
    rest = memoryview(content)
    while rest:
        piece = rest[:_PIECE]
        written = file.write(piece)
        crc = zlib.crc32(piece[:written], crc)
        rest = rest[written:]
    return crc


def _header(stored: Sequence[StoredChunk], notes: dict[str, str], sharded: bool) -> bytes:
    entries: dict[str, Any] = {}
    place, offsets = 0, {}
    for each in stored:
        if each.dtype not in _NAMES:
            kind = str(each.dtype).removeprefix("torch.")
            raise ValueError(f"{each.key} is in {kind}, which a safetensors file cannot hold")
        end = place + each.chunk.volume * each.dtype.itemsize
        entries[each.key] = {
            "dtype": _NAMES[each.dtype],
            "shape": list(each.chunk.sizes),
            "data_offsets": [place, end],
        }
        offsets[each.key] = {OFFSETS: list(each.chunk.offsets)}
        place = end
    told = {**notes, SHARDING_INFO: json.dumps(offsets)} if sharded else notes
    text = json.dumps({"__metadata__": told, **entries}).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class TensorFile:
    """What the header of a file says: the Chunk under each key, and its notes."""

    path: Path
    stored: dict[str, StoredChunk]
    notes: dict[str, str] = field(default_factory=dict)


def read_header(path: Path) -> TensorFile:
    """The header of a file. Raises ValueError, naming the file, if it is damaged or missing."""
    try:
        with safe_open(str(path), framework="pt") as file:
            notes = dict(file.metadata() or {})
            shapes = {}
            for key in list(file.keys()):
                part = file.get_slice(key)
                shapes[key] = (tuple(part.get_shape()), part.get_dtype())
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged: {_first_line(error)}") from None
    offsets = _offsets(path, notes.pop(SHARDING_INFO, None), shapes.keys())
    stored = {}
    for key, (sizes, kind) in shapes.items():
        begin = offsets.get(key, (0,) * len(sizes))
        if len(begin) != len(sizes):
            raise ValueError(f"{path} is damaged: {brief(key)!r} begins in {len(begin)} dims")
        if kind not in DTYPES:
            raise ValueError(f"{path} has {brief(key)!r} in {kind}, which torch does not know")
        stored[key] = StoredChunk(key, Chunk(begin, sizes), DTYPES[kind])
    return TensorFile(path, stored, notes)


def _offsets(path: Path, text: str | None, keys: Any) -> dict[str, tuple[int, ...]]:
    """Where the tensors of a file begin."""
    if text is None:
        return {}
    wrong = ValueError(f"{path} is damaged: it does not say where its tensors begin")
    try:
        told = parse_json(text)
    except ValueError:
        raise wrong from None
    if not isinstance(told, dict) or told.keys() != set(keys):
        raise wrong
    found = {}
    for key, entry in told.items():
        begin = entry.get(OFFSETS) if isinstance(entry, dict) else None
        if not isinstance(begin, list) or not all(type(x) is int and x >= 0 for x in begin):
            raise wrong
        found[key] = tuple(begin)
    return found


def checksum(path: Path) -> FileFacts:
    """The length and the checksum of a file as it is now; raises OSError."""
    crc, count = 0, 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            crc, count = zlib.crc32(piece, crc), count + len(piece)
    return FileFacts(count, crc)


def _first_line(error: Exception) -> str:
    said = str(error).strip().splitlines() or [type(error).__name__]
    return brief(said[0], 200)
