"""capture: a PyTorch training step -> Program (a Graph bound to the live model and optimizer).

    step, model, optimizer, batch --record--> Trace --rewrite--> Nodes --build--> Graph

The step runs once on fake tensors (trace.py), so that a model on the meta device is captured too.
Forward, loss, backward and clipping are one trace; the optimizer's update is a template per group
(optimizer.py), stamped once per parameter. `eager_steps` is the independent reference: plain
PyTorch on a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import _engine_run_backward
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from apportion import graph as g
from apportion.capture import optimizer as updates
from apportion.capture.build_graph import Binding, Leaf, Tensors, build
from apportion.capture.counter_random import CounterRandom
from apportion.capture.decompose import decompose
from apportion.capture.normalise import rewrite
from apportion.capture.optimizer import setting
from apportion.capture.record import CaptureError, Recorder, Site, fake_mode, record

__all__ = [
    "CaptureError",
    "Program",
    "batch_leaves",
    "capture",
    "capture_as",
    "cast_batch",
    "cast_program",
    "check_settings",
    "eager_steps",
    "setting",
    "state_tensor",
]

# Operators of gradient clipping differentiate nothing.
_CLIPPING = Site(g.BACKWARD, sequence=-1)


class Step(Protocol):
    """The user's function: a scalar loss, or something with a `loss`."""

    def __call__(self, model: Any, batch: Any, /) -> Any: ...


@dataclass(frozen=True, eq=False)
class Program:
    """A captured step.

    inputs     (value index, flat position of the leaf in the batch's pytree)
    constants  tensors found in the trace, by value index
    bindings   for every state Value the step begins with, what it is bound to
    fixed      the optimizer settings that decided which operators the update has
    widened    a dtype, and the one that the step gets wherever it names that
    """

    graph: g.Graph
    step: Step
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    batch: Any
    clip_norm: float | None
    constants: dict[int, torch.Tensor]
    inputs: tuple[tuple[int, int], ...]
    bindings: dict[int, Binding]
    fixed: tuple[updates.Fixed, ...]
    widened: tuple[torch.dtype, torch.dtype] | None = None

    def __repr__(self) -> str:
        return f"<Program {type(self.model).__name__}, {len(self.graph.ops)} ops>"


def capture(
    step: Step,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    clip_norm: float | None = None,
) -> Program:
    """Captures forward, loss, backward, clipping and update of `step(model, batch)` as one Graph.

    Parameters may be on the meta device. Raises CaptureError, one sentence with the user's line,
    for a step that depends on data or uses something unsupported.
    """
    return _capture(step, model, optimizer, batch, clip_norm, None)


def _capture(
    step: Step,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    clip_norm: float | None,
    widened: tuple[torch.dtype, torch.dtype] | None,
) -> Program:
    updates.check_supported(optimizer)
    tensors = _tensors(model, optimizer, batch)
    mode = fake_mode()
    leaves = _leaves(tensors)
    with mode:
        fakes = [_fake(leaf.tensor) for leaf in leaves]
    traced = _traced(step, model, tensors, leaves, batch, clip_norm, widened)
    trace = record(traced, fakes, mode, model)
    templates = _Templates(optimizer, mode)
    nodes = decompose(rewrite(trace))
    built = build(trace, nodes, leaves, tensors, templates, clipped=clip_norm is not None)
    g.verify(built.graph)
    return Program(
        built.graph, step, model, optimizer, batch, clip_norm, built.constants, built.inputs,
        built.bindings, updates.fixed_settings(optimizer), widened,
    )  # fmt: skip


def _tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensors:
    """All live tensors of the step, by name."""
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    groups = {id(p): k for k, group in enumerate(optimizer.param_groups) for p in group["params"]}
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
    return Tensors(parameters, buffers, _batch_names(batch), trained)


def _batch_names(batch: Any) -> dict[str, tuple[int, torch.Tensor]]:
    """Name, flat position and tensor of each tensor in the batch: `batch.x.0`."""
    named = {}
    for position, (path, leaf) in enumerate(pytree.tree_flatten_with_path(batch)[0]):
        if isinstance(leaf, torch.Tensor):
            parts = [
                str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))
                for key in path
            ]
            named[".".join(["batch", *parts])] = (position, leaf)
    return named


def _leaves(tensors: Tensors) -> list[Leaf]:
    return [
        *(Leaf(n, g.PARAMETER, t) for n, t in tensors.parameters.items()),
        *(Leaf(n, g.BUFFER, t) for n, t in tensors.buffers.items()),
        *(Leaf(n, g.INPUT, t, position) for n, (position, t) in tensors.batch.items()),
    ]


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    """A fake CPU tensor of that shape; contiguous, because a Graph knows no memory order."""
    fake = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


def _traced(
    step: Step,
    model: torch.nn.Module,
    tensors: Tensors,
    leaves: Sequence[Leaf],
    batch: Any,
    clip_norm: float | None,
    widened: tuple[torch.dtype, torch.dtype] | None,
) -> Any:
    """The function to record: all leaves -> loss, gradients, clipped gradients, state after."""

    def run(recorder: Recorder, *fakes: torch.Tensor) -> list[torch.Tensor | None]:
        state = {
            leaf.name: fake
            for leaf, fake in zip(leaves, fakes, strict=True)
            if leaf.role != g.INPUT
        }
        fake_batch = _filled(batch, leaves, fakes)
        bound = _reparametrize_module(model, state, tie_weights=True)
        with bound, torch.enable_grad(), _widening(widened):
            loss = _loss(step(model, fake_batch), step)
            _refuse_backward(state)
            after = state | dict(model.named_buffers())
            recorder.phase = g.BACKWARD
            grads = _gradients(loss, {name: state[name] for name in tensors.trained})
        recorder.replayed = _CLIPPING
        with torch.no_grad():
            clipped = [] if clip_norm is None else _clipped(grads, clip_norm)
        return [loss, *grads, *clipped, *(after[name] for name in state)]

    return run


def _filled(batch: Any, leaves: Iterable[Leaf], fakes: Iterable[torch.Tensor]) -> Any:
    flat, spec = pytree.tree_flatten(batch)
    for leaf, fake in zip(leaves, fakes, strict=True):
        if leaf.role == g.INPUT:
            flat[leaf.position] = fake
    return pytree.tree_unflatten(flat, spec)


def _loss(result: Any, step: Step) -> torch.Tensor:
    """The scalar that a step returned, by itself or as `.loss` or ["loss"]."""
    name = getattr(step, "__name__", "the step")
    if isinstance(result, Mapping) and "loss" in result:
        result = result["loss"]
    loss = result if isinstance(result, torch.Tensor) else getattr(result, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(
            f"{name} returns {type(result).__name__}; it must return a scalar loss tensor, or "
            "an object or dict with one as loss"
        )
    if loss.dim() != 0 or not loss.is_floating_point():
        raise CaptureError(
            f"{name} returns a loss of shape {tuple(loss.shape)} and dtype {loss.dtype}; it must "
            "be a floating scalar, so reduce it with mean() or sum()"
        )
    if not loss.requires_grad:
        raise CaptureError(
            f"the loss that {name} returns depends on no trainable parameter; it must not be "
            "detached or computed under torch.no_grad()"
        )
    return loss


def _refuse_backward(state: Mapping[str, torch.Tensor]) -> None:
    if any(x.is_leaf and x.grad is not None for x in state.values()):
        raise CaptureError(
            "the step calls backward() itself; it must only return the loss, because capture adds "
            "backward and update"
        )


def _gradients(loss: torch.Tensor, trained: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    grads = _backward(loss, tuple(trained.values()))
    missing = [name for name, grad in zip(trained, grads, strict=True) if grad is None]
    if missing:
        raise CaptureError(
            f"these trainable parameters get no gradient: {', '.join(missing)}; freeze them with "
            "requires_grad_(False) or use them in the step"
        )
    return [grad for grad in grads if grad is not None]


def _backward(loss: torch.Tensor, inputs: tuple[torch.Tensor, ...] = ()) -> Sequence[Any]:
    """Gradients of the inputs, or, for none, the `grad` of all parameters.

    The engine is called as `loss.backward()` calls it, which however would suspend `_Widened`, and
    activation checkpointing runs the step's code again in here.
    """
    ones = (torch.ones_like(loss),)
    return _engine_run_backward(
        (loss,), ones, False, False, inputs, allow_unreachable=True, accumulate_grad=not inputs
    )


def _clipped(grads: Sequence[torch.Tensor], clip_norm: float) -> list[torch.Tensor]:
    """torch.nn.utils.clip_grad_norm_, in operators whose parts can be added."""
    squares = torch.stack([torch.sum(grad * grad) for grad in grads])
    factor = torch.clamp(clip_norm / (torch.sqrt(torch.sum(squares)) + 1e-6), max=1.0)
    return [grad * factor for grad in grads]


class _Templates:
    """Update Bodies, one per kind of parameter in a group."""

    def __init__(self, optimizer: torch.optim.Optimizer, mode: FakeTensorMode) -> None:
        self._optimizer, self._mode = optimizer, mode
        self._index: dict[Any, int] = {}
        self.bodies: list[g.Body] = []

    def state(self, group: int, parameter: torch.Tensor) -> list[tuple[str, Any]]:
        """Name and (shape, dtype) of each state tensor of a parameter."""
        names = updates.state_names(self._optimizer.param_groups[group])
        return [(n, updates.state_type(self._optimizer, parameter, n)) for n in names]

    def body(self, group: int, parameter: torch.Tensor) -> int:
        """Index of the Body that updates the parameter."""
        dtypes = tuple(dtype for _, (_, dtype) in self.state(group, parameter))
        key = (group, parameter.dtype, parameter.dim() == 0, dtypes)
        if key not in self._index:
            self._index[key] = len(self.bodies)
            body = updates.update_body(self._optimizer, group, parameter, self._mode)
            self.bodies.append(body)
        return self._index[key]


# a captured Program and the live tensors


def state_tensor(program: Program, value_index: int) -> torch.Tensor:
    """The live tensor behind a parameter, buffer, constant or optimizer state at the step's begin.

    Optimizer state that the optimizer has not made yet is what it begins with: zeros.
    """
    if value_index in program.constants:
        return program.constants[value_index]
    binding = program.bindings.get(value_index)
    if binding is None:
        name = program.graph.values[value_index].name
        raise ValueError(
            f"value {name!r} is not a parameter, buffer or optimizer state the step begins with"
        )
    return _bound(program.model, program.optimizer, binding)


def _bound(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, binding: Binding
) -> torch.Tensor:
    if binding.role == g.BUFFER:
        tensor = model.get_buffer(binding.name)
    else:
        tensor = model.get_parameter(binding.name)
    if tensor.is_meta:
        raise ValueError(
            f"{binding.role} {binding.name} has no data (meta device); materialise the model with "
            "model.to_empty(device=...) and initialise it before running"
        )
    if binding.state is None:
        return tensor.detach()
    return updates.state_value(optimizer, tensor, binding.state)


def batch_leaves(program: Program, batch: Any) -> dict[int, torch.Tensor]:
    """The batch's tensors by value index; raises ValueError unless the batch is as captured."""
    captured, spec = pytree.tree_flatten(program.batch)
    flat, given = pytree.tree_flatten(batch)
    if given != spec:
        raise ValueError(
            f"the batch has the structure {given}, but the step was captured with {spec}"
        )
    for position, (new, old) in enumerate(zip(flat, captured, strict=True)):
        _check_leaf(position, new, old)
    return {value: flat[position] for value, position in program.inputs}


def _check_leaf(position: int, new: Any, old: Any) -> None:
    if not isinstance(old, torch.Tensor):
        if isinstance(new, torch.Tensor) or new != old:
            raise ValueError(
                f"leaf {position} of the batch is {new!r}, but the step was captured with {old!r}, "
                "which is part of the graph; capture again"
            )
    elif not isinstance(new, torch.Tensor) or (new.shape, new.dtype) != (old.shape, old.dtype):
        shown = f"{new.dtype} {tuple(new.shape)}" if isinstance(new, torch.Tensor) else repr(new)
        raise ValueError(
            f"leaf {position} of the batch is {shown}, but the step was captured with {old.dtype} "
            f"{tuple(old.shape)}; give every batch the same shape or capture again"
        )


def check_settings(program: Program) -> None:
    """Raises ValueError if an optimizer setting that shaped the captured update has changed."""
    updates.check_fixed(program.optimizer, program.fixed)


# the reference


def eager_steps(
    program: Program, batches: Iterable[Any], seed: int
) -> tuple[list[float], dict[int, torch.Tensor]]:
    """Runs the steps by plain PyTorch on a copy of model and optimizer; the n-th batch is step n.

    Returns the losses and, by the index of the Value it begins with, the tensor that every
    parameter, buffer and optimizer state ends with. Random operators draw what the Graph draws.
    """
    for binding in program.bindings.values():
        _bound(program.model, program.optimizer, binding)
    model, optimizer = copy.deepcopy((program.model, program.optimizer))
    losses = [
        _eager_step(program, model, optimizer, batch, seed, number)
        for number, batch in enumerate(batches)
    ]
    ends = {v: _bound(model, optimizer, b) for v, b in program.bindings.items()}
    return losses, ends


def _eager_step(
    program: Program,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    seed: int,
    number: int,
) -> float:
    optimizer.zero_grad(set_to_none=True)
    random = CounterRandom(seed, number)
    with torch.enable_grad(), torch.random.fork_rng(devices=[]), random, _widening(program.widened):
        loss = _loss(program.step(model, batch), program.step)
        _backward(loss)
    if program.clip_norm is not None:
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(trained, program.clip_norm)
    optimizer.step()
    return float(loss.detach())


# the step in another precision


def capture_as(program: Program, dtype: torch.dtype) -> Program:
    """The step captured again with model, optimizer state and floating batch cast to `dtype`.

    Where the step itself names the precision of the model (`logits.float()` in a float32 model), it
    gets `dtype` as well: such a cast does nothing in the model's own precision, nor may it here.
    """
    cast = cast_program(program, dtype)
    return _capture(cast.step, cast.model, cast.optimizer, cast.batch, cast.clip_norm, cast.widened)


def cast_program(program: Program, dtype: torch.dtype) -> Program:
    """The Program with model, optimizer state and floating batch cast to `dtype`, not captured
    again: its Graph is still the one in the model's own precision. `eager_steps`, which runs no
    Graph, needs no more than this."""
    own = _precision(program.model)
    model, optimizer = copy.deepcopy((program.model, program.optimizer))
    model.to(dtype)
    for state in optimizer.state.values():
        for name, value in state.items():
            if name != "step" and isinstance(value, torch.Tensor) and value.is_floating_point():
                state[name] = value.to(dtype)
    batch = cast_batch(program.batch, dtype)
    widened = None if own == dtype else (own, dtype)
    return replace(program, model=model, optimizer=optimizer, batch=batch, widened=widened)


def _precision(model: torch.nn.Module) -> torch.dtype:
    """The widest dtype of the floating parameters."""
    return max(
        (p.dtype for p in model.parameters() if p.is_floating_point()),
        key=lambda dtype: torch.finfo(dtype).bits,
        default=torch.get_default_dtype(),
    )


_CASTS = {  # casts that name a dtype by themselves
    torch.float64: torch.Tensor.double,
    torch.float32: torch.Tensor.float,
    torch.float16: torch.Tensor.half,
    torch.bfloat16: torch.Tensor.bfloat16,
}


class _Widened(TorchFunctionMode):
    """Runs Python code with one dtype replaced by another wherever a call of torch names it."""

    def __init__(self, widened: tuple[torch.dtype, torch.dtype]) -> None:
        super().__init__()
        self._narrow, self._wide = widened

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {key: self._wider(value) for key, value in (kwargs or {}).items()}
        if func is _CASTS.get(self._narrow):
            func = _CASTS.get(self._wide, func)
        return func(*map(self._wider, args), **named)

    def _wider(self, value: Any) -> Any:
        return self._wide if value is self._narrow else value


@contextmanager
def _widening(widened: tuple[torch.dtype, torch.dtype] | None) -> Iterator[None]:
    """Named dtypes and the default one replaced, if any are to be."""
    if widened is None:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(widened[1] if before == widened[0] else before)
    try:
        with _Widened(widened):
            yield
    finally:
        torch.set_default_dtype(before)


def cast_batch(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating tensors in `dtype`."""

    def cast(leaf: Any) -> Any:
        floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if floating else leaf

    return pytree.tree_map(cast, batch)
