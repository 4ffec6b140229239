"""owt: one weird trick (Krizhevsky 2014).

In: a Problem. Out: the Strategy that cuts convolutions along samples and dense layers along
features.

A dense layer's weight is a matrix; it is stored in slices of output features, and its products,
gradients and updates are cut along them on all devices, each for the whole batch. Ops that lie
between dense layers (their activations) follow, as far as all of their class can. All others are
cut along samples, their parameters on every device. What has neither axis runs everywhere.
"""

from __future__ import annotations

from collections.abc import Collection

from apportion.search.baselines.data import sample_classes
from apportion.search.baselines.weights import (
    atoms_cut_with,
    grouped_choice,
    sample_axis,
    tensor_axis,
    weights,
)
from apportion.search.problem import Problem, SearchResult
from apportion.split import AxisEffects, Space, Strategy


def owt(problem: Problem, *, budget: float = 0.0, seed: int = 0) -> SearchResult:
    """Dense layers over features, all else over samples."""
    space = problem.space
    everywhere = range(problem.devices)
    effects, samples = AxisEffects(space), sample_classes(space)
    stored = {
        w.value: max(w.out, key=lambda atom: space.factors(w.value)[atom])
        for w in weights(effects)
        if w.out and len(space.graph.values[w.value].shape or ()) == 2
    }
    stored_at = atoms_cut_with(effects, stored, samples)
    features = _follows(space, {_class(space, v, atom) for v, atom in stored.items()})
    choices = []
    for op in range(len(space.graph.ops)):
        tensor = tensor_axis(effects, op, stored_at, features)
        if tensor is not None:
            choices.append(grouped_choice(space, op, [everywhere], None, tensor))
        else:
            sample = sample_axis(space, op, samples)
            choices.append(grouped_choice(space, op, [[d] for d in everywhere], sample, None))
    return SearchResult(Strategy(tuple(choices), digits=space.digits, opening=space.opening))


def _class(space: Space, value: int, atom: int) -> int:
    return space.atoms.value_classes[value][atom]


def _follows(space: Space, features: Collection[int]) -> set[int]:
    """Those classes along which every Op that has them can be cut."""
    stuck = {
        axis.group
        for op in range(len(space.graph.ops))
        for axis, able in zip(space.axes(op), space.cuttable(op), strict=True)
        if not able and axis.extent > 1
    }
    return set(features) - stuck
