"""A plan that is found for fewer ranks keeps what the known one decided beside its strategy."""

from __future__ import annotations

import pytest

import apportion as ap
from apportion.capture import Program
from apportion.cli.requests import capture_without_data
from apportion.plan import Plan, make_plan, with_model
from apportion.run.plan_for_ranks import replanned

MODEL = "mlp:tiny"
SHARE = 0.9  # of the memory that is needed if all state lies on the devices


@pytest.fixture(scope="module")
def program() -> Program:
    return capture_without_data(MODEL, 0)


@pytest.fixture(scope="module")
def roomy(program: Program) -> Plan:
    return make_plan(program, ap.cluster("4xh100"), "data", 0.0)


@pytest.mark.slow
def test_state_on_the_host_the_limit_and_the_policy_are_kept(program: Program, roomy: Plan) -> None:
    limit = int(SHARE * max(roomy.predicted.peak_bytes))
    known = make_plan(
        program, roomy.cluster, "data", 0.0, limit, 5, host_state="auto", communication="p3"
    )
    assert known.host_state and known.feasible
    found = replanned(program, with_model(known, MODEL), 2)
    assert len(found.cluster.devices) == 2 and found.method == "data"
    assert found.host_state and found.feasible
    assert found.memory_limit == (limit, limit)
    assert found.strategy.communication.policy == "p3"
    assert (found.model, found.seed) == (MODEL, 5)


@pytest.mark.slow
@pytest.mark.parametrize("update", ["host", "device"])
def test_state_that_lies_there_without_need_stays(
    update: str, program: Program, roomy: Plan
) -> None:
    known = make_plan(program, roomy.cluster, "data", 0.0, host_state=update)
    found = replanned(program, known, 3)
    assert [(h.parameter, h.update) for h in found.host_state] == [
        (h.parameter, h.update) for h in known.host_state
    ]


def test_a_plan_without_any_gets_none(program: Program, roomy: Plan) -> None:
    found = replanned(program, roomy, 2)
    assert not found.host_state and not found.recomputed and not found.offloaded
    assert found.strategy.communication.policy == roomy.strategy.communication.policy
