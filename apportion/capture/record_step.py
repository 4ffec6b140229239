"""record_step: runs the user's step on fakes, and what capture adds to it -> Trace and its ends.

Part of capture/, called by capture.py. A step that returns its loss gets backward, clipping and the
update from here; the body of a user's own loop does them itself (own_loop.py). Either way the trace
ends with the loss and the other scalars that the step returned, the gradients, parameters, buffers
and optimizer state as the step leaves them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from apportion import graph as g
from apportion.capture.build_graph import LeafTensor, StepEnds, StepTensors
from apportion.capture.live_state import LiveState
from apportion.capture.own_loop import OwnLoop, StaleView, StateTypes
from apportion.capture.record import Recorder, record
from apportion.capture.step_results import StepResults, returned_scalars
from apportion.capture.torch_private import FakeTensorMode, step_hooks, with_parameters
from apportion.capture.trace import CallSite, CaptureError, Trace
from apportion.capture.training_step import (
    DtypeReplacement,
    StepFunction,
    check_loss,
    loss_name,
    takes_optimizer,
    with_dtype_replaced,
)

# Operators of gradient clipping differentiate nothing.
_CLIPPING = CallSite(g.BACKWARD, sequence=-1)


@dataclass(frozen=True)
class StepCall:
    """The user's step, what it is called with beside the batch, and what is added to it."""

    step: StepFunction
    model: Any
    optimizer: Any
    clip_norm: float | None
    widened: DtypeReplacement | None


@dataclass(frozen=True)
class RecordedStep:
    """The trace of a step.

    ends     what its inputs and results are
    results  what the step returns
    by_itself  whether the step calls backward and its optimizers itself
    notes    on what was left out
    """

    trace: Trace
    ends: StepEnds
    results: StepResults
    by_itself: bool
    notes: tuple[str, ...]


def record_step(
    call: StepCall,
    live: LiveState,
    tensors: StepTensors,
    leaves: Sequence[LeafTensor],
    states: StateTypes,
    fakes_of: Any,
    mode: FakeTensorMode,
) -> RecordedStep:
    """Records the step; `fakes_of` makes the fakes of the leaves and the batch of them."""
    for renames in (True, False):
        fakes, batch = fakes_of()
        run = _StepRun(call, live, tensors, leaves, states, batch, renames)
        try:
            trace = record(run, fakes, mode, live)
        except StaleView:
            continue
        return run.recorded(trace)
    raise AssertionError("a copied parameter cannot be stale")


class _StepRun:
    """The function to record, and what is known of the step once it was."""

    def __init__(
        self,
        call: StepCall,
        live: LiveState,
        tensors: StepTensors,
        leaves: Sequence[LeafTensor],
        states: StateTypes,
        batch: Any,
        renames: bool,
    ) -> None:
        self.call, self.live, self.tensors, self.leaves = call, live, tensors, leaves
        self.states, self.batch, self.renames = states, batch, renames

    def __call__(self, recorder: Recorder, *fakes: torch.Tensor) -> list[torch.Tensor | None]:
        call = self.call
        held = {
            leaf.name: fake
            for leaf, fake in zip(self.leaves, fakes, strict=True)
            if leaf.role != g.INPUT
        }
        self.loop = loop = OwnLoop(recorder, self.live, held, self.states, self.renames)
        loop.leave_gradients()
        with self._bound(held), torch.enable_grad(), with_dtype_replaced(call.widened):
            with loop.in_place():
                result = self._call_step()
                self.returned = returned_scalars(result)
                if not loop.by_itself:
                    self._add_rest(loop)
            self._check_updates(loop)
            after = held | self.live.buffers()
        loop.check_end()
        return self._ends(loop, after)

    def _call_step(self) -> Any:
        call = self.call
        if takes_optimizer(call.step):
            return call.step(call.model, call.optimizer, self.batch)
        return call.step(call.model, self.batch)

    @contextmanager
    def _bound(self, held: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """A context in which modules, and whatever else refers to a parameter, have the fakes."""
        fake_of = {id(t): held[n] for n, t in self.tensors.parameters.items()}
        fake_of |= {id(t): held[n] for n, t in self.tensors.buffers.items()}
        with ExitStack() as stack:
            for place in self.live.places:
                if id(place.parameter) in fake_of:
                    stack.callback(place.put, place.parameter)
            for place in self.live.places:
                if id(place.parameter) in fake_of:
                    place.put(fake_of[id(place.parameter)])
            for _, module in self.live.modules:
                named = [*module.named_parameters(), *module.named_buffers()]
                own = {name: fake_of[id(tensor)] for name, tensor in named}
                stack.enter_context(with_parameters(module, own))
            yield

    def _add_rest(self, loop: OwnLoop) -> None:
        """Backward, clipping and update, for a step that returns its loss."""
        call = self.call
        name = loss_name(self.returned.scalars, self.returned.left_out, call.step)
        loss = self.returned.scalars[name]
        check_loss(loss, call.step)
        trained = [loop.fakes[n] for n in self.tensors.trained]
        for fake in loop.fakes.values():
            fake.grad = None
        loop.backward_of_loss(loss)
        loop.recorder.fixed_site = _CLIPPING
        if call.clip_norm is not None:
            with torch.no_grad():
                _clip([p for p in trained if p.grad is not None], call.clip_norm)
        loop.recorder.fixed_site = None
        if not any(any(step_hooks(optimizer)) for optimizer in self.live.optimizers):
            loop.update(trained)
            return
        for optimizer in self.live.optimizers:
            loop.step_of(optimizer)

    def _check_updates(self, loop: OwnLoop) -> None:
        if loop.updated:
            return
        name = getattr(self.call.step, "__name__", "the step")
        if loop.by_itself:
            raise CaptureError(
                f"{name} calls backward() itself and no parameter is updated; let it call "
                "optimizer.step() too, or only return the loss, because then capture adds backward "
                "and update"
            )
        raise CaptureError(
            f"no parameter of the optimizer gets a gradient from the loss that {name} returns; use "
            "them in the step"
        )

    def _ends(self, loop: OwnLoop, after: Mapping[str, torch.Tensor]) -> list[torch.Tensor | None]:
        scalars = dict(self.returned.scalars)
        self.loss = loss_name(scalars, (), self.call.step, required=False)
        loss = scalars[self.loss] if self.loss else loop.losses[-1]
        check_loss(loss, self.call.step, depends=False)
        recorder = loop.recorder
        begins = {recorder.slots[id(x)] for x in after.values()} | set(recorder.constants)
        rest = [
            x.detach().clone() if recorder.slot(x) in begins else x
            for n, x in scalars.items()
            if n != self.loss
        ]
        gradients = [grad for _, grad in loop.gradients]
        state = [after[name] for name in (*self.tensors.parameters, *self.tensors.buffers)]
        updated = [loop.state[n][key] for n in loop.updated for key, _ in self.states[n]]
        return [loss, *rest, *gradients, *state, *updated]

    def recorded(self, trace: Trace) -> RecordedStep:
        loop, scalars = self.loop, list(self.returned.scalars)
        others = [name for name in scalars if name != self.loss]
        ends = StepEnds(
            (*((name, "") for name in loop.leftover), *loop.begins),
            (self.loss or "loss", *others),
            tuple([name for name, _ in loop.gradients]),
            (*self.tensors.parameters, *self.tensors.buffers),
            tuple([(n, tuple([key for key, _ in self.states[n]])) for n in loop.updated]),
        )
        results = StepResults(tuple(scalars), self.returned.form, self._number_of_loss(scalars))
        return RecordedStep(trace, ends, results, loop.by_itself, tuple(self._notes()))

    def _number_of_loss(self, scalars: list[str]) -> int | None:
        return scalars.index(self.loss) if self.loss else None

    def _notes(self) -> Iterator[str]:
        never = [name for name in self.loop.skipped if name not in self.loop.updated]
        never = [n for n in never if self.tensors.parameters[n].requires_grad]
        if never:
            yield (
                f"{_listed(never)} get no gradient and are left as they are, as PyTorch's "
                "optimizers do"
            )
        if self.returned.left_out:
            yield (
                f"of what the step returns, {_listed(self.returned.left_out)} is left out; a "
                "divided step returns scalars only"
            )


def _clip(trained: Sequence[torch.Tensor], clip_norm: float) -> None:
    """torch.nn.utils.clip_grad_norm_, in operators whose parts can be added."""
    grads = [p.grad for p in trained if p.grad is not None]
    squares = torch.stack([torch.sum(grad * grad) for grad in grads])
    factor = torch.clamp(clip_norm / (torch.sqrt(torch.sum(squares)) + 1e-6), max=1.0)
    for parameter, grad in zip(trained, grads, strict=True):
        parameter.grad = grad * factor


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
