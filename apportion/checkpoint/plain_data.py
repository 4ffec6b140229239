"""Plain data: what schedulers, loaders and optimizers' groups keep, as JSON and back.

Part of the room checkpoint. Numbers, texts, None, lists, tuples, dicts, sets, counters and small
tensors come in and come back as they were. Anything else is refused by name: it would take pickle,
which executes what a file says.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

KIND, OF = "$", "of"
MOST_BYTES = 1 << 24  # of a tensor in plain data
_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def to_plain(value: Any, where: str) -> Any:
    """A value as JSON has it; raises ValueError, saying `where` it was, if it is not plain."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {KIND: "number", OF: repr(float(value))}
    if isinstance(value, torch.Tensor | np.ndarray):
        return _tensor_to_plain(value, where)
    if isinstance(value, Mapping):
        return _mapping_to_plain(value, where)
    for kind, name in ((list, ""), (tuple, "tuple"), (set, "set"), (frozenset, "set")):
        if isinstance(value, kind):
            each = [to_plain(x, f"{where}[{n}]") for n, x in enumerate(value)]
            return {KIND: name, OF: each} if name else each
    raise ValueError(
        f"{where} is a {type(value).__name__}, which a checkpoint does not keep: it has numbers, "
        "texts, lists, dicts and tensors only"
    )


def _mapping_to_plain(value: Mapping[Any, Any], where: str) -> Any:
    if not isinstance(value, Counter) and all(isinstance(k, str) and k != KIND for k in value):
        return {key: to_plain(each, f"{where}.{key}") for key, each in value.items()}
    pairs = [[to_plain(k, where), to_plain(x, f"{where}[{k!r}]")] for k, x in value.items()]
    return {KIND: "counter" if isinstance(value, Counter) else "dict", OF: pairs}


def _tensor_to_plain(value: Any, where: str) -> Any:
    array = isinstance(value, np.ndarray)
    if array and value.dtype.kind not in "biuf":
        raise ValueError(f"{where} is an array of {value.dtype}, which a checkpoint does not keep")
    tensor = (torch.from_numpy(value) if array else value).detach().cpu().contiguous()
    if tensor.nbytes > MOST_BYTES:
        raise ValueError(
            f"{where} is a tensor of {tensor.nbytes} bytes; what a checkpoint keeps beside the "
            f"model may have {MOST_BYTES}"
        )
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return {
        KIND: "array" if array else "tensor",
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        OF: base64.b64encode(data).decode(),
    }


def from_plain(data: Any) -> Any:
    """The value that `to_plain` made; raises ValueError if it made none such."""
    if isinstance(data, list):
        return [from_plain(each) for each in data]
    if not isinstance(data, dict):
        return data
    if KIND not in data:
        return {key: from_plain(each) for key, each in data.items()}
    kind = data[KIND]
    made = _MADE.get(kind) if isinstance(kind, str) else None
    if made is None or OF not in data:
        raise ValueError("plain data of an unknown kind")
    try:
        return made(data)
    except (TypeError, KeyError, AttributeError, RuntimeError, ValueError) as error:
        raise ValueError(f"plain data that is no {kind}: {error}") from None


def _number(data: dict[str, Any]) -> float:
    return _NUMBERS[data[OF]]


def _pairs(data: dict[str, Any]) -> dict[Any, Any]:
    return {from_plain(key): from_plain(each) for key, each in data[OF]}


def _tensor(data: dict[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, data["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError("plain data of an unknown dtype")
    raw = base64.b64decode(data[OF], validate=True)
    shape = [int(n) for n in data["shape"]]
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(raw):
        raise ValueError("plain data: a tensor whose bytes do not fit its shape")
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)


_MADE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "number": _number,
    "tuple": lambda data: tuple(from_plain(each) for each in data[OF]),
    "set": lambda data: {from_plain(each) for each in data[OF]},
    "dict": _pairs,
    "counter": lambda data: Counter(_pairs(data)),
    "tensor": _tensor,
    "array": lambda data: _tensor(data).numpy(),
}
