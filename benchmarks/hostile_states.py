"""Kinds of file for benchmarks/hostile_files.py that training leaves or needs: checkpoints, plan
books, checkpoints of loops, and graphs of others that are placed.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from hostile_mutants import FileKind, json_mutant, tensors_mutant

GRAPH = {
    "maxFPGAs": 2, "maxCPUs": 1, "maxSizePerFPGA": 1e9,
    "nodes": [
        {"id": k, "supportedOnFpga": 1, "cpuLatency": 3.0 + k, "fpgaLatency": 1.0 + k,
         "isBackwardNode": 0, "colorClass": k, "size": 10.0, "name": f"n{k}"}
        for k in range(4)
    ],
    "edges": [{"sourceId": k, "destId": k + 1, "cost": 0.5, "size": 4} for k in range(3)],
}  # fmt: skip


def state_kinds(plan: bytes) -> dict[str, FileKind]:
    """Good files of these kinds; the plan is one for two devices."""
    with tempfile.TemporaryDirectory() as folder:
        single = _saved(Path(folder, "c.safetensors"))
        root = _saved_folder(Path(folder, "run"))
        record = (root / "checkpoint.json").read_bytes()
        shards = {path.name: path.read_bytes() for path in root.glob("*.safetensors")}
        loops = _saved_loop(Path(folder, "loop"))
    index = loops.pop("loops.json")
    graph = json.dumps(GRAPH).encode()
    checkpoint = FileKind(
        "checkpoint", (single,), sealed_tensors, load_plain, use_loaded, "safetensors"
    )
    return {
        "checkpoint": checkpoint,
        "record": FileKind(
            "record", (record,), sealed_json, in_folder("checkpoint.json", shards), use_loaded
        ),
        "book": FileKind("book", (plan,), json_mutant, read_book, lambda *_: None),
        "loops": FileKind("loops", (index,), json_mutant, loop_folder(loops), use_loop),
        "placement": FileKind("placement", (graph,), json_mutant, read_placed, use_placed),
    }


# Checkpoints


def _model() -> tuple[Any, Any]:
    """A model and its optimizer after a step."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def _saved(path: Path) -> bytes:
    from apportion.checkpoint import save_checkpoint

    save_checkpoint(path, *_model(), step=7, seen={"words": 5, "mean": 0.5})
    return path.read_bytes()


def _saved_folder(path: Path) -> Path:
    from apportion.checkpoint import save_checkpoint

    save_checkpoint(path, *_model(), step=7)
    (found,) = path.iterdir()
    return found


def sealed_json(text: bytes, rng: Random) -> bytes:
    """A record that somebody has changed who knows its checksum, mostly."""
    found = json_mutant(text, rng)
    return found if rng.random() < 0.2 else _resealed(found)


def sealed_tensors(data: bytes, rng: Random) -> bytes:
    return tensors_mutant(data, rng, _resealed)


def _resealed(text: bytes) -> bytes:
    from apportion.checkpoint.checkpoint_record import sealed

    try:
        data = json.loads(text)
        return json.dumps(sealed(data)).encode()
    except (ValueError, RecursionError, AttributeError, TypeError):
        return text


def load_plain(path: Path) -> Any:
    """Loaded into a model; what is refused has changed nothing."""
    import torch

    from apportion.checkpoint import load_checkpoint

    model, optimizer = _model()
    before = json.dumps([_plain(model.state_dict()), _plain(optimizer.state_dict())])
    try:
        found = load_checkpoint(path, model, optimizer)
    except ValueError:
        now = json.dumps([_plain(model.state_dict()), _plain(optimizer.state_dict())])
        assert now == before, "it is refused and has changed the model"
        raise
    assert isinstance(model.weight, torch.Tensor)
    return found, model, optimizer


def in_folder(name: str, others: dict[str, bytes]) -> Callable[[Path], Any]:
    """Reads a file as one of a folder with others."""

    def read(path: Path) -> Any:
        folder = path.with_suffix(".d")
        try:
            folder.mkdir()
            for other, data in others.items():
                (folder / other).write_bytes(data)
            shutil.copy(path, folder / name)
            return load_plain(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    return read


def _plain(item: Any) -> Any:
    if hasattr(item, "tolist"):
        return item.tolist()
    if isinstance(item, dict):
        return {str(key): _plain(each) for key, each in item.items()}
    return [_plain(each) for each in item] if isinstance(item, list | tuple) else item


def use_loaded(loaded: Any, path: Path, rng: Random) -> None:
    """Its settings are numbers that can be used, and training goes on."""
    import torch

    found, model, optimizer = loaded
    assert found.step >= 0
    for group in optimizer.param_groups:
        numbers = [group["lr"], *group["betas"], group["eps"], group["weight_decay"]]
        assert all(type(x) in (int, float) and 0 <= x < math.inf for x in numbers), numbers
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


# Plan books


def read_book(path: Path) -> Any:
    from apportion.plan import book_sizes, planned_for

    folder = path.with_suffix(".d")
    try:
        folder.mkdir()
        shutil.copy(path, folder / "2.json")
        (folder / "x.json").write_text("")
        assert book_sizes(folder) == [2]
        found = planned_for(folder, 2)
        assert found is not None and len(found.cluster.devices) == 2
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# Loops


def _saved_loop(folder: Path) -> dict[str, bytes]:
    from apportion import loops
    from apportion.loops.session import threads

    with threads(1):
        loops.save(folder, W=loops.array.full((4, 3), 2.0), passes=3)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def loop_folder(others: dict[str, bytes]) -> Callable[[Path], Any]:
    """Reads an index as that of a folder with the parts that it names."""

    def read(path: Path) -> Any:
        from apportion import loops
        from apportion.loops.session import threads

        folder = path.with_suffix(".d")
        try:
            folder.mkdir()
            for other, data in others.items():
                (folder / other).write_bytes(data)
            shutil.copy(path, folder / "loops.json")
            array = loops.array.zeros((4, 3))
            with threads(1):
                numbers = loops.load(folder, W=array)
                return numbers, array.numpy()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    return read


def use_loop(found: Any, path: Path, rng: Random) -> None:
    """The numbers are finite, and the array is what was saved: no part is missing or elsewhere."""
    numbers, array = found
    assert all(math.isfinite(x) for x in numbers.values()), numbers
    assert array.tolist() == [[2.0] * 3] * 4, array


# Graphs of others


def read_placed(path: Path) -> Any:
    from apportion.place import imported_problem, read_graph

    return imported_problem(read_graph(path))


def use_placed(problem: Any, path: Path, rng: Random) -> None:
    """Its numbers are none that are negative or not finite."""
    import numpy as np

    for column in (*problem.columns, *problem.links):
        if isinstance(column, np.ndarray) and column.dtype.kind == "f":
            assert np.isfinite(column).all(), "a column that is not finite"
    assert (problem.columns.nbytes >= 0).all()
    assert math.isfinite(problem.tick) and problem.tick > 0
