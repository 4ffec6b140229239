"""host_state: parameters that lie in the host's memory, with what the optimizer keeps of them.

Part of the room memory. A Graph and HostStates come in, a RewrittenGraph goes out. A parameter
comes to the device before it is read, is dropped after the last reader of that copy, and comes
again for the backward:

    w1 = from_host(w)   y = x @ w1   ...   w2 = from_host(w)   dx = dy @ w2   dw = x.T @ dy

and is updated in one of two places:

    DEVICE  m1 = from_host(m)   w3, m2 = update(w2, dw, m1)   w' = to_host(w3)   m' = to_host(m2)
    HOST    g = to_host(dw)     w', m' = host_update(w, g, m)

What is updated on the host travels in fewer bytes where the step casts it before it is read: the
host then keeps a *shadow* of the parameter in the narrower dtype, which its update makes and the
next step begins with, and a gradient leaves in the dtype in which it was made.

    HOST, cast    c1 = from_host(c)   y = x @ c1   ...   g = to_host(d)   w', m', c' = host_update

A cast rounds the same wherever it is done, so that the results are the same. Every Op here is an Op
like any other. Values keep their numbers and new ones follow. Where on the device there is a copy
of the parameter, its readers of one stretch of the order share it; the Graph that comes in may
recompute Ops, and copies of views and casts of a parameter read what comes back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from apportion.describe import (
    FROM_HOST_KIND,
    HOST_UPDATE_KIND,
    ON_HOST_KIND,
    TO_HOST_KIND,
    UPDATE_KIND,
)
from apportion.graph import (
    BACKWARD,
    FORWARD,
    ITEMSIZE,
    PARAMETER,
    Arg,
    Body,
    BodyOp,
    Dtype,
    Graph,
    Op,
    Ref,
)
from apportion.memory.insert_ops import InsertedOps, host_op
from apportion.memory.rewritten_graph import NewValues, RewrittenGraph, unchanged

HOST, DEVICE, FIXED = "host", "device", "fixed"
UPDATES = (HOST, DEVICE, FIXED)
CAST = "aten._to_copy.default"

# Where several Ops are put at one place, these come in this order: what leaves before what comes
LEAVES, WORKS, GONE, COMES = range(4)


@dataclass(frozen=True, slots=True)
class HostState:
    """A parameter that lies on the host. Ops are those of the Graph that comes in.

    parameter  a Value that the step begins with
    update     where it is updated: HOST, DEVICE, or FIXED if it never is
    fetches    for each copy that comes to the device: the first Op that reads it, and the Op before
               which it begins to come, at the latest
    moments    the Op before which the optimizer's state begins to come, at the latest; for DEVICE
    out        the Op before which what leaves begins to, at the soonest: the gradient for HOST, new
               state for DEVICE
    gone       the Op before which its memory on the device is free, at the soonest
    """

    parameter: int
    update: str
    fetches: tuple[tuple[int, int], ...]
    moments: int = 0
    out: int = 0
    gone: int = 0


def host_state(graph: Graph, states: Iterable[HostState]) -> RewrittenGraph:
    """The Graph in which these parameters lie on the host; raises ValueError for one that
    cannot."""
    chosen = sorted(states, key=lambda each: each.parameter)
    if not chosen:
        return unchanged(graph)
    builder = _StateBuilder(graph)
    for number, each in enumerate(chosen):
        if number and chosen[number - 1].parameter == each.parameter:
            raise ValueError(f"{_name(graph, each.parameter)} is put on the host twice")
        builder.add(each)
    return builder.built()


def update_of(graph: Graph, parameter: int) -> int | None:
    """The Op that updates a parameter, if it is one that host_state.py knows: it reads the
    parameter, its gradient and state that the step begins with, and nobody reads what it makes."""
    after = graph.after.get(parameter)
    made = None if after is None else graph.producer[after]
    if made is None or graph.ops[made[0]].kind != UPDATE_KIND:
        return None
    op = graph.ops[made[0]]
    begins = [graph.producer[value] is None for value in op.inputs]
    fine = (
        len(op.inputs) == 1 + len(op.outputs)
        and op.inputs[0] == parameter
        and all(begins[2:])
        and op.outputs == tuple(graph.after.get(v) for v in (parameter, *op.inputs[2:]))
        and not any(graph.consumers[value] for value in op.outputs)
        and all(len(graph.consumers[value]) == 1 for value in op.inputs[2:])
        and op.args == tuple(Ref(k) for k in range(len(op.inputs)))
    )
    return made[0] if fine else None


def readers_on_device(graph: Graph, parameter: int, update: str) -> list[int]:
    """The Ops that read a parameter where the device can: all but an update on the host."""
    own = update_of(graph, parameter) if update == HOST else None
    return [op for op in graph.consumers[parameter] if op != own]


def shadow_dtype(graph: Graph, parameter: int) -> str | None:
    """The narrower dtype that all readers but the update cast a parameter to; None if there is
    none."""
    value, found = graph.values[parameter], set()
    for op in readers_on_device(graph, parameter, HOST):
        meant = graph.ops[op]
        made = graph.values[meant.outputs[0]]
        if meant.kind != CAST or made.shape != value.shape:
            return None
        found.add(made.dtype)
    if len(found) != 1:
        return None
    narrow = found.pop()
    assert narrow is not None and value.dtype is not None
    return narrow if ITEMSIZE[narrow] < ITEMSIZE[value.dtype] else None


def travelling_gradient(graph: Graph, update: int) -> int:
    """The Value that leaves for an update on the host: the gradient, or what it is a cast of if
    that is narrower and nobody else reads the cast."""
    gradient = graph.ops[update].inputs[1]
    made = graph.producer[gradient]
    if made is None or graph.consumers[gradient] != (update,) or gradient in graph.final_values:
        return gradient
    op = graph.ops[made[0]]
    if op.kind != CAST:
        return gradient
    source, cast = graph.values[op.inputs[0]], graph.values[gradient]
    assert source.dtype is not None and cast.dtype is not None
    narrow = source.shape == cast.shape and ITEMSIZE[source.dtype] < ITEMSIZE[cast.dtype]
    return op.inputs[0] if narrow else gradient


def moved_state(graph: Graph, parameter: int, update: int) -> list[int]:
    """Which inputs of an update on the device are state that comes and leaves with the parameter:
    not counts of steps."""
    shape = graph.values[parameter].shape
    inputs = graph.ops[update].inputs
    return [k for k in range(2, len(inputs)) if graph.values[inputs[k]].shape == shape]


def _name(graph: Graph, value: int) -> str:
    return f"value {graph.values[value].name!r}"


class _StateBuilder:
    """The new Ops, Values, Bodies and state so far."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.values = graph, NewValues(graph.values)
        self.inserted = InsertedOps(graph)
        self.state = list(graph.state)
        self.bodies = list(graph.bodies)
        self.known: dict[tuple[int, str, str], int] = {}  # Bodies of updates on the host

    def built(self) -> RewrittenGraph:
        return self.inserted.built(self.values, tuple(self.state), tuple(self.bodies))

    def add(self, each: HostState) -> None:
        update = self._checked(each)
        shadow = None if each.update != HOST else shadow_dtype(self.graph, each.parameter)
        source = each.parameter
        if shadow is not None:
            source = self.values.add(each.parameter, "shadow", PARAMETER, shadow)
        self._fetch(each, source, shadow is not None)
        if each.update == HOST:
            assert update is not None
            self._update_on_host(each, update, source if shadow is not None else None)
        elif each.update == DEVICE:
            assert update is not None
            self._update_on_device(each, update)

    def _checked(self, each: HostState) -> int | None:
        """The Op that updates the parameter."""
        graph, value = self.graph, each.parameter
        if not 0 <= value < len(graph.values):
            raise ValueError(f"there is no value {value} to put on the host")
        if graph.producer[value] is not None or graph.values[value].role != PARAMETER:
            raise ValueError(f"{_name(graph, value)} is no parameter; only those lie on the host")
        if each.update not in UPDATES:
            raise ValueError(f"a parameter is not updated at {each.update!r}; {', '.join(UPDATES)}")
        update = update_of(graph, value)
        if (update is None) != (each.update == FIXED):
            raise ValueError(
                f"{_name(graph, value)} cannot be updated so ({each.update}): what updates it is "
                "none, or reads or makes more than the parameter, its gradient and its state"
            )
        if not readers_on_device(graph, value, each.update):
            raise ValueError(f"nobody reads {_name(graph, value)} on the device")
        return update

    def _fetch(self, each: HostState, source: int, casts: bool) -> None:
        """The copies that come to the device, and who reads which."""
        graph, value = self.graph, each.parameter
        readers = readers_on_device(graph, value, each.update)
        begins = dict(each.fetches)
        copy = -1
        for reader in readers:
            op = graph.ops[reader]
            if reader in begins or copy < 0:
                copy = self.values.add(source, "here")
                begin = min(begins.get(reader, reader), reader)
                turn = (COMES, reader)
                self._stand(begin, turn, -1, FROM_HOST_KIND, (source,), copy, op)
            if casts:
                self.inserted.replace(reader, None)
                for later in graph.consumers[op.outputs[0]]:
                    self.inserted.read_instead(later, op.outputs[0], copy)
            else:
                self.inserted.read_instead(reader, value, copy)

    def _update_on_device(self, each: HostState, update: int) -> None:
        op = self.graph.ops[update]
        outputs = list(op.outputs)
        out = max(each.out, update + 1)
        gone = max(each.gone, out)
        moved = moved_state(self.graph, each.parameter, update)
        for k in moved:
            copy = self.values.add(op.inputs[k], "here")
            begin = min(each.moments, update)
            turn = (COMES, update)
            self._stand(begin, turn, -1, FROM_HOST_KIND, (op.inputs[k],), copy, op)
            self.inserted.read_instead(update, op.inputs[k], copy)
        for k in (0, *(k - 1 for k in moved)):
            outputs[k] = self.values.add(op.outputs[k], "there")
            self._leave(outputs[k], op.outputs[k], update, out, gone, op)
        self.inserted.replace(update, replace(op, outputs=tuple(outputs)))

    def _update_on_host(self, each: HostState, update: int, shadow: int | None) -> None:
        graph, op = self.graph, self.graph.ops[update]
        leaving = travelling_gradient(graph, update)
        made = graph.producer[leaving]
        maker = update if made is None else made[0]
        out = max(each.out, maker + 1)
        host = self.values.add(leaving, "host")
        self._leave(leaving, host, maker, out, max(each.gone, out), op)
        if leaving != op.inputs[1]:
            cast = graph.producer[op.inputs[1]]
            assert cast is not None
            self.inserted.replace(cast[0], None)
        inputs = (op.inputs[0], host, *op.inputs[2:])
        outputs = op.outputs
        if shadow is not None:
            after = self.values.add(op.outputs[0], "shadow", PARAMETER, self._dtype(shadow))
            outputs = (*outputs, after)
            self.state.append((shadow, after))
        body = self._body(op, host, shadow)
        there = replace(op, kind=HOST_UPDATE_KIND, inputs=inputs, outputs=outputs, body=body)
        self.inserted.replace(update, None)
        self.inserted.add(out, (WORKS, maker), update, there)

    def _leave(self, value: int, host: int, maker: int, out: int, gone: int, op: Op) -> None:
        self._stand(out, (LEAVES, maker), maker, TO_HOST_KIND, (value,), host, op)
        done = self.values.add(value, "gone")
        self._stand(gone, (GONE, maker), maker, ON_HOST_KIND, (value, host), done, op)

    def _stand(
        self, place: int, turn: tuple[int, int], origin: int, kind: str, inputs: tuple[int, ...],
        output: int, like: Op,
    ) -> None:  # fmt: skip
        name = self.values.values[output].name
        phase = like.phase if kind == FROM_HOST_KIND else BACKWARD
        self.inserted.add(place, turn, origin, host_op(kind, name, inputs, output, phase, like))

    def _dtype(self, value: int) -> str:
        found = self.values.values[value].dtype
        assert found is not None
        return found

    def _body(self, op: Op, gradient: int, shadow: int | None) -> int:
        """The Body of an update on the host, with the casts that are done there."""
        assert op.body is not None
        wide, given = self._dtype(op.inputs[1]), self._dtype(gradient)
        narrow = "" if shadow is None else self._dtype(shadow)
        key = (op.body, "" if given == wide else wide, narrow)
        if key not in self.known:
            self.known[key] = len(self.bodies)
            self.bodies.append(with_casts(self.graph.bodies[op.body], *key[1:]))
        return self.known[key]


def with_casts(body: Body, wide: str, narrow: str) -> Body:
    """The Body of an update that first casts the gradient to `wide`, and at last the new parameter
    to `narrow`, a further output; "": it does not."""
    ops: Sequence[BodyOp] = body.ops
    outputs = body.outputs
    if wide:
        cast = BodyOp(CAST, (Ref(1), Dtype(wide), False))
        moved = {1: body.inputs}
        moved |= {body.inputs + k: body.inputs + k + 1 for k in range(len(ops))}
        ops = [cast, *(replace(op, args=_moved(op.args, moved)) for op in ops)]
        outputs = tuple([moved.get(k, k) for k in outputs])
    if narrow:
        ops = [*ops, BodyOp(CAST, (Ref(outputs[0]), Dtype(narrow), False))]
        outputs = (*outputs, body.inputs + len(ops) - 1)
    return replace(body, ops=tuple(ops), outputs=outputs)


def _moved(arg: tuple[Arg, ...], moved: dict[int, int]) -> tuple[Arg, ...]:
    def of(item: Arg) -> Arg:
        if isinstance(item, Ref):
            return Ref(moved.get(item.index, item.index))
        return tuple(map(of, item)) if isinstance(item, tuple) else item

    return tuple(map(of, arg))


def parameters_on_host(graph: Graph) -> list[int]:
    """The parameters that can lie on the host, in the order in which they are read first."""
    found = []
    for value, meant in enumerate(graph.values):
        if meant.role != PARAMETER or graph.producer[value] is not None:
            continue
        known = update_of(graph, value) is not None or value not in graph.after
        if known and readers_on_device(graph, value, HOST if known else FIXED):
            found.append(value)
    return sorted(found, key=lambda value: graph.consumers[value][0])


def derived_ops(graph: Graph, parameters: Collection[int]) -> frozenset[int]:
    """The Ops of the forward that read nothing but these parameters and what such Ops make, such as
    views and casts: where the backward computes them again, it reads another copy."""
    known, found = set(parameters), set()
    for index, op in enumerate(graph.ops):
        if op.phase == FORWARD and op.inputs and known.issuperset(op.inputs):
            found.add(index)
            known.update(op.outputs)
    return frozenset(found)
