"""Plans that fit because activations leave chunk by chunk while the device goes on."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from apportion import zoo
from apportion.capture.capture import capture
from apportion.graph import Graph
from apportion.machine.cluster import cluster
from apportion.machine.topology import Cluster
from apportion.plan.auto import choose
from apportion.plan.candidates import DefaultCosts, PlanRequest, fits
from apportion.plan.make_plan import make_plan
from apportion.plan.offload_in_chunks import LARGER, _ChunkedStep
from apportion.plan.plan import Plan
from apportion.split.space import Space

pytestmark = pytest.mark.slow
WHERE = cluster("1xtitanx")
BUDGET = 4.0


@pytest.fixture(scope="module")
def graph() -> Graph:
    it = zoo.load("deepspeech:frames=40", 0, meta=True)
    return capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm).graph


@pytest.fixture(scope="module")
def kept(graph: Graph) -> Plan:
    return make_plan(graph, WHERE, "single", 1.0)


def within(graph: Graph, limit: int, where: Cluster = WHERE, offload: str = "auto") -> Plan:
    return make_plan(
        graph, where, "single", BUDGET, limit, recompute="auto", offload=offload, host_state="auto"
    )


def test_copies_that_a_step_hides_cost_little(graph: Graph, kept: Plan) -> None:
    chunks = within(graph, int(0.6 * kept.predicted.peak_bytes[0]))
    assert chunks.feasible and chunks.memory.offloaded
    assert chunks.predicted.step_seconds < 1.1 * kept.predicted.step_seconds
    assert "wait in the host's memory" in " ".join(chunks.notes)


@pytest.mark.soak
def test_they_cost_less_than_recomputation(graph: Graph, kept: Plan) -> None:
    limit = int(0.6 * kept.predicted.peak_bytes[0])
    chunks, again = within(graph, limit), within(graph, limit, offload="none")
    assert chunks.feasible and again.feasible
    assert chunks.predicted.step_seconds < again.predicted.step_seconds


def test_nothing_is_tried_over_a_way_that_is_too_slow(graph: Graph, kept: Plan) -> None:
    links = tuple(replace(link, bandwidth=link.bandwidth / 1e4) for link in WHERE.links)
    slow = replace(WHERE, links=links)
    limit = int(0.6 * kept.predicted.peak_bytes[0])
    made = within(graph, limit, slow)
    assert made.feasible
    assert not made.memory.offloaded


@pytest.mark.soak
def test_chunks_are_tried_over_a_slow_way_if_nothing_else_fits(graph: Graph) -> None:
    links = tuple(replace(link, bandwidth=link.bandwidth / 30) for link in WHERE.links)
    slow = replace(WHERE, links=links)
    request = PlanRequest(Space(graph), slow, DefaultCosts(slow), (1 << 31,))
    chunked = _ChunkedStep(request, choose(request, "single", 1.0).best)
    least = chunked._trial((1 << 31) // 64, (True, True), 0).candidate.timeline.peak_bytes[0]
    assert not within(graph, least, slow, offload="none").feasible
    made = within(graph, least, slow)
    assert made.feasible
    assert made.memory.offloaded


def test_one_size_is_tried_when_it_is_late(graph: Graph) -> None:
    request = PlanRequest(Space(graph), WHERE, DefaultCosts(WHERE), (1 << 20,))
    chunked = _ChunkedStep(request, choose(request, "single", 1.0).best)
    (only,) = chunked.trials(lambda: True)
    assert only.how == (True, True)


def test_larger_chunks_are_taken_where_they_fit(graph: Graph, kept: Plan) -> None:
    """They wait less for the host, and hold more; the largest that fits is looked for."""
    limit = int(0.6 * kept.predicted.peak_bytes[0])
    request = PlanRequest(Space(graph), WHERE, DefaultCosts(WHERE), (limit,))
    chunked = _ChunkedStep(request, choose(request, "single", 1.0).best)
    small = chunked._trial(limit // 256, (True, True), limit)
    assert fits(request, small.candidate)
    tried = list(chunked.larger(small, math.inf))
    assert 2 <= len(tried) <= LARGER
    best = min(
        (one for one in tried if fits(request, one)), key=lambda one: one.timeline.step_seconds
    )
    assert best.timeline.step_seconds < small.candidate.timeline.step_seconds
    assert not list(chunked.larger(small, 0.0))  # no time is left
