"""Groups: a forward Op with its backward Ops and the updates of its parameters."""

from __future__ import annotations

import pytest
from graphs import captured

from apportion.graph import BACKWARD, FORWARD, UPDATE
from apportion.split.groups import Groups


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["mlp:tiny", "gpt2:tiny", "rnnlm:tiny"])
def test_members_of_a_group_are_in_it(spec: str) -> None:
    program, _ = captured(spec)
    graph = program.graph
    groups = Groups(graph)
    for index, op in enumerate(graph.ops):
        group = groups.of(index)
        assert index in group and len(set(group)) == len(group)
        if op.phase == BACKWARD and op.forward is not None and len(group) > 1:
            assert group == groups.of(op.forward)
        if op.phase == UPDATE and op.parameter is not None and len(group) > 1:
            assert graph.ops[group[0]].phase == FORWARD


def test_a_layer_has_its_backward_and_its_updates() -> None:
    program, _ = captured("mlp:tiny")
    graph = program.graph
    first = next(k for k, op in enumerate(graph.ops) if op.kind == "aten.addmm.default")
    phases = [graph.ops[k].phase for k in Groups(graph).of(first)]
    assert phases[0] == FORWARD and BACKWARD in phases
    assert phases.count(UPDATE) >= 2  # weight and bias
