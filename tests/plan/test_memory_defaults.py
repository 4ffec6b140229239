"""The devices' memory is a limit, and so is a smaller one: what does not fit is recomputed or lies
on the host unless that is refused, and where a single operator is too large a sentence says so."""

from __future__ import annotations

import math

import pytest

import apportion as ap
from apportion import zoo
from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.machine.cluster import cluster
from apportion.plan.memory_defaults import memory_defaults


@pytest.fixture(scope="module")
def program() -> Program:
    it = zoo.load("gpt2:layers=1,width=64,heads=2,vocab=64,batch=8,seq=64", 0, meta=True)
    return capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)


@pytest.mark.parametrize(
    ("where", "limit", "given", "meant"),
    [
        ("1xh100", None, (None, None, None), ("auto", "auto", "auto")),
        ("1xh100", math.inf, (None, None, None), ("none", "none", "none")),
        ("1xh100", 1e9, (None, None, None), ("auto", "auto", "auto")),
        ("1xh100", 1e9, ("full", "none", "host"), ("full", "none", "host")),
        ("1xh100", 1e9, ("auto", None, None), ("auto", "none", "none")),
        ("local:2", 1e9, (None, None, None), ("auto", "none", "none")),
        ("local:2", 1e9, (None, "auto", "auto"), ("none", "auto", "auto")),
    ],
)
def test_what_is_not_said(
    where: str,
    limit: float | None,
    given: tuple[str | None, str | None, str | None],
    meant: tuple[str, str, str],
) -> None:
    assert memory_defaults(cluster(where), limit, *given) == meant


@pytest.mark.slow
def test_a_limit_is_kept_without_being_asked_how(program: Program) -> None:
    whole = ap.plan(program, "1xh100", method="single")
    limit = whole.predicted.peak_bytes[0] * 0.6
    fits = ap.plan(program, "1xh100", method="single", memory_limit=limit)
    assert fits.feasible and max(fits.predicted.peak_bytes) <= limit
    assert any("lie on the host" in note and "become" in note for note in fits.notes)
    refused = ap.plan(program, "1xh100", method="single", memory_limit=limit, recompute="none")
    assert not refused.feasible
    (side,) = ap.compare(program, "1xh100", ["single"], memory_limit=limit)
    assert side.feasible


@pytest.mark.slow
def test_a_limit_below_what_one_operator_needs(program: Program) -> None:
    found = ap.plan(program, "1xh100", method="single", budget=0.0, memory_limit=100e3)
    assert not found.feasible
    (told,) = [note for note in found.notes if "alone reads and writes" in note]
    assert "over its limit of 100 kB" in told
