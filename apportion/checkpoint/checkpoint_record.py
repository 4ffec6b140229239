"""CheckpointRecord: the file that says what a checkpoint is, and makes a folder one.

Part of the room checkpoint. Facts about a run and its files come in and go into `checkpoint.json`;
on the way back everything in it is checked. It is written last: a folder without it is no
checkpoint, whatever else is in it.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from apportion.checked import brief, check_plain, parse_json
from apportion.checkpoint.tensor_file import SUFFIX
from apportion.version import VERSION

NAME = "checkpoint.json"
RECORD_NOTE = "apportion"  # under which a single file has its record
SEAL = "crc32"
MOST_BYTES = 1 << 28  # of the file
_Count = Annotated[int, Field(ge=0, lt=1 << 62, strict=True)]
_Text = Annotated[str, Field(max_length=4096)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StoredTensor(_Strict):
    """The shape and the dtype of a whole tensor."""

    shape: tuple[_Count, ...] = Field(max_length=64)
    dtype: str

    @field_validator("dtype")
    @classmethod
    def _known(cls, name: str) -> str:
        if not isinstance(getattr(torch, name, None), torch.dtype):
            raise ValueError("no dtype of torch")
        return name


class StoredFile(_Strict):
    """A file of tensors, its length and the checksum of its bytes."""

    bytes: _Count
    crc32: Annotated[int, Field(ge=0, lt=1 << 32, strict=True)]


class CheckpointRecord(_Strict):
    """What a checkpoint is.

    run        names the training run: all that is resumed from it has the same
    number     counts the saves of a run; the largest one is the last
    step       how many steps were done, which is the number of the next one
    seed       of random operators
    model      what the user calls it, or ""
    tensors    all tensors, by key
    files      all files of tensors, by name
    numbers    the type of the optimizer state that is kept as a Python number, by key
    kept       entries of optimizer state that are neither tensors nor numbers, by key
    loose      keys of tensors that are in no module's state_dict
    groups     the settings of all groups of all optimizers
    position   how far the passes over the data have come
    others     what schedulers, loaders and others gave to be kept, by name
    devices    how many ranks wrote it
    crc32      the checksum of the record itself
    """

    format: Literal["apportion checkpoint"] = "apportion checkpoint"
    version: Literal[1] = 1
    apportion: _Text = VERSION
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{8,64}$")]
    number: _Count
    step: _Count
    seed: Annotated[int, Field(strict=True)]
    model: _Text = ""
    tensors: dict[_Text, StoredTensor]
    files: dict[_Text, StoredFile]
    numbers: dict[_Text, Literal["int", "float"]] = Field(default_factory=dict)
    kept: dict[_Text, Any] = Field(default_factory=dict)
    loose: list[_Text] = Field(default_factory=list)
    groups: list[dict[_Text, Any]] = Field(default_factory=list)
    position: dict[_Text, _Count] = Field(default_factory=dict)
    others: dict[_Text, Any] = Field(default_factory=dict)
    devices: _Count = 1
    crc32: _Count = 0

    @field_validator("files")
    @classmethod
    def _plain_names(cls, files: dict[str, StoredFile]) -> dict[str, StoredFile]:
        for name in files:
            if not name.endswith(SUFFIX) or Path(name).name != name or "\0" in name:
                raise ValueError(f"{name[:100]!r} is no name of a file beside it")
        return files

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(
            math.prod(t.shape) * getattr(torch, t.dtype).itemsize for t in self.tensors.values()
        )


def record_text(record: CheckpointRecord) -> str:
    """The record as the text of its file."""
    return json.dumps(sealed(record.model_dump(mode="json")), allow_nan=False) + "\n"


def sealed(data: dict[str, Any]) -> dict[str, Any]:
    """A record as plain data with the checksum of all else in it."""
    rest = {key: value for key, value in data.items() if key != SEAL}
    text = json.dumps(rest, sort_keys=True, allow_nan=False)
    return {**rest, SEAL: zlib.crc32(text.encode())}


def read_record(folder: Path) -> CheckpointRecord:
    """The record of a folder. Raises ValueError, one sentence, if there is none or it is wrong."""
    path = folder / NAME
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"{path} is larger than any checkpoint's record")
        text = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{folder} is no checkpoint: it has no {NAME}") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    return parse_record(text, path)


def parse_record(text: str | bytes, path: Path) -> CheckpointRecord:
    """The record that a text is; raises ValueError, naming where it comes from, if it is none."""
    try:
        data = parse_json(text)
        check_plain(data, "it")
        record = CheckpointRecord.model_validate(data)
        if data.get(SEAL) != sealed(data)[SEAL]:
            raise ValueError("it was changed since it was saved")
        return record
    except ValidationError as error:
        raise ValueError(f"{path} is no record of a checkpoint: {_first(error)}") from None
    except ValueError as error:
        raise ValueError(f"{path} is no record of a checkpoint: {brief(str(error), 200)}") from None


def _first(error: ValidationError) -> str:
    """The first thing that is wrong."""
    found = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part)[:60] for part in found["loc"])
    return brief(f"{where}: {found['msg']}" if where else found["msg"], 200)
