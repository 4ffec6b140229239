"""layout_strategy: what a MeshLayout means for every Op of a step.

Part of the room mesh. A Problem and a MeshLayout come in, a SearchResult goes out: the Strategy of
data parallelism, or of tensor parallelism where the mesh has tensor ranks, with state cut over the
shards. It is made of the baselines of search/, so that a layout costs what these do.
"""

from __future__ import annotations

from collections.abc import Mapping

from apportion.graph import PARAMETER, Graph
from apportion.memory import inside_modules, modules_of, numbered_modules
from apportion.mesh.mesh_layout import EVERY_LAYER, MeshLayout, ParameterPlacement, matching
from apportion.search import (
    Problem,
    SearchResult,
    ShardMesh,
    data,
    shard_state,
    tensor_parallel,
)
from apportion.split import Space, space_of


def layout_strategy(problem: Problem, layout: MeshLayout) -> SearchResult:
    """The Strategy of a layout; raises ValueError if it is not for this step or cluster."""
    if layout.devices != problem.devices:
        raise ValueError(
            f"the layout is for {layout.devices} devices, the cluster has {problem.devices}"
        )
    placed = _placed(problem.space.source, layout)
    if layout.tensor == 1:
        found = data(problem)
    else:
        found = _within_groups(problem, layout, placed)
    if layout.shard == 1:
        return found
    space = found.space or _space(problem.space, found)
    dims = {} if placed is None else {n: p.shard for n, p in placed.items() if p.shard is not None}
    mesh = ShardMesh(layout.replicate, layout.shard, layout.tensor, dims)
    strategy = shard_state(space, found.strategy, mesh, keep=not layout.reshard)
    return SearchResult(strategy, notes=found.notes, space=found.space)


def _space(space: Space, found: SearchResult) -> Space:
    return space_of(space.source, found.strategy, space)


def _within_groups(
    problem: Problem, layout: MeshLayout, placed: Mapping[str, ParameterPlacement] | None
) -> SearchResult:
    width = layout.tensor
    groups = [range(k, k + width) for k in range(0, problem.devices, width)]
    dims = None
    if placed is not None:
        dims = {name: p.tensor for name, p in placed.items() if p.tensor is not None}
    return tensor_parallel(problem, groups, dims)


def _placed(graph: Graph, layout: MeshLayout) -> dict[str, ParameterPlacement] | None:
    """The placements by name of a parameter."""
    if layout.placements is None:
        return None
    dims = {
        value.name: len(value.shape or ())
        for number, value in enumerate(graph.values)
        if value.role == PARAMETER and graph.producer[number] is None
    }
    found: dict[str, ParameterPlacement] = {}
    for pattern, placement in layout.placements.items():
        names = matching(pattern, dims)
        if not names:
            raise ValueError(f"the step has no parameter {pattern!r} to place")
        for name in names:
            for cut in (placement.shard, placement.tensor):
                if cut is not None and cut >= dims[name]:
                    raise ValueError(
                        f"parameter {name!r} has {dims[name]} dimensions; Shard({cut}) cuts none"
                    )
            found[name] = placement
    return found


# Checkpointed modules


def checkpointed_ops(graph: Graph, layout: MeshLayout) -> list[int]:
    """The forward Ops that the modules which a layout checkpoints do again."""
    paths = modules_of(graph)
    chosen: set[str] = set()
    for pattern in layout.checkpoint:
        names = numbered_modules(graph) if pattern == EVERY_LAYER else matching(pattern, paths)
        if not names:
            raise ValueError(f"the step has no module {pattern!r} to checkpoint")
        chosen.update(names)
    return inside_modules(graph, chosen)
