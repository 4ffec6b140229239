"""The two gradients of a convolution become one call again, where one device computes both.

Part of the room lower. A TaskGraph comes in, with the Space and the Strategy it was lowered from;
one with the same tasks in the same order goes out, in which some calls are joined.

Capture opens the backward of a convolution into the gradient of its input and that of its weight,
so that they can be cut in different ways. Where both are cut alike, each device calls torch's
kernel once for both: it brings the gradient into its own order of memory once. The task of the
weight's gradient does the work of both, that of the input's calls nothing.

All parts of both Ops are joined or none, so that copies of one computation stay bit-equal. None if
a part's kernel gets more than its regions, if the two do not agree about the convolution, or if
another task reads the input's gradient before the weight's is made.
"""

from __future__ import annotations

from collections.abc import Iterator

from apportion.describe import Box, volume
from apportion.graph import Graph, Op, Ref
from apportion.lower.join_calls import Rewiring, TaskRows, is_plain, rewired
from apportion.lower.task_graph import JoinedCall, TaskGraph
from apportion.split import Part, Space, Strategy

FOR_INPUT, FOR_WEIGHT = "apportion.conv_backward_input", "apportion.conv_backward_weight"
BOTH = "apportion.conv_backward_both"
GRAD, OTHER, SIZE, SETTINGS = 0, 1, 2, 3  # arguments: the gradient, x or weight, the result's size


def join_conv_backward(space: Space, strategy: Strategy, tasks: TaskGraph) -> TaskGraph:
    """The tasks with both gradients of a convolution in one call where that can be."""
    found = list(convolutions(space.graph))
    if not found:
        return tasks
    rows, done = TaskRows(tasks, space.graph), Rewiring()
    for pair in found:
        for one, other in _paired(space, strategy, rows, pair):
            grad = rows.arg(pair[1], other, GRAD)
            x, weight = rows.arg(pair[1], other, OTHER), rows.arg(pair[0], one, OTHER)
            part = _part(space, strategy, rows, pair[0], one)
            done.call[other] = JoinedCall(BOTH, (Ref(0), Ref(1), Ref(2), *part.args[SETTINGS:]))
            done.ins[other] = (grad, x, weight)
            done.outs[other] = (*rows.outs(one), *rows.outs(other))
            done.leave(other, (one,))
    return rewired(tasks, done)


def convolutions(graph: Graph) -> Iterator[tuple[int, int]]:
    """The Ops of the gradients of input and weight of each convolution that has both."""
    for index, op in enumerate(graph.ops):
        if op.kind != FOR_INPUT:
            continue
        for other in graph.consumers[_value(op, GRAD)]:
            if other > index and _alike(graph, op, graph.ops[other]):
                yield index, other
                break


def _value(op: Op, place: int) -> int:
    arg = op.args[place]
    assert isinstance(arg, Ref)
    return op.inputs[arg.index]


def _alike(graph: Graph, op: Op, other: Op) -> bool:
    """Whether these are the gradients of one convolution."""
    if other.kind != FOR_WEIGHT or op.args[SETTINGS:] != other.args[SETTINGS:]:
        return False
    shapes = [graph.values[_value(o, OTHER)].shape for o in (op, other)]
    return _value(op, GRAD) == _value(other, GRAD) and shapes == [other.args[SIZE], op.args[SIZE]]


def _paired(
    space: Space, strategy: Strategy, rows: TaskRows, ops: tuple[int, int]
) -> list[tuple[int, int]]:
    """The tasks of both Ops, side by side; none unless that can be for all, each with one of its
    own: several parts of one Op may read the same gradient."""
    of_weight = {rows.arg(ops[1], task, GRAD): task for task in rows.of(ops[1])}
    ones = rows.of(ops[0])
    if not len(ones) == len(of_weight) == len(rows.of(ops[1])):
        return []
    found: list[tuple[int, int]] = []
    for one in ones:
        other = of_weight.get(rows.arg(ops[0], one, GRAD), -1)
        fine = other > one and all(other != taken for _, taken in found)
        fine = fine and min(rows.ins(one) + rows.ins(other)) >= 0
        fine = fine and all(t > other for slot in rows.outs(one) for t in rows.readers(slot))
        if not fine or not _agree(space, strategy, rows, ops, (one, other)):
            return []
        found.append((one, other))
    return found


def _agree(
    space: Space, strategy: Strategy, rows: TaskRows, ops: tuple[int, int], tasks: tuple[int, int]
) -> bool:
    """Whether two parts are those of one local convolution."""
    first, second = (_part(space, strategy, rows, o, t) for o, t in zip(ops, tasks, strict=True))
    return (
        is_plain(first)
        and is_plain(second)
        and first.args[SETTINGS:] == second.args[SETTINGS:]
        and first.args[SIZE] == _local(space, rows.graph.ops[ops[1]], second)
        and second.args[SIZE] == _local(space, rows.graph.ops[ops[0]], first)
    )


def _part(space: Space, strategy: Strategy, rows: TaskRows, op: int, task: int) -> Part:
    choice = strategy.choices[op]
    number = int(rows.tasks.part[task]) % choice.count
    return space.split(op, choice.parts).parts[number]


def _local(space: Space, op: Op, part: Part) -> tuple[int, ...]:
    """The shape of what a part reads of x, or of the weight."""
    arg = op.args[OTHER]
    assert isinstance(arg, Ref)
    return _shape(space, op.inputs[arg.index], part.inputs[arg.index])


def _shape(space: Space, value: int, region: Box) -> tuple[int, ...]:
    shape, place = [], 0
    for factors in space.atoms.dims[value]:
        shape.append(volume(region[place : place + len(factors)]))
        place += len(factors)
    return tuple(shape)
