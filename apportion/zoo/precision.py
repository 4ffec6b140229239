"""The precision that a named model trains in: float32, bfloat16, or a mix with autocast.

In: what a spec names, in float32. Out: the same model, step and batch in another precision.

    float32      parameters, activations and optimizer state in float32
    bf16         all of them in bfloat16
    bf16-mixed   parameters and state in float32, products in bfloat16 by torch.autocast, and what
                 autocast keeps in float32 on a GPU (norms, softmax, losses) in float32
    fp16-mixed   the same with float16, the loss scaled by a torch.amp.GradScaler

A precision is a setting of every model: `gpt2:tiny,precision=bf16-mixed`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from apportion.zoo.whole_names import whole

PRECISIONS = ("float32", "bf16", "bf16-mixed", "fp16-mixed")
SETTING = "precision"
_FLOAT32 = frozenset(
    [
        "__pow__",
        "__rdiv__",
        "__rpow__",
        "__rtruediv__",
        "acos",
        "asin",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "cosh",
        "cosine_embedding_loss",
        "cdist",
        "cosine_similarity",
        "cross_entropy",
        "ctc_loss",
        "cumprod",
        "cumsum",
        "dist",
        "erfinv",
        "exp",
        "expm1",
        "gaussian_nll_loss",
        "group_norm",
        "hinge_embedding_loss",
        "huber_loss",
        "kl_div",
        "l1_loss",
        "layer_norm",
        "log",
        "log10",
        "log_softmax",
        "log1p",
        "log2",
        "logsumexp",
        "margin_ranking_loss",
        "mse_loss",
        "multilabel_margin_loss",
        "multi_margin_loss",
        "nll_loss",
        "norm",
        "normalize",
        "pdist",
        "poisson_nll_loss",
        "pow",
        "prod",
        "reciprocal",
        "renorm",
        "rms_norm",
        "rsqrt",
        "sinh",
        "smooth_l1_loss",
        "soft_margin_loss",
        "softmax",
        "softmin",
        "softplus",
        "sum",
        "tan",
        "triplet_margin_loss",
    ]
)
"""Functions that autocast computes in float32 on a GPU; on a CPU it knows fewer."""
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class TrainedParts:
    """What a training step consists of, in some precision; `notes` says what was decided.
    `has_own_loop`: the step calls its own backward and optimizer, `step(model, optimizer, batch)`.
    """

    step: Callable[..., Any]
    model: Any
    optimizer: Any
    batch: Any
    clip_norm: float | None
    notes: tuple[str, ...] = ()
    has_own_loop: bool = False


def check_precision(name: str) -> str:
    """The name, if it is one of a precision; else raises ValueError."""
    if name not in PRECISIONS:
        raise ValueError(f"Unknown precision {name!r}; known are {', '.join(PRECISIONS)}.")
    return name


def with_precision(spec: str, precision: str | None) -> str:
    """The spec in a precision; a user's file decides about its own."""
    if precision is None:
        return spec
    check_precision(precision)
    if spec.endswith(".py") or ".py:" in spec:
        raise ValueError(
            f"{spec!r} decides itself in which precision it trains, by its dtypes and by "
            "torch.autocast; --precision is for models of the zoo and hf:."
        )
    rest, _ = without_precision(whole(spec))
    if precision == "float32":
        return rest
    joint = "," if ":" in rest else ":"
    return f"{rest}{joint}{SETTING}={precision}"


def without_precision(spec: str) -> tuple[str, str]:
    """The spec without that setting, and the precision; raises ValueError for one that is not
    known or is set twice."""
    rest, found = take_setting(spec, SETTING)
    return rest, "float32" if found is None else check_precision(found)


def take_setting(spec: str, key: str) -> tuple[str, str | None]:
    """The spec without a setting that every model has, and what it is set to, None if it is not;
    raises ValueError if it is set twice."""
    name, colon, rest = spec.partition(":")
    items = rest.split(",")
    found = [item.partition("=")[2] for item in items if item.partition("=")[0] == key]
    if len(found) > 1:
        raise ValueError(f"{spec!r}: {key} is set twice.")
    if not found:
        return spec, None
    kept = ",".join(item for item in items if item.partition("=")[0] != key)
    return (f"{name}{colon}{kept}" if kept else name), found[0]


def in_precision(it: TrainedParts, precision: str) -> TrainedParts:
    """What a float32 step is in another precision."""
    if precision == "bf16":
        it.model.to(torch.bfloat16)
        batch = _cast(it.batch, torch.bfloat16)
        return TrainedParts(it.step, it.model, it.optimizer, batch, it.clip_norm, it.notes)
    if precision == "bf16-mixed":
        step = _autocast(it.step, torch.bfloat16)
        return TrainedParts(step, it.model, it.optimizer, it.batch, it.clip_norm, it.notes)
    if precision == "fp16-mixed":
        step = _scaled(_autocast(it.step, torch.float16), it.clip_norm)
        note = (
            "the loss is scaled by a GradScaler: a step whose gradients overflow float16 updates "
            "nothing, and the next one has half the scale"
        )
        return replace(it, step=step, clip_norm=None, notes=(*it.notes, note), has_own_loop=True)
    return it


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {key: _cast(each, dtype) for key, each in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(_cast(each, dtype) for each in batch)
    return batch


def _autocast(step: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    def autocast_step(model: Any, batch: Any) -> Any:
        with torch.autocast("cpu", dtype=dtype), Float32Functions():
            return step(model, batch)

    return autocast_step


def _scaled(step: Callable[..., Any], clip_norm: float | None) -> Callable[..., Any]:
    """The body of a loop whose scaler multiplies the loss and divides the gradients again."""
    scaler = torch.amp.GradScaler("cpu")

    def scaled_step(model: Any, optimizer: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        loss = step(model, batch)
        scaler.scale(loss).backward()
        if clip_norm is not None:
            scaler.unscale_(optimizer)
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(trained, clip_norm)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return scaled_step


class Float32Functions(TorchFunctionMode):
    """Gives functions that need the digits tensors in float32 for those in half precision."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _FLOAT32:
            args = tuple(_wide(x) for x in args)
            kwargs = {key: _wide(x) for key, x in kwargs.items()}
        return func(*args, **kwargs)


def _wide(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in _HALF else value
    if type(value) in (list, tuple):
        return type(value)(map(_wide, value))
    return value
