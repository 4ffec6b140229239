"""MeshLayout: how a training step is divided over a device mesh, in the words of PyTorch.

Part of the room mesh. A file comes in, a MeshLayout goes out, and the other way round.

    {"format": "apportion mesh layout", "version": 1,
     "mesh": {"replicate": 2, "shard": 4, "tensor": 2},
     "reshard_after_forward": true,
     "placements": {"blocks.*.mlp.up.weight": {"shard": "Shard(0)", "tensor": "Shard(0)"}},
     "checkpoint": ["blocks.*"]}

The mesh is that of `init_device_mesh`: rank = (replica * shard + shard index) * tensor + tensor
index. Samples are divided over replicas and shards. All but `mesh` may be left out: then parameters
are cut over `tensor` as Megatron-LM stores them, over `shard` where FSDP2 would, and nothing is
checkpointed. A `*` in a name stands for any text without a dot; of several names that fit the last
counts. The file of a torchtitan job (TOML, its sections parallelism and activation_checkpoint) says
the same and is read too.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apportion.checked import (
    brief,
    parse_json,
    read_every,
    read_field,
    read_flag,
    read_mapping,
    read_text,
    read_whole,
)

FORMAT, VERSION = "apportion mesh layout", 1
REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"
MESH_DIMS = (REPLICATE, SHARD, TENSOR)
MOST_DEVICES = 1 << 16
MOST_DIMS = 16
MOST_BYTES = 16 << 20  # of a file
EVERY_LAYER = "every layer"
_PLACEMENT = re.compile(r"Shard\((\d{1,2})\)|Replicate\(\)")


@dataclass(frozen=True, slots=True)
class ParameterPlacement:
    """The dimension of a parameter that is cut over the shards of the mesh, and the one that is cut
    over its tensor ranks; None: it is whole there, or as it is usual where nothing is said."""

    shard: int | None = None
    tensor: int | None = None


@dataclass(frozen=True)
class MeshLayout:
    """How a step is divided over a mesh.

    replicate, shard, tensor  the extents of the mesh
    reshard     whether what is gathered of parameters is dropped after the forward
    placements  by name of a parameter (or a pattern); None: as it is usual
    checkpoint  modules (or patterns) whose forward the backward does again
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    reshard: bool = True
    placements: Mapping[str, ParameterPlacement] | None = field(default=None, hash=False)
    checkpoint: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        return self.replicate * self.shard * self.tensor

    def __str__(self) -> str:
        said = [f"{getattr(self, dim)} x {dim}" for dim in MESH_DIMS if getattr(self, dim) > 1]
        more = "" if self.reshard or self.shard == 1 else ", gathered parameters kept"
        again = f", {len(self.checkpoint)} modules checkpointed" if self.checkpoint else ""
        return f"{', '.join(said) or 'one device'}{more}{again}"


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern stands for."""
    parts = (re.escape(part) for part in pattern.split("*"))
    found = re.compile(r"[^.]*".join(parts))
    return [name for name in names if found.fullmatch(name)]


# Files


def layout_text(layout: MeshLayout) -> str:
    """The file of a layout."""
    data: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "mesh": {dim: getattr(layout, dim) for dim in MESH_DIMS},
        "reshard_after_forward": layout.reshard,
    }
    if layout.placements is not None:
        data["placements"] = {
            name: {
                dim: "Replicate()" if cut is None else f"Shard({cut})"
                for dim, cut in ((SHARD, placed.shard), (TENSOR, placed.tensor))
            }
            for name, placed in layout.placements.items()
        }
    if layout.checkpoint:
        data["checkpoint"] = list(layout.checkpoint)
    return json.dumps(data, indent=1) + "\n"


def load_layout(path: str | Path, devices: int) -> MeshLayout:
    """The layout in a file, for so many devices; ValueError, in one sentence, for anything else."""
    if Path(path).stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} has more than {MOST_BYTES >> 20} MB: it is no layout")
    text = Path(path).read_bytes()
    try:
        layout = _titan(text, devices) if Path(path).suffix == ".toml" else _layout(text)
        if layout.devices != devices:
            raise ValueError(
                f"its mesh has {layout.devices} devices ({layout}), the cluster {devices}"
            )
    except ValueError as error:
        reason = brief(str(error), 400)
        raise ValueError(f"{path} is no layout that can be used: {reason}") from None
    return layout


def _layout(text: bytes) -> MeshLayout:
    data = read_mapping(parse_json(text), "the layout")
    if data.get("format") != FORMAT:
        raise ValueError(f"its format is {brief(data.get('format'))}, not {FORMAT!r}")
    if data.get("version") != VERSION:
        raise ValueError(f"its version is {brief(data.get('version'))}; {VERSION} is known")
    known = {"format", "version", "mesh", "reshard_after_forward", "placements", "checkpoint"}
    _check_known(data, known, "the layout")
    mesh = read_mapping(read_field(data, "mesh", "the layout"), "the mesh")
    _check_known(mesh, set(MESH_DIMS), "the mesh")
    sizes = {d: read_whole(mesh.get(d, 1), f"{d} of the mesh", 1, MOST_DEVICES) for d in MESH_DIMS}
    placements = data.get("placements")
    return MeshLayout(
        **sizes,
        reshard=read_flag(data.get("reshard_after_forward", True), "reshard_after_forward"),
        placements=None if placements is None else _placements(placements),
        checkpoint=read_every(data.get("checkpoint", []), "checkpoint", read_text),
    )


def _check_known(data: Mapping[str, Any], known: set[str], what: str) -> None:
    for key in data:
        if key not in known:
            raise ValueError(
                f"{what} has the unknown field {brief(key)!r}; known are {', '.join(sorted(known))}"
            )


def _placements(data: Any) -> dict[str, ParameterPlacement]:
    found = {}
    for name, placed in read_mapping(data, "the placements").items():
        of = read_mapping(placed, f"the placement of {brief(name)!r}")
        _check_known(of, {SHARD, TENSOR}, f"the placement of {brief(name)!r}")
        found[name] = ParameterPlacement(
            *(_dim(of.get(dim, "Replicate()"), name) for dim in (SHARD, TENSOR))
        )
    return found


def _dim(text: Any, name: str) -> int | None:
    """The dimension that a placement cuts."""
    given = read_text(text, f"the placement of {brief(name)!r}")
    match = _PLACEMENT.fullmatch(given)
    if match is None or int(match[1] or 0) > MOST_DIMS:
        raise ValueError(
            f"the placement of {brief(name)!r} is {brief(given)!r}; write Shard(0) or Replicate()"
        )
    return None if match[1] is None else int(match[1])


# torchtitan

_ONE = ("pipeline_parallel_degree", "context_parallel_degree", "expert_tensor_parallel_degree")


def _titan(text: bytes, devices: int) -> MeshLayout:
    """What a torchtitan job says of parallelism."""
    try:
        data = tomllib.loads(text.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"it is not TOML: {error}") from None
    given = read_mapping(read_field(data, "parallelism"), "parallelism")
    for key in _ONE:
        if _degree(given, key, 1) != 1:
            raise ValueError(f"{key} is {given[key]}, which a mesh layout has no word for")
    replicate = _degree(given, "data_parallel_replicate_degree", 1)
    tensor = _degree(given, "tensor_parallel_degree", 1)
    shard = _degree(given, "data_parallel_shard_degree", -1)
    if shard == -1:
        shard = max(devices // (replicate * tensor), 1)
    policy = read_text(given.get("fsdp_reshard_after_forward", "default"), "resharding")
    again = read_mapping(data.get("activation_checkpoint", {}), "activation_checkpoint")
    mode = read_text(again.get("mode", "none"), "mode of activation_checkpoint")
    if mode not in ("none", "full"):
        raise ValueError(
            f"activation_checkpoint has mode {brief(mode)!r}; only none and full can be read"
        )
    every = (EVERY_LAYER,) if mode == "full" else ()
    return MeshLayout(replicate, shard, tensor, policy != "never", None, every)


def _degree(given: Mapping[str, Any], key: str, usual: int) -> int:
    degree = read_whole(given.get(key, usual), key, -1, MOST_DEVICES)
    if degree == 0 or (degree == -1 and usual != -1):
        raise ValueError(f"{key} is {degree}; it must be at least 1")
    return degree
