"""capture: a PyTorch training step -> Program (a Graph bound to the live model and optimizer).

    step, model, optimizer, batch --record--> Trace --normalise--> Nodes --build--> Graph

The main file of capture/. The step runs once on fake tensors (record.py), so that a model on the
meta device is captured too. Forward, loss, backward and clipping are one trace; the optimizer's
update is a template per group (optimizer.py), from which every parameter gets an update Op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from apportion import graph as g
from apportion.capture.all_updates import AllUpdateTemplates
from apportion.capture.batch_tree import flatten
from apportion.capture.build_graph import LeafTensor, StepTensors, build
from apportion.capture.decompose import decompose
from apportion.capture.discover import holds_another
from apportion.capture.empty_values import without_empty
from apportion.capture.fixed_inputs import DependsOnData, fixed_inputs, fixed_notes, or_fixed
from apportion.capture.foreign_errors import foreign_errors
from apportion.capture.found_constants import constant_notes
from apportion.capture.live_state import LiveState
from apportion.capture.normalise import normalise
from apportion.capture.phases import with_phases
from apportion.capture.program import Program, live_state_of
from apportion.capture.read_probes import unheard
from apportion.capture.record import fake_mode
from apportion.capture.step_run import StepCall, StepLeaves, recorded_step
from apportion.capture.trace import CaptureError
from apportion.capture.training_step import DtypeReplacement, StepFunction
from apportion.capture.untouched import LiveObjects, untouched
from apportion.capture.written_tensors import ReplacedState, WrittenState, WrittenTensor


def capture(
    step: StepFunction,
    model: Any,
    optimizer: Any,
    batch: Any,
    clip_norm: float | None = None,
    fixed: Sequence[str] = (),
) -> Program:
    """Captures forward, loss, backward, clipping and update of `step(model, batch)` as one Graph.

    Parameters may be on the meta device. `fixed` names tensors of the batch that are the same in
    every step, so that shapes may depend on their values: `["batch.edge_index"]`. Raises
    CaptureError, one sentence with the user's line, for a step that depends on data or uses
    something unsupported.
    """

    def attempt(same: Sequence[str]) -> Program:
        return capture_with(step, model, optimizer, batch, clip_norm, None, same)

    try:
        return attempt(fixed)
    except DependsOnData as refusal:
        if not refusal.fixable:
            raise
        said = _with_fixed_tried(refusal, lambda names: attempt((*fixed, *names)))
        raise CaptureError(said) from None


def _with_fixed_tried(refusal: DependsOnData, attempt: Callable[[Sequence[str]], Program]) -> str:
    """A refusal, with what comes of it if the tensors that decide are fixed."""
    names: list[str] = []
    then: CaptureError | None = refusal
    while isinstance(then, DependsOnData) and set(then.fixable) - set(names):
        names += [name for name in then.fixable if name not in names]
        try:
            with unheard():
                attempt(names)
            then = None
        except CaptureError as error:
            then = error
        except Exception:  # no remedy, whatever it is
            return str(refusal)
    return or_fixed(refusal, names, then)


def capture_with(
    step: StepFunction,
    model: Any,
    optimizer: Any,
    batch: Any,
    clip_norm: float | None,
    widened: DtypeReplacement | None,
    fixed: Sequence[str] = (),
) -> Program:
    """What `capture` does, with a dtype replaced wherever the step names it (None: none is)."""
    roots = {"model": model, "optimizer": optimizer, "batch": batch, "step": step}
    with foreign_errors(), untouched(roots) as objects:
        kept = fixed_inputs(batch, fixed)
        call = StepCall(step, model, optimizer, batch, clip_norm, widened, kept)
        return _captured(call, objects)


def _captured(call: StepCall, objects: LiveObjects) -> Program:
    written: tuple[WrittenTensor, ...] = ()
    for _ in range(_MOST_TRIES):
        try:
            return _captured_with(call, objects, written)
        except (WrittenState, ReplacedState) as found:
            more = _more_state(found, call, objects, written)
            if not more:
                raise
            written += more
    return _captured_with(call, objects, written)


_MOST_TRIES = 4


def _more_state(
    found: WrittenState | ReplacedState,
    call: StepCall,
    objects: LiveObjects,
    known: tuple[WrittenTensor, ...],
) -> tuple[WrittenTensor, ...]:
    """The tensors that a step was found to write to or to replace, if they can be its state."""
    if isinstance(found, WrittenState):
        objects.forget_writes(found.tensors)
    objects.restore()
    live = live_state_of(call.step, call.model, call.optimizer, known)
    taken = live.parameters() | live.buffers()
    if isinstance(found, WrittenState):
        return objects.named(found.tensors, taken)
    return tuple(each for each in found.tensors if each.name not in taken)


def _captured_with(
    call: StepCall, objects: LiveObjects, written: tuple[WrittenTensor, ...]
) -> Program:
    live = live_state_of(call.step, call.model, call.optimizer, written)
    tensors = _tensors(live, call)
    mode = fake_mode()
    leaves = _leaves(tensors)
    templates = AllUpdateTemplates(live, mode)
    states = {n: templates.state(k, tensors.parameters[n]) for n, k in tensors.trained.items()}
    recorded = recorded_step(call, live, StepLeaves(tensors, leaves, states), mode, objects)
    found = constant_notes(recorded.trace, tensors, objects)
    nodes = decompose(without_empty(normalise(recorded.trace)))
    nodes = with_phases(nodes) if recorded.by_itself else nodes
    built = build(recorded.trace, nodes, leaves, tensors, templates, recorded.ends)
    g.verify(built.graph)
    return Program(
        built.graph, call.step, call.model, call.optimizer, call.batch, call.clip_norm,
        built.constants, built.inputs, built.bindings, templates.fixed, call.widened,
        (*fixed_notes(call.fixed), *recorded.notes, *found), recorded.results, built.returned,
        recorded.by_itself, call.fixed, written,
    )  # fmt: skip


def _tensors(live: LiveState, call: StepCall) -> StepTensors:
    """All live tensors of the step, by name."""
    parameters, buffers = live.parameters(), live.buffers()
    groups = _groups(live)
    known = {id(p) for p in parameters.values()}
    strangers = sum(1 for p in groups if p not in known)
    if strangers:
        raise CaptureError(
            f"the optimizer holds {strangers} parameters that are not in the model; build it from "
            "model.parameters()"
        )
    trained = {n: groups[id(p)] for n, p in parameters.items() if id(p) in groups}
    if not any(parameters[name].requires_grad for name in trained):
        raise CaptureError(
            "the optimizer holds no parameter that requires a gradient; there is nothing to train"
        )
    fixed = {each.position for each in call.fixed}
    named = {
        name: (position, leaf)
        for position, name, leaf in flatten(call.batch).tensors
        if position not in fixed
    }
    return StepTensors(parameters, buffers, named, trained)


def _groups(live: LiveState) -> dict[int, int]:
    """The group of every parameter, by its id."""
    groups: dict[int, int] = {}
    for optimizer in live.optimizers:
        first = live.first_group(optimizer)
        outer = holds_another(optimizer)
        for number, group in enumerate(optimizer.param_groups, first):
            for parameter in group["params"]:
                if id(parameter) in groups and not outer:
                    raise CaptureError(
                        f"two optimizers hold the same parameter of shape "
                        f"{tuple(parameter.shape)}; give each parameter to one of them"
                    )
                if not outer:
                    groups[id(parameter)] = number
    return groups


def _leaves(tensors: StepTensors) -> list[LeafTensor]:
    return [
        *(LeafTensor(n, g.PARAMETER, t) for n, t in tensors.parameters.items()),
        *(LeafTensor(n, g.BUFFER, t) for n, t in tensors.buffers.items()),
        *(LeafTensor(n, g.INPUT, t, position) for n, (position, t) in tensors.batch.items()),
    ]
