"""Batch norm in pieces becomes one call again, where a device has all of the batch.

Part of the room lower. A TaskGraph comes in, with the Space and the Strategy it was lowered from;
one with the same tasks in the same order goes out, in which some calls are joined.

Capture opens batch norm into statistics and what is pointwise, so that it can be cut along the
batch (docs/design/005-batch-norm.md). Where it is not, or along channels only, torch's own kernels
do the same in less time. The pieces of one batch norm are the Ops

    total = channel_sum(x)       squares = channel_squares(x, total)       out = batch_norm(...)
    running statistics = mul.Scalar, add.Tensor      (twice, or not at all)
    bias's, weight's gradient = batch_norm_reduce(...)      gradient = batch_norm_backward(...)

The task of batch_norm then does the work of the forward pieces and that of batch_norm_backward the
work of the backward ones; the tasks of the others call nothing. The slots of `total` and `squares`
hold the mean and the inverse of the deviation instead, which is what torch's backward kernel reads.

All parts of all these Ops are joined or none: copies of one computation stay bit-equal. None if a
statistic is put together from several parts, if an Op beside these reads it, or if another task
reads a result before the joined call has made it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from apportion.graph import Arg, Graph, Op, Ref
from apportion.lower.join_calls import Rewiring, TaskRows, computes_whole, rewired
from apportion.lower.task_graph import JoinedCall, TaskGraph
from apportion.split import Space, Strategy

SUM, SQUARES, NORM = "apportion.channel_sum", "apportion.channel_squares", "apportion.batch_norm"
REDUCE, BACKWARD = "apportion.batch_norm_reduce", "apportion.batch_norm_backward"
SCALED, ADDED = "aten.mul.Scalar", "aten.add.Tensor"

SAME = 1e-12  # two momenta are the same up to rounding


@dataclass(frozen=True, slots=True)
class BatchNormOps:
    """The Ops of one batch norm; `running` are the multiplication and the addition of the mean and
    those of the variance, or nothing. There may be no gradient."""

    total: int
    squares: int
    norm: int
    running: tuple[int, ...]
    momentum: float
    reduce: int | None
    backward: int | None

    @property
    def forward(self) -> tuple[int, ...]:
        return (self.total, self.squares, self.norm, *self.running)

    @property
    def last(self) -> int | None:
        """The Op whose tasks compute all gradients."""
        return self.reduce if self.backward is None else self.backward

    @property
    def all(self) -> tuple[int, ...]:
        gradients = (self.reduce, self.backward)
        return (*self.forward, *(op for op in gradients if op is not None))


def join_batch_norm(space: Space, strategy: Strategy, tasks: TaskGraph) -> TaskGraph:
    """The tasks with the pieces of every batch norm joined where each device has the whole of
    what it normalises."""
    found = [
        ops
        for ops in batch_norms(space.graph)
        if all(computes_whole(space, strategy, op) for op in ops.all)
    ]
    if not found:
        return tasks
    rows = TaskRows(tasks, space.graph)
    done = Rewiring()
    for ops in found:
        wired = _wired(rows, ops)
        if wired is not None:
            for part in wired:
                _join(rows, ops, part, done)
    return rewired(tasks, done) if done.call else tasks


# The Ops


def batch_norms(graph: Graph) -> Iterator[BatchNormOps]:
    """The batch norms of a Graph of which nobody else reads a statistic."""
    for index, op in enumerate(graph.ops):
        if op.kind == NORM:
            found = _pieces(graph, index)
            if found is not None:
                yield found


def _value(op: Op, place: int) -> int:
    """The Value that is an argument, -1 if it is none."""
    arg = op.args[place]
    return op.inputs[arg.index] if isinstance(arg, Ref) else -1


def _maker(graph: Graph, value: int, kind: str) -> int:
    made = graph.producer[value] if value >= 0 else None
    return made[0] if made is not None and graph.ops[made[0]].kind == kind else -1


def _pieces(graph: Graph, norm: int) -> BatchNormOps | None:
    op = graph.ops[norm]
    total, squares, weight, bias = (_value(op, k) for k in range(1, 5))
    count = op.args[5]
    makers = _maker(graph, total, SUM), _maker(graph, squares, SQUARES)
    if min(weight, bias, *makers) < 0 or not isinstance(count, int) or count < 2:
        return None
    readers = {k for value in (total, squares) for k in graph.consumers[value]}
    by_kind: dict[str, list[int]] = {}
    for k in sorted(readers - {norm, makers[1]}):
        by_kind.setdefault(graph.ops[k].kind, []).append(k)
    reduce, backward = (by_kind.pop(kind, []) for kind in (REDUCE, BACKWARD))
    added = by_kind.pop(ADDED, [])
    if by_kind or len(reduce) > 1 or len(backward) > len(reduce):
        return None
    running = _running(graph, added, total, squares, count)
    if running is None or {total, squares} & {graph.loss, *chain(*graph.state)}:
        return None
    found = BatchNormOps(*makers, norm, *running, *(*reduce, None)[:1], *(*backward, None)[:1])
    return found if _same_values(graph, found, (total, squares)) else None


def _running(
    graph: Graph, added: Sequence[int], total: int, squares: int, count: int
) -> tuple[tuple[int, ...], float] | None:
    """The Ops of the running statistics and their momentum; None if they are not as torch has
    it."""
    if not added:
        return (), 0.0
    by_value = {_value(graph.ops[k], 1): k for k in added}
    if len(added) != 2 or by_value.keys() != {total, squares}:
        return None
    ops: list[int] = []
    momenta: list[float] = []
    for value, divisor in ((total, count), (squares, count - 1)):
        op = graph.ops[by_value[value]]
        scaled = _maker(graph, _value(op, 0), SCALED)
        if scaled < 0 or list(graph.consumers[_value(op, 0)]) != [by_value[value]]:
            return None
        kept, share = graph.ops[scaled].args[1], op.args[2]
        if not isinstance(kept, float | int) or not isinstance(share, float | int):
            return None
        ops += [scaled, by_value[value]]
        momenta += [share * divisor, 1 - kept]
    if max(momenta) - min(momenta) > SAME:
        return None
    return tuple(ops), momenta[0]


def _same_values(graph: Graph, ops: BatchNormOps, statistics: tuple[int, int]) -> bool:
    """Whether the pieces read the same Values."""
    at = graph.ops
    x = _value(at[ops.norm], 0)
    fine = _value(at[ops.total], 0) == x
    fine &= tuple(_value(at[ops.squares], k) for k in (0, 1)) == (x, statistics[0])
    if ops.reduce is None:
        return fine
    reduce = at[ops.reduce]
    fine &= tuple(_value(reduce, k) for k in (1, 2, 3)) == (x, *statistics)
    if ops.backward is None:
        return fine
    backward = at[ops.backward]
    fine &= tuple(_value(backward, k) for k in (0, 1, 2, 3)) == tuple(
        _value(reduce, k) for k in range(4)
    )
    fine &= _value(backward, 4) == _value(at[ops.norm], 3)
    return fine and tuple(_value(backward, k) for k in (5, 6)) == reduce.outputs


# The tasks


@dataclass(frozen=True, slots=True)
class _PartTasks:
    """The tasks of the pieces of one batch norm on one device, in the order of BatchNormOps.all,
    by Op."""

    task: dict[int, int]


def _wired(rows: TaskRows, ops: BatchNormOps) -> list[_PartTasks] | None:
    """The tasks of a batch norm, one for each part and piece; None unless each device hands on
    what it has made itself."""
    of = {op: rows.of(op) for op in ops.all}
    count = len(of[ops.norm])
    if any(len(tasks) != count for tasks in of.values()):
        return None
    owner = {task: op for op, tasks in of.items() for task in tasks}
    found = []
    for norm in of[ops.norm]:
        total, squares = (rows.arg(ops.norm, norm, k) for k in (1, 2))
        mine = {ops.norm: norm}
        for task in (
            rows.maker(total), rows.maker(squares), *rows.readers(total), *rows.readers(squares)
        ):  # fmt: skip
            op = owner.get(task)
            if op is None or mine.setdefault(op, task) != task:
                return None
        for scaled, added in zip(ops.running[::2], ops.running[1::2], strict=True):
            kept = rows.arg(added, mine[added], 0) if added in mine else -1
            if owner.get(rows.maker(kept)) != scaled or len(rows.readers(kept)) != 1:
                return None
            mine[scaled] = rows.maker(kept)
        part = _PartTasks(mine)
        if mine.keys() != set(ops.all) or not _in_order(rows, ops, part):
            return None
        found.append(part)
    return found


def _in_order(rows: TaskRows, ops: BatchNormOps, part: _PartTasks) -> bool:
    """Whether the pieces read the same slots and nobody reads a result before the joined call."""
    task = part.task
    norm = task[ops.norm]
    x = rows.arg(ops.norm, norm, 0)
    fine = min(rows.ins(norm)) >= 0
    fine &= {rows.arg(op, task[op], 0) for op in (ops.total, ops.squares)} == {x}
    fine &= all(task[op] > norm for op in ops.running)
    fine &= all(
        rows.maker(rows.arg(op, task[op], 0)) < norm for op in ops.running[::2]
    )  # the running statistics are there by then
    if ops.reduce is None or ops.backward is None:
        return fine
    reduce, backward = task[ops.reduce], task[ops.backward]
    fine &= min(rows.ins(backward)) >= 0
    fine &= [rows.arg(ops.reduce, reduce, k) for k in range(4)] == [
        rows.arg(ops.backward, backward, k) for k in range(4)
    ]
    fine &= [rows.arg(ops.backward, backward, k) for k in (5, 6)] == rows.outs(reduce)
    return fine and all(
        reader >= backward for slot in rows.outs(reduce) for reader in rows.readers(slot)
    )


def _join(rows: TaskRows, ops: BatchNormOps, part: _PartTasks, done: Rewiring) -> None:
    """Notes what changes for one part."""
    task, graph = part.task, rows.graph
    norm = task[ops.norm]
    x, total, squares, weight, bias = (rows.arg(ops.norm, norm, k) for k in range(5))
    eps = graph.ops[ops.norm].args[6]
    before = [rows.arg(op, task[op], 0) for op in ops.running[::2]]
    after = [slot for op in ops.running[1::2] for slot in rows.outs(task[op])]
    done.gone += [slot for op in ops.running[::2] for slot in rows.outs(task[op])]
    refs: tuple[Arg, ...] = tuple(map(Ref, range(3 + len(before))))
    statistics = refs[3:] if before else (None, None)
    done.call[norm] = JoinedCall(
        "apportion.batch_norm_whole", (*refs[:3], *statistics, ops.momentum, eps)
    )
    done.ins[norm] = (x, weight, bias, *before)
    done.outs[norm] = (*rows.outs(norm), total, squares, *after)
    done.leave(norm, (task[op] for op in ops.forward if op != ops.norm))
    if ops.reduce is None or ops.last is None:
        return
    last, sums = task[ops.last], rows.outs(task[ops.reduce])
    grad, x = (rows.arg(ops.last, last, k) for k in (0, 1))
    results = rows.outs(last) if ops.backward is not None else []
    weights = [rows.arg(ops.last, last, 4)] if results else []
    given = (grad, x, total, squares, *weights)
    refs = tuple(map(Ref, range(len(given))))
    done.call[last] = JoinedCall(
        "apportion.batch_norm_whole_backward", (*refs[:4], refs[4] if results else None, eps)
    )
    done.ins[last], done.outs[last] = given, (*results, *sums)
    if ops.backward is not None:
        done.leave(last, (task[ops.reduce],))
