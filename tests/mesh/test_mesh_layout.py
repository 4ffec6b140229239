"""Files of layouts: written and read again, refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from apportion.mesh.mesh_layout import (
    EVERY_LAYER,
    FORMAT,
    MeshLayout,
    ParameterPlacement,
    layout_text,
    load_layout,
    matching,
)

WHOLE = MeshLayout(2, 4, 2, False, {"a.*.weight": ParameterPlacement(0, 1)}, ("a.*",))


def test_a_layout_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "layout.json"
    file.write_text(layout_text(WHOLE))
    assert load_layout(file, 16) == WHOLE
    with pytest.raises(ValueError, match=r"its mesh has 16 devices .*the cluster 8"):
        load_layout(file, 8)


def test_patterns_stand_for_one_part_of_a_name() -> None:
    names = ["a.0.weight", "a.1.weight", "a.1.b.weight", "aXweight"]
    assert matching("a.*.weight", names) == ["a.0.weight", "a.1.weight"]
    assert matching("a.1.weight", names) == ["a.1.weight"]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"format": "plan"}, "format"),
        ({"version": 2}, "version"),
        ({"mesh": {"shard": 0}}, "less than 1"),
        ({"mesh": {"shard": 1e300}}, "whole number"),
        ({"mesh": {"pipeline": 2}}, "unknown field 'pipeline'"),
        ({"mesh": []}, "not a mapping"),
        ({"placements": {"a": {"shard": "Shard(-1)"}}}, r"write Shard\(0\)"),
        ({"placements": {"a": {"shard": 1}}}, "not a text"),
        ({"reshard_after_forward": 1}, "neither true nor false"),
        ({"checkpoint": "all"}, "not a list"),
        ({"more": 1}, "unknown field 'more'"),
    ],
)
def test_a_wrong_layout_is_refused_in_a_sentence(
    tmp_path: Path, changed: dict[str, Any], says: str
) -> None:
    file = tmp_path / "layout.json"
    file.write_text(json.dumps({"format": FORMAT, "version": 1, "mesh": {"shard": 2}} | changed))
    with pytest.raises(ValueError, match=says) as error:
        load_layout(file, 2)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_jobs_of_torchtitan_are_layouts(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(
        "[parallelism]\ntensor_parallel_degree = 2\ndata_parallel_replicate_degree = 2\n"
        '[activation_checkpoint]\nmode = "full"\n[training]\nsteps = 10\n'
    )
    assert load_layout(file, 16) == MeshLayout(2, 4, 2, checkpoint=(EVERY_LAYER,))
    file.write_text("[parallelism]\npipeline_parallel_degree = 4\n")
    with pytest.raises(ValueError, match="pipeline_parallel_degree is 4"):
        load_layout(file, 16)
    file.write_text("not toml")
    with pytest.raises(ValueError, match="not TOML"):
        load_layout(file, 16)
