"""A model for `apportion place`: its step as a placement problem, and the judge of placements.

Part of the room cli. A model's name and a Cluster come in; a PlacementProblem and a function go out
that simulates a placement as it would be run. Searches look at the fast copy of the simulator's
rules; what is printed is the simulator's.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from apportion.cli.requests import capture_without_data

if TYPE_CHECKING:
    from apportion.columns import Ints
    from apportion.machine import Cluster
    from apportion.place import Evaluation, Judge, PlacementProblem
    from apportion.search import Problem


def model_problem(model: str, cluster: Cluster, seed: int) -> tuple[PlacementProblem, Judge]:
    """The problem of placing a model's step, with an expert's placement, and who judges it."""
    from apportion.machine import default_cost
    from apportion.place import captured_problem
    from apportion.search import Problem, with_layers_as_expert
    from apportion.split import Space

    space = Space(capture_without_data(model, seed).graph)
    problem = Problem(space, cluster, default_cost(cluster))
    step = captured_problem(space, cluster, problem.cost, name=model)
    return with_layers_as_expert(step, space.graph), partial(simulated, problem)


def simulated(problem: Problem, step: PlacementProblem, place: Ints) -> Evaluation:
    """A placement under the full simulator."""
    import numpy as np

    from apportion.lower import lower
    from apportion.place import Evaluation
    from apportion.search import strategy_of
    from apportion.simulate import simulate

    tasks = lower(problem.space, strategy_of(problem, step, place), problem.devices)
    line = simulate(tasks, problem.cluster, problem.cost)
    loads = np.array(line.busy) * line.step_seconds
    peaks = np.array(line.peak_bytes, np.int64)
    return Evaluation(line.step_seconds, loads, peaks, bool((peaks <= step.limit).all()))
