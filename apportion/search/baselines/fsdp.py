"""fsdp, fsdp-keep, zero2: data parallelism with sharded state (ZeRO, FSDP).

In: a Problem. Out: the Strategy of `data`, with state and its updates cut as well.

Ops are cut as by `data`; optimizer state, updates and what leads to nothing but updates are cut
over all devices along their first atom that is long enough. What differs is where parameters are,
and how long what is gathered of them is kept:

    fsdp       cut; gathered for the forward and again for the backward (ZeRO-3, FSDP)
    fsdp-keep  cut; gathered at the first use and kept until the last (reshard_after_forward=False)
    zero2      on every device, and gathered as they are updated

Gradients are summed onto the device that updates with them, bucket by bucket as the backward makes
them. ZeRO-1 sums all of them after the backward: the same bytes, and more of them at once.

Casts of parameters that are cut are cut too, so that these are gathered in the precision that they
are used in.
"""

from __future__ import annotations

from dataclasses import replace

from apportion.describe import IllegalCut
from apportion.graph import BACKWARD, FORWARD, PARAMETER, UPDATE, Graph
from apportion.lower import termwise
from apportion.search.baselines.data import data
from apportion.search.problem import Problem, SearchResult
from apportion.split import Choice, Layout, Space, Strategy, one_cut

CAST = "aten._to_copy.default"


def fsdp(problem: Problem, *, budget: float = 0.0, seed: int = 0) -> SearchResult:
    """Updates, state and parameters sharded; parameters gathered for each pass."""
    strategy, sharded = _sharded_state(problem)
    graph = problem.space.graph
    gathered = {
        graph.ops[op].outputs[0] for op in _casts(graph, sharded) if strategy.choices[op].count > 1
    }
    gathered.update(_parameters(graph, sharded))
    refetched = [value for value in sorted(gathered) if _both_passes_read(graph, value)]
    return SearchResult(replace(strategy, refetched=tuple(refetched)))


def fsdp_keep(problem: Problem, *, budget: float = 0.0, seed: int = 0) -> SearchResult:
    """The same, parameters gathered once."""
    return SearchResult(_sharded_state(problem)[0])


def zero2(problem: Problem, *, budget: float = 0.0, seed: int = 0) -> SearchResult:
    """Updates and state sharded, parameters on every device."""
    strategy, sharded = _sharded_state(problem, cut_casts=False)
    graph = problem.space.graph
    return SearchResult(_on_every_device(problem, strategy, _at_both_ends(graph, sharded)))


def _sharded_state(problem: Problem, cut_casts: bool = True) -> tuple[Strategy, set[int]]:
    """Data parallelism with updates and state sharded, and the Ops that are cut for that."""
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
    for index in _casts(graph, sharded) if cut_casts else ():
        choices[index] = _sharded(space, index, problem.devices) or choices[index]
    return Strategy(tuple(choices), digits=space.digits, opening=space.opening), sharded


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


def _casts(graph: Graph, sharded: set[int]) -> list[int]:
    """The Ops that cast a parameter whose update is sharded."""
    return [
        index
        for index, op in enumerate(graph.ops)
        if op.kind == CAST and _updated(graph, op.inputs[0]) in sharded
    ]


def _both_passes_read(graph: Graph, value: int) -> bool:
    return {FORWARD, BACKWARD} <= {graph.ops[op].phase for op in graph.consumers[value]}


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
