"""The verification itself can fail: planted errors are found, and draws are independent."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from apportion.capture.decompose.base import DECOMPOSITIONS
from apportion.capture.normalise import Node
from apportion.execute.kernels import base
from apportion.verify.draws import draw
from apportion.verify.sample import aten, sample_of
from apportion.verify.verdict import RAISED, WRONG
from apportion.verify.verify_call import verify

X = torch.randn(4, 6)


def test_a_decomposition_that_computes_something_else_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def to_cosine(node: Node, make: Any) -> list[Node]:
        return [Node("aten.cos.default", node.args, node.outputs, node.site)]

    monkeypatch.setitem(DECOMPOSITIONS, "aten.sin.default", to_cosine)
    (verdict,) = verify([sample_of(aten.sin.default, X)], blind=False)
    (cut,) = verdict.bad
    assert (cut.axis, cut.status) == ("the whole", WRONG)
    assert "aten.sin.default: the lifted operators differ from the call" in cut.why


@pytest.mark.slow
def test_a_kernel_that_kills_its_process_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(*_: Any) -> tuple[Any, ...]:
        os._exit(9)

    known = base._kernel
    monkeypatch.setattr(base, "_kernel", lambda kind: kill if "tanh" in kind else known(kind))
    dead, alive = verify([sample_of(aten.tanh.default, X), sample_of(aten.exp.default, X)])
    assert [cut.status for cut in dead.bad] == [RAISED]
    assert alive.splits and alive.finds == 2


def test_draws_differ_and_stay_in_the_domain() -> None:
    values = torch.tensor([[0.1, 0.9, 0.4], [0.6, float("inf"), float("nan")]])
    sample = sample_of(aten.neg.default, values)
    first, second = draw(sample, 0)[0], draw(sample, 1)[0]
    finite = values.isfinite()
    for drawn in (first, second):
        assert drawn.dtype == torch.float64
        assert torch.equal(drawn.isfinite(), finite)
        assert drawn[finite].min() >= 0.1 - 1e-7 and drawn[finite].max() <= 0.9 + 1e-7
        assert (drawn[finite] != values.double()[finite]).sum() >= 2  # the ends may be clamped
    assert not torch.equal(first[finite], second[finite])
    (constant,) = draw(sample_of(aten.neg.default, torch.ones(5)), 0)
    assert constant.unique().numel() == 5


@pytest.mark.slow
def test_what_holds_by_accident_of_order_is_not_found() -> None:
    """The first of two numbers is their minimum on one draw in two."""
    (verdict,) = verify([sample_of(aten.select.int, torch.tensor([1.0, 2.0, 3.0, 4.0]), 0, 0)])
    assert verdict.searched and not verdict.missing
