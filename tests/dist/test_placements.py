"""Placements on four processes: by every method the single device's result, and the bytes planned.

`apportion run MODEL --procs 4 --method M --check` for every placer, with the processes, the model
and the eager run shared. Plans are made as if messages took no time, since tiny steps would stay on
one device. benchmarks/check_methods.py does this for every model and every method.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from soak import kept

from apportion import zoo
from apportion.capture.capture import capture
from apportion.capture.reference import capture_as, eager_steps
from apportion.capture.widen import widened
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.machine.topology import Cluster
from apportion.place.placers import PLACERS
from apportion.plan.plan import Plan, Prediction
from apportion.run.check_run import PER_STEP, distance, gather_copies
from apportion.run.pool import SharedPool
from apportion.run.step_source import source_of_model
from apportion.run.training import TrainingRequest, losses_of, vary
from apportion.search import METHODS
from apportion.search.problem import Problem, UnsuitableMethod
from apportion.split.space import Space
from apportion.split.strategy import Choice, Strategy

DEVICES, STEPS, SEED = 4, 2, 3
MODELS = ["inception-v3:tiny", "gnmt:tiny", "transformer-xl:tiny"]
PLACED = [name for name, row in METHODS.items() if row.options.get("placer") in PLACERS]


@pytest.fixture(scope="module")
def processes() -> Iterator[SharedPool]:
    with SharedPool(DEVICES, 240.0) as made:
        yield made


def _free_links() -> Cluster:
    here = cluster(f"local:{DEVICES}")
    links = tuple(replace(link, bandwidth=1e18, latency=0.0) for link in here.links)
    return replace(here, links=links)


def _strategies(space: Space) -> list[tuple[Strategy, list[str]]]:
    """What the methods find, and by which; those that need an extra that is not here are left
    out."""
    where = _free_links()
    problem = Problem(space, where, default_cost(where))
    found: dict[tuple[Choice, ...], tuple[Strategy, list[str]]] = {}
    for method in PLACED:
        try:
            strategy = METHODS[method](problem, budget=0.5, seed=SEED).strategy
        except UnsuitableMethod as why:
            assert "pip install" in str(why) or "no policy file" in str(why), why
            continue
        found.setdefault(strategy.choices, (strategy, []))[1].append(method)
    return list(found.values())


@pytest.mark.parametrize("spec", kept(MODELS, "gnmt:tiny"))
def test_placements_by_every_method_train_the_same_model(processes: SharedPool, spec: str) -> None:
    it = zoo.load(spec, SEED)
    program = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)
    exact = capture_as(program, torch.float64)
    losses, state = eager_steps(exact, [vary(exact.batch, SEED, k) for k in range(STEPS)], SEED)
    slack = PER_STEP * STEPS * max(float(g["lr"]) for g in exact.optimizer.param_groups)
    source, where = source_of_model(program, spec, SEED), cluster(f"local:{DEVICES}")
    none = Prediction(0.0, (0,) * DEVICES, 0, (0.0,) * DEVICES)
    several = _strategies(Space(program.graph))
    used: set[int] = set()
    for strategy, methods in several:
        how = (strategy, "", 0, 0.0, 0.0, none, None, default_cost(where))
        plan = Plan(widened(program.graph), where, *how)  # which the ranks run
        request = TrainingRequest(source, strategy, DEVICES, STEPS, SEED, double=True, state=True)
        ranks = processes.pool().train(request)
        split = gather_copies(plan.space, plan.tasks, ranks)
        found = distance(exact, losses_of(ranks), split, losses, state, slack)
        assert found.equal, (methods, found)
        assert sum(rank.sent_bytes for rank in ranks) == STEPS * plan.tasks.bytes_moved, methods
        used |= {device for choice in strategy.choices for device in choice.devices}
    assert used == set(range(DEVICES)) and len(several) > 4
