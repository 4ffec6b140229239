"""fsdp, fsdp-keep, zero2: data parallelism with sharded state (ZeRO, FSDP).

In: a Problem. Out: the Strategy of `data`, with state and its updates cut as well; `shard_state`
does the same to any Strategy on a mesh of devices.

Ops are cut as by `data`; optimizer state, updates and what leads to nothing but updates are cut
over all devices along their first atom that is long enough. What differs is where parameters are,
and how long what is gathered of them is kept:

    fsdp       cut; gathered for the forward and again for the backward (ZeRO-3, FSDP)
    fsdp-keep  cut; gathered at the first use and kept until the last (reshard_after_forward=False)
    zero2      on every device, and gathered as they are updated

Gradients are summed onto the device that updates with them, bucket by bucket as the backward makes
them. ZeRO-1 sums all of them after the backward: the same bytes, and more of them at once.

Casts of parameters that are cut are cut too, so that these are gathered in the precision that they
are used in; and so are views that both passes read, so that what is gathered is not kept as a view.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

import numpy as np

from apportion.describe import IllegalCut
from apportion.graph import BACKWARD, FORWARD, PARAMETER, UPDATE, Graph, Op
from apportion.lower import termwise
from apportion.search.baselines.data import data
from apportion.search.baselines.sample_axis import SampleAxis, sample_axis
from apportion.search.problem import Problem, SearchResult
from apportion.split import Choice, Layout, Space, Strategy

CAST = "aten._to_copy.default"


@dataclass(frozen=True)
class ShardMesh:
    """Devices in rank order as a mesh of `replicas` by `shards` by `tensor`: state is cut over the
    shards, besides what a Strategy cuts within each row of `tensor` devices.

    dims  by the name of a parameter, the dimension to cut it along; those of others are found
    """

    replicas: int
    shards: int
    tensor: int = 1
    dims: Mapping[str, int] = field(default_factory=dict)


def fsdp(problem: Problem, *, budget: float = 0.0, seed: int = 0) -> SearchResult:
    """Updates, state and parameters sharded; parameters gathered for each pass."""
    strategy, sharded = _sharded_state(problem)
    strategy = _gathered_twice(problem.space, strategy, sharded)
    return SearchResult(strategy, notes=_notes(problem, "fsdp"))


def shard_state(space: Space, start: Strategy, mesh: ShardMesh, keep: bool) -> Strategy:
    """A Strategy on a mesh with state and updates cut over its shards; what is gathered of
    parameters is kept for the backward, or gathered again."""
    strategy, sharded = _shard(space, start, mesh, cut_casts=True)
    return strategy if keep else _gathered_twice(space, strategy, sharded)


def _gathered_twice(space: Space, strategy: Strategy, sharded: set[int]) -> Strategy:
    """The same, where the backward gathers parameters anew."""
    graph = space.graph
    gathered = {
        graph.ops[op].outputs[0]
        for op, _ in _derived(graph, sharded)
        if strategy.choices[op].count > 1
    }
    gathered.update(_parameters(graph, sharded))
    refetched = [value for value in sorted(gathered) if _both_passes_read(graph, value)]
    return replace(strategy, refetched=tuple(refetched))


def fsdp_keep(problem: Problem, *, budget: float = 0.0, seed: int = 0) -> SearchResult:
    """The same, parameters gathered once."""
    return SearchResult(_sharded_state(problem)[0], notes=_notes(problem, "fsdp-keep"))


def zero2(problem: Problem, *, budget: float = 0.0, seed: int = 0) -> SearchResult:
    """Updates and state sharded, parameters on every device."""
    strategy, sharded = _sharded_state(problem, cut_casts=False)
    graph = problem.space.graph
    laid_out = _on_every_device(problem, strategy, _at_both_ends(graph, sharded))
    return SearchResult(laid_out, notes=_notes(problem, "zero2"))


def _notes(problem: Problem, method: str) -> tuple[str, ...]:
    """What the user should know of the samples, as `data` says it."""
    note = sample_axis(problem.space).note(problem.devices, method)
    return (note,) if note else ()


def _sharded_state(problem: Problem, cut_casts: bool = True) -> tuple[Strategy, set[int]]:
    """Data parallelism with updates and state sharded, and the Ops that are cut for that."""
    start = data(problem).strategy
    return _shard(problem.space, start, ShardMesh(1, problem.devices), cut_casts)


def _shard(
    space: Space, start: Strategy, mesh: ShardMesh, cut_casts: bool
) -> tuple[Strategy, set[int]]:
    graph, samples = space.graph, sample_axis(space)
    splits = [space.split(o, choice.parts) for o, choice in enumerate(start.choices)]
    partial = termwise(space, start, splits)  # computed on terms: nothing to shard yet
    choices = list(start.choices)
    sharded: set[int] = set()
    for index in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[index]
        readers = {r for v in op.outputs for r in graph.consumers[v]}
        uncut = index not in partial and not _cut_by_samples(space, index, choices[index], samples)
        leads_to_update = uncut and bool(readers) and readers <= sharded
        if op.phase == UPDATE or leads_to_update:
            choice = _sharded(space, index, choices[index], mesh)
            if choice is not None:
                choices[index] = choice
                sharded.add(index)
    for index, update in _derived(graph, sharded) if cut_casts else ():
        classes = _classes_cut(space, update, choices[update])
        choice = _sharded(space, index, choices[index], mesh, classes)
        choices[index] = choice or choices[index]
    layouts = {
        value: layout
        for value, layout in start.layouts.items()
        if sharded.isdisjoint(graph.consumers[value])
    }
    return replace(start, choices=tuple(choices), layouts=layouts), sharded


def _cut_by_samples(space: Space, op: int, choice: Choice, samples: SampleAxis) -> bool:
    axes = zip(space.axes(op), choice.parts, strict=True)
    return any(parts > 1 and axis.group in samples.classes for axis, parts in axes)


def _on_every_device(problem: Problem, strategy: Strategy, values: list[int]) -> Strategy:
    """The same, where these Values lie whole on every device."""
    factors, devices = problem.space.factors, tuple(range(problem.devices))
    whole = {value: Layout((1,) * len(factors(value)), devices) for value in values}
    return replace(strategy, layouts=strategy.layouts | whole)


def _parameters(graph: Graph, sharded: set[int]) -> list[int]:
    """The parameters whose updates are sharded."""
    return [before for before, _ in graph.state if _updated(graph, before) in sharded]


def _at_both_ends(graph: Graph, sharded: set[int]) -> list[int]:
    """The same as the step finds them, and as it leaves them: each is gathered once it is updated,
    and not all together at the end."""
    ends = dict(graph.state)
    return [value for before in _parameters(graph, sharded) for value in (before, ends[before])]


def _derived(graph: Graph, sharded: set[int]) -> list[tuple[int, int]]:
    """The Ops that make as many numbers of a parameter whose update is sharded, each with that
    update: casts, and views and the like that both passes read."""
    update_of = {p: _updated(graph, p) for p in _parameters(graph, sharded)}
    found = []
    for index, op in enumerate(graph.ops):
        update = update_of.get(op.inputs[0]) if len(op.inputs) == len(op.outputs) == 1 else None
        if update is None or not _as_many(graph, op):
            continue
        if op.kind == CAST or (op.phase == FORWARD and _both_passes_read(graph, op.outputs[0])):
            found.append((index, update))
            update_of[op.outputs[0]] = update
    return found


def _as_many(graph: Graph, op: Op) -> bool:
    """Whether an Op of one Value makes as many numbers as it reads."""
    before, after = graph.values[op.inputs[0]].shape, graph.values[op.outputs[0]].shape
    return before is not None and after is not None and math.prod(before) == math.prod(after)


def _classes_cut(space: Space, op: int, choice: Choice) -> set[int]:
    """The classes that a Choice cuts."""
    axes = zip(space.axes(op), choice.parts, strict=True)
    return {axis.group for axis, parts in axes if parts > 1}


def _both_passes_read(graph: Graph, value: int) -> bool:
    return {FORWARD, BACKWARD} <= {graph.ops[op].phase for op in graph.consumers[value]}


def _updated(graph: Graph, parameter: int) -> int | None:
    """The Op that updates a parameter."""
    ends = dict(graph.state).get(parameter)
    made = None if ends is None else graph.producer[ends]
    return None if made is None or graph.values[parameter].role != PARAMETER else made[0]


def _sharded(
    space: Space, op: int, now: Choice, mesh: ShardMesh, classes: Set[int] = frozenset()
) -> Choice | None:
    """The Choice of an Op that has nothing of samples, cut over the shards as well, along one of
    these classes rather than another."""
    devices = mesh.replicas * mesh.shards * mesh.tensor
    if now.count != mesh.tensor or len(now.devices) != devices:
        now = Choice((1,) * len(now.parts), tuple(range(devices)))
    for position, count in _shard_axes(space, op, now, mesh, classes):
        parts = list(now.parts)
        parts[position] = count
        try:
            space.split(op, parts)
        except IllegalCut:
            continue
        table = np.array(now.devices).reshape(mesh.replicas, mesh.shards, mesh.tensor)
        tensor = next((k for k, n in enumerate(now.parts) if n > 1), -1)
        if not position < tensor:
            table = table.transpose(0, 2, 1)
        return Choice(tuple(parts), tuple(table.ravel().tolist()))
    return None


def _shard_axes(
    space: Space, op: int, now: Choice, mesh: ShardMesh, classes: Set[int]
) -> list[tuple[int, int]]:
    """Axes that are long enough for so many parts, with these; those first that are of the classes,
    and then those that divide evenly."""
    wanted = _axes_of_dim(space, op, mesh)
    counts = [parts * mesh.shards for parts in now.parts]
    axes = zip(space.axes(op), counts, strict=True)
    able = [
        (axis.group not in classes, bool(axis.extent % count), position, count)
        for position, (axis, count) in enumerate(axes)
        if axis.extent >= count and (wanted is None or position in wanted)
    ]
    return [(position, count) for *_, position, count in sorted(able)]


def _axes_of_dim(space: Space, op: int, mesh: ShardMesh) -> set[int] | None:
    """The axes of an update that cut its parameter along the dimension that the mesh says; None
    where it says nothing."""
    parameter = space.graph.ops[op].parameter
    dim = None if parameter is None else mesh.dims.get(space.graph.values[parameter].name)
    if parameter is None or dim is None:
        return None
    rows = space.atoms.dims[parameter]
    first = sum(len(row) for row in rows[:dim])
    classes = space.atoms.value_classes[parameter]
    wanted = set(classes[first : first + len(rows[dim])])
    return {k for k, axis in enumerate(space.axes(op)) if axis.group in wanted}
