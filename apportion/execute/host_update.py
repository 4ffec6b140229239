"""Updates that the host does: an optimizer's step on tensors in its memory, in place.

Part of the room execute. The Op of an update on the host and its tensors come in; its new parameter
and state are written over the old ones, and a shadow of the parameter in a narrower dtype where the
Op has one (memory/host_state.py). Adam's updates and SGD's are one compiled loop (host_adam.py,
host_sgd.py), which casts as it goes; others run their Body, as on a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from apportion.execute.host_adam import AdamSettings, adam_parts, adam_workspace
from apportion.execute.host_sgd import SgdSettings, sgd_parts, sgd_workspace
from apportion.execute.kernels.base import Context
from apportion.execute.kernels.update import run_body
from apportion.graph import Body, Op, UpdateRecipe

ADAM_STATE = ("exp_avg", "exp_avg_sq", "step")
SGD_STATES = ((), ("momentum_buffer",))
FLOATS = (torch.float32, torch.float64)


def host_update(
    bodies: Sequence[Body],
    op: Op,
    ins: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    context: Context,
) -> None:
    """Updates `outs`, which are the memory of parameter and state among `ins`, and of a shadow."""
    for part in update_parts(bodies, op, ins, outs, context):
        part()


def update_parts(
    bodies: Sequence[Body],
    op: Op,
    ins: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    context: Context,
) -> list[Callable[[], None]]:
    """What `host_update` does, in parts that may run at the same time; it has begun."""
    assert op.body is not None
    body = bodies[op.body]
    recipe = body.recipe
    if recipe is not None and sgd_on_host(recipe, ins, outs):
        state, more = ins[2:], outs[len(ins) - 1 :]
        buffer, shadow = (state[0] if state else None), (more[0] if more else None)
        return sgd_parts(ins[0], ins[1], buffer, shadow, sgd_settings(recipe, context))
    if recipe is None or not adam_on_host(recipe, ins, outs):
        return [partial(_by_body, body, ins, outs, replace(context, device="cpu"))]
    parameter, gradient, first, second, step = ins
    shadow = outs[4] if len(outs) > 4 else None
    step.add_(1)
    settings = adam_settings(recipe, float(step), context)
    return adam_parts(parameter, gradient, first, second, shadow, settings)


def _by_body(
    body: Body, ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], context: Context
) -> None:
    made = run_body(body, list(ins), context)
    for room, tensor in zip(outs, made, strict=True):
        room.copy_(tensor)


def host_workspace(
    recipe: UpdateRecipe | None,
    ins: Sequence[tuple[Sequence[int], torch.dtype]],
    outs: Sequence[tuple[Sequence[int], torch.dtype]],
    of_body: int,
) -> int:
    """Bytes that torch's allocator gives to `host_update` of dense tensors with these shapes and
    dtypes, at most; `of_body`: what its Body needs beside its results. Of a rank on a GPU it is the
    host's memory; a rank on a CPU has no other."""
    dtypes = [dtype for _, dtype in ins]
    if recipe is not None and _is_plain_sgd(recipe, len(outs), dtypes):
        rounded = outs[-1][1] if len(outs) == len(ins) else None
        return sgd_workspace(math.prod(ins[0][0]), dtypes[0], rounded)
    if recipe is None or not _is_plain_adam(recipe, len(ins), len(outs), dtypes):
        made = sum(math.prod(shape) * dtype.itemsize for shape, dtype in outs)
        return of_body + made
    shadow = outs[4][1] if len(outs) > 4 else None
    flags = (recipe.kind == "adamw", "maximize" in recipe.flags)
    return adam_workspace(math.prod(ins[0][0]), dtypes[0], dtypes[1], shadow, *flags)


def adam_on_host(
    recipe: UpdateRecipe, ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
) -> bool:
    """Whether the compiled loop computes this update: Adam without its variants, on dense tensors
    that it may write over."""
    dtypes = [tensor.dtype for tensor in ins]
    return _is_plain_adam(recipe, len(ins), len(outs), dtypes) and _in_place(ins, outs)


def sgd_on_host(
    recipe: UpdateRecipe, ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
) -> bool:
    """Whether the compiled loop computes this update: SGD on dense tensors that it may write
    over."""
    dtypes = [tensor.dtype for tensor in ins]
    return _is_plain_sgd(recipe, len(outs), dtypes) and _in_place(ins, outs)


def _in_place(ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> bool:
    """Whether new parameter and state are where the old ones were, all dense, and what comes after
    them is a shadow in a dtype that can be made."""
    kept = (ins[0], *ins[2:])
    shadows = outs[len(kept) :]
    return (
        all(shadow.dtype in (ins[0].dtype, torch.bfloat16) for shadow in shadows)
        and all(tensor.is_contiguous() for tensor in (*ins, *outs))
        and all(old.data_ptr() == new.data_ptr() for old, new in zip(kept, outs, strict=False))
    )


def _is_plain_adam(
    recipe: UpdateRecipe, ins: int, outs: int, dtypes: Sequence[torch.dtype]
) -> bool:
    """Whether it is Adam without its variants, on so many tensors of these dtypes."""
    if recipe.kind not in ("adam", "adamw") or recipe.state != ADAM_STATE:
        return False
    if set(recipe.flags) - {"maximize"} or ins != 5 or outs not in (4, 5):
        return False
    parameter, gradient, first, second, _ = dtypes
    return (
        len({parameter, first, second}) == 1
        and parameter in FLOATS
        and gradient in (parameter, torch.bfloat16)
    )


def _is_plain_sgd(recipe: UpdateRecipe, outs: int, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether it is SGD on tensors of these dtypes, with or without momentum."""
    if recipe.kind != "sgd" or recipe.state not in SGD_STATES:
        return False
    if len(dtypes) != 2 + len(recipe.state) or outs not in (len(dtypes) - 1, len(dtypes)):
        return False
    parameter, gradient, *state = dtypes
    return (
        parameter in FLOATS
        and gradient in (parameter, torch.bfloat16)
        and all(dtype == parameter for dtype in state)
    )


def sgd_settings(recipe: UpdateRecipe, context: Context) -> SgdSettings:
    """The numbers of an update, as they are at this step."""

    def of(key: str) -> float:
        return context.setting(("get", recipe.group, key))

    return SgdSettings(
        of("lr"), of("momentum"), of("dampening"), of("weight_decay"),
        "nesterov" in recipe.flags, "maximize" in recipe.flags,
    )  # fmt: skip


def adam_settings(recipe: UpdateRecipe, step: float, context: Context) -> AdamSettings:
    """The numbers of an update, as they are at this step."""

    def of(key: str, *place: int) -> float:
        return context.setting(("get", recipe.group, key, *place))

    beta1, beta2 = of("betas", 0), of("betas", 1)
    return AdamSettings(
        of("lr"), beta1, beta2, of("eps"), of("weight_decay"),
        1 - beta1**step, (1 - beta2**step) ** 0.5,
        recipe.kind == "adamw", "maximize" in recipe.flags,
    )  # fmt: skip
