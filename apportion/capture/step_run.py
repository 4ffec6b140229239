"""step_run: runs the user's step on fakes, and what capture adds to it -> Trace and its ends.

Part of capture/, called by capture.py. A step that returns its loss gets backward, clipping and the
update from here; the body of a user's own loop does them itself (own_loop.py). Either way the trace
ends with the loss and the other scalars that the step returned, the gradients, parameters, buffers
and optimizer state as the step leaves them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from apportion import graph as g
from apportion.capture.batch_tree import flatten
from apportion.capture.build_graph import LeafTensor, StepEnds, StepTensors
from apportion.capture.fixed_inputs import FixedInput
from apportion.capture.live_state import LiveState
from apportion.capture.loss_scale import LossScale
from apportion.capture.own_loop import OwnLoop, StaleView, StateTypes
from apportion.capture.read_probes import StepInput, record_probed
from apportion.capture.record import Recorder, at_user_line, record
from apportion.capture.repeatable import RepeatedRecording, StepWatch, is_ours
from apportion.capture.step_results import ReturnedScalars, StepResults, returned_scalars
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
from apportion.capture.untouched import LiveObjects
from apportion.capture.value_reads import ReadValues
from apportion.capture.written_tensors import TensorWrites

# Operators of gradient clipping differentiate nothing.
_CLIPPING = CallSite(g.BACKWARD, sequence=-1)


@dataclass(frozen=True)
class StepCall:
    """The user's step, what it is called with, and what is added to it."""

    step: StepFunction
    model: Any
    optimizer: Any
    batch: Any
    clip_norm: float | None
    widened: DtypeReplacement | None
    fixed: tuple[FixedInput, ...] = ()


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


@dataclass(frozen=True)
class StepLeaves:
    """The tensors that a step begins with: by name, as a flat list, and the optimizers' state of
    every parameter that has an optimizer."""

    tensors: StepTensors
    flat: Sequence[LeafTensor]
    states: StateTypes


def recorded_step(
    call: StepCall,
    live: LiveState,
    leaves: StepLeaves,
    mode: FakeTensorMode,
    objects: LiveObjects,
) -> RecordedStep:
    """Records the step, more than once where it reads values or is not known to do the same every
    time. Each recording leaves `objects` as they were."""
    try:
        return _recorded(call, live, leaves, mode, objects, renames=True)
    except StaleView:
        return _recorded(call, live, leaves, mode, objects, renames=False)


def _recorded(
    call: StepCall,
    live: LiveState,
    leaves: StepLeaves,
    mode: FakeTensorMode,
    objects: LiveObjects,
    *,
    renames: bool,
) -> RecordedStep:
    trained = leaves.tensors.trained
    inputs = [
        StepInput(
            x.name, x.tensor, x.role != g.INPUT and not _is_trained(x, trained), x.role == g.INPUT
        )
        for x in leaves.flat
    ]
    watch = StepWatch({k: x.tensor for k, x in enumerate(inputs) if x.steady})

    def once(reads: ReadValues) -> RecordedStep:
        run = _StepRun(call, live, leaves, objects, watch, renames)
        with mode:
            fakes = [_fake(x.tensor, watch.needs_grad.get(k)) for k, x in enumerate(leaves.flat)]
        return run.recorded(record(watch.watched(run), fakes, mode, live, reads))

    compares = call.widened is None and not is_ours(call.step, call.model)
    repeated = RepeatedRecording(once, _trace, objects, watch, compares)
    recorded, notes = record_probed(repeated, _trace, inputs, _agreed)
    return replace(recorded, notes=(*notes, *repeated.notes, *recorded.notes))


def _agreed(recorded: RecordedStep, other: RecordedStep) -> RecordedStep:
    """The record without returned numbers that are made of values it read, outside of torch."""
    results, names = recorded.results.agreed(other.results)
    if not names:
        return recorded
    note = (
        f"of what the step returns, {_listed(names)} is left out: it is computed outside of torch, "
        "from values that were read"
    )
    return replace(recorded, results=results, notes=(*recorded.notes, note))


def _is_trained(leaf: LeafTensor, trained: Iterable[str]) -> bool:
    """Whether an optimizer changes it; one that holds a parameter without gradient does not."""
    return leaf.name in trained and leaf.tensor.requires_grad


def _trace(recorded: RecordedStep) -> Trace:
    return recorded.trace


def _fake(tensor: torch.Tensor, needs_grad: bool | None) -> torch.Tensor:
    """A fake CPU tensor of that shape; contiguous, because a Graph knows no memory order. The last
    is whether a step before has made a parameter need its gradient, or not."""
    fake = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, torch.nn.Parameter):
        needs_grad = tensor.requires_grad if needs_grad is None else needs_grad
        return torch.nn.Parameter(fake, requires_grad=needs_grad)
    return fake


@dataclass(frozen=True)
class _Outcome:
    """What one run of a step has come to."""

    loop: OwnLoop
    returned: ReturnedScalars
    loss: str


class _StepRun:
    """The function to record."""

    def __init__(
        self,
        call: StepCall,
        live: LiveState,
        leaves: StepLeaves,
        objects: LiveObjects,
        watch: StepWatch,
        renames: bool,
    ) -> None:
        self.objects, self.watch = objects, watch
        self.call, self.live, self.renames = call, live, renames
        self.tensors, self.leaves, self.states = leaves.tensors, leaves.flat, leaves.states
        self.outcome: _Outcome | None = None
        self.remade: dict[str, None] = {}
        self.changed: list[str] = []

    def __call__(self, recorder: Recorder, *fakes: torch.Tensor) -> list[torch.Tensor | None]:
        held = {
            leaf.name: fake
            for leaf, fake in zip(self.leaves, fakes, strict=True)
            if leaf.role != g.INPUT
        }
        fed = [(x, f, f._version) for x, f in zip(self.leaves, fakes, strict=True)]
        recorder.writes = TensorWrites(self.objects.had, at_user_line)
        loop = OwnLoop(recorder, self.live, held, self.states, self.renames)
        loop.leave_gradients()
        with self._bound(held), torch.enable_grad(), with_dtype_replaced(self.call.widened):
            with loop.in_place():
                result = self._call_step(_with_fakes(self.call, self.leaves, fakes))
                returned = returned_scalars(result, _tensor_of(recorder))
                if not loop.by_itself:
                    ends = (*returned.scalars.values(), *self._buffers(held).values())
                    self.watch.forward_done(recorder, ends)
                    self._add_rest(loop, returned)
            self._check_updates(loop)
            self._check_parameters(held)
            after = self._kept_types(held, self._buffers(held))
        recorder.writes.check()
        loop.check_end()
        self.changed = [x.name for x, f, v in fed if x.role == g.INPUT and f._version != v]
        self._tell_watch(after, held)
        loss = loss_name(returned.scalars, (), self.call.step, required=False)
        self.outcome = _Outcome(loop, returned, loss)
        return self._ends(loop, returned, loss, after)

    def _buffers(self, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All buffers as they are now."""
        found = self.live.buffers()
        for each in self.live.written:
            if each.place is None or not isinstance(each.now, torch.Tensor):
                found[each.name] = held[each.name]
        return found

    def _kept_types(
        self, held: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Parameters and buffers as the step leaves them; one that it has made anew in another
        shape is none of its state if the step does not read it the next time (repeatable.py), and
        stays as it was."""
        after = {**held, **buffers}
        for name, before in held.items():
            now = after[name]
            if (now.shape, now.dtype) != (before.shape, before.dtype):
                after[name] = before
                self.remade[name] = None
        return after

    def _check_parameters(self, held: Mapping[str, torch.Tensor]) -> None:
        now, loose = self.live.parameters(), dict(self.live.loose)
        for name in self.tensors.parameters:
            if name not in loose and now.get(name) is not held[name]:
                raise CaptureError(
                    f"the step puts another tensor in the place of the parameter {name}; write to "
                    "the parameter instead, under torch.no_grad() with copy_"
                )

    def _tell_watch(
        self, after: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]
    ) -> None:
        named = {k: x for k, x in enumerate(self.leaves) if x.role != g.INPUT}
        states = {k: after[x.name] for k, x in named.items()}
        needs = {
            k: held[x.name].requires_grad
            for k, x in named.items()
            if x.role == g.PARAMETER and held[x.name].requires_grad != x.tensor.requires_grad
        }
        self.watch.step_done(states, needs, remade=bool(self.remade))

    def _call_step(self, batch: Any) -> Any:
        call = self.call
        if takes_optimizer(call.step):
            return call.step(call.model, call.optimizer, batch)
        return call.step(call.model, batch)

    @contextmanager
    def _bound(self, held: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """A context in which modules, and whatever else refers to a parameter, have the fakes."""
        fake_of = {id(t): held[n] for n, t in self.tensors.parameters.items()}
        fake_of |= {id(t): held[n] for n, t in self.tensors.buffers.items()}
        with ExitStack() as stack:
            for each in self.live.written:
                if each.place is not None:
                    stack.callback(each.place.put, each.tensor)
            for place in self.live.places:
                if id(place.parameter) in fake_of:
                    stack.callback(place.put, place.parameter)
            for place in self.live.places:
                if id(place.parameter) in fake_of:
                    place.put(fake_of[id(place.parameter)])
            named = [(m, [*m.named_parameters(), *m.named_buffers()]) for _, m in self.live.modules]
            for module, tensors in named:
                own = {name: fake_of[id(x)] for name, x in tensors if id(x) in fake_of}
                stack.enter_context(with_parameters(module, own))
                if isinstance(module, LossScale):
                    stack.enter_context(module.lent(own))
            stack.enter_context(self.objects.replaced(fake_of))
            yield

    def _add_rest(self, loop: OwnLoop, returned: ReturnedScalars) -> None:
        """Backward, clipping and update, for a step that returns its loss."""
        call = self.call
        loss = returned.scalars[loss_name(returned.scalars, returned.left_out, call.step)]
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

    def _ends(
        self,
        loop: OwnLoop,
        returned: ReturnedScalars,
        name: str,
        after: Mapping[str, torch.Tensor],
    ) -> list[torch.Tensor | None]:
        loss = returned.scalars[name] if name else loop.losses[-1]
        loss = loss.reshape(()) if loss.numel() == 1 and loss.dim() else loss
        check_loss(loss, self.call.step, depends=False)
        recorder = loop.recorder
        begins = {recorder.slots[id(x)] for x in after.values()} | set(recorder.constants)
        rest = [
            x.detach().clone() if recorder.slot(x) in begins else x
            for each, x in returned.scalars.items()
            if each != name
        ]
        gradients = [grad for _, grad in loop.gradients]
        state = [after[each] for each in (*self.tensors.parameters, *self.tensors.buffers)]
        updated = [loop.state[n][key] for n in loop.updated for key, _ in self.states[n]]
        return [loss, *rest, *gradients, *state, *updated]

    def recorded(self, trace: Trace) -> RecordedStep:
        """What was recorded, with all that is known of it."""
        assert self.outcome is not None
        loop, returned, loss = self.outcome.loop, self.outcome.returned, self.outcome.loss
        names = list(returned.scalars)
        ends = StepEnds(
            (*((name, "") for name in loop.leftover), *loop.begins),
            (loss or "loss", *(name for name in names if name != loss)),
            tuple([name for name, _ in loop.gradients]),
            (*self.tensors.parameters, *self.tensors.buffers),
            tuple([(n, tuple([key for key, _ in self.states[n]])) for n in loop.updated]),
        )
        results = StepResults(tuple(names), returned.form, names.index(loss) if loss else None)
        notes = tuple(self._notes(loop, returned))
        return RecordedStep(trace, ends, results, loop.by_itself, notes)

    def _notes(self, loop: OwnLoop, returned: ReturnedScalars) -> Iterator[str]:
        never = [
            name
            for name in loop.skipped
            if name not in loop.updated and self.tensors.parameters[name].requires_grad
        ]
        if never:
            yield (
                f"{_listed(never)} get no gradient and are left as they are, as PyTorch's "
                "optimizers do"
            )
        if self.changed:
            yield (
                f"the step changes {_listed(self.changed)} in place: a divided run changes a copy, "
                "and the batch that is passed stays as it was"
            )
        if self.remade:
            yield (
                f"the step makes {_listed(list(self.remade))} anew in another shape, and does not "
                "read what the step before has left there: a divided run leaves it as it is"
            )
        if returned.left_out:
            yield (
                f"of what the step returns, {_listed(returned.left_out)} is left out; a divided "
                "step returns scalars only"
            )


def _tensor_of(recorder: Recorder) -> Callable[[Any], torch.Tensor | None]:
    """Who knows the tensors that numbers were read from."""
    return (lambda _: None) if recorder.reads is None else recorder.reads.tensor_of


def _with_fakes(call: StepCall, leaves: Iterable[LeafTensor], fakes: Iterable[torch.Tensor]) -> Any:
    flat = flatten(call.batch)
    new = list(flat.leaves)
    for each in call.fixed:
        new[each.position] = each.tensor
    for leaf, fake in zip(leaves, fakes, strict=True):
        if leaf.role == g.INPUT:
            new[leaf.position] = fake
    return flat.rebuild(new)


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
