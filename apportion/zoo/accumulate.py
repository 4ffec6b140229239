"""Steps that accumulate gradients: the batch in several micro-batches, one update.

In: what a spec names. Out: the same model with a step that takes its batch in K equal parts, one
after the other, and adds up their gradients: activations of one part are there at a time. A setting
of every model: `gpt2:tiny,accumulate=2`.

The loss is the mean over the parts. That is the mean over the batch where every part has as many
terms; batch norm and padding see a part by itself, as they do wherever gradients are accumulated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from apportion.zoo.precision import TrainedParts, take_setting
from apportion.zoo.whole_names import whole

SETTING = "accumulate"


def with_accumulation(spec: str, parts: int | None) -> str:
    """The spec with so many micro-batches; a user's file has a loop of its own."""
    if parts is None:
        return spec
    if spec.endswith(".py") or ".py:" in spec:
        raise ValueError(
            f"{spec!r} has a step of its own, which accumulates gradients as it likes; "
            "--accumulate is for models of the zoo and hf:."
        )
    rest, _ = take_setting(whole(spec), SETTING)
    return rest if parts == 1 else f"{rest}{',' if ':' in rest else ':'}{SETTING}={parts}"


def without_accumulation(spec: str) -> tuple[str, int]:
    """The spec without that setting, and the number of micro-batches; raises ValueError if it is
    not one."""
    rest, given = take_setting(spec, SETTING)
    if given is None:
        return rest, 1
    if not given.isascii() or not given.isdecimal() or not 1 <= int(given) <= 1 << 20:
        raise ValueError(f"{spec!r}: {SETTING} must be a positive whole number, not {given!r}.")
    return rest, int(given)


def in_micro_batches(it: TrainedParts, parts: int, spec: str) -> TrainedParts:
    """What a step is that takes its batch in so many parts."""
    if parts == 1:
        return it
    if it.has_own_loop:
        raise ValueError(
            f"{spec!r}: {SETTING} does not go with fp16-mixed; bf16-mixed needs no scaled loss."
        )
    _check(it.batch, parts, spec)
    step = _accumulating(it.step, parts, it.clip_norm)
    note = f"gradients are accumulated over {parts} micro-batches"
    return replace(it, step=step, clip_norm=None, notes=(*it.notes, note), has_own_loop=True)


def _accumulating(
    step: Callable[..., Any], parts: int, clip_norm: float | None
) -> Callable[..., Any]:
    def accumulating_step(model: Any, optimizer: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        total = None
        for micro_batch in _parts(batch, parts):
            loss = step(model, micro_batch) / parts
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        if clip_norm is not None:
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(trained, clip_norm)
        optimizer.step()
        return total

    return accumulating_step


def _parts(batch: Any, parts: int) -> list[Any]:
    """The batch cut along the first dimension of its tensors."""
    if isinstance(batch, torch.Tensor):
        return list(batch.split(batch.shape[0] // parts))
    if isinstance(batch, dict):
        cut = {key: _parts(each, parts) for key, each in batch.items()}
        return [{key: each[k] for key, each in cut.items()} for k in range(parts)]
    if isinstance(batch, list | tuple):
        rows = [_parts(each, parts) for each in batch]
        return [type(batch)(row[k] for row in rows) for k in range(parts)]
    return [batch] * parts


def _check(batch: Any, parts: int, spec: str) -> None:
    """Raises ValueError unless all tensors have as many samples, and these can be shared out."""
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in batch_tensors(batch)}
    if len(sizes) != 1:
        raise ValueError(
            f"{spec!r}: its batch cannot be taken in micro-batches, because its tensors do not all "
            "have one row for each sample."
        )
    (samples,) = sizes
    if samples % parts:
        raise ValueError(
            f"{spec!r}: a batch of {samples} cannot be taken in {parts} equal micro-batches."
        )


def batch_tensors(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, dict):
        batch = list(batch.values())
    return (
        [t for each in batch for t in batch_tensors(each)]
        if isinstance(batch, list | tuple)
        else []
    )
