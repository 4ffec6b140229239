"""CostTable: what was measured on one kind of device, and its file.

The data of machine/ that `apportion calibrate` writes and cost_model.py reads.
A file is JSON with a version and holds tables of one machine, one for each Condition: costs on a
CPU depend on how many threads a kernel has and how many processes run beside it.

    {"format": "apportion costs", "version": 1, "machine": "...", "torch": "2.13.0", "tables": [{
      "condition": {"kind": "cpu", "threads": 1, "processes": 2, "mode": "generated"},
      "measured": "2026-01-31", "noise": 0.03,
      "works": {"aten.mm.default(float32[8,4] float32[4,8]) #0a1b2c3d4e":
                [seconds, flops, bytes, itemsize, workspace bytes]},
      "fits": {"aten.mm.default": [launch, per flop, per byte, relative error, points]},
      "lines": {"assemble": [each, per box, per byte, relative error, points]},
      "issue": {"": 1.2e-05}, "resident": 33554432,
      "references": {"matmul": [seconds, spread]}, "provisional": ["exchange"]}]}

works   seconds of one kernel call by its signature (execute/dry_run.py), with what fits need; of a
        call in a fused kernel its share of that, by `fused_name`
fits    seconds = launch + flops * per flop + bytes * per byte, for a kind of Op or a family
lines   seconds = each + boxes * per box + bytes * per byte: "assemble" (a region put together),
        "pack" (a message put together; bytes read and written),
        "exchange" (the messages of one position as one process sees them, boxes being messages),
        "fused" (a fused kernel; boxes being kernels, and bytes those that it still moves)
issue   seconds of the host for issuing one task to an asynchronous device, by kind of Op; "" else;
        by kind and number of inputs (`aten.cat.default/3`), where that is known;
        by signature for calls that are far from the others of their kind. "ahead": how many such
        seconds the host may be ahead of the device, whose queue has an end. "begin": what a
        step takes the host before it issues anything. "replay": to have what was recorded between
        two exchanges done once more
resident  bytes that libraries take at their first call on a device and keep
references  what kernels took that should always take the same: another machine, or another state of
        this one, is known by them. Files of before have none: whether they still hold is unknown
provisional  works and lines that were measured while other programs ran
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from apportion.checked import (
    brief,
    parse_json,
    read_call,
    read_field,
    read_list,
    read_number,
    read_seconds,
    read_text,
    read_whole,
)
from apportion.files import write_atomic

FORMAT, VERSION = "apportion costs", 1
ASSEMBLE_LINE, PACK_LINE, EXCHANGE_LINE = "assemble", "pack", "exchange"
FUSED_LINE = "fused"
HOST_OUT_LINE, HOST_BACK_LINE, HOST_WORK_LINE = "host out", "host back", "host work"
BESIDE = " beside"
"""Copies to the host, back, and what the host computes itself, each alone; with BESIDE after it,
what they take while the others are at work too."""
AHEAD, BEGIN, REPLAY = "ahead", "begin", "replay"  # among issue costs


class KernelMeasurement(NamedTuple):
    """One kernel call: measured seconds, and what it computes, reads and writes."""

    seconds: float
    flops: float
    nbytes: int
    itemsize: int
    workspace: int = 0


class Fit(NamedTuple):
    """A line through measured works; `error` is relative, of works left out in turn."""

    launch: float
    per_flop: float
    per_byte: float
    error: float
    points: int


class CostLine(NamedTuple):
    """Costs of copies or messages; `error` is relative, over the measured ones."""

    each: float
    per_box: float
    per_byte: float
    error: float
    points: int


class ReferenceTime(NamedTuple):
    """A kernel that should always take the same: a low quantile of its seconds, and how far, as a
    share of that, most were above it."""

    seconds: float
    spread: float


@dataclass(frozen=True, slots=True)
class Condition:
    """What costs depend on beside the call: kind of device, threads of each process, processes
    that run at the same time, and how tasks are run (`mode`, one of execute's; files that do not
    say were measured with the interpreter)."""

    kind: str
    threads: int = 1
    processes: int = 1
    mode: str = "none"


@dataclass(frozen=True, eq=False)
class CostTable:
    """Measurements of one kind of device under one Condition. `noise` is the relative spread of a
    reference kernel over the rounds; `references` are what reference kernels took then, by name;
    `provisional` are works and lines measured while other programs ran, to be measured again."""

    condition: Condition
    measured: str = ""
    noise: float = 0.0
    works: Mapping[str, KernelMeasurement] = field(default_factory=dict)
    fits: Mapping[str, Fit] = field(default_factory=dict)
    lines: Mapping[str, CostLine] = field(default_factory=dict)
    issue: Mapping[str, float] = field(default_factory=dict)
    resident: int = 0
    references: Mapping[str, ReferenceTime] = field(default_factory=dict)
    provisional: tuple[str, ...] = ()

    def __str__(self) -> str:
        at = self.condition
        how = "" if at.mode == "none" else f", {at.mode}"
        beside = f", {len(self.provisional)} beside other programs" if self.provisional else ""
        return (
            f"{at.kind}, {at.threads} thread(s), {at.processes} process(es){how}: "
            f"{len(self.works)} works, {len(self.fits)} fits, "
            f"measured {self.measured or 'at an unknown date'}{beside}"
        )


@dataclass(frozen=True)
class CostFile:
    """The tables of one machine."""

    machine: str
    torch: str
    tables: tuple[CostTable, ...] = ()

    def table(self, condition: Condition) -> CostTable:
        """The table under a Condition; an empty one if there is none yet."""
        empty = CostTable(condition)
        return next((t for t in self.tables if t.condition == condition), empty)

    def with_table(self, table: CostTable) -> CostFile:
        """The same file with one table put in the place of the old one."""
        others = tuple(t for t in self.tables if t.condition != table.condition)
        return replace(self, tables=(*others, table))


def kind_and_inputs(signature: str) -> str:
    """The kind of a signature and its number of inputs, `aten.cat.default/3`: a host takes about as
    long for all of these."""
    kind, _, rest = signature.partition("(")
    return f"{kind}/{len(rest.partition(')')[0].split())}"


def fused_name(signature: str) -> str:
    """The name of a call's share of the fused kernel that it is in."""
    return f"fused:{signature}"


def kind_of_signature(signature: str) -> str:
    """The kind of Op of a signature."""
    return signature.partition("(")[0]


def to_json(file: CostFile) -> dict[str, Any]:
    """The file as plain JSON data."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "machine": file.machine,
        "torch": file.torch,
        "tables": [table_to_json(table) for table in file.tables],
    }


def table_to_json(table: CostTable) -> dict[str, Any]:
    """One table as plain JSON data."""
    at = asdict(table.condition)
    if at["mode"] == "none":
        del at["mode"]
    found: dict[str, Any] = {
        "condition": at,
        "measured": table.measured,
        "noise": table.noise,
        "works": {name: list(work) for name, work in table.works.items()},
        "fits": {name: list(fit) for name, fit in table.fits.items()},
        "lines": {name: list(line) for name, line in table.lines.items()},
        "issue": dict(table.issue),
        "resident": table.resident,
    }
    # What older files do not have is written only where there is some.
    if table.references:
        found["references"] = {name: list(time) for name, time in table.references.items()}
    if table.provisional:
        found["provisional"] = list(table.provisional)
    return found


_TABLE = TypeAdapter(CostTable)


def table_from_json(data: Any) -> CostTable:
    """The table written by `table_to_json`; ValueError on anything else."""
    try:
        table = _TABLE.validate_json(json.dumps(data), strict=True, extra="forbid")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise ValueError(f"the cost table: {brief(where)}: {brief(first['msg'], 200)}") from None
    except (TypeError, RecursionError) as error:
        raise ValueError(f"the cost table is not plain data: {brief(str(error))}") from None
    _check_texts(table)
    _check_numbers(table)
    return table


def _check_texts(table: CostTable) -> None:
    """Raises ValueError unless all names can be shown."""
    named = (*table.works, *table.fits, *table.lines, *table.issue, *table.references)
    for name in (*named, *table.provisional, table.measured, table.condition.kind):
        read_call(name, "a name in the cost table")


def _check_numbers(table: CostTable) -> None:
    """Raises ValueError, naming it, for a number that nothing can cost."""
    at = table.condition
    read_whole(at.threads, "the threads of the cost table", 1)
    read_whole(at.processes, "the processes of the cost table", 1)
    read_whole(table.resident, "the resident bytes of the cost table")
    read_number(table.noise, "the noise of the cost table")
    for name, work in table.works.items():
        what = f"the cost of {brief(name)}"
        read_seconds(work.seconds, what)
        read_number(work.flops, what)
        for count in (work.nbytes, work.itemsize, work.workspace):
            read_whole(count, what)
    for name, (*shares, error, points) in (*table.fits.items(), *table.lines.items()):
        for share in shares:
            read_seconds(share, f"the line of {brief(name)}")
        read_number(error, f"the error of {brief(name)}")
        read_whole(points, f"the points of {brief(name)}")
    for name, cost in table.issue.items():
        read_seconds(cost, f"the issue cost of {brief(name)}")
    for name, reference in table.references.items():
        read_number(reference.seconds, f"the reference {brief(name)}", 1e-12)
        read_number(reference.spread, f"the reference {brief(name)}")


def from_json(data: Any) -> CostFile:
    """The file written by `to_json`; ValueError on anything else."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError("it does not say that it is one; make one with `apportion calibrate`")
    if data.get("version") != VERSION:
        raise ValueError(f"it has version {brief(data.get('version'))}, this is version {VERSION}")
    given = read_list(read_field(data, "tables"), "its tables")
    tables = tuple(table_from_json(table) for table in given)
    machine = read_text(data.get("machine", ""), "its machine")
    return CostFile(machine, read_text(data.get("torch", ""), "its version of torch"), tables)


def load_cost_file(path: str | Path) -> CostFile:
    """Reads a file of tables; ValueError, naming the file and what is wrong, if it is not one."""
    try:
        return from_json(parse_json(Path(path).read_bytes()))
    except OSError as error:
        raise ValueError(f"the cost table {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        reason = brief(str(error), 400)
        raise ValueError(f"{path} is not a cost table that can be read: {reason}") from None


def save_cost_file(file: CostFile, path: str | Path) -> None:
    """Writes a file of tables whole or not at all."""
    write_atomic(Path(path), json.dumps(to_json(file), separators=(",", ":")))
