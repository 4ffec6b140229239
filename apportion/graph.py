"""Graph, Op, Value: one training step as data. capture/ makes it, all later rooms read it.

Frozen, hashable, printable, with its own JSON; independent of torch.

A Graph is functional: every Value is made by one Op, or by nobody (parameters, optimizer state,
buffers, inputs). Ops stand in an order in which they can run. State that survives the step is named
twice, as the Value the step begins with and the Value it ends with (`Graph.state`).

    Arg ::= Ref | Dtype | Setting | int | float | complex | bool | str | None | (Arg, ...)

An Op holds *all* arguments of its operator in schema order, defaults filled in, devices and layouts
left out; its tensors are `Ref(k)`, the k-th of `Op.inputs`.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from apportion.checked import (
    LARGEST_WHOLE,
    MOST_NESTING,
    brief,
    read_every,
    read_field,
    read_list,
    read_mapping,
    read_number,
    read_row,
    read_text,
    read_whole,
    read_wholes,
)

SCHEMA_VERSION = 1

PARAMETER, OPTIMIZER_STATE, BUFFER, INPUT = "parameter", "optimizer state", "buffer", "input"
ACTIVATION, GRADIENT, OUTPUT = "activation", "gradient", "output"
ROLES = (PARAMETER, OPTIMIZER_STATE, BUFFER, INPUT, ACTIVATION, GRADIENT, OUTPUT)

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
PHASES = (FORWARD, BACKWARD, UPDATE)

ITEMSIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ref:
    """The k-th input of the Op (in a Body: the k-th of its inputs and then its results so far)."""

    index: int


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype argument, by torch's name without the prefix: `float32`."""

    name: str


@dataclass(frozen=True, slots=True)
class Setting:
    """A number computed at every step from the optimizer's live parameter groups.

    expression ::= number | ("get", group, key) | ("get", group, key, position)
                 | (operator, expression, ...)    with operators neg, +, -, *, /, **
    """

    expression: Any


Arg = Ref | Dtype | Setting | int | float | complex | bool | str | None | tuple["Arg", ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the step. `shape` and `dtype` may be absent if imported, `nbytes` never."""

    name: str
    role: str
    shape: tuple[int, ...] | None
    dtype: str | None
    nbytes: int

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.nbytes // max(math.prod(self.shape or (1,)), 1) or 1


@dataclass(frozen=True, slots=True)
class ImportedCosts:
    """What a file says of a node that was not captured, in the file's own unit of time.

    times         (kind of device, time), for the kinds of device that can run it
    transfer      the time that its output takes from one device to another
    memory_bytes  what it occupies on its device
    colocation    nodes with the same name here share a device; None: free
    """

    times: tuple[tuple[str, float], ...]
    transfer: float = 0.0
    memory_bytes: int = 0
    colocation: str | None = None


@dataclass(frozen=True, slots=True)
class Op:
    """One operator call. `inputs` and `outputs` are indices into `Graph.values`.

    kind      `aten.mm.default`, `apportion.update`, `mylib.op.default`
    phase     forward, backward or update
    line      the user's `file.py:12`, or ""
    module    path of the module that called it, or ""
    forward   for a backward Op the index of the forward Op that it differentiates; else None
    parameter for an update Op the index of the Value it updates; else None
    body      for a composite Op (`apportion.update`) the index of its Body; else None
    imported  for an Op from a file that has costs of its own; else None
    """

    name: str
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    args: tuple[Arg, ...]
    phase: str = FORWARD
    line: str = ""
    module: str = ""
    forward: int | None = None
    parameter: int | None = None
    body: int | None = None
    imported: ImportedCosts | None = None


@dataclass(frozen=True, slots=True)
class BodyOp:
    """One operator call inside a Body; it has exactly one result."""

    kind: str
    args: tuple[Arg, ...]


@dataclass(frozen=True, slots=True)
class UpdateRecipe:
    """Which optimizer's update a Body is, so that one call can do many of them in place.

    kind   sgd, adam or adamw
    group  index of the optimizer's parameter group, whose settings it reads
    state  names of the state tensors, in the order of the Body's inputs after the parameter and
           its gradient, and of its outputs after the new parameter
    flags  those of amsgrad, maximize and nesterov that are set, sorted
    """

    kind: str
    group: int
    state: tuple[str, ...]
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Body:
    """What a composite Op computes. `Ref(k)` is input k for k < inputs, else the result of
    `ops[k - inputs]`. `recipe` says the same in fewer words, where it is an optimizer's update; it
    is not part of what identifies a step."""

    inputs: int
    ops: tuple[BodyOp, ...]
    outputs: tuple[int, ...]
    recipe: UpdateRecipe | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Graph:
    """A whole step.

    state   pairs of Values: what a state begins the step with, and what it ends the step with
    loss    a Value, or None
    bodies  what composite Ops compute
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    state: tuple[tuple[int, int], ...] = ()
    loss: int | None = None
    bodies: tuple[Body, ...] = field(default=())

    @cached_property
    def producer(self) -> tuple[tuple[int, int] | None, ...]:
        """For every Value the (op, output position) that makes it, or None."""
        made: list[tuple[int, int] | None] = [None] * len(self.values)
        for index, op in enumerate(self.ops):
            for position, value in enumerate(op.outputs):
                made[value] = (index, position)
        return tuple(made)

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """For every Value the Ops that read it, each once, in order."""
        readers: list[list[int]] = [[] for _ in self.values]
        for index, op in enumerate(self.ops):
            for value in dict.fromkeys(op.inputs):
                readers[value].append(index)
        return tuple(tuple(r) for r in readers)

    @cached_property
    def after(self) -> dict[int, int]:
        """For a state that the step begins with what it ends with."""
        return dict(self.state)

    @cached_property
    def final_values(self) -> frozenset[int]:
        """What is there when the step is over: its loss and its state."""
        state = (after for _, after in self.state)
        return frozenset((*state,) if self.loss is None else (self.loss, *state))

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the step: ops, arguments, shapes, dtypes, roles. Not names or lines, nor the
        version of torch."""
        facts = [
            [[v.role, v.shape, v.dtype, v.nbytes] for v in self.values],
            [
                [o.kind, o.inputs, o.outputs, _dump_arg(o.args), o.phase, o.body, *_own_costs(o)]
                for o in self.ops
            ],
            [
                [b.inputs, [[o.kind, _dump_arg(o.args)] for o in b.ops], b.outputs]
                for b in self.bodies
            ],
            self.state,
            self.loss,
        ]
        return hashlib.sha256(json.dumps(facts, separators=(",", ":")).encode()).hexdigest()[:16]

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def nbytes_of(shape: Iterable[int], dtype: str) -> int:
    """Bytes of a dense tensor."""
    return math.prod(shape) * ITEMSIZE[dtype]


def refs(arg: Arg) -> Iterator[int]:
    """Indices of all Refs inside an argument, in order."""
    if isinstance(arg, Ref):
        yield arg.index
    elif isinstance(arg, tuple):
        for item in arg:
            yield from refs(item)


def substitute(arg: Arg, tensors: Any, *, dtype: Any = None, setting: Any = None) -> Any:
    """`arg` with each Ref(k) replaced by tensors[k], and Dtypes and Settings by what the two
    functions return."""
    if isinstance(arg, Ref):
        return tensors[arg.index]
    if isinstance(arg, tuple):
        return tuple(substitute(item, tensors, dtype=dtype, setting=setting) for item in arg)
    if isinstance(arg, Dtype) and dtype is not None:
        return dtype(arg.name)
    if isinstance(arg, Setting) and setting is not None:
        return setting(arg.expression)
    return arg


def verify(graph: Graph) -> None:
    """Raises ValueError, naming the Op or Value, unless the Graph is well formed and its order can
    run."""
    count = len(graph.values)
    names: set[str] = set()
    for value in graph.values:
        if value.name in names:
            raise ValueError(f"two values are named {value.name!r}")
        names.add(value.name)
        if value.role not in ROLES:
            raise ValueError(
                f"value {value.name!r} has the unknown role {value.role!r}; "
                f"roles: {', '.join(ROLES)}"
            )
        if value.dtype is not None and value.dtype not in ITEMSIZE:
            raise ValueError(
                f"value {value.name!r} has the unknown dtype {value.dtype!r}; "
                f"dtypes: {', '.join(ITEMSIZE)}"
            )
        if value.shape is not None and value.dtype is not None:
            expected = nbytes_of(value.shape, value.dtype)
            if value.nbytes != expected:
                raise ValueError(
                    f"value {value.name!r} says {value.nbytes} bytes, its shape says {expected}"
                )
    made = {o for op in graph.ops for o in op.outputs if 0 <= o < count}
    known = set(range(count)) - made
    for op in graph.ops:
        if op.phase not in PHASES:
            raise ValueError(f"op {op.name!r} has the unknown phase {op.phase!r}")
        for value_index in op.inputs:
            if value_index not in known:
                raise ValueError(f"op {op.name!r} reads value {value_index} before it is made")
        for ref in refs(op.args):
            if not 0 <= ref < len(op.inputs):
                raise ValueError(f"op {op.name!r} refers to input {ref} of {len(op.inputs)}")
        for value_index in op.outputs:
            if not 0 <= value_index < count or value_index in known:
                raise ValueError(
                    f"op {op.name!r} makes value {value_index}, which is already made or not there"
                )
            known.add(value_index)
        _verify_indices(graph, op)
    for body in graph.bodies:
        _verify_body(body)
    for before, after in graph.state:
        if not (0 <= before < count and 0 <= after < count):
            raise ValueError(f"state ({before}, {after}) is not among the {count} values")
        a, b = graph.values[before], graph.values[after]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(
                f"state {a.name!r} ends the step with another shape or dtype than it began with"
            )
    if graph.loss is not None and not 0 <= graph.loss < count:
        raise ValueError(f"the loss is value {graph.loss}, of which there are {count}")


def _verify_indices(graph: Graph, op: Op) -> None:
    """Raises ValueError unless what an Op names is there."""
    for what, index, count in (
        ("body", op.body, len(graph.bodies)),
        ("forward op", op.forward, len(graph.ops)),
        ("parameter", op.parameter, len(graph.values)),
    ):
        if index is not None and not 0 <= index < count:
            raise ValueError(f"op {op.name!r} names {what} {index}, of which there are {count}")
    if op.body is not None:
        body = graph.bodies[op.body]
        if (body.inputs, len(body.outputs)) != (len(op.inputs), len(op.outputs)):
            raise ValueError(
                f"op {op.name!r} has {len(op.inputs)} inputs and {len(op.outputs)} outputs, its "
                f"body {body.inputs} and {len(body.outputs)}"
            )


def _verify_body(body: Body) -> None:
    """Raises ValueError unless every operator of a Body refers to what is there before it."""
    for position, op in enumerate(body.ops):
        for ref in refs(op.args):
            if not 0 <= ref < body.inputs + position:
                raise ValueError(f"operator {position} of a body refers to {ref}, made later")
    for output in body.outputs:
        if not 0 <= output < body.inputs + len(body.ops):
            raise ValueError(f"a body has the output {output}, which nothing makes")


def _lines(graph: Graph) -> Iterator[str]:
    for value, made in zip(graph.values, graph.producer, strict=True):
        if made is None:
            yield f"{value.role} {_typed(value)}"
    for op in graph.ops:
        outs = ", ".join(_typed(graph.values[v]) for v in op.outputs)
        ins = ", ".join(_show_arg(a, [graph.values[v].name for v in op.inputs]) for a in op.args)
        yield f"{outs} = {op.kind}({ins})  # {op.phase} {op.line}".rstrip()
    for before, after in graph.state:
        yield f"{graph.values[before].name} <- {graph.values[after].name}"


def _typed(value: Value) -> str:
    shape = "?" if value.shape is None else ",".join(map(str, value.shape))
    return f"{value.name}: {value.dtype or '?'}[{shape}]"


def _show_arg(arg: Arg, names: list[str]) -> str:
    if isinstance(arg, Ref):
        return names[arg.index]
    if isinstance(arg, tuple):
        return "[" + ", ".join(_show_arg(a, names) for a in arg) + "]"
    if isinstance(arg, Dtype):
        return arg.name
    if isinstance(arg, Setting):
        return str(arg.expression)
    return repr(arg)


# JSON


def _dump_arg(arg: Any) -> Any:
    if isinstance(arg, Ref):
        return {"ref": arg.index}
    if isinstance(arg, Dtype):
        return {"dtype": arg.name}
    if isinstance(arg, Setting):
        return {"setting": _dump_arg(arg.expression)}
    if isinstance(arg, tuple):
        return [_dump_arg(a) for a in arg]
    if isinstance(arg, float) and not math.isfinite(arg):
        return {"float": str(arg)}
    if isinstance(arg, complex):
        return {"complex": str(arg)}
    return arg


def _load_arg(data: Any, what: str, depth: int = 0) -> Any:
    """An argument; `what` is whose, for complaints."""
    if depth > MOST_NESTING:
        raise ValueError(f"{what} is nested more than {MOST_NESTING} times")
    if isinstance(data, list | tuple):
        return tuple([_load_arg(item, what, depth + 1) for item in data])
    if isinstance(data, dict):
        if len(data) != 1:
            raise ValueError(f"{what} has {brief(data)} for one argument")
        ((key, item),) = data.items()
        return _load_special(key, item, what, depth)
    if isinstance(data, str):
        return read_text(data, what)
    if isinstance(data, bool | None):
        return data
    if isinstance(data, int):
        return read_whole(data, what, -(1 << 63), (1 << 63) - 1)
    return read_number(data, what, -sys.float_info.max, sys.float_info.max)


def _load_special(key: str, item: Any, what: str, depth: int) -> Any:
    if key == "ref":
        return Ref(read_whole(item, what, 0, LARGEST_WHOLE))
    if key == "dtype":
        return Dtype(read_text(item, what))
    if key == "setting":
        return Setting(_load_arg(item, what, depth + 1))
    if key in ("float", "complex"):
        kind = float if key == "float" else complex
        try:
            return kind(read_text(item, what, 100))
        except ValueError:
            raise ValueError(f"{what} has {brief(item)} for a {key} number") from None
    raise ValueError(f"{what} has an argument of unknown kind {brief(key)!r}")


def _own_costs(op: Op) -> list[Any]:
    """Nothing for a captured Op: what is written of it is as it was before there were others."""
    costs = op.imported
    if costs is None:
        return []
    return [[costs.times, costs.transfer, costs.memory_bytes, costs.colocation]]


def _own_recipe(body: Body) -> list[Any]:
    """Nothing for a Body without one, as in files from before there were any."""
    recipe = body.recipe
    return [] if recipe is None else [[recipe.kind, recipe.group, recipe.state, recipe.flags]]


def _load_recipe(rows: list[Any], what: str) -> UpdateRecipe | None:
    if not rows:
        return None
    kind, group, state, flags = read_row(rows[0], what, 4)
    return UpdateRecipe(
        read_text(kind, what), read_whole(group, what),
        read_every(state, what, read_text), read_every(flags, what, read_text),
    )  # fmt: skip


def _load_imported(rows: list[Any], what: str) -> ImportedCosts | None:
    if not rows:
        return None
    times, transfer, memory_bytes, colocation = read_row(rows[0], what, 4)
    pairs = [read_row(pair, what, 2) for pair in read_list(times, what)]
    return ImportedCosts(
        tuple((read_text(kind, what), read_number(time, what)) for kind, time in pairs),
        read_number(transfer, what),
        read_whole(memory_bytes, what),
        None if colocation is None else read_text(colocation, what),
    )


def _load_value(data: Any) -> Value:
    name, role, shape, dtype, nbytes = read_row(data, "a value", 5)
    what = f"value {brief(name)!r}"
    return Value(
        read_text(name, "the name of a value"),
        read_text(role, f"the role of {what}"),
        None if shape is None else read_wholes(shape, f"the shape of {what}"),
        None if dtype is None else read_text(dtype, f"the dtype of {what}"),
        read_whole(nbytes, f"the size of {what}"),
    )


def _load_op(data: Any) -> Op:
    row = read_row(data, "an operator", 11, 12)
    name, kind, inputs, outputs, args, phase, line, module, forward, parameter, body, *own = row
    what = f"operator {brief(name)!r}"

    def index(given: Any, which: str) -> int | None:
        return None if given is None else read_whole(given, f"the {which} of {what}")

    loaded = _load_arg(args, f"an argument of {what}")
    if not isinstance(loaded, tuple):
        raise ValueError(f"the arguments of {what} are {brief(args)}, not a list")
    return Op(
        read_text(name, "the name of an operator"), read_text(kind, f"the kind of {what}"),
        read_wholes(inputs, f"the inputs of {what}"),
        read_wholes(outputs, f"the outputs of {what}"), loaded,
        read_text(phase, f"the phase of {what}"), read_text(line, f"the line of {what}"),
        read_text(module, f"the module of {what}"), index(forward, "forward operator"),
        index(parameter, "parameter"), index(body, "body"),
        _load_imported(own, f"the costs of {what}"),
    )  # fmt: skip


def _load_body(data: Any) -> Body:
    inputs, ops, outputs, *own = read_row(data, "a body", 3, 4)
    rows = [read_row(op, "an operator of a body", 2) for op in read_list(ops, "a body")]
    made = []
    for kind, args in rows:
        name = read_text(kind, "the kind of an operator of a body")
        loaded = _load_arg(args, f"an argument of {brief(name)} in a body")
        if not isinstance(loaded, tuple):
            raise ValueError(f"the arguments of {brief(name)} in a body are not a list")
        made.append(BodyOp(name, loaded))
    return Body(
        read_whole(inputs, "the inputs of a body"), tuple(made),
        read_wholes(outputs, "the outputs of a body"), _load_recipe(own, "the recipe of a body"),
    )  # fmt: skip


def to_json(graph: Graph) -> dict[str, Any]:
    """The Graph as plain JSON data."""
    return {
        "values": [[v.name, v.role, v.shape, v.dtype, v.nbytes] for v in graph.values],
        "ops": [
            [
                o.name, o.kind, o.inputs, o.outputs, _dump_arg(o.args), o.phase, o.line, o.module,
                o.forward, o.parameter, o.body, *_own_costs(o),
            ]
            for o in graph.ops
        ],
        "bodies": [
            [b.inputs, [[o.kind, _dump_arg(o.args)] for o in b.ops], b.outputs, *_own_recipe(b)]
            for b in graph.bodies
        ],
        "state": [list(pair) for pair in graph.state],
        "loss": graph.loss,
    }  # fmt: skip


def from_json(data: Any) -> Graph:
    """The Graph written by `to_json`; raises ValueError on anything else."""
    data = read_mapping(data, "the graph")
    values, ops, state, bodies, loss = (
        read_field(data, key, "the graph") for key in ("values", "ops", "state", "bodies", "loss")
    )
    pairs = [read_row(pair, "a state", 2) for pair in read_list(state, "its states")]
    graph = Graph(
        values=read_every(values, "its values", lambda row, what: _load_value(row)),
        ops=read_every(ops, "its operators", lambda row, what: _load_op(row)),
        state=tuple((read_whole(a, "a state"), read_whole(b, "a state")) for a, b in pairs),
        loss=None if loss is None else read_whole(loss, "the loss"),
        bodies=read_every(bodies, "its bodies", lambda row, what: _load_body(row)),
    )
    verify(graph)
    return graph
