"""borrowed: the live model and optimizer, with copies in the place of all their tensors.

Part of capture/. The reference runs the user's own objects, because a copy of a model or an
optimizer lacks their hooks and whatever a step reaches past its arguments. A Program comes in; in
the context its parameters, buffers and optimizer state are copies, in another precision if wanted;
after it everything is as it was (untouched.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from apportion.capture.live_state import LiveState
from apportion.capture.program import Program
from apportion.capture.torch_private import with_versions_kept
from apportion.capture.untouched import untouched

Copying = Callable[[torch.Tensor], torch.Tensor]
"""What makes the copy of a tensor; it must not share memory with it."""


@contextmanager
def borrowed(program: Program, copying: Copying) -> Iterator[None]:
    """A context in which all tensors of the program's modules and optimizers are copies; nothing of
    them has a gradient when it begins."""
    live = program.live
    held = [p for group in live.param_groups for p in group["params"]]
    loose = [each.tensor for each in live.written]
    every = (*live.parameters().values(), *held, *loose)
    parameters = list({id(p): p for p in every}.values())
    data = [parameter.data for parameter in parameters]
    roots = {"model": program.model, "optimizer": program.optimizer, "step": program.step}
    with untouched(roots, fakes=False), with_versions_kept(parameters):
        try:
            _lend(parameters, live, copying)
            yield
        finally:
            for parameter, own in zip(parameters, data, strict=True):
                parameter.grad = None
                parameter.data = own


def _lend(parameters: Iterable[torch.Tensor], live: LiveState, copying: Copying) -> None:
    for parameter in parameters:
        parameter.grad = None
        parameter.data = copying(parameter.data)
    buffers: dict[int, torch.Tensor] = {}
    for _, module in live.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if id(buffer) not in buffers:
                buffers[id(buffer)] = copying(buffer.detach())
            setattr(module, name, buffers[id(buffer)])
    for optimizer in live.optimizers:
        for parameter, state in list(optimizer.state.items()):
            optimizer.state[parameter] = _copied(state, copying)
        for group in optimizer.param_groups:
            group.update({key: _copied(x, copying) for key, x in group.items() if key != "params"})


def _copied(value: Any, copying: Copying) -> Any:
    """A setting or state with copies of its tensors; containers of Python are new ones."""
    if isinstance(value, torch.Tensor):
        return value if isinstance(value, torch.nn.Parameter) else copying(value.detach())
    if type(value) is dict:
        return {key: _copied(each, copying) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(each, copying) for each in value)
    return value
