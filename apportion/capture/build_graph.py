"""build: Nodes -> Graph: names, roles, links from backward to forward, an update Op per parameter.

The last station of capture/, after decompose/.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from apportion import graph as g
from apportion.capture.all_updates import AllUpdateTemplates
from apportion.capture.inline_update import inlined_updates
from apportion.capture.leftover import without_leftovers
from apportion.capture.normalise import Node, NormalisedTrace
from apportion.capture.optimizer import StateBegin
from apportion.capture.trace import CaptureError, Trace, dtype_name
from apportion.capture.update_call import KIND as UPDATE_CALL

RESULT = "result"


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The live tensors of a step, by name.

    batch    with their positions in the flat batch
    trained  the names of parameters that the optimizer updates, each with its group
    """

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    batch: dict[str, tuple[int, torch.Tensor]]
    trained: dict[str, int]


@dataclass(frozen=True, slots=True)
class LeafTensor:
    """A tensor that nobody makes; `position` is that of a batch tensor in the flat batch."""

    name: str
    role: str
    tensor: torch.Tensor
    position: int = -1


@dataclass(frozen=True, slots=True)
class Binding:
    """What a Value is bound to: a parameter or buffer, or the optimizer state of a parameter, which
    is `begin` where the optimizer has not made it.

    A result, which nobody reads at the step's begin, has its dtype as its `state`.
    """

    role: str
    name: str
    state: str | None = None
    begin: StateBegin | None = None


@dataclass(frozen=True, slots=True)
class BuiltGraph:
    """A Graph, and what the Values are that no Op makes.

    constants  tensors that the step found somewhere, by Value
    inputs     (Value, position in the flat batch)
    bindings   what a Value is bound to: a parameter, a buffer or optimizer state
    returned   for each scalar that the step returns, by name, the Value that becomes it; None for
               the loss
    """

    graph: g.Graph
    constants: dict[int, torch.Tensor]
    inputs: tuple[tuple[int, int], ...]
    bindings: dict[int, Binding]
    returned: dict[str, int | None]


@dataclass(frozen=True, slots=True)
class StepEnds:
    """What the inputs of a trace are beside the leaves, and what its results are, in their order.

    begun      (parameter, key) of the optimizer state that the step begins with; with "" as its
               key, the gradient that the step before has left, which nothing may read
    scalars    the names of what the step returns; the first is the loss
    gradients  the parameter of each gradient that led to an update
    state      the names of parameters and buffers
    updated    the updated parameters, each with the keys of its optimizer state
    """

    begun: tuple[tuple[str, str], ...]
    scalars: tuple[str, ...]
    gradients: tuple[str, ...]
    state: tuple[str, ...]
    updated: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class _ResultSlots:
    """The slots of a step's results.

    scalars    what the step returns, by name; the first is the loss
    gradients  of updated parameters
    after      parameters and buffers as the step leaves them
    updated    the updated parameters, each with the slots of its optimizer state by key
    """

    loss: int
    scalars: dict[str, int]
    gradients: tuple[tuple[str, int], ...]
    after: dict[str, int]
    updated: dict[str, dict[str, int]]


def build(
    trace: Trace,
    normalised: NormalisedTrace,
    leaves: Sequence[LeafTensor],
    tensors: StepTensors,
    templates: AllUpdateTemplates,
    ends: StepEnds,
) -> BuiltGraph:
    """The Graph of a recorded step."""
    results = _result_slots(normalised.outputs, ends)
    begun = dict(zip(trace.inputs[len(leaves) :], ends.begun, strict=True))
    slots = {leaf.name: slot for slot, leaf in zip(trace.inputs, leaves, strict=False)}
    left = {slot: slots[name] for slot, (name, key) in begun.items() if not key}
    normalised = without_leftovers(normalised, left)
    normalised = inlined_updates(normalised, tensors.parameters, tensors.trained, templates)
    builder = _GraphBuilder(normalised, results, tensors, templates, begun)
    builder.add_leaves(trace, leaves, results)
    for node in normalised.nodes:
        if node.kind == UPDATE_CALL:
            builder.add_update(node)
        else:
            builder.add_node(node)
    for name, after in results.after.items():
        if name not in results.updated:
            builder.add_pair(name, slots[name], after)
    for name in results.updated:
        builder.add_updated_pairs(name, slots[name])
    returned = builder.add_returned()
    graph = g.Graph(
        tuple(builder.values), tuple(builder.ops), tuple(builder.state),
        builder.index[results.loss], tuple(templates.bodies),
    )  # fmt: skip
    inputs = tuple(builder.inputs)
    return BuiltGraph(graph, builder.constants, inputs, builder.bindings, returned)


def _result_slots(outputs: Sequence[int | None], ends: StepEnds) -> _ResultSlots:
    rest = iter([-1 if slot is None else slot for slot in outputs])
    scalars = {name: next(rest) for name in ends.scalars}
    gradients = tuple([(name, next(rest)) for name in ends.gradients])
    after = {name: next(rest) for name in ends.state}
    updated = {name: {key: next(rest) for key in keys} for name, keys in ends.updated}
    return _ResultSlots(scalars[ends.scalars[0]], scalars, gradients, after, updated)


@dataclass
class _GraphBuilder:
    """The Values and Ops so far.

    begun        the optimizer state that the step begins with, by slot
    index        the Value of a slot
    own          the Value that a parameter begins the step with
    by_sequence  the forward Op of an autograd node
    links        the forward Op that a Value belongs to
    """

    normalised: NormalisedTrace
    results: _ResultSlots
    tensors: StepTensors
    templates: AllUpdateTemplates
    begun: dict[int, tuple[str, str]]
    values: list[g.Value] = field(default_factory=list)
    ops: list[g.Op] = field(default_factory=list)
    state: list[tuple[int, int]] = field(default_factory=list)
    index: dict[int, int] = field(default_factory=dict)
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    inputs: list[tuple[int, int]] = field(default_factory=list)
    bindings: dict[int, Binding] = field(default_factory=dict)
    value_names: Counter[str] = field(default_factory=Counter)
    op_names: Counter[str] = field(default_factory=Counter)
    by_sequence: dict[int, int] = field(default_factory=dict)
    links: dict[int, int] = field(default_factory=dict)
    own: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        results, names = self.results, list(self.tensors.parameters)
        updates: list[Any] = [
            node.args for node in self.normalised.nodes if node.kind == UPDATE_CALL
        ]
        named = [
            *((s, f"{n}.grad") for n, s in results.gradients),
            *((given[1].index, f"{names[number]}.grad.clipped") for given, number, _ in updates),
            *((s, n) for n, s in results.scalars.items()),
            *((s, f"{n}'") for n, s in results.after.items()),
            *((s, f"{n}:{k}'") for n, own in results.updated.items() for k, s in own.items()),
        ]
        self.roles = {results.loss: g.OUTPUT}
        for own in results.updated.values():
            self.roles |= dict.fromkeys(own.values(), g.OPTIMIZER_STATE)
        self.names: dict[int, str] = {}
        for slot, name in named:
            self.names.setdefault(slot, name)

    def add_value(self, name: str, role: str, shape: Sequence[int], dtype: torch.dtype) -> int:
        """A new Value, its name made unique."""
        kind = dtype_name(dtype)
        if kind not in g.ITEMSIZE:
            raise CaptureError(
                f"{name} has the dtype {kind}; supported are {', '.join(g.ITEMSIZE)}"
            )
        while name in self.value_names:
            self.value_names[name] += 1
            name = f"{name}_{self.value_names[name] - 1}"
        self.value_names[name] += 1
        self.values.append(g.Value(name, role, tuple(shape), kind, g.nbytes_of(shape, kind)))
        return len(self.values) - 1

    def add_leaves(self, trace: Trace, leaves: Sequence[LeafTensor], results: _ResultSlots) -> None:
        """Parameters, buffers, inputs and constants that are read or that the step changes."""
        read = {slot for node in self.normalised.nodes for slot in g.refs(node.args)}
        for slot, leaf in zip(trace.inputs, leaves, strict=False):
            after = results.after[leaf.name] if leaf.role != g.INPUT else slot
            if after != slot:
                self.roles.setdefault(after, leaf.role)
            if slot in read or after != slot:
                self._add_leaf(slot, leaf)
        for number, (slot, tensor) in enumerate(trace.constants.items()):
            if slot in read:
                shape, dtype = self.normalised.types[slot]
                value = self.add_value(f"constant:{number}", g.BUFFER, shape, dtype)
                self.index[slot], self.constants[value] = value, tensor

    def _add_leaf(self, slot: int, leaf: LeafTensor) -> None:
        value = self.add_value(leaf.name, leaf.role, leaf.tensor.shape, leaf.tensor.dtype)
        self.index[slot] = value
        if leaf.role == g.PARAMETER:
            self.own[leaf.name] = value
        if leaf.role == g.INPUT:
            self.inputs.append((value, leaf.position))
        else:
            self.bindings[value] = Binding(leaf.role, leaf.name)

    def add_node(self, node: Node) -> None:
        """An Op of forward or backward and the Values it makes."""
        forward = self._forward_op(node)
        module = node.site.module if forward is None else self.ops[forward].module
        line = node.site.line if forward is None else self.ops[forward].line
        slots = list(dict.fromkeys(g.refs(node.args)))
        args = _with_positions(node.args, {slot: k for k, slot in enumerate(slots)})
        for slot in slots:
            if slot not in self.index:
                self._add_state(slot)
        outputs = self._outputs(node)
        number = len(self.ops)
        self.ops.append(
            g.Op(
                self._op_name(node, module),
                node.kind,
                tuple(self.index[s] for s in slots),
                outputs,
                args,
                node.site.phase,
                line,
                module,
                forward,
            )
        )
        if node.site.phase == g.FORWARD and node.site.sequence is not None:
            self.by_sequence.setdefault(node.site.sequence, number)
        self.links.update(dict.fromkeys(outputs, number if forward is None else forward))

    def _forward_op(self, node: Node) -> int | None:
        """The Op that a backward Node differentiates: by autograd's number, or by what it reads."""
        sequence = node.site.sequence
        if node.site.phase != g.BACKWARD or sequence == -1:
            return None
        if sequence in self.by_sequence:
            return self.by_sequence[sequence]
        read = (self.links.get(self.index[slot]) for slot in g.refs(node.args))
        return next((link for link in read if link is not None), None)

    def _op_name(self, node: Node, module: str) -> str:
        short = _short(node.kind)
        parts = [module, short]
        if node.site.sequence == -1:
            parts = ["clip", short]
        elif node.site.phase == g.UPDATE and node.site.line == "":
            parts = [module, "update", short]
        elif node.site.phase == g.BACKWARD:
            parts = [module, short.removesuffix("_backward"), "backward"]
        return self._unique_op(".".join(part for part in parts if part))

    def _unique_op(self, name: str) -> str:
        self.op_names[name] += 1
        count = self.op_names[name]
        return name if count == 1 else f"{name}#{count}"

    def _outputs(self, node: Node) -> tuple[int, ...]:
        slots = list(node.outputs)
        while slots[-1] is None:
            slots.pop()
        role = g.ACTIVATION if node.site.phase == g.FORWARD else g.GRADIENT
        dtype = next(self.normalised.types[s][1] for s in slots if s is not None)
        base = f"{_short(node.kind)}_{len(self.ops)}"
        outputs = []
        for position, slot in enumerate(slots):
            name = base if len(slots) == 1 else f"{base}.{position}"
            if slot is None:
                outputs.append(self.add_value(name, role, (0,), dtype))
                continue
            name, kind = self.names.get(slot, name), self.roles.get(slot, role)
            self.index[slot] = self.add_value(name, kind, *self.normalised.types[slot])
            outputs.append(self.index[slot])
        return tuple(outputs)

    def add_pair(self, name: str, before: int, after: int) -> None:
        """Pairs a state that the forward pass changes with what it becomes."""
        if before == after:
            return
        if self.normalised.types[before] != self.normalised.types[after]:
            raise CaptureError(
                f"the step changes the shape or dtype of {name}; a step must leave its state as it "
                "finds it, so run it once before it is captured if that is how the state is made"
            )
        self.state.append((self.index[before], self.index[after]))

    def add_update(self, node: Node) -> None:
        """The update Op of one parameter, and the state that it is the first to read."""
        given, number, _ = node.args
        assert isinstance(given, tuple) and isinstance(number, int)
        name = list(self.tensors.parameters)[number]
        slots = [ref.index for ref in given if isinstance(ref, g.Ref)]
        after = [self._updated(node.outputs[0], self.index[slots[0]], f"{name}'")]
        for slot, made in zip(slots[2:], node.outputs[1:], strict=True):
            if slot not in self.index:
                self._add_state(slot)
            before = self.index[slot]
            after.append(self._updated(made, before, f"{self.values[before].name}'"))
        group, own = self.tensors.trained[name], self.own[name]
        self.ops.append(
            g.Op(
                self._unique_op(f"{name}.update"),
                "apportion.update",
                tuple(self.index[slot] for slot in slots),
                tuple(after),
                tuple(g.Ref(k) for k in range(len(slots))),
                g.UPDATE,
                module=name.rpartition(".")[0],
                parameter=own,
                body=self.templates.body(group, self.tensors.parameters[name]),
            )
        )

    def _add_state(self, slot: int) -> None:
        """Optimizer state that the step begins with."""
        name, key = self.begun[slot]
        kind = self.normalised.types[slot]
        self.index[slot] = value = self.add_value(f"{name}:{key}", g.OPTIMIZER_STATE, *kind)
        begin = self.templates.begin(self.tensors.trained[name], self.tensors.parameters[name], key)
        self.bindings[value] = Binding(g.OPTIMIZER_STATE, name, key, begin)

    def _updated(self, slot: int | None, before: int, name: str) -> int:
        assert slot is not None
        self.index[slot] = self._like(before, self.names.get(slot, name))
        return self.index[slot]

    def add_updated_pairs(self, name: str, slot: int) -> None:
        """Pairs a parameter and its optimizer state with what they become."""
        self.add_pair(name, slot, self.results.after[name])
        for key, after in self.results.updated[name].items():
            begun = self.slot_begun[name, key]
            if begun not in self.index:
                self._add_state(begun)
            self.add_pair(f"{name}:{key}", begun, after)

    @cached_property
    def slot_begun(self) -> dict[tuple[str, str], int]:
        """The slot of each optimizer state that the step begins with."""
        return {which: slot for slot, which in self.begun.items()}

    def add_returned(self) -> dict[str, int | None]:
        """Pairs each scalar that the step returns beside its loss with a Value of its own, so that
        it is kept as state is; these Values by name, None for the loss."""
        found: dict[str, int | None] = {}
        for name, slot in self.results.scalars.items():
            if slot == self.results.loss:
                found[name] = None
                continue
            kind = self.normalised.types[slot]
            value = self.add_value(f"result:{name}", g.BUFFER, *kind)
            self.bindings[value] = Binding(RESULT, name, dtype_name(kind[1]))
            self.state.append((value, self.index[slot]))
            found[name] = value
        return found

    def _like(self, value: int, name: str) -> int:
        same = self.values[value]
        assert same.shape is not None and same.dtype is not None
        return self.add_value(name, same.role, same.shape, getattr(torch, same.dtype))


def _short(kind: str) -> str:
    return kind.split(".")[1].strip("_")


def _with_positions(arg: Any, places: dict[int, int]) -> Any:
    if isinstance(arg, g.Ref):
        return g.Ref(places[arg.index])
    if isinstance(arg, tuple):
        return tuple(_with_positions(x, places) for x in arg)
    return arg
