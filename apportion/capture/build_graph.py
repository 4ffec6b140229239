"""build: Nodes -> Graph: names, roles, links from backward to forward, an update Op per parameter.

The last station of capture/, after decompose/.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from apportion import graph as g
from apportion.capture.normalise import Node, NormalisedTrace
from apportion.capture.inline_update import inline_update
from apportion.capture.optimizer import StateBegin, UpdateTemplates
from apportion.capture.trace import CallSite, CaptureError, Trace, dtype_name


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
    is `begin` where the optimizer has not made it."""

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
    """

    graph: g.Graph
    constants: dict[int, torch.Tensor]
    inputs: tuple[tuple[int, int], ...]
    bindings: dict[int, Binding]


@dataclass(frozen=True, slots=True)
class _ResultSlots:
    """The slots of a step's results.

    raw    gradients, by the name of the parameter
    used   the gradients that the update gets: clipped, if they are
    after  parameters and buffers as the forward pass leaves them
    """

    loss: int
    raw: dict[str, int]
    used: dict[str, int]
    after: dict[str, int]


def build(
    trace: Trace,
    normalised: NormalisedTrace,
    leaves: Sequence[LeafTensor],
    tensors: StepTensors,
    templates: UpdateTemplates,
    *,
    clipped: bool,
) -> BuiltGraph:
    """The Graph of a recorded step.

    The trace's results are the loss, gradients, clipped gradients, and parameters and buffers as
    the forward pass leaves them.
    """
    results = _result_slots(normalised.outputs, tensors, clipped)
    builder = _GraphBuilder(normalised, results)
    builder.add_leaves(trace, leaves, results)
    for node in normalised.nodes:
        builder.add_node(node)
    slots = {leaf.name: slot for slot, leaf in zip(trace.inputs, leaves, strict=True)}
    for name, after in results.after.items():
        if name not in tensors.trained:
            builder.add_pair(name, slots[name], after)
    for name, group in tensors.trained.items():
        builder.add_update(name, slots[name], group, tensors.parameters[name], templates)
    graph = g.Graph(
        tuple(builder.values), tuple(builder.ops), tuple(builder.state),
        builder.index[results.loss], tuple(templates.bodies),
    )  # fmt: skip
    return BuiltGraph(graph, builder.constants, tuple(builder.inputs), builder.bindings)


def _result_slots(
    outputs: Sequence[int | None], tensors: StepTensors, clipped: bool
) -> _ResultSlots:
    count = len(tensors.trained)
    loss, grads, rest = outputs[0], outputs[1 : count + 1], outputs[count + 1 :]
    used, after = (rest[:count], rest[count:]) if clipped else (grads, rest)
    names = (*tensors.parameters, *tensors.buffers)
    assert loss is not None
    return _ResultSlots(
        loss,
        {n: s for n, s in zip(tensors.trained, grads, strict=True) if s is not None},
        {n: s for n, s in zip(tensors.trained, used, strict=True) if s is not None},
        {n: s for n, s in zip(names, after, strict=True) if s is not None},
    )


@dataclass
class _GraphBuilder:
    """The Values and Ops so far.

    index        the Value of a slot
    by_sequence  the forward Op of an autograd node
    links        the forward Op that a Value belongs to
    """

    normalised: NormalisedTrace
    results: _ResultSlots
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

    def __post_init__(self) -> None:
        results = self.results
        named = [
            *((s, f"{n}.grad") for n, s in results.raw.items()),
            *((s, f"{n}.grad.clipped") for n, s in results.used.items() if s != results.raw[n]),
            (results.loss, "loss"),
            *((s, f"{n}'") for n, s in results.after.items() if n not in results.used),
        ]
        self.roles = {results.loss: g.OUTPUT}
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
        for slot, leaf in zip(trace.inputs, leaves, strict=True):
            after = results.after[leaf.name] if leaf.role != g.INPUT else slot
            if after != slot and leaf.name not in results.used:
                self.roles.setdefault(after, leaf.role)
            if slot in read or after != slot or leaf.name in results.used:
                self._add_leaf(slot, leaf)
        for number, (slot, tensor) in enumerate(trace.constants.items()):
            if slot in read:
                shape, dtype = self.normalised.types[slot]
                value = self.add_value(f"constant:{number}", g.BUFFER, shape, dtype)
                self.index[slot], self.constants[value] = value, tensor

    def _add_leaf(self, slot: int, leaf: LeafTensor) -> None:
        value = self.add_value(leaf.name, leaf.role, leaf.tensor.shape, leaf.tensor.dtype)
        self.index[slot] = value
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
        elif node.site.phase == g.UPDATE:
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
                "finds it"
            )
        self.state.append((self.index[before], self.index[after]))

    def add_update(
        self, name: str, slot: int, group: int, parameter: torch.Tensor, templates: UpdateTemplates
    ) -> None:
        """The update of one parameter, its state before and after: an Op, or several."""
        update = templates.inline(templates.body(group, parameter))
        if update is not None:
            self._add_inline(name, slot, group, parameter, templates)
            return
        own = self.index[slot]
        before, after = [own], [self._like(own, f"{name}'")]
        for key, (shape, dtype) in templates.state(group, parameter):
            value = self.add_value(f"{name}:{key}", g.OPTIMIZER_STATE, shape, dtype)
            begin = templates.begin(group, parameter, key)
            self.bindings[value] = Binding(g.OPTIMIZER_STATE, name, key, begin)
            before.append(value)
            after.append(self._like(value, f"{name}:{key}'"))
        changed, grad = self.index[self.results.after[name]], self.index[self.results.used[name]]
        inputs = (changed, grad, *before[1:])
        self.ops.append(
            g.Op(
                self._unique_op(f"{name}.update"),
                "apportion.update",
                inputs,
                tuple(after),
                tuple(g.Ref(k) for k in range(len(inputs))),
                g.UPDATE,
                module=name.rpartition(".")[0],
                parameter=own,
                body=templates.body(group, parameter),
            )
        )
        self.state.extend(zip(before, after, strict=True))

    def _add_inline(
        self, name: str, slot: int, group: int, parameter: torch.Tensor, templates: UpdateTemplates
    ) -> None:
        """The Ops of an update that is not elementwise."""
        types = list(self.normalised.types)
        before = [slot]
        for key, (shape, dtype) in templates.state(group, parameter):
            value = self.add_value(f"{name}:{key}", g.OPTIMIZER_STATE, shape, dtype)
            begin = templates.begin(group, parameter, key)
            self.bindings[value] = Binding(g.OPTIMIZER_STATE, name, key, begin)
            types.append((shape, dtype))
            self.index[len(types) - 1] = value
            before.append(len(types) - 1)
        inputs = [self.results.after[name], self.results.used[name], *before[1:]]
        site = CallSite(g.UPDATE, module=name.rpartition(".")[0])
        update = templates.inline(templates.body(group, parameter))
        assert update is not None
        after = [len(types) + k for k in range(len(before))]
        types += [types[old] for old in before]
        nodes = inline_update(update, inputs, after, types, site)
        self.normalised = replace(self.normalised, types=tuple(types))
        for old, new in zip(before, after, strict=True):
            meant = self.values[self.index[old]]
            self.names[new], self.roles[new] = f"{meant.name}'", meant.role
        for node in nodes:
            self.add_node(node)
        self.state.extend(
            (self.index[a], self.index[b]) for a, b in zip(before, after, strict=True)
        )

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
