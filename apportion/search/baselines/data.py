"""data: data parallelism. Ops that have the sample axis are cut along it; others run everywhere.

In: a Problem. Out: the Strategy of data parallelism, which other baselines start from.

The sample axis is the class of atoms that the first dimension of the batch's tensors belongs to.
Gradients of parameters come out as partial sums and are reduced by lowering; parameters and
optimizer state are on every device.
"""

from __future__ import annotations

from collections import Counter

from apportion.describe import IllegalCut
from apportion.graph import INPUT
from apportion.search.problem import Problem, SearchResult
from apportion.split import Choice, Space, Strategy, one_cut, unsplit_choice


def data(problem: Problem, *, budget: float = 0.0, seed: int = 0) -> SearchResult:
    """Sample axes cut over all devices (fewer, if there are fewer samples), the rest replicated."""
    space, devices = problem.space, problem.devices
    samples = sample_classes(space)
    choices = tuple(_choice(space, op, samples, devices) for op in range(len(space.graph.ops)))
    return SearchResult(Strategy(choices, opening=problem.space.opening))


def sample_classes(space: Space) -> frozenset[int]:
    """Classes of the first atom of the batch's tensors; tensors of the batch that share no first
    extent stay out."""
    firsts = Counter[int]()
    found: dict[int, int] = {}
    for value, meant in enumerate(space.graph.values):
        dims = space.atoms.dims[value]
        if meant.role == INPUT and dims and dims[0]:
            group = space.atoms.value_classes[value][0]
            found[group] = meant.shape[0] if meant.shape else 0
            firsts[found[group]] += 1
    if not firsts:
        return frozenset()
    extent = max(firsts, key=lambda n: (firsts[n], n))
    return frozenset(g for g, n in found.items() if n == extent)


def _choice(space: Space, op: int, samples: frozenset[int], devices: int) -> Choice:
    for position, axis in enumerate(space.axes(op)):
        count = min(devices, axis.extent)
        if axis.group in samples and count > 1:
            parts = one_cut(len(space.axes(op)), position, count)
            try:
                space.split(op, parts)
            except IllegalCut:
                continue
            return Choice(parts, tuple(range(count)))
    return unsplit_choice(space, op, range(devices))
