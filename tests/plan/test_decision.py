"""What a plan decides, in a sentence; and how much of the devices' arithmetic it uses."""

from __future__ import annotations

import pytest
from graphs import captured

import apportion as ap
from apportion.cli.requests import capture_without_data
from apportion.plan.decision import decision
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan
from apportion.plan.utilisation import utilisation

GPT = "gpt2:layers=2,width=32,heads=4,vocab=64,seq=8,batch=8"


def made(method: str, spec: str = GPT, place: str = "4xh100", **how: str) -> Plan:
    return make_plan(captured(spec)[0], ap.cluster(place), method, 1.0, seed=3, **how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("single", "Everything on device 0"),
        ("data", "Data parallel over 4 devices"),
        ("zero2", "Data parallel over 4 devices; optimizer state cut over 4"),
        ("fsdp-keep", "Data parallel over 4 devices; parameters and optimizer state cut over 4"),
        ("op-placement", "Layers whole, placed on 4 of 4 devices"),
    ],
)
def test_a_baseline_is_called_what_it_is(method: str, says: str) -> None:
    assert decision(made(method)) == says


@pytest.mark.slow
def test_layers_that_are_cut_are_told_apart_from_samples() -> None:
    assert decision(made("megatron")).startswith("Weights cut over 4 devices")
    two = decision(made("megatron", place="2x2xh100"))
    assert two.startswith("Data parallel over 2, weights cut in 2, on 4 devices")


@pytest.mark.slow
def test_modules_that_differ_are_named() -> None:
    said = decision(made("owt", "lenet:tiny", "4xk80"))
    assert said.startswith("Data parallel over 4 devices; ") and "full1: weights cut over 4" in said


@pytest.mark.slow
def test_what_is_traded_for_memory_is_said() -> None:
    said = decision(made("data", recompute="full", offload="full"))
    assert "2 of 2 layers computed again in the backward" in said
    assert "activations wait in the host's memory" in said
    said = decision(made("data", communication="p3", place="2x2xk80"))
    assert said.endswith("the next step begins while gradients travel")


def test_one_device_needs_few_words() -> None:
    assert decision(made("single", place="1xh100")) == "Everything on the one device"


@pytest.mark.slow
def test_utilisation_is_of_the_models_own_operations() -> None:
    plain, again = made("data"), made("data", recompute="full")
    assert again.recomputed and 0 < utilisation(plain) < 1
    ideal = utilisation(plain) * plain.predicted.step_seconds
    assert utilisation(again) * again.predicted.step_seconds == pytest.approx(ideal, rel=1e-12)
    alone = made("single")
    assert utilisation(alone) * alone.predicted.step_seconds == pytest.approx(ideal, rel=1e-12)


@pytest.mark.slow
def test_utilisation_of_a_product_is_what_is_counted_by_hand() -> None:
    program = capture_without_data("mlp:layers=1,width=256,batch=512", 0)
    plan = make_plan(program, ap.cluster("2xh100"), "data", 0.0)
    flops = sum(
        plan.space.split(k, (1,) * len(plan.space.axes(k))).parts[0].flops
        for k in range(len(plan.space.graph.ops))
    )
    rate = dict(plan.cluster.devices[0].flops)[4]
    expected = flops / (2 * rate) / plan.predicted.step_seconds
    assert utilisation(plan) == pytest.approx(expected, rel=1e-9)
