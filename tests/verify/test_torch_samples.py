"""A share of PyTorch's operator database that touches every description, and all own inputs.

The whole of it is `apportion ops --verify`, whose last table is docs/coverage.md.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
from soak import cases

from apportion import zoo
from apportion.capture.capture import capture
from apportion.capture.lift_call import lift_call
from apportion.capture.trace import CaptureError
from apportion.describe import descriptions
from apportion.describe.descriptions import find_description
from apportion.graph import Graph
from apportion.split.open_composites import open_composites
from apportion.verify import own_samples as inputs
from apportion.verify.sample import Sample
from apportion.verify.survey import core_operators
from apportion.verify.torch_samples import entries, samples_of_entry
from apportion.verify.verdict import Verdict
from apportion.verify.verify_call import verify

pytestmark = pytest.mark.slow  # all of them begin by running the whole database

EACH = cases(2, 1)  # calls of each operator
LOOKED_AT = cases(4, 2)  # of each entry of the database
CHUNKS = 6


@cache
def chosen() -> tuple[Sample, ...]:
    """Own inputs, and of each operator of the database the calls with the most elements."""
    found: dict[str, dict[str, Sample]] = {}
    for entry in entries():
        for sample in samples_of_entry(entry, limit=LOOKED_AT):
            found.setdefault(str(sample.target), {}).setdefault(sample.key, sample)
    largest = [
        sorted(calls.values(), key=lambda s: -sum(t.numel() for t in s.tensors))[:EACH]
        for calls in found.values()
    ]
    return (*inputs.samples(), *(sample for calls in largest for sample in calls))


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_derived_split_is_wrong_and_none_raises(chunk: int) -> None:
    verdicts = verify(chosen()[chunk::CHUNKS], blind=False)
    assert [_told(v) for v in verdicts if v.bad] == []
    assert [v.key for v in verdicts if {"wrong", "raised"} & v.pairs.keys()] == []
    assert sum(v.splits for v in verdicts) > 75 * EACH


def _told(verdict: Verdict) -> str:
    return f"{verdict.key}: {'; '.join(map(str, verdict.bad))}"


def test_every_description_is_touched() -> None:
    """A new description must bring a call of its operator, where the database has none."""
    touched: Counter[str] = Counter()
    for sample in chosen():
        args = [_filled(sample, arg) for arg in sample.args]
        named = {k: _filled(sample, arg) for k, arg in sample.kwargs.items()}
        try:
            graph = lift_call(sample.target, args, named).graph
        except (CaptureError, RuntimeError):
            continue
        _count(graph, touched)
    for spec in ("wresnet:tiny", "rnn:tiny"):  # own kinds of whole steps: updates, totals
        it = zoo.load(spec)
        _count(capture(it.step, it.model, it.optimizer, it.batch).graph, touched)
    own = {name for name in descriptions.DESCRIPTIONS if name.startswith(("aten.", "apportion."))}
    assert own - touched.keys() - set(UNREACHED.split()) == set()


# Composites in torch, operators that capture replaces by others, rare relatives of operators whose
# description they share, and the host's part, which only plans add (tests/memory).
UNREACHED = """
apportion.from_host apportion.host_update apportion.on_host apportion.to_host
aten.__lshift__ aten.__rshift__ aten._aminmax aten._batch_norm_with_update
aten._euclidean_dist aten._grid_sampler_2d_cpu_fallback
aten._grid_sampler_2d_cpu_fallback_backward aten._logcumsumexp
aten._native_batch_norm_legit.default aten._native_batch_norm_legit.no_stats aten._neg_view
aten._unsafe_view aten._upsample_lanczos2d_aa aten._upsample_lanczos2d_aa_backward
aten.alias aten.argsort.default aten.argsort.stable aten.avg_pool2d_backward
aten.avg_pool3d_backward aten.conj_physical aten.contiguous aten.detach aten.embedding
aten.embedding_dense_backward aten.float_power aten.gather aten.hash_tensor aten.isfinite
aten.lift_fresh_copy aten.log_sigmoid aten.max.other aten.max_pool2d_with_indices_backward
aten.max_pool3d_with_indices aten.max_pool3d_with_indices_backward aten.min.other
aten.norm.ScalarOpt_dim_dtype aten.norm.ScalarOpt_dtype aten.positive aten.relu6
aten.reshape aten.select_backward aten.selu aten.slice_backward aten.square aten.true_divide
"""


def _filled(sample: Sample, arg: object) -> object:
    from apportion.graph import substitute

    return substitute(arg, sample.tensors)  # type: ignore[arg-type]


def _count(graph: Graph, touched: Counter[str]) -> None:
    for some in {graph, open_composites(graph)}:
        for op in some.ops:
            description = find_description(op.kind)
            if description is not None:
                touched[description.kind] += 1


def test_every_core_operator_has_a_call() -> None:
    called = {str(sample.target) for sample in chosen()}
    assert set(core_operators()) - called == set()
