"""precision: a named model in bfloat16 or by autocast; what it takes, and what is refused."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import apportion as ap
from apportion import zoo
from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.cli import main as cli
from apportion.graph import OPTIMIZER_STATE, PARAMETER
from apportion.machine.cluster import cluster
from apportion.zoo.precision import without_precision


def captured(spec: str, meta: bool = True) -> Program:
    it = zoo.load(spec, meta=meta)
    return capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)


def nbytes(program: Program, *roles: str) -> int:
    begins = {before for before, _ in program.graph.state}
    return sum(
        program.graph.values[v].nbytes for v in begins if program.graph.values[v].role in roles
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp:tiny", "wgan-gp:tiny"])
def test_bf16_halves_parameters_and_state(model: str) -> None:
    whole, half = captured(model), captured(f"{model},precision=bf16")
    assert nbytes(half, PARAMETER) * 2 == nbytes(whole, PARAMETER)
    counts = 2 * 4 * sum(v.name.endswith(":step") for v in half.graph.values)
    state = nbytes(half, OPTIMIZER_STATE) - counts // 2
    assert state * 2 == nbytes(whole, OPTIMIZER_STATE) - counts // 2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_mixed_keeps_master_weights(name: str, kind: str) -> None:
    whole, mixed = captured("llama:tiny"), captured(f"llama:tiny,precision={name}-mixed")
    assert nbytes(mixed, PARAMETER, OPTIMIZER_STATE) == nbytes(whole, PARAMETER, OPTIMIZER_STATE)
    products = [op for op in mixed.graph.ops if op.kind in ("aten.mm.default", "apportion.sdpa")]
    assert {mixed.graph.values[op.outputs[0]].dtype for op in products} == {kind}
    exact = ("softmax", "mse_loss", "nll_loss", "rsqrt", "pow", "layer_norm")
    wide = [op for op in mixed.graph.ops if any(f".{e}" in op.kind for e in exact)]
    assert wide and {mixed.graph.values[op.outputs[0]].dtype for op in wide} == {"float32"}
    assert mixed.graph.values[mixed.graph.loss or 0].dtype == "float32"


def test_float16_has_a_scale_that_moves() -> None:
    it = zoo.load("mlp:tiny,precision=fp16-mixed")
    assert "scaled by a GradScaler" in it.notes[0]
    program = captured("mlp:tiny,precision=fp16-mixed")
    names = {b.name for b in program.bindings.values()}
    assert {"scaler.scale", "scaler.growth_tracker"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("precision", zoo.PRECISIONS)
def test_every_precision_trains_as_plain_pytorch(precision: str) -> None:
    program = captured(zoo.with_precision("mlp:tiny", precision), meta=False)
    plan = ap.plan(program, cluster("local:2"), "data", calibrate=False)
    found = ap.check(program, plan)
    assert found.equal, found


def test_the_loss_scale_changes_nothing_but_rounding() -> None:
    runs = []
    for precision in ("float32", "fp16-mixed"):
        it = zoo.load(zoo.with_precision("mlp:tiny", precision))
        for _ in range(3):
            if precision == "float32":
                it.optimizer.zero_grad()
                it.step(it.model, it.batch).backward()
                it.optimizer.step()
            else:
                it.step(it.model, it.optimizer, it.batch)
        runs.append(torch.cat([p.detach().flatten() for p in it.model.parameters()]))
    torch.testing.assert_close(*runs, rtol=0.02, atol=2e-3)


def test_names() -> None:
    assert zoo.with_precision("gpt2", "bf16") == "gpt2:precision=bf16"
    assert zoo.with_precision("gpt2:tiny,precision=bf16", "bf16-mixed").endswith(
        "tiny,precision=bf16-mixed"
    )
    assert zoo.with_precision("gpt2:tiny,precision=bf16", "float32") == "gpt2:tiny"
    assert zoo.with_precision("gpt2:tiny", None) == "gpt2:tiny"
    assert without_precision("gpt2:precision=bf16,tiny") == ("gpt2:tiny", "bf16")
    assert zoo.load("mlp:tiny,precision=bf16", meta=True).name == "mlp:tiny,precision=bf16"


@pytest.mark.parametrize(
    ("spec", "precision", "why"),
    [
        ("gpt2", "fp8", "Unknown precision 'fp8'; known are float32, bf16"),
        ("train.py:make", "bf16", "decides itself in which precision"),
    ],
)
def test_nonsense_is_refused(spec: str, precision: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        zoo.with_precision(spec, precision)


def test_a_precision_that_is_set_twice_or_unknown_is_refused() -> None:
    with pytest.raises(ValueError, match="set twice"):
        zoo.load("mlp:tiny,precision=bf16,precision=bf16", meta=True)
    with pytest.raises(ValueError, match="Unknown precision"):
        zoo.load("mlp:tiny,precision=half", meta=True)


@pytest.mark.slow
def test_less_is_predicted_on_a_gpu() -> None:
    spec = "mlp:layers=4,width=2048,batch=2048"
    where = cluster("1xh200")
    plans = {
        p: ap.plan(captured(zoo.with_precision(spec, p)), where, "single")
        for p in zoo.PRECISIONS[:3]
    }
    seconds = {p: plan.predicted.step_seconds for p, plan in plans.items()}
    peaks = {p: plan.predicted.peak_bytes[0] for p, plan in plans.items()}
    assert seconds["bf16"] < seconds["bf16-mixed"] < seconds["float32"], seconds
    assert peaks["bf16"] < peaks["bf16-mixed"], peaks
    kinds = Counter(v.dtype for v in plans["bf16-mixed"].graph.values)
    assert kinds["bfloat16"] and kinds["float32"]


@pytest.mark.slow
def test_a_device_that_gains_no_time_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "mlp:tiny", "--method", "data", "--budget", "0", "--precision", "bf16"]
    assert cli.status([*command, "--cluster", "2xk80"]) == 0
    assert "k80 computes in half precision no faster" in capfd.readouterr().err
    assert cli.status([*command, "--cluster", "2xh100"]) == 0
    assert "no faster" not in capfd.readouterr().err
