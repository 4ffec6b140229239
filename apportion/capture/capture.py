"""capture: a PyTorch training step -> Program (a Graph bound to the live model and optimizer).

    step, model, optimizer, batch --record--> Trace --normalise--> Nodes --build--> Graph

The main file of capture/. The step runs once on fake tensors (record.py), so that a model on the
meta device is captured too. Forward, loss, backward and clipping are one trace; the optimizer's
update is a template per group (optimizer.py), from which every parameter gets an update Op.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from apportion import graph as g
from apportion.capture.all_updates import AllUpdateTemplates, all_fixed_settings
from apportion.capture.batch_tree import flatten
from apportion.capture.build_graph import LeafTensor, StepTensors, build
from apportion.capture.decompose import decompose
from apportion.capture.foreign_errors import foreign_errors
from apportion.capture.found_constants import constant_notes
from apportion.capture.live_state import LiveState
from apportion.capture.normalise import normalise
from apportion.capture.program import Program, live_state_of
from apportion.capture.read_probes import StepInput, record_probed
from apportion.capture.record import Recorder, fake_mode, record
from apportion.capture.repeatable import RepeatedRecording, StepWatch, is_ours
from apportion.capture.torch_private import (
    run_backward,
    with_parameters,
)
from apportion.capture.trace import CallSite, CaptureError, Trace
from apportion.capture.training_step import (
    DtypeReplacement,
    StepFunction,
    scalar_loss,
    with_dtype_replaced,
)
from apportion.capture.untouched import LiveObjects, untouched
from apportion.capture.value_reads import ReadValues

# Operators of gradient clipping differentiate nothing.
_CLIPPING = CallSite(g.BACKWARD, sequence=-1)


def capture(
    step: StepFunction,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    clip_norm: float | None = None,
) -> Program:
    """Captures forward, loss, backward, clipping and update of `step(model, batch)` as one Graph.

    Parameters may be on the meta device. Raises CaptureError, one sentence with the user's line,
    for a step that depends on data or uses something unsupported.
    """
    return capture_with(step, model, optimizer, batch, clip_norm, None)


def capture_with(
    step: StepFunction,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    clip_norm: float | None,
    widened: DtypeReplacement | None,
) -> Program:
    """What `capture` does, with a dtype replaced wherever the step names it (None: none is)."""
    roots = {"model": model, "optimizer": optimizer, "batch": batch, "step": step}
    with foreign_errors(), untouched(roots) as objects:
        return _captured(step, model, optimizer, batch, clip_norm, widened, objects)


def _captured(
    step: StepFunction,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    clip_norm: float | None,
    widened: DtypeReplacement | None,
    objects: LiveObjects,
) -> Program:
    live = live_state_of(step, model, optimizer)
    tensors = _tensors(live, batch)
    mode = fake_mode()
    leaves = _leaves(tensors)
    traced = _function_to_record(step, model, tensors, leaves, batch, clip_norm, widened)
    inputs = [StepInput(x.name, x.tensor, _is_steady(x, tensors)) for x in leaves]

    watch = StepWatch(frozenset(k for k, x in enumerate(inputs) if x.steady))

    def once(reads: ReadValues) -> Trace:
        with mode:
            fakes = [_fake(leaf.tensor) for leaf in leaves]
        return record(watch.watched(traced), fakes, mode, model, reads)

    compares = widened is None and not is_ours(step)
    repeated = RepeatedRecording(once, lambda trace: trace, objects, watch, compares)
    trace, notes = record_probed(repeated, lambda trace: trace, inputs)
    trained = {name: tensors.parameters[name] for name in tensors.trained}
    given = {name: tensor for name, (_, tensor) in tensors.batch.items()}
    notes = (*notes, *repeated.notes, *constant_notes(trace, given, trained))
    templates = AllUpdateTemplates(live, mode)
    nodes = decompose(normalise(trace))
    built = build(trace, nodes, leaves, tensors, templates, clipped=clip_norm is not None)
    g.verify(built.graph)
    return Program(
        built.graph, step, model, optimizer, batch, clip_norm, built.constants, built.inputs,
        built.bindings, all_fixed_settings(live), widened, notes,
    )  # fmt: skip


def _tensors(live: LiveState, batch: Any) -> StepTensors:
    """All live tensors of the step, by name."""
    parameters, buffers = live.parameters(), live.buffers()
    groups = {id(p): k for k, group in enumerate(live.param_groups) for p in group["params"]}
    known = {id(p) for p in parameters.values()}
    strangers = sum(1 for p in groups if p not in known)
    if strangers:
        raise CaptureError(
            f"the optimizer holds {strangers} parameters that are not in the model; build it from "
            "model.parameters()"
        )
    trained = {
        n: groups[id(p)] for n, p in parameters.items() if p.requires_grad and id(p) in groups
    }
    if not trained:
        raise CaptureError(
            "the optimizer holds no parameter that requires a gradient; there is nothing to train"
        )
    named = {name: (position, leaf) for position, name, leaf in flatten(batch).tensors}
    return StepTensors(parameters, buffers, named, trained)


def _leaves(tensors: StepTensors) -> list[LeafTensor]:
    return [
        *(LeafTensor(n, g.PARAMETER, t) for n, t in tensors.parameters.items()),
        *(LeafTensor(n, g.BUFFER, t) for n, t in tensors.buffers.items()),
        *(LeafTensor(n, g.INPUT, t, position) for n, (position, t) in tensors.batch.items()),
    ]


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    """A fake CPU tensor of that shape; contiguous, because a Graph knows no memory order."""
    fake = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


def _is_steady(leaf: LeafTensor, tensors: StepTensors) -> bool:
    """Whether no update changes it."""
    return leaf.role != g.INPUT and leaf.name not in tensors.trained


def _function_to_record(
    step: StepFunction,
    model: torch.nn.Module,
    tensors: StepTensors,
    leaves: Sequence[LeafTensor],
    batch: Any,
    clip_norm: float | None,
    widened: DtypeReplacement | None,
) -> Any:
    """The function to record: all leaves -> loss, gradients, clipped gradients, state after."""

    def run(recorder: Recorder, *fakes: torch.Tensor) -> list[torch.Tensor | None]:
        state = {
            leaf.name: fake
            for leaf, fake in zip(leaves, fakes, strict=True)
            if leaf.role != g.INPUT
        }
        fake_batch = _with_fakes(batch, leaves, fakes)
        bound = with_parameters(model, state)
        with bound, torch.enable_grad(), with_dtype_replaced(widened):
            loss = scalar_loss(step(model, fake_batch), step)
            _refuse_backward(state)
            after = state | dict(model.named_buffers())
            recorder.phase = g.BACKWARD
            grads = _gradients(loss, {name: state[name] for name in tensors.trained})
        recorder.fixed_site = _CLIPPING
        with torch.no_grad():
            clipped = [] if clip_norm is None else _clipped(grads, clip_norm)
        return [loss, *grads, *clipped, *(after[name] for name in state)]

    return run


def _with_fakes(batch: Any, leaves: Iterable[LeafTensor], fakes: Iterable[torch.Tensor]) -> Any:
    flat = flatten(batch)
    new = list(flat.leaves)
    for leaf, fake in zip(leaves, fakes, strict=True):
        if leaf.role == g.INPUT:
            new[leaf.position] = fake
    return flat.rebuild(new)


def _refuse_backward(state: Mapping[str, torch.Tensor]) -> None:
    if any(x.is_leaf and x.grad is not None for x in state.values()):
        raise CaptureError(
            "the step calls backward() itself; it must only return the loss, because capture adds "
            "backward and update"
        )


def _gradients(loss: torch.Tensor, trained: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    grads = run_backward(loss, tuple(trained.values()))
    missing = [name for name, grad in zip(trained, grads, strict=True) if grad is None]
    if missing:
        raise CaptureError(
            f"these trainable parameters get no gradient: {', '.join(missing)}; freeze them with "
            "requires_grad_(False) or use them in the step"
        )
    return [grad for grad in grads if grad is not None]


def _clipped(grads: Sequence[torch.Tensor], clip_norm: float) -> list[torch.Tensor]:
    """torch.nn.utils.clip_grad_norm_, in operators whose parts can be added."""
    squares = torch.stack([torch.sum(grad * grad) for grad in grads])
    factor = torch.clamp(clip_norm / (torch.sqrt(torch.sum(squares)) + 1e-6), max=1.0)
    return [grad * factor for grad in grads]
