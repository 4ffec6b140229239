"""Offloading on real processes: the step is the same, and the peak of every rank, by the events of
its allocator, is the predicted one, in which what lies on the host is not counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from apportion import zoo
from apportion.capture.capture import capture
from apportion.machine.cluster import cluster
from apportion.plan.make_plan import make_plan
from apportion.run.pool import ProcessPool
from apportion.run.step_source import source_of_model
from apportion.run.training import TrainingRequest
from apportion.simulate.host_bytes import host_peaks

SEED, SPEC = 7, "gpt2:tiny"


@pytest.mark.slow
def test_an_offloaded_step_trains_the_same_in_less_memory() -> None:
    it = zoo.load(SPEC, SEED)
    program = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)
    place = cluster("local:2")
    kept = make_plan(program, place, "data", 1.0)
    away = make_plan(program, place, "data", 1.0, recompute="full", offload="full")
    assert away.offloaded and away.recomputed
    assert max(away.predicted.peak_bytes) < max(kept.predicted.peak_bytes)
    assert min(host_peaks(away.tasks)) > 0 and max(host_peaks(kept.tasks)) == 0
    with ProcessPool(2, 120.0) as pool:
        source = source_of_model(program, SPEC, SEED)
        other = replace(source, graph=away.graph)
        plain = pool.train(TrainingRequest(source, kept.strategy, 2, 2, SEED, double=True))
        wide = pool.train(TrainingRequest(other, away.strategy, 2, 2, SEED, double=True))
        for one, same in zip(plain, wide, strict=True):
            assert same.losses == pytest.approx(one.losses, rel=1e-12) and same.notes == []
        own = pool.train(TrainingRequest(other, away.strategy, 2, 1, SEED, profile=True))
        assert [rank.peak_bytes for rank in own] == list(away.predicted.peak_bytes)
