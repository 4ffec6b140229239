"""A Timeline as execution traces of MLCommons Chakra, which simulators such as ASTRA-sim replay.

Part of the room show. A Timeline comes in, files go out.
One file a rank, `<name>.<rank>.et`: messages of protobuf, each after its length, first a
GlobalMetadata and then the Nodes; the numbers below are those of the fields in
schema/protobuf/et_def.proto (github.com/mlcommons/chakra). A node's id is the index of its task:

    work                COMP_NODE on its device
    pairwise message    COMM_SEND_NODE on its sender and COMM_RECV_NODE on its receiver, whose
                        comm_tag, the task, makes them find each other
    collective message  COMM_COLL_NODE on each member; pg_name is its group in comm_group.json, and
                        comm_size the bytes of its input on one member

Data dependencies are those of the tasks, as far as they are on the same rank; the control
dependency of a COMP_NODE is the one before it in its lane.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from apportion.columns import Ints
from apportion.describe import lengths
from apportion.files import open_atomic
from apportion.graph import Graph
from apportion.lower import TaskGraph
from apportion.machine import (
    ALL_GATHER,
    ALL_TO_ALL,
    REDUCE_SCATTER,
)
from apportion.simulate import Timeline, op_name

SCHEMA = "0.0.4"

COMP_NODE, COMM_SEND_NODE, COMM_RECV_NODE, COMM_COLL_NODE = 4, 5, 6, 7
COMM_TYPES = {ALL_GATHER: 2, ALL_TO_ALL: 6, REDUCE_SCATTER: 7}  # CollectiveCommType
INT32, INT64, UINT64, BOOL, STRING = 7, 9, 13, 27, 29  # fields of an AttributeProto's value

Attribute = tuple[str, int, int | str]
"""Name, which of the value fields, value."""


def export(
    timeline: Timeline, tasks: TaskGraph, graph: Graph, folder: str | Path, name: str = "step"
) -> list[Path]:
    """Writes the files of all ranks into `folder`, which is made if need be; returns their paths.

    Each file appears whole or not at all.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{name}.{rank}.et" for rank in range(tasks.devices)]
        for path, rows in zip(paths, _ranks(tasks), strict=True):
            _write(path, _messages(timeline, tasks, graph, rows))
        groups = {str(k): list(members) for k, members in enumerate(tasks.groups)}
        _write(folder / "comm_group.json", [json.dumps(groups).encode()])
    except OSError as error:
        raise ValueError(f"traces cannot be written to {folder}: {error.strerror}") from None
    return paths


def _write(path: Path, pieces: Iterable[bytes]) -> None:
    with open_atomic(path) as file:
        file.writelines(pieces)


def _ranks(tasks: TaskGraph) -> list[list[tuple[int, int]]]:
    """For every rank its nodes: (task, type), by task."""
    ends = tasks.ends
    work = np.flatnonzero(tasks.is_work)
    sends = tasks.device[ends.task] == ends.device
    types = np.where(sends, COMM_SEND_NODE, COMM_RECV_NODE)
    types[tasks.is_collective[ends.task]] = COMM_COLL_NODE
    task = np.concatenate([work, ends.task])
    device = np.concatenate([tasks.device[work], ends.device])
    kind = np.concatenate([np.full(len(work), COMP_NODE), types])
    found = []
    for rank in range(tasks.devices):
        mine = np.flatnonzero(device == rank)
        mine = mine[np.argsort(task[mine])]
        found.append(list(zip(task[mine].tolist(), kind[mine].tolist(), strict=True)))
    return found


def _messages(
    timeline: Timeline, tasks: TaskGraph, graph: Graph, rows: list[tuple[int, int]]
) -> Iterator[bytes]:
    source = _attribute(("source", STRING, timeline.source))
    yield _framed(_text(1, SCHEMA) + _inside(2, source))
    here = {task for task, _ in rows}
    last: dict[str, int] = {}  # the COMP_NODE at which each lane is
    for task, kind in rows:
        deps = [d for d in _row(tasks.dep_start, tasks.dep, task) if d in here]
        lane, controls = tasks.kind_of(task).lane, []
        if kind == COMP_NODE:
            controls, last[lane] = [last[lane]] if lane in last else [], task
        start, end = int(timeline.start_ns[task]), int(timeline.end_ns[task])
        node = (
            _number(1, task)
            + _text(2, _name(tasks, graph, task))
            + _number(3, kind)
            + _packed(4, controls)
            + _packed(5, deps)
            + _number(6, start // 1000)
            + _number(7, max(round((end - start) / 1000), 1))
        )
        if kind == COMP_NODE:
            node += _inside(8, _tensors(tasks, graph, _row(tasks.in_start, tasks.in_slot, task)))
            node += _inside(9, _tensors(tasks, graph, _row(tasks.out_start, tasks.out_slot, task)))
        attributes: list[Attribute] = [("is_cpu_op", BOOL, 0)]
        attributes.append(("duration_nanos", INT64, end - start))
        attributes += _attributes(tasks, graph, task, kind)
        yield _framed(node + b"".join(_inside(10, _attribute(a)) for a in attributes))


def _attributes(tasks: TaskGraph, graph: Graph, task: int, kind: int) -> Iterator[Attribute]:
    nbytes, op = int(tasks.nbytes[task]), int(tasks.op[task])
    if op < len(graph.ops):
        yield "kind", STRING, graph.ops[op].kind
        yield "phase", STRING, graph.ops[op].phase
        yield "line", STRING, graph.ops[op].line
    if kind == COMP_NODE:
        yield "num_ops", INT64, round(float(tasks.flops[task]))
        yield "tensor_size", UINT64, nbytes
    elif kind == COMM_COLL_NODE:
        pattern, members = int(tasks.pattern[task]), tasks.groups[tasks.group[task]]
        block = nbytes // (len(members) * (len(members) - 1))
        yield "comm_type", INT64, COMM_TYPES[pattern]
        yield "comm_size", INT64, block if pattern == ALL_GATHER else block * len(members)
        yield "pg_name", STRING, str(tasks.group[task])
    else:
        yield "comm_size", INT64, nbytes
        yield "comm_src", INT32, int(tasks.device[task])
        yield "comm_dst", INT32, int(tasks.peer[task])
        yield "comm_tag", INT32, task


def _name(tasks: TaskGraph, graph: Graph, task: int) -> str:
    name, label = op_name(tasks, graph, task), tasks.kind_of(task).label
    return f"{name} ({label})" if label else name


def _tensors(tasks: TaskGraph, graph: Graph, slots: list[int]) -> bytes:
    """An IOInfo: the regions that a task reads or makes."""
    real = [slot for slot in slots if slot >= 0]
    values = [graph.values[int(tasks.slot_value[slot])] for slot in real]
    shapes = [list(lengths(tasks.boxes[int(tasks.slot_region[slot])])) for slot in real]
    return (
        _text(1, json.dumps([value.name for value in values]))
        + _text(2, json.dumps(shapes))
        + _text(3, json.dumps([value.dtype for value in values]))
    )


def _row(offsets: Ints, items: Ints, row: int) -> list[int]:
    return items[offsets[row] : offsets[row + 1]].tolist()  # type: ignore[no-any-return]


# Protobuf's encoding: a field is its number and how it is written, then that


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _framed(message: bytes) -> bytes:
    return _varint(len(message)) + message


def _number(field: int, number: int) -> bytes:
    return _varint(field << 3) + _varint(number)


def _inside(field: int, message: bytes) -> bytes:
    return _varint(field << 3 | 2) + _framed(message)


def _text(field: int, text: str) -> bytes:
    return _inside(field, text.encode())


def _packed(field: int, numbers: list[int]) -> bytes:
    return _inside(field, b"".join(map(_varint, numbers))) if numbers else b""


def _attribute(attribute: Attribute) -> bytes:
    name, field, value = attribute
    written = _text(field, value) if isinstance(value, str) else _number(field, value)
    return _text(1, name) + written
