"""Chakra's execution traces: what protobuf reads, by Chakra's schema, is what the tasks say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from graphs import captured
from make_tasks import EXACT, SURVIVES, Maker, graph_of, ports, random_tasks

import apportion as ap
from apportion.cli import main as cli
from apportion.describe.interval import lengths
from apportion.lower.task_graph import (
    TaskGraph,
)
from apportion.lower.task_kinds import (
    TRANSFER,
)
from apportion.machine.collective import (
    ALL_GATHER,
    ALL_TO_ALL,
    REDUCE_SCATTER,
)
from apportion.plan.make_plan import make_plan
from apportion.show import chakra
from apportion.simulate.simulate import simulate
from apportion.simulate.timeline import Timeline

pytest.importorskip("google.protobuf")
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# Fields of et_def.proto that we write: name, number, type; "*" for repeated.
SCHEMA = {
    "AttributeProto": [
        ("name", 1, "STRING"), ("doc_string", 2, "STRING"), ("int32_val", 7, "INT32"),
        ("int64_val", 9, "INT64"), ("uint64_val", 13, "UINT64"), ("bool_val", 27, "BOOL"),
        ("string_val", 29, "STRING"),
    ],
    "GlobalMetadata": [("version", 1, "STRING"), ("attr", 2, "*AttributeProto")],
    "IOInfo": [("values", 1, "STRING"), ("shapes", 2, "STRING"), ("types", 3, "STRING")],
    "Node": [
        ("id", 1, "UINT64"), ("name", 2, "STRING"), ("type", 3, "INT32"),
        ("ctrl_deps", 4, "*UINT64"), ("data_deps", 5, "*UINT64"),
        ("start_time_micros", 6, "UINT64"), ("duration_micros", 7, "UINT64"),
        ("inputs", 8, "IOInfo"), ("outputs", 9, "IOInfo"), ("attr", 10, "*AttributeProto"),
    ],
}  # fmt: skip


def classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="et_def.proto", package="ChakraProtoMsg", syntax="proto3"
    )
    kinds = descriptor_pb2.FieldDescriptorProto
    for title, fields in SCHEMA.items():
        message = file.message_type.add(name=title)
        for name, number, kind in fields:
            field = message.field.add(name=name, number=number)
            field.label = kinds.LABEL_REPEATED if kind[0] == "*" else kinds.LABEL_OPTIONAL
            kind = kind.removeprefix("*")
            if kind in SCHEMA:
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".ChakraProtoMsg.{kind}"
            else:
                field.type = getattr(kinds, f"TYPE_{kind}")
        if title == "AttributeProto":
            message.oneof_decl.add(name="value")
            for field in message.field[2:]:
                field.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {name: pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}") for name in SCHEMA}
    return {name: message_factory.GetMessageClass(d) for name, d in found.items()}


CLASSES = classes()


def decoded(path: Path) -> tuple[Any, list[Any]]:
    """The head and the nodes of one file; nothing in it may be unknown to the schema."""
    frames = list(framed(path.read_bytes()))
    head = CLASSES["GlobalMetadata"].FromString(frames[0])
    nodes = [CLASSES["Node"].FromString(frame) for frame in frames[1:]]
    for message, frame in zip([head, *nodes], frames, strict=True):
        kept = message.SerializeToString()
        message.DiscardUnknownFields()
        assert message.SerializeToString() == kept and message.ByteSize() <= len(frame)
    return head, nodes


def framed(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        size = shift = 0
        while True:
            byte = data[at]
            at += 1
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        yield data[at : at + size]
        at += size
    assert at == len(data)


def attributes(node: Any) -> dict[str, Any]:
    return {a.name: getattr(a, a.WhichOneof("value")) for a in node.attr}


def exported(tasks: TaskGraph, line: Timeline, folder: Path) -> list[dict[int, Any]]:
    """For each rank its nodes by id."""
    paths = chakra.export(line, tasks, graph_of(tasks), folder)
    assert [path.name for path in paths] == [f"step.{k}.et" for k in range(tasks.devices)]
    found = []
    for path in paths:
        head, nodes = decoded(path)
        assert head.version == "0.0.4" and attributes(head) == {"source": "simulated"}
        found.append({node.id: node for node in nodes})
        assert len(found[-1]) == len(nodes)
    return found


def test_nodes_are_the_tasks_of_their_ranks(tmp_path: Path) -> None:
    tasks = random_tasks(5, count=200)
    line = simulate(tasks, ports(3), EXACT)
    ranks = exported(tasks, line, tmp_path / "new" / "folder")
    for task in tasks:
        holders = {k for k, nodes in enumerate(ranks) if task.index in nodes}
        assert holders == ({task.device, task.peer} - {-1})
        deps = set(tasks.dep[tasks.dep_start[task.index] : tasks.dep_start[task.index + 1]])
        for rank in holders:
            node = ranks[rank][task.index]
            facts = attributes(node)
            assert set(node.data_deps) == deps & ranks[rank].keys()
            assert facts["is_cpu_op"] is False
            length = int(line.end_ns[task.index] - line.start_ns[task.index])
            assert facts["duration_nanos"] == length
            assert node.duration_micros == max(round(length / 1000), 1)
            if task.kind == TRANSFER:
                assert node.type == (5 if rank == task.device else 6)
                ends = [facts[f"comm_{name}"] for name in ("src", "dst", "tag", "size")]
                assert ends == [task.device, task.peer, task.index, task.nbytes]
            else:
                assert node.type == 4
                assert (facts["num_ops"], facts["tensor_size"]) == (task.flops, task.nbytes)


def test_computation_on_a_rank_is_one_chain(tmp_path: Path) -> None:
    tasks = random_tasks(6)
    for nodes in exported(tasks, simulate(tasks, ports(3), EXACT), tmp_path):
        chain = [node for node in nodes.values() if node.type == 4]
        assert [list(node.ctrl_deps) for node in chain] == [[], *([n.id] for n in chain[:-1])]
        assert all(not node.ctrl_deps for node in nodes.values() if node.type != 4)


@pytest.mark.parametrize(
    ("pattern", "kind", "size"), [(ALL_TO_ALL, 6, 30), (ALL_GATHER, 2, 10), (REDUCE_SCATTER, 7, 30)]
)
def test_a_collective_is_on_all_members(pattern: int, kind: int, size: int, tmp_path: Path) -> None:
    make = Maker(4)
    make.compute(0, flops=1)
    joint = make.collective((1, 2, 3), 60, pattern=pattern)
    for d in (1, 2, 3):
        source, taken = make.slot(d, 20, -1, joint), make.assemble(d, 20, [joint])
        target = make.slot(d, 20, taken, SURVIVES)
        make.copies += [(source, target, joint, taken, 10)]
    tasks = make.done()
    ranks = exported(tasks, simulate(tasks, ports(4), EXACT), tmp_path)
    assert [joint in nodes for nodes in ranks] == [False, True, True, True]
    facts = attributes(ranks[2][joint])
    assert ranks[2][joint].type == 7
    assert [facts[key] for key in ("comm_type", "comm_size", "pg_name")] == [kind, size, "0"]
    assert json.loads((tmp_path / "comm_group.json").read_text()) == {"0": [1, 2, 3]}


@pytest.mark.slow
def test_the_command_exports_a_plan(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(captured("mlp:tiny")[0], ap.cluster("local:2"), "data")
    plan.save(tmp_path / "p.json")
    arguments = ["simulate", str(tmp_path / "p.json"), "--chakra", str(tmp_path / "out")]
    assert cli.status(arguments) == 0
    assert "step.1.et" in capfd.readouterr().err
    tasks, graph = plan.tasks, plan.space.graph
    _, nodes = decoded(tmp_path / "out" / "step.1.et")
    named = 0
    for node in nodes:
        if node.type != 4 or tasks.op[node.id] >= len(graph.ops):
            continue
        op = graph.ops[tasks.op[node.id]]
        facts = attributes(node)
        assert (facts["kind"], facts["phase"], facts["line"]) == (op.kind, op.phase, op.line)
        made = tasks.out_slot[tasks.out_start[node.id] : tasks.out_start[node.id + 1]]
        boxes = [tasks.boxes[tasks.slot_region[slot]] for slot in made]
        assert json.loads(node.outputs.shapes) == [list(lengths(box)) for box in boxes]
        named += len(made)
    assert named


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    tasks = random_tasks(1)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"traces cannot be written to .*file: File exists"):
        chakra.export(simulate(tasks, ports(3), EXACT), tasks, graph_of(tasks), tmp_path / "file")
