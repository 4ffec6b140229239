"""data: data parallelism. Ops that have the sample axis are cut along it; others run everywhere.

In: a Problem. Out: the Strategy of data parallelism, which other baselines start from.

The sample axis is the class of atoms that, as a rule, the first dimension of the batch's tensors
belongs to (sample_axis.py); where it is another one, or there is none, a note says so. Gradients of
parameters come out as partial sums and are reduced by lowering; parameters and optimizer state are
on every device.
"""

from __future__ import annotations

from apportion.describe import IllegalCut
from apportion.search.baselines.sample_axis import sample_axis
from apportion.search.problem import Problem, SearchResult
from apportion.split import Choice, Space, Strategy, one_cut, unsplit_choice


def data(problem: Problem, *, budget: float = 0.0, seed: int = 0) -> SearchResult:
    """Sample axes cut over all devices (fewer, if there are fewer samples), the rest replicated."""
    space, devices = problem.space, problem.devices
    samples = sample_axis(space)
    ops = range(len(space.graph.ops))
    choices = tuple(_choice(space, op, samples.classes, devices) for op in ops)
    note = samples.note(devices)
    strategy = Strategy(choices, opening=problem.space.opening)
    return SearchResult(strategy, notes=(note,) if note else ())


def sample_classes(space: Space) -> frozenset[int]:
    """Classes of the sample axis."""
    return sample_axis(space).classes


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
