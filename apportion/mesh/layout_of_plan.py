"""layout_of_plan: the MeshLayout that says the same as a Plan, or why there is none.

Part of the room mesh. A captured Graph and a Plan come in, a MeshLayout goes out. The mesh and the
placements are read off the Plan: how many parts samples have, and which piece of every parameter
each device holds. Then the layout is turned into a Strategy again (layout_strategy.py), and that
must be the Plan's, Op by Op: what a layout would do otherwise is what it cannot say, and is named.
So the Plan of an exported layout predicts what the exported Plan does.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from apportion.describe import Box
from apportion.graph import FORWARD, PARAMETER, Graph
from apportion.memory import carry_strategy, is_within, modules_of, planned_graph
from apportion.mesh.layout_strategy import checkpointed_ops, layout_strategy
from apportion.mesh.mesh_layout import MeshLayout, ParameterPlacement
from apportion.plan import MODULES, Plan, repeated_ops
from apportion.search import Problem, UnsuitableMethod, sample_classes
from apportion.split import Choice, Space, Strategy


class NotExpressible(ValueError):
    """A Plan does something that no layout on a mesh says; the message names the operator."""


def layout_of_plan(graph: Graph, plan: Plan) -> MeshLayout:
    """The layout of a Plan for a captured Graph; raises NotExpressible, naming the operator."""
    _check_settings(plan)
    made = planned_graph(graph, plan.memory)
    if made.graph.fingerprint != plan.graph.fingerprint:
        raise ValueError("the plan was made for another step than that of its model; plan it again")
    samples, tensor = _groups_of_samples(plan)
    placements, shard = _placements(plan, tensor)
    if samples % shard:
        raise _no_mesh(plan, f"state is cut over {shard} devices and samples over {samples}")
    again = _checkpoint(graph, plan)
    reshard = bool(plan.strategy.refetched)
    layout = MeshLayout(samples // shard, shard, tensor, reshard, placements, again)
    space = Space(graph)
    problem = Problem(space, plan.cluster, plan.cost, plan.memory_limit)
    try:
        strategy = layout_strategy(problem, layout).strategy
    except UnsuitableMethod as refusal:
        raise _no_mesh(plan, str(refusal)) from None
    if plan.memory:
        strategy = carry_strategy(strategy, space, made)
    _check_equal(plan, strategy, layout)
    return layout


def _check_settings(plan: Plan) -> None:
    """Raises NotExpressible for what has nothing to do with cuts."""
    ops, values = plan.space.graph.ops, plan.graph.values
    if plan.staleness is not None:
        raise NotExpressible("a plan whose ranks train on stale parameters has no layout on a mesh")
    for op in ops:
        if op.kind.startswith("apportion.") and "host" in op.kind:
            raise NotExpressible(
                f"operator {op.name!r} ({op.kind}) copies to or from the host; FSDP2 and DTensor "
                "have no such decision for single values"
            )
    if plan.strategy.wire:
        raise NotExpressible(f"sums of gradients travel in {plan.strategy.wire}, parameters do not")
    if plan.strategy.communication.overlaps:
        name = next((v.name for v in values if v.role == PARAMETER), "the first parameter")
        raise NotExpressible(f"the next step begins before {name!r} is new (communication p3)")


def _groups_of_samples(plan: Plan) -> tuple[int, int]:
    """Into how many parts samples are cut, and how many devices share each."""
    space, devices = plan.space, len(plan.cluster.devices)
    classes, most, at = sample_classes(space), 1, 0
    for index, op in enumerate(space.graph.ops):
        if op.phase == FORWARD:
            cuts = zip(space.axes(index), plan.strategy.choices[index].parts, strict=True)
            parts = math.prod(n for axis, n in cuts if axis.group in classes)
            if parts > most:
                most, at = parts, index
    if devices % most:
        raise NotExpressible(
            f"{_in_words(plan, at)} has its samples cut into {most} parts: "
            f"{devices} devices are no mesh of these"
        )
    return most, devices // most


def _placements(plan: Plan, tensor: int) -> tuple[dict[str, ParameterPlacement], int]:
    """Where each parameter is cut over shards and tensor ranks, and over how many shards."""
    space, found, most = plan.space, dict[str, ParameterPlacement](), 1
    for before, _ in space.graph.state:
        value = space.graph.values[before]
        if value.role != PARAMETER:
            continue
        boxes = _pieces(plan, before)
        most = max(most, len({boxes.get(k) for k in range(0, len(plan.cluster.devices), tensor)}))
        dims = [
            _differing_dim(space, before, boxes.get(0), boxes.get(other))
            for other in (tensor, 1 if tensor > 1 else 0)
        ]
        found[value.name] = ParameterPlacement(*dims)
    return found, most


def _pieces(plan: Plan, before: int) -> dict[int, Box]:
    """By device the piece of a state that it holds across steps."""
    space, strategy = plan.space, plan.strategy
    after = space.graph.after[before]
    layout = strategy.layouts.get(before) or strategy.layouts.get(after)
    if layout is not None:
        return {device: box for box, device in layout.pieces(space.factors(before))}
    made = space.graph.producer[after]
    if made is None:
        return {}
    op, position = made
    choice = strategy.choices[op]
    parts = space.split(op, choice.parts).parts
    return {
        device: parts[k % choice.count].outputs[position] for k, device in enumerate(choice.devices)
    }


def _differing_dim(space: Space, value: int, one: Box | None, other: Box | None) -> int | None:
    """The dimension in which two pieces of a Value differ."""
    if one is None or other is None or one == other:
        return None
    owners = [dim for dim, row in enumerate(space.atoms.dims[value]) for _ in row]
    return next(owners[k] for k, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)


# Recomputation


def _checkpoint(graph: Graph, plan: Plan) -> tuple[str, ...]:
    """The outermost modules that are computed again as a whole, and together are all that is."""
    again = set(plan.recomputed)
    if not again:
        return ()
    if plan.memory.order:
        raise _no_mesh(plan, "operators run in another order than that of the model")
    chosen: list[str] = []
    paths = modules_of(graph)
    for path in paths:
        if any(is_within(path, outer) for outer in chosen) or _is_list(path, paths):
            continue
        inside = checkpointed_ops(graph, MeshLayout(checkpoint=(path,)))
        repeats = repeated_ops(graph, inside)
        if repeats and again.issuperset(repeats):
            chosen.append(path)
    made = repeated_ops(graph, checkpointed_ops(graph, MeshLayout(checkpoint=tuple(chosen))))
    if again != set(made):
        raise _no_modules(graph, again, made)
    return tuple(chosen)


def _no_modules(graph: Graph, again: set[int], made: Collection[int]) -> NotExpressible:
    """Why recomputation does not follow modules: the first Op of a module that is done in part."""
    apart = again.symmetric_difference(made)
    op = min(apart)
    which = "is computed again" if op in again else "is not computed again"
    return NotExpressible(
        f"operator {graph.ops[op].name!r} of module {graph.ops[op].module!r} {which} in the "
        "backward, unlike the rest of its module: checkpointing takes whole modules, which "
        f"{len(apart)} operators here do not follow (--recompute auto chooses single operators, "
        f"full segments that end inside modules); plan it again with --recompute {MODULES}"
    )


def _is_list(path: str, paths: list[str]) -> bool:
    """Whether a module is a list of numbered ones, which is not called itself."""
    inside = [other.removeprefix(f"{path}.") for other in paths if other.startswith(f"{path}.")]
    return bool(inside) and all(name.partition(".")[0].isdecimal() for name in inside)


# What a layout would do


def _check_equal(plan: Plan, strategy: Strategy, layout: MeshLayout) -> None:
    """Raises NotExpressible, naming the first Op or Value, unless the two Strategies are equal."""
    mine, space = plan.strategy, plan.space
    if mine.opening != strategy.opening:
        one = min(set(mine.opening).symmetric_difference(strategy.opening))
        raise NotExpressible(
            f"operator {plan.graph.ops[one].name!r} is cut inside here, not on a mesh of {layout}, "
            "or the other way round"
        )
    for index, (own, other) in enumerate(zip(mine.choices, strategy.choices, strict=True)):
        if own != other:
            raise NotExpressible(
                f"{_in_words(plan, index)} is cut {_shown(space, index, own)}; on a mesh of "
                f"{layout} it would be {_shown(space, index, other)}"
            )
    for value in sorted(mine.layouts.keys() | strategy.layouts.keys()):
        if mine.layouts.get(value) != strategy.layouts.get(value):
            name, made = space.graph.values[value].name, space.graph.producer[value]
            by = f", which {_in_words(plan, made[0])} makes," if made else ""
            raise NotExpressible(f"value {name!r}{by} lies otherwise than on a mesh of {layout}")
    if set(mine.refetched) != set(strategy.refetched):
        value = min(set(mine.refetched).symmetric_difference(strategy.refetched))
        name = space.graph.values[value].name
        raise NotExpressible(
            f"parameter {name!r} is not gathered as the others are: FSDP2 gathers all of them for "
            "the backward again, or none"
        )


def _in_words(plan: Plan, index: int) -> str:
    op = plan.space.graph.ops[index]
    where = ", ".join(filter(None, (op.module, op.line)))
    return f"operator {op.name!r}" + (f" ({where})" if where else "")


def _shown(space: Space, op: int, choice: Choice) -> str:
    """The parts of an Op by the names of its axes, and how many devices have it."""
    if len(choice.parts) != len(space.axes(op)):
        return "in another division of its axes"
    pairs = zip(space.axes(op), choice.parts, strict=True)
    cuts = [f"{axis.name} in {parts}" for axis, parts in pairs if parts > 1]
    how = " and ".join(cuts) or "whole"
    return f"{how}, {choice.replicas} times, on {len(set(choice.devices))} devices"


def _no_mesh(plan: Plan, why: str) -> NotExpressible:
    heaviest = max(
        range(len(plan.space.graph.ops)), key=lambda k: plan.strategy.choices[k].count, default=0
    )
    return NotExpressible(f"{why}: see {_in_words(plan, heaviest)}")
