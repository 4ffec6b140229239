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
from apportion.plan.auto import Selection, choose
from apportion.plan.candidate import Candidate
from apportion.plan.candidates import DefaultCosts, PlanRequest, fits
from apportion.plan.make_plan import make_plan
from apportion.plan.offload_in_chunks import LARGER, _ChunkedStep, _promising, replace_in_chunks
from apportion.plan.plan import Plan
from apportion.split.space import Space

pytestmark = pytest.mark.slow
WHERE = cluster("1xtitanx")
BUDGET = 60.0


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


def limited(graph: Graph, kept: Plan, where: Cluster = WHERE) -> tuple[PlanRequest, Selection]:
    """To stay within six tenths of what the step holds, and what does not."""
    limit = int(0.6 * kept.predicted.peak_bytes[0])
    request = PlanRequest(Space(graph), where, DefaultCosts(where), (limit,))
    return request, choose(request, "single", 1.0)


@pytest.fixture(scope="module")
def hidden(graph: Graph, kept: Plan) -> Candidate:
    """What fits in chunks."""
    request, chosen = limited(graph, kept)
    return replace_in_chunks(request, chosen, chosen).best


def test_copies_that_a_step_hides_cost_little(graph: Graph, kept: Plan, hidden: Candidate) -> None:
    assert fits(limited(graph, kept)[0], hidden) and hidden.memory.offloaded
    assert hidden.timeline.step_seconds < 1.1 * kept.predicted.step_seconds
    assert "wait in the host's memory" in " ".join(hidden.notes)


@pytest.mark.soak
def test_they_cost_less_than_recomputation(graph: Graph, kept: Plan) -> None:
    limit = int(0.6 * kept.predicted.peak_bytes[0])
    chunks, again = within(graph, limit), within(graph, limit, offload="none")
    assert chunks.feasible and again.feasible
    assert chunks.predicted.step_seconds < again.predicted.step_seconds


def test_nothing_is_tried_over_a_way_that_is_too_slow(
    graph: Graph, kept: Plan, hidden: Candidate
) -> None:
    links = tuple(replace(link, bandwidth=link.bandwidth / 1e4) for link in WHERE.links)
    request, chosen = limited(graph, kept, replace(WHERE, links=links))
    assert _promising(limited(graph, kept)[0], chosen.best, hidden)
    assert not _promising(request, chosen.best, hidden)
    best = Selection(hidden)
    assert replace_in_chunks(request, chosen, best) is best


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
