"""problem_file: a PlacementProblem in a file, so that it is made once and placed elsewhere.

In: a problem, or a path. Out: a file of columns (.npz) with a JSON header, or the problem again,
the same bit for bit. A file is never executed: no pickle, and whatever compiled loops would read
without looking is checked first.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import numpy.typing as npt

from apportion.columns import Bools, Floats, Ints
from apportion.files import open_atomic
from apportion.place.placement_problem import (
    PlacementColumns,
    PlacementDevice,
    PlacementLinks,
    PlacementProblem,
    check_placement,
    check_problem,
)

FORMAT = "apportion placement problem"
VERSION = 1
HEADER = "header"
TYPES: dict[Any, type[np.generic]] = {Ints: np.int64, Floats: np.float64, Bools: np.bool_}

Arrays = dict[str, npt.NDArray[Any]]


def save_problem(path: Path | str, problem: PlacementProblem) -> None:
    """Write the problem to a file, whole or not at all."""
    arrays: Arrays = {}
    numbers: dict[str, int] = {}
    for prefix, part in (("columns", problem.columns), ("links", problem.links)):
        for name, value in part._asdict().items():
            if isinstance(value, np.ndarray):
                arrays[f"{prefix}.{name}"] = value
            else:
                numbers[f"{prefix}.{name}"] = int(value)
    if problem.transfer is not None:
        arrays["transfer"] = problem.transfer
    if problem.expert is not None:
        arrays["expert"] = problem.expert
    header = {
        "format": FORMAT,
        "version": VERSION,
        "name": problem.name,
        "node_names": problem.node_names,
        "node_kinds": problem.node_kinds,
        "devices": [asdict(device) for device in problem.devices],
        "tick": problem.tick,
        "time_unit": problem.time_unit,
        "numbers": numbers,
    }
    arrays[HEADER] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with open_atomic(Path(path)) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def load_problem(path: Path | str) -> PlacementProblem:
    """The problem of a file. Raises ValueError, naming the file, if it holds none."""
    try:
        return _problem(*_read(Path(path)))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, IndexError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path} holds no placement problem that can be used: {why}") from None


def _read(path: Path) -> tuple[dict[str, Any], Arrays]:
    """Header and columns of a file."""
    try:
        with path.open("rb") as file:
            kept = np.load(file, allow_pickle=False)
            if not isinstance(kept, np.lib.npyio.NpzFile):
                raise ValueError("it is a single column")
            arrays = {name: kept[name] for name in kept.files}
    except (zipfile.BadZipFile, EOFError):
        raise ValueError("it is damaged, or not a file of columns (.npz)") from None
    header = json.loads(arrays.pop(HEADER).tobytes())
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError("its header does not say that it does")
    if header["version"] != VERSION:
        raise ValueError(f"it has version {header['version']}, this program reads {VERSION}")
    return header, arrays


def _problem(header: dict[str, Any], arrays: Arrays) -> PlacementProblem:
    numbers = header["numbers"]
    columns = PlacementColumns(**_fields(PlacementColumns, "columns", numbers, arrays))
    links = PlacementLinks(**_fields(PlacementLinks, "links", numbers, arrays))
    problem = PlacementProblem(
        name=str(header["name"]),
        node_names=tuple(map(str, header["node_names"])),
        node_kinds=tuple(map(str, header["node_kinds"])),
        columns=columns,
        links=links,
        devices=tuple(PlacementDevice(**device) for device in header["devices"]),
        tick=float(header["tick"]),
        time_unit=str(header["time_unit"]),
        transfer=_column(arrays, "transfer", Floats) if "transfer" in arrays else None,
        expert=_column(arrays, "expert", Ints) if "expert" in arrays else None,
    )
    _check_shapes(problem)
    _check_numbers(problem)
    check_problem(problem)
    if problem.expert is not None:
        check_placement(problem, problem.expert)
    return problem


def _fields(of: Any, prefix: str, numbers: dict[str, Any], arrays: Arrays) -> dict[str, Any]:
    """The fields of a NamedTuple: columns from the file, single numbers from its header."""
    return {
        name: _column(arrays, f"{prefix}.{name}", kind)
        if kind in TYPES
        else int(numbers[f"{prefix}.{name}"])
        for name, kind in get_type_hints(of).items()
    }


def _column(arrays: Arrays, name: str, kind: Any) -> npt.NDArray[Any]:
    found = arrays[name]
    if found.dtype != TYPES[kind]:
        raise ValueError(f"column {name} has numbers of type {found.dtype}")
    return np.ascontiguousarray(found)


def _check_shapes(problem: PlacementProblem) -> None:
    c, links, k = problem.columns, problem.links, len(problem.devices)
    n, m, u = len(problem.node_names), len(c.source), len(c.allowed)
    expected = {
        "unit": (n,), "duration": (n, k), "backward": (n,), "resident": (n,), "source": (m,),
        "nbytes": (m,), "send": (m,), "output_start": (n + 1,), "reader_start": (m + 1,),
        "reader": (len(c.reader),), "allowed": (u, k), "hop_start": (k * k + 1,),
        "hop_link": (len(links.hop_link),), "hop_pace": (len(links.hop_link),),
        "lag": (k, k), "drag": (k, k),
    }  # fmt: skip
    if len(c.issue):
        expected["issue"] = (n, k)
    if len(links.receive):
        expected["receive"] = (k, 3)
    both = {**c._asdict(), **links._asdict()}
    for name, shape in expected.items():
        if both[name].shape != shape:
            raise ValueError(f"column {name} has shape {both[name].shape}, not {shape}")
    if len(problem.node_kinds) != n or not k or not u:
        raise ValueError("it has no devices, no units, or nodes without a kind")
    if problem.transfer is not None and problem.transfer.shape != (n,):
        raise ValueError("column transfer does not have a number for every node")


def _check_numbers(problem: PlacementProblem) -> None:
    c, links = problem.columns, problem.links
    n, m = len(c.unit), len(c.source)
    _check_range("unit", c.unit, problem.units)
    _check_range("source", c.source, n)
    _check_range("reader", c.reader, n)
    _check_range("hop_link", links.hop_link, links.links)
    _check_offsets("output_start", c.output_start, m)
    _check_offsets("reader_start", c.reader_start, len(c.reader))
    _check_offsets("hop_start", links.hop_start, len(links.hop_link))
    if not np.array_equal(np.repeat(np.arange(n), np.diff(c.output_start)), c.source):
        raise ValueError("columns output_start and source disagree")
    if len(np.unique(c.unit)) != problem.units:
        raise ValueError("a unit has no nodes")
    counts = {"duration": c.duration, "nbytes": c.nbytes, "resident": c.resident, "issue": c.issue}
    times = {
        "send": c.send, "hop_pace": links.hop_pace, "lag": links.lag, "drag": links.drag,
        "receive": links.receive,
    }  # fmt: skip
    if problem.transfer is not None:
        times["transfer"] = problem.transfer
    for name, numbers in {**counts, **times}.items():
        if not (np.isfinite(numbers) & (numbers >= 0)).all():
            raise ValueError(f"column {name} has numbers that are negative or not finite")
    if not (np.isfinite(problem.tick) and problem.tick > 0):
        raise ValueError(f"{problem.tick} ticks in a unit of time")


def _check_range(name: str, numbers: Ints, end: int) -> None:
    if not ((numbers >= 0) & (numbers < end)).all():
        raise ValueError(f"column {name} has numbers outside 0 to {end - 1}")


def _check_offsets(name: str, numbers: Ints, end: int) -> None:
    if numbers[0] != 0 or numbers[-1] != end or (np.diff(numbers) < 0).any():
        raise ValueError(f"column {name} does not rise from 0 to {end}")
