"""OwnLoop: what a step calls that is no operator while it is recorded: backward, optimizer.step.

Part of capture/. A Recorder (record.py) sees operators only. Here `backward` runs with gradients
that accumulate in fake parameters, and `optimizer.step()` becomes one call of `apportion.update`
for each parameter that has a gradient; all else that a loop does (zero_grad, clipping, averages of
the parameters) is operators on the fakes and needs no word. Hooks on gradients and on optimizers'
steps run as they do in PyTorch. An update that a GradScaler skips where gradients are not finite is
computed and then chosen or not. What cannot be captured (a scheduler's step) is refused here, with
the user's line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from apportion import graph as g
from apportion.capture import cumulative_norm
from apportion.capture.averaged_model import update_parameters
from apportion.capture.backward_leaves import backward_leaves
from apportion.capture.discover import holds_another
from apportion.capture.live_state import LiveState
from apportion.capture.loss_scale import plain_scaling
from apportion.capture.record import Recorder, at_user_line
from apportion.capture.torch_private import (
    BatchNorm,
    gradient_hooks,
    gradients_of,
    step_hooks,
    with_skipping,
)
from apportion.capture.trace import CaptureError, TensorType
from apportion.capture.update_call import update_call

StateTypes = dict[str, list[tuple[str, TensorType]]]
"""Name and type of each state tensor, by the name of the parameter."""


class StaleView(CaptureError):
    """A view of a parameter was made before the update and read after it."""


@dataclass(eq=False)
class OwnLoop:
    """What has happened so far in a step that is being recorded.

    fakes       parameters and buffers, by name
    states      the optimizers' state of every parameter that has an optimizer
    renames     whether a new parameter takes the old one's place by renaming; else it is copied
    state       the state tensors as they are now, by parameter and key
    begins      the state tensors that the step began with
    latest      the gradients as the last backward left them
    gradients   those of them that led to an update, each with the name of its parameter
    losses      what backward was called on
    leftover    the gradients of the step before, which only a step without zero_grad would see
    unclear     parameters whose leftover gradient was taken for cleared
    by_itself   whether the step calls backward or an optimizer itself
    skips       whether the update that is under way is to be skipped, a tensor
    """

    recorder: Recorder
    live: LiveState
    fakes: dict[str, torch.Tensor]
    states: StateTypes
    renames: bool = True
    state: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    begins: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    latest: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    leftover: dict[str, torch.Tensor] = field(default_factory=dict)
    unclear: set[str] = field(default_factory=set)
    updated: dict[str, None] = field(default_factory=dict)
    skipped: dict[str, None] = field(default_factory=dict)
    leftover_slots: dict[str, int] = field(default_factory=dict)
    by_itself: bool = False
    skips: torch.Tensor | None = None
    _steps: int = 0
    _running: bool = False

    def __post_init__(self) -> None:
        live = self.live.parameters()
        self.name_of = {id(self.fakes[name]): name for name in live}
        self.fake_of = {id(tensor): self.fakes[name] for name, tensor in live.items()}
        self.number = {name: k for k, name in enumerate(live)}
        for name, tensor in live.items():
            before, after = gradient_hooks(tensor)
            for hook in before:
                self.fakes[name].register_hook(hook)
            for hook in after:
                self.fakes[name].register_post_accumulate_grad_hook(hook)

    # backward

    def backward(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        """What torch.autograd.backward does, recorded; called by the step itself."""
        self.by_itself = self.by_itself or not self._running
        roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        given = (grad_tensors,) if isinstance(grad_tensors, torch.Tensor) else grad_tensors
        wanted = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs or ())
        if not self._running:
            self.losses.append(roots[0])
        keeps = create_graph if retain_graph is None else retain_graph
        self._backward(roots, given, wanted, keeps, create_graph)

    def backward_of_loss(self, loss: torch.Tensor) -> None:
        """The backward that capture adds to a step that returns its loss."""
        self._backward((loss,), None, (), False, False)

    def _backward(
        self,
        roots: Sequence[torch.Tensor],
        given: Sequence[Any] | None,
        wanted: Sequence[torch.Tensor],
        keeps: bool,
        again: bool,
    ) -> None:
        outer, phase, self._running = self._running, self.recorder.phase, True
        self.recorder.phase = g.BACKWARD
        try:
            graph = backward_leaves(roots)
            leaves = list(wanted) or [x for x in graph.leaves if x.requires_grad]
            seeds = _seeds(roots, given or (None,) * len(roots))
            if graph.reentrant and not wanted:
                every = [*leaves, *(self.fakes[name] for name in self.number)]
                self._accumulate(roots, seeds, list({id(x): x for x in every}.values()), keeps)
            else:
                found = gradients_of(roots, seeds, leaves, keeps, again)
                with torch.set_grad_enabled(again):
                    for leaf, grad in zip(leaves, found, strict=True):
                        self._add(leaf, grad, hooks=True)
        finally:
            self._running, self.recorder.phase = outer, phase
            self.recorder.after_backward()

    def _accumulate(
        self, roots: Any, seeds: Any, leaves: Sequence[torch.Tensor], keeps: bool
    ) -> None:
        """Lets the engine accumulate, as activation checkpointing wants that runs it inside."""
        before = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        gradients_of(roots, seeds, (), keeps, False)
        for leaf, old in zip(leaves, before, strict=True):
            new, leaf.grad = leaf.grad, old
            with torch.no_grad():
                self._add(leaf, new, hooks=False)

    def _add(self, leaf: torch.Tensor, grad: torch.Tensor | None, hooks: bool) -> None:
        """Adds to the gradient of a leaf, and calls what waits for that."""
        if grad is None:
            return
        name, old = self.name_of.get(id(leaf), ""), leaf.grad
        if old is not None and self._is_leftover(old, name):
            self.unclear.add(name)
            old = None
        total = grad if old is None else old + grad
        leaf.grad = self.recorder.apart(total) if not total.requires_grad else total
        if name:
            self.latest[name] = total
        if hooks:
            for hook in gradient_hooks(leaf)[1]:
                hook(leaf)

    # updates

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """What optimizer.step does, its update recorded as one call per parameter; called by the
        step itself."""
        self.by_itself = True
        found = vars(optimizer).get("found_inf")  # an optimizer that skips and unscales by itself
        if found is None or self.skips is not None:
            return self.step_of(optimizer, *args, **kwargs)
        scale = vars(optimizer).get("grad_scale")
        for group in optimizer.param_groups if scale is not None else ():
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(scale)
        return self.step_unless(optimizer, found, *args, **kwargs)

    def step_unless(
        self, optimizer: torch.optim.Optimizer, found: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """The step of an optimizer that a GradScaler skips if `found` is not zero."""
        if holds_another(optimizer) or any(step_hooks(optimizer)):
            raise CaptureError(
                f"a GradScaler may skip the step of {type(optimizer).__name__}{at_user_line()}, "
                "which holds another optimizer or has hooks, and what they do cannot be skipped; "
                "use torch.autocast with torch.bfloat16, which needs no scaler"
            )
        with torch.no_grad():
            self.skips = found != 0
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            self.skips = None

    def step_of(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """The same, called by whoever."""
        before, after = step_hooks(optimizer)
        for hook in before:
            changed = hook(optimizer, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        closure = kwargs.get("closure", args[0] if args else None)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update([p for group in optimizer.param_groups for p in group["params"]])
        for hook in after:
            hook(optimizer, args, kwargs)
        return loss

    def update(self, fakes: Iterable[torch.Tensor]) -> None:
        """Updates those of these parameters that have a gradient."""
        phase, self.recorder.phase = self.recorder.phase, g.UPDATE
        self._steps += 1
        with torch.no_grad():
            for fake in fakes:
                self._update(fake)
        self.recorder.phase = phase

    def _update(self, fake: torch.Tensor) -> None:
        name = self.name_of[id(fake)]
        grad = fake.grad
        if grad is None or self._is_leftover(grad, name):
            if grad is not None:
                self.unclear.add(name)
            self.skipped[name] = None
            return
        if name in self.latest:
            self.gradients.append((name, self.latest[name]))
        held = [self._state(name, key, kind) for key, kind in self.states[name]]
        new, *state = update_call([fake, grad, *held], self.number[name], self._steps)
        if self.skips is not None:
            new = torch.where(self.skips, fake, new)
            state = [torch.where(self.skips, old, x) for old, x in zip(held, state, strict=True)]
        keys = [key for key, _ in self.states[name]]
        self.state[name] = dict(zip(keys, state, strict=True))
        self.updated[name] = None
        if self.renames:
            self.recorder.overwrite(fake, new)
        else:
            fake.copy_(new)

    def _is_leftover(self, grad: torch.Tensor, name: str) -> bool:
        known = grad is self.leftover.get(name)
        return known and self.recorder.slots[id(grad)] == self.leftover_slots[name]

    def _state(self, name: str, key: str, kind: TensorType) -> torch.Tensor:
        known = self.state.get(name, {}).get(key)
        if known is None:
            known = self.recorder.new_leaf(*kind)
            self.begins[name, key] = known
        return known

    # the objects of the step, while it is recorded

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the fakes into the optimizers, and this in the place of what is no operator."""
        with ExitStack() as stack:
            stack.enter_context(_attribute(torch.autograd, "backward", self.backward))
            for optimizer in self.live.optimizers:
                stack.enter_context(self._in_optimizer(optimizer))
            for cls in _with_subclasses(torch.optim.lr_scheduler.LRScheduler):
                if "step" in vars(cls):
                    stack.enter_context(_attribute(cls, "step", _refuse_scheduler))
            average = ("update_parameters", update_parameters)
            stack.enter_context(_attribute(AveragedModel, *average))
            stack.enter_context(_attribute(BatchNorm, "forward", cumulative_norm.forward))
            stack.enter_context(plain_scaling())
            stack.enter_context(with_skipping(self.step_unless))
            yield

    @contextmanager
    def _in_optimizer(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        groups = list(optimizer.param_groups)
        params = [group["params"] for group in groups]
        settings = [_settings(group) for group in groups]
        state = optimizer.state
        optimizer.state = defaultdict(dict)
        for group in groups:
            group["params"] = [self.fake_of[id(p)] for p in group["params"]]
        step = optimizer.step if holds_another(optimizer) else partial(self.step, optimizer)
        try:
            with _attribute(optimizer, "step", step):
                yield
            self._refuse_new_settings(optimizer, groups, settings)
        finally:
            optimizer.state = state
            optimizer.param_groups[:] = groups
            for group, members, before in zip(groups, params, settings, strict=True):
                group.clear()
                group.update({"params": members}, **before)

    def _refuse_new_settings(
        self, optimizer: torch.optim.Optimizer, groups: list[Any], settings: list[Any]
    ) -> None:
        if len(optimizer.param_groups) != len(groups):
            raise CaptureError(
                "the step adds a group of parameters to its optimizer; add it before the step is "
                "captured"
            )
        for number, (group, before) in enumerate(zip(groups, settings, strict=True)):
            for key, value in _settings(group).items():
                if key not in before or not _same(value, before[key]):
                    raise CaptureError(
                        f"the step changes {key} of group {number} of {type(optimizer).__name__}; "
                        "settings are read at every step, so change it outside, between two calls "
                        "of runner.step"
                    )

    def leave_gradients(self) -> None:
        """Gives every parameter of an optimizer the gradient that a step before may have left."""
        for name in self.states:
            fake = self.fakes[name]
            left = self.recorder.new_leaf(tuple(fake.shape), fake.dtype)
            self.leftover[name] = fake.grad = left
            self.leftover_slots[name] = self.recorder.slot(left)

    def check_end(self) -> None:
        """Raises CaptureError if gradients of one step would be added to those of the next, and
        StaleView if the parameters could not be renamed."""
        kept = [n for n in self.unclear if self.fakes[n].grad is not None]
        if kept and self.by_itself:
            raise CaptureError(
                f"the step adds to the gradient that the step before has left in {kept[0]}; call "
                "optimizer.zero_grad() in the step, before backward() or at the end"
            )
        if self.recorder.stale:
            raise StaleView


def _seeds(roots: Sequence[torch.Tensor], given: Sequence[Any]) -> list[torch.Tensor]:
    found = []
    for root, seed in zip(roots, given, strict=True):
        if seed is None and root.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        if not root.requires_grad:
            raise CaptureError(
                f"backward() is called{at_user_line()} on what depends on no trainable parameter; "
                "it must not be detached or computed under torch.no_grad()"
            )
        found.append(torch.ones_like(root) if seed is None else seed)
    return found


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """A context in which an object or class has another attribute of its own."""
    absent = object()
    before = vars(owner).get(name, absent)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is absent:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _with_subclasses(cls: Any) -> Iterator[Any]:
    yield cls
    for each in cls.__subclasses__():
        yield from _with_subclasses(each)


def _refuse_scheduler(self: Any, *args: Any, **kwargs: Any) -> None:
    raise CaptureError(
        f"the step calls {type(self).__name__}.step(){at_user_line()}; a learning rate is read at "
        "every step and is no part of it, so call the scheduler outside, after runner.step"
    )


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _same(value: Any, before: Any) -> bool:
    if isinstance(value, torch.Tensor) or isinstance(before, torch.Tensor):
        return value is before
    return bool(value == before)
