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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

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
        if op.body is not None and not 0 <= op.body < len(graph.bodies):
            raise ValueError(
                f"op {op.name!r} names body {op.body}, of which there are {len(graph.bodies)}"
            )
    for before, after in graph.state:
        a, b = graph.values[before], graph.values[after]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(
                f"state {a.name!r} ends the step with another shape or dtype than it began with"
            )
    if graph.loss is not None and not 0 <= graph.loss < count:
        raise ValueError(f"the loss is value {graph.loss}, of which there are {count}")


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


def _load_arg(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(_load_arg(a) for a in data)
    if isinstance(data, dict):
        ((key, item),) = data.items()
        if key == "ref":
            return Ref(int(item))
        if key == "dtype":
            return Dtype(str(item))
        if key == "setting":
            return Setting(_load_arg(item))
        if key == "float":
            return float(item)
        if key == "complex":
            return complex(item)
        raise ValueError(f"unknown argument kind {key!r}")
    return data


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


def _load_recipe(rows: list[Any]) -> UpdateRecipe | None:
    if not rows:
        return None
    ((kind, group, state, flags),) = rows
    return UpdateRecipe(kind, group, tuple(state), tuple(flags))


def _load_imported(rows: list[Any]) -> ImportedCosts | None:
    if not rows:
        return None
    ((times, transfer, memory_bytes, colocation),) = rows
    return ImportedCosts(tuple((k, t) for k, t in times), transfer, memory_bytes, colocation)


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


def from_json(data: dict[str, Any]) -> Graph:
    """The Graph written by `to_json`; raises ValueError on anything else."""
    try:
        graph = Graph(
            values=tuple(
                Value(name, role, None if shape is None else tuple(shape), dtype, nbytes)
                for name, role, shape, dtype, nbytes in data["values"]
            ),
            ops=tuple(
                Op(n, k, tuple(i), tuple(o), _load_arg(a), ph, li, m, f, pa, b, _load_imported(own))
                for n, k, i, o, a, ph, li, m, f, pa, b, *own in data["ops"]
            ),
            state=tuple((a, b) for a, b in data["state"]),
            loss=data["loss"],
            bodies=tuple(
                Body(
                    n, tuple(BodyOp(k, _load_arg(a)) for k, a in ops), tuple(outs),
                    _load_recipe(own),
                )
                for n, ops, outs, *own in data["bodies"]
            ),
        )  # fmt: skip
        verify(graph)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"the graph is malformed: {error}") from None
    return graph
