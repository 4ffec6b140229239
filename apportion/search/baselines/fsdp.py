"""fsdp: data parallelism with fully sharded state (ZeRO-3, FSDP).

In: a Problem. Out: the Strategy of `data`, with state and its updates cut as well.

Ops are cut as by `data`; parameters, optimizer state, their updates and what leads to nothing but
updates are cut over all devices along their first atom that is long enough. So are casts of
parameters, which are gathered in the precision that they are used in. A parameter is gathered at
its first use and kept until its last; where casts are recomputed, the backward gathers them anew.
"""

from __future__ import annotations

from apportion.describe import IllegalCut
from apportion.graph import PARAMETER, UPDATE, Graph
from apportion.lower import termwise
from apportion.search.baselines.data import data
from apportion.search.problem import Problem, SearchResult
from apportion.split import Choice, Space, Strategy, one_cut

CAST = "aten._to_copy.default"


def fsdp(problem: Problem, *, budget: float = 0.0, seed: int = 0) -> SearchResult:
    """Data parallelism, updates and state sharded."""
    space = problem.space
    graph = space.graph
    start = data(problem).strategy
    splits = [space.split(o, choice.parts) for o, choice in enumerate(start.choices)]
    partial = termwise(space, start, splits)  # computed on terms: nothing to shard yet
    choices = list(start.choices)
    sharded: set[int] = set()
    for index in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[index]
        readers = {r for v in op.outputs for r in graph.consumers[v]}
        uncut = choices[index].count == 1 and index not in partial
        leads_to_update = uncut and bool(readers) and readers <= sharded
        if op.phase == UPDATE or leads_to_update:
            choice = _sharded(space, index, problem.devices)
            if choice is not None:
                choices[index] = choice
                sharded.add(index)
    for index, op in enumerate(graph.ops):
        if op.kind == CAST and _updated(graph, op.inputs[0]) in sharded:
            choices[index] = _sharded(space, index, problem.devices) or choices[index]
    return SearchResult(Strategy(tuple(choices), digits=space.digits, opening=space.opening))


def _updated(graph: Graph, parameter: int) -> int | None:
    """The Op that updates a parameter."""
    ends = dict(graph.state).get(parameter)
    made = None if ends is None else graph.producer[ends]
    return None if made is None or graph.values[parameter].role != PARAMETER else made[0]


def _sharded(space: Space, op: int, devices: int) -> Choice | None:
    axes = space.axes(op)
    for position, axis in sorted(enumerate(axes), key=lambda pair: bool(pair[1].extent % devices)):
        if axis.extent >= devices:
            parts = one_cut(len(axes), position, devices)
            try:
                space.split(op, parts)
            except IllegalCut:
                continue
            return Choice(parts, tuple(range(devices)))
    return None
