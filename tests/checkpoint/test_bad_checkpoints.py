"""Bad input ends in one sentence, changes nothing and executes nothing."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from checkpoint_runs import RanksHere, batches, space, wide_program

from apportion.capture.program import Program
from apportion.checkpoint.checkpoint_record import NAME, sealed
from apportion.checkpoint.folder import find_checkpoint
from apportion.checkpoint.plain_model import load_checkpoint
from apportion.checkpoint.stored import StoredCheckpoint, open_checkpoint
from apportion.search.baselines.random_strategy import draw


@pytest.fixture(scope="module")
def program() -> Program:
    return wide_program("mlp:tiny")


@pytest.fixture(scope="module")
def good(program: Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of two ranks after a step."""
    ranks = RanksHere(program, draw(space(program), 2, Random(3)), 2)
    ranks.train(batches(program, 0, 1))
    return ranks.save(tmp_path_factory.mktemp("run"))


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "step-1"))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def read(folder: Path) -> StoredCheckpoint:
    stored = open_checkpoint(folder)
    stored.check_bytes(0, 1)
    return stored


def refused(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        read(folder)
    said = str(caught.value)
    assert "\n" not in said and len(said) < 1000 and said.isprintable()
    return said


def edited(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """A change of the record by somebody who knows its checksum."""

    def apply(folder: Path) -> None:
        data = json.loads((folder / NAME).read_text())
        change(data)
        (folder / NAME).write_text(json.dumps(sealed(data)))

    return apply


def test_the_good_one_is_read(folder: Path) -> None:
    assert read(folder).record is not None


def test_a_missing_shard(folder: Path) -> None:
    shards(folder)[0].unlink()
    assert "lacks shard-00001" in refused(folder)


def test_a_truncated_shard(folder: Path) -> None:
    path = shards(folder)[0]
    os.truncate(path, path.stat().st_size - 4)
    assert "bytes and had" in refused(folder)


def test_a_changed_byte(folder: Path) -> None:
    path = shards(folder)[0]
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(bytes(raw))
    assert "was changed since it was saved" in refused(folder)


def test_shards_of_another_save(folder: Path, good: Path, program: Program) -> None:
    """Parts of two checkpoints are never one."""
    ranks = RanksHere(program, draw(space(program), 2, Random(3)), 2)
    ranks.train(batches(program, 0, 2))
    other = ranks.save(folder.parent)
    shutil.copy(shards(other)[0], shards(folder)[0])
    assert "was changed since it was saved" in refused(folder)


def test_without_a_record_it_is_none(folder: Path) -> None:
    """A save that was cut off before its last file: shards alone, under the name of a checkpoint or
    of an unfinished one."""
    (folder / NAME).unlink()
    with pytest.raises(ValueError, match="is no checkpoint"):
        find_checkpoint(folder.parent)
    os.rename(folder, folder.parent / ".saving-1-aa")
    with pytest.raises(ValueError, match="there is no checkpoint in"):
        find_checkpoint(folder.parent)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (edited(lambda d: d.update(format="x")), "format"),
        (edited(lambda d: d.update(version=99)), "version"),
        (edited(lambda d: d.update(step=-1)), "step"),
        (edited(lambda d: d.update(step=10**30)), "step"),
        (edited(lambda d: d.update(step="3")), "step"),
        (edited(lambda d: d.update(more=1)), "more"),
        (edited(lambda d: d.pop("tensors")), "tensors"),
        (edited(lambda d: d["tensors"].popitem()), "does not know"),
        (edited(lambda d: d["tensors"].update({"model.z": {"shape": [1], "dtype": "float32"}})),
         "files lack"),
        (edited(lambda d: d["tensors"]["model.layers.0.bias"].update(dtype="load")), "dtype"),
        (edited(lambda d: d["tensors"]["model.layers.0.bias"].update(dtype="float16")), "dtype"),
        (edited(lambda d: d["tensors"]["model.layers.0.bias"].update(shape=[11])), "missing"),
        (edited(lambda d: d["tensors"]["model.layers.0.bias"].update(shape=[9])), "outside"),
        (edited(lambda d: d["tensors"]["model.layers.0.bias"].update(shape=[5, 2])), "dims"),
        (edited(lambda d: d["files"].update({"../x.safetensors": {"bytes": 1, "crc32": 1}})),
         "no name of a file"),
        (edited(lambda d: d["files"].update({"/etc/x.safetensors": {"bytes": 1, "crc32": 1}})),
         "no name of a file"),
        (lambda f: (f / NAME).write_bytes((f / NAME).read_bytes()[:-50]), "no record"),
        (lambda f: (f / NAME).write_text("[" * 100_000), "nested"),
        (lambda f: (f / NAME).write_text('{"step": NaN}'), "NaN"),
        (lambda f: (f / NAME).write_text("\x1b[31mred"), "no record"),
        (lambda f: (f / NAME).write_bytes(b"\xff\xfe\x00"), "no record"),
        (lambda f: (f / NAME).write_bytes(pickle.dumps({"a": 1})), "no record"),
    ],
)  # fmt: skip
def test_a_hostile_record(folder: Path, change: Callable[[Path], object], said: str) -> None:
    change(folder)
    assert said in refused(folder)


class Bomb:
    """What a pickle would do."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("exploded"),))


def test_nothing_is_unpickled(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what lies beside a checkpoint, nor a pickle in the place of its files."""
    monkeypatch.chdir(tmp_path)
    for name in (".metadata", "model.pt", "__0_0.distcp"):
        (folder / name).write_bytes(pickle.dumps(Bomb()))
    read(folder)
    for path in (folder / NAME, shards(folder)[0]):
        kept = path.read_bytes()
        path.write_bytes(pickle.dumps(Bomb()))
        refused(folder)
        path.write_bytes(kept)
    assert not Path("exploded").exists()


@pytest.mark.slow
def test_another_model(good: Path, program: Program) -> None:
    other = wide_program("gpt2:tiny")
    ranks = RanksHere(other, draw(space(other), 2, Random(0)), 2)
    before = {key: tensor.clone() for key, tensor in ranks.whole().items()}
    with pytest.raises(ValueError, match=r"is of another model: it has no blocks\.0"):
        ranks.load(open_checkpoint(good))
    assert all(torch.equal(before[key], tensor) for key, tensor in ranks.whole().items())


def test_a_model_with_fewer_layers(good: Path) -> None:
    """What a checkpoint has more is not left out silently."""
    other = wide_program("mlp:layers=2,width=10,batch=6")
    ranks = RanksHere(other, draw(space(other), 2, Random(0)), 2)
    with pytest.raises(ValueError, match=r"it has layers.2.bias, layers.2.weight, which this"):
        ranks.load(open_checkpoint(good))


def test_a_model_of_another_width(good: Path) -> None:
    other = wide_program("mlp:layers=3,width=12,batch=6")
    ranks = RanksHere(other, draw(space(other), 2, Random(0)), 2)
    with pytest.raises(ValueError, match=r"layers.0.\w+ is \[10.*\] there and \[12.*\] here"):
        ranks.load(open_checkpoint(good))


def test_another_optimizer(good: Path, program: Program) -> None:
    model = program.model
    with pytest.raises(ValueError, match="is of another optimizer"):
        load_checkpoint(good, model, torch.optim.SGD([{"params": [p]} for p in model.parameters()]))


def test_no_folder_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no checkpoint"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(ValueError, match="there is no checkpoint in"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("seed", range(60))
def test_mutated_files_are_refused_or_harmless(folder: Path, good: Path, seed: int) -> None:
    """One byte, a stretch or the length of some file: a ValueError, or nothing was lost."""
    rng = Random(seed)
    path = rng.choice([folder / NAME, *shards(folder)])
    raw = bytearray(path.read_bytes())
    at = rng.randrange(len(raw))
    kind = rng.randrange(4)
    if kind == 0:
        raw[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        raw[at : at + rng.randrange(1, 40)] = rng.randbytes(rng.randrange(40))
    elif kind == 2:
        del raw[at:]
    else:
        raw[:8] = rng.randbytes(8)
    path.write_bytes(bytes(raw))
    try:
        stored = read(folder)
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        assert stored.record == read(good).record
