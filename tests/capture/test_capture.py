"""capture: the captured Graph means what plain PyTorch does."""

from __future__ import annotations

import copy
import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cases_capture import (
    CASES,
    Attention,
    Block,
    Case,
    Writing,
    batches,
    captured,
    mlp,
    mse_step,
    sgd,
    vectors,
)
from helpers_capture import begin, run, run_graph
from torch import nn

from apportion import graph as g
from apportion.capture.capture import capture
from apportion.capture.optimizer import setting_value
from apportion.capture.program import Program, batch_leaves, check_settings, state_tensor
from apportion.capture.reference import capture_as, eager_steps
from apportion.capture.trace import CaptureError


def plain_steps(program: Program, data: list[Any]) -> tuple[list[float], nn.Module, Any]:
    """A training loop that knows nothing of apportion."""
    model, optimizer = copy.deepcopy((program.model, program.optimizer))
    losses = []
    for batch in data:
        optimizer.zero_grad()
        result = program.step(model, batch)
        loss = result["loss"] if isinstance(result, dict) else getattr(result, "loss", result)
        loss.backward()
        if program.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), program.clip_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model, optimizer


def assert_close(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.shape == b.shape and a.dtype == b.dtype
    scale = float(b.abs().max()) if b.numel() else 0.0
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * scale)


@pytest.mark.parametrize("name", CASES)
def test_graph_equals_eager_steps(name: str) -> None:
    program = captured(CASES[name])
    g.verify(program.graph)
    assert g.from_json(g.to_json(program.graph)) == program.graph
    data = batches(CASES[name])
    losses, state = run(program, data, seed=7)
    expected, ends = eager_steps(program, data, seed=7)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert state.keys() == ends.keys()
    for value, tensor in ends.items():
        assert_close(state[value], tensor)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.random])
def test_graph_equals_plain_pytorch(name: str) -> None:
    program = captured(CASES[name])
    data = batches(CASES[name])
    losses, state = run(program, data)
    expected, model, optimizer = plain_steps(program, data)
    assert losses == pytest.approx(expected, rel=1e-9)
    for value, binding in program.bindings.items():
        if binding.state is not None:
            parameter = model.get_parameter(binding.name)
            assert_close(state[value], optimizer.state[parameter][binding.state])
        elif binding.role == g.PARAMETER:
            assert_close(state[value], model.get_parameter(binding.name).detach())
        else:
            assert_close(state[value], model.get_buffer(binding.name))


@pytest.mark.slow
def test_eager_reference_leaves_the_model_and_the_generator_alone() -> None:
    program = captured(CASES["gpt with dropout"])
    before = copy.deepcopy(program.model.state_dict())
    torch.manual_seed(3)
    drawn = torch.rand(2)
    torch.manual_seed(3)
    losses, _ = eager_steps(program, batches(CASES["gpt with dropout"]), seed=1)
    again, _ = eager_steps(program, batches(CASES["gpt with dropout"]), seed=1)
    other, _ = eager_steps(program, batches(CASES["gpt with dropout"]), seed=2)
    assert losses == again and losses != other
    for name, tensor in program.model.state_dict().items():
        assert torch.equal(tensor, before[name])
    torch.manual_seed(3)
    capture(program.step, program.model, program.optimizer, program.batch)
    assert torch.equal(torch.rand(2), drawn)


# the example


def llama7b(**sizes: Any) -> Any:
    path = Path(__file__).parent.parent.parent / "examples" / "llama7b.py"
    spec = importlib.util.spec_from_file_location("llama7b", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build(**sizes)


@pytest.mark.slow
def test_the_llama_example_in_small_equals_plain_pytorch() -> None:
    sizes = {"layers": 2, "width": 16, "heads": 2, "hidden": 24, "vocab": 20, "length": 8}
    torch.manual_seed(0)
    program = capture_as(capture(*llama7b(**sizes, batch=2, device="cpu")), torch.float64)
    losses, state = run(program, [program.batch] * 3)
    expected, model, _ = plain_steps(program, [program.batch] * 3)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert losses[2] < losses[1] < losses[0]
    for value, binding in program.bindings.items():
        if binding.role == g.PARAMETER:
            assert_close(state[value], model.get_parameter(binding.name).detach())


@pytest.mark.slow
def test_seven_billion_parameters_are_captured_in_seconds() -> None:
    parts = llama7b()
    start = time.perf_counter()
    graph = capture(*parts, clip_norm=1.0).graph
    assert time.perf_counter() - start < 30
    held = [v for v in graph.values if v.role == g.PARAMETER and not v.name.endswith("'")]
    assert sum(v.nbytes for v in held) // 4 == 6_738_415_616
    assert len(graph.bodies) == 1


# settings and state


@pytest.mark.slow
def test_schedulers_and_a_zero_learning_rate_work() -> None:
    case = CASES["gpt, adamw"]
    program = captured(case)
    data = batches(case)
    model, optimizer = copy.deepcopy((program.model, program.optimizer))
    twin = capture(case.step, model, optimizer, data[0])
    state = begin(program)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.5 * n)
        for o in (program.optimizer, optimizer)
    ]
    for number, batch in enumerate(data):
        optimizer.zero_grad()
        loss = case.step(model, batch)
        loss.backward()
        assert run_graph(program, batch, state, 0, number) == pytest.approx(float(loss.detach()))
        optimizer.step()
        program.optimizer.step()  # without gradients it does nothing, but schedulers want to see it
        for schedule in schedules:
            schedule.step()
    for value in program.bindings:
        assert_close(state[value], state_tensor(twin, value))


def test_existing_optimizer_state_is_used() -> None:
    case = Case(mse_step, mlp, sgd(momentum=0.9, dampening=0.5))
    torch.manual_seed(0)
    model = mlp().double()
    optimizer = case.optimizer(model)
    data = batches(case)
    case.step(model, data[0]).backward()
    optimizer.step()
    program = capture(case.step, model, optimizer, data[0])
    losses, state = run(program, data)
    expected, ends = eager_steps(program, data, seed=0)
    assert losses == pytest.approx(expected, rel=1e-9)
    for value, tensor in ends.items():
        assert_close(state[value], tensor)
    wide = capture_as(program, torch.float32)
    index = next(v for v, b in wide.bindings.items() if b.state == "momentum_buffer")
    assert state_tensor(wide, index).dtype == torch.float32
    assert state_tensor(wide, index).abs().max() > 0


def test_settings_are_expressions_read_when_asked() -> None:
    program = captured(CASES["gpt, adamw"])
    optimizer = program.optimizer
    decay = ("-", 1, ("*", ("get", 0, "lr"), ("get", 0, "weight_decay")))
    used = [a for body in program.graph.bodies for op in body.ops for a in op.args]
    assert g.Setting(decay) in used
    assert setting_value(optimizer, decay) == pytest.approx(1 - 1e-2 * 0.1)
    optimizer.param_groups[0]["lr"] = 0.5
    assert setting_value(optimizer, decay) == pytest.approx(1 - 0.5 * 0.1)
    assert setting_value(optimizer, ("**", ("get", 0, "betas", 1), ("neg", 2))) == pytest.approx(
        0.999**-2
    )


def test_a_setting_that_changes_the_operators_needs_a_new_capture() -> None:
    program = captured(CASES["mlp, plain sgd"])
    check_settings(program)
    program.optimizer.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(
        ValueError, match=r"weight_decay of group 0 was 0 .* is 0.1 now.*capture again"
    ):
        check_settings(program)


def test_bodies_are_shared() -> None:
    assert len(captured(CASES["mlp, momentum"]).graph.bodies) == 1
    assert len(captured(CASES["gpt, adamw"]).graph.bodies) == 2


@pytest.mark.slow
def test_capture_as_keeps_the_step() -> None:
    program = captured(CASES["gpt with dropout"], torch.float32)
    double = capture_as(program, torch.float64)
    assert [op.name for op in double.graph.ops] == [op.name for op in program.graph.ops]
    assert program.graph.values[0].dtype == "float32" and double.graph.values[0].dtype == "float64"
    assert double.clip_norm == program.clip_norm
    held = {id(p) for group in double.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in double.model.parameters()}
    data = batches(CASES["gpt with dropout"], torch.float32)
    single, _ = run(program, data, seed=5)
    precise, _ = run(double, data, seed=5)
    assert single == pytest.approx(precise, rel=1e-5)


def test_meta_models_are_captured_but_have_no_data() -> None:
    with torch.device("meta"):
        model = mlp()
    batch = (torch.empty(5, 4, device="meta"), torch.empty(5, 3))
    program = capture(mse_step, model, torch.optim.SGD(model.parameters(), lr=0.1), batch)
    assert (
        program.graph.fingerprint
        == captured(CASES["mlp, plain sgd"], torch.float32).graph.fingerprint
    )
    with pytest.raises(
        ValueError, match=r"parameter 0.weight has no data \(meta device\); materialise"
    ):
        state_tensor(program, 0)


def test_batch_leaves_checks_the_batch() -> None:
    program = capture(
        lambda m, b: mse_step(m, b["pair"]) * b["scale"],
        model := mlp(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        {"pair": vectors(), "scale": 2},
    )
    names = [program.graph.values[v].name for v, _ in program.inputs]
    assert names == ["batch.pair.0", "batch.pair.1"]
    x, y = vectors()
    leaves = batch_leaves(program, {"pair": (x, y), "scale": 2})
    assert [t is u for t, u in zip(leaves.values(), (x, y), strict=True)] == [True, True]
    with pytest.raises(ValueError, match="structure"):
        batch_leaves(program, {"pair": x, "scale": 2})
    with pytest.raises(ValueError, match=r"leaf 0 .* \(2, 4\), but .* \(5, 4\)"):
        batch_leaves(program, {"pair": (x[:2], y), "scale": 2})
    with pytest.raises(
        ValueError, match="leaf 2 of the batch is 3, but the step was captured with 2"
    ):
        batch_leaves(program, {"pair": (x, y), "scale": 3})


# names, roles, links, lines


def test_names_and_roles() -> None:
    graph = captured(CASES["gpt, clipped"]).graph
    roles = {v.name: v.role for v in graph.values}
    assert roles["layers.0.attn.qkv.weight"] == g.PARAMETER
    assert roles["layers.0.attn.qkv.weight'"] == g.PARAMETER
    assert roles["layers.0.attn.qkv.weight.grad"] == g.GRADIENT
    assert roles["layers.0.attn.qkv.weight:exp_avg"] == g.OPTIMIZER_STATE
    assert roles["layers.0.attn.qkv.weight:step'"] == g.OPTIMIZER_STATE
    assert roles["batch.x"] == g.INPUT and roles["loss"] == g.OUTPUT
    assert "head.weight" not in roles  # tied to wte.weight
    assert len({op.name for op in graph.ops}) == len(graph.ops)
    ops = {op.name: op for op in graph.ops}
    assert ops["layers.1.attn.qkv.addmm"].module == "layers.1.attn.qkv"
    update = ops["wte.weight.update"]
    assert update.parameter is not None and graph.values[update.parameter].name == "wte.weight"
    assert graph.loss is not None and graph.values[graph.loss].name == "loss"


def test_backward_ops_link_to_their_forward_op() -> None:
    graph = captured(CASES["gpt, adamw"]).graph
    for op in graph.ops:
        if op.phase != g.BACKWARD:
            assert op.forward is None
            continue
        assert op.forward is not None and ".backward" in op.name
        source = graph.ops[op.forward]
        assert source.phase == g.FORWARD
        assert (op.line, op.module) == (source.line, source.module)
    links = {op.kind: graph.ops[op.forward].kind for op in graph.ops if op.forward is not None}
    assert links["apportion.sdpa_backward"] == "apportion.sdpa"
    assert links["aten.gelu_backward.default"] == "aten.gelu.default"
    assert links["aten.native_layer_norm_backward.default"] == "aten.native_layer_norm.default"
    assert links["aten.nll_loss_backward.default"] == "aten.nll_loss_forward.default"


def test_lines_are_the_users() -> None:
    program = captured(CASES["gpt, adamw"])
    start = Block.forward.__code__.co_firstlineno
    first, second = f"tests/cases_capture.py:{start + 1}", f"tests/cases_capture.py:{start + 2}"
    lines = {op.name: op.line for op in program.graph.ops}
    assert lines["layers.0.add"].endswith(first)
    assert lines["layers.0.mlp.0.addmm"].endswith(second)
    inside = Attention.forward.__code__.co_firstlineno
    assert lines["layers.0.attn.sdpa"].endswith(f"tests/cases_capture.py:{inside + 6}")
    assert all(op.line for op in program.graph.ops if op.phase == g.FORWARD)


@pytest.mark.slow
def test_the_graph_is_functional_and_lean() -> None:
    for case in CASES.values():
        graph = captured(case).graph
        kinds = {op.kind for op in graph.ops}
        assert not {
            k for k in kinds if k.split(".")[1].endswith("_") or "detach" in k or "alias" in k
        }
        ends = {after for _, after in graph.state} | {graph.loss}
        for op in graph.ops:
            assert any(graph.consumers[v] or v in ends for v in op.outputs), op


def test_operators_with_a_kernel_are_not_taken_apart() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.SiLU())
    program = capture(mse_step, model, torch.optim.SGD(model.parameters(), lr=0.1), vectors())
    assert "aten.silu_backward.default" in {op.kind for op in program.graph.ops}


def test_a_mean_of_losses_is_a_sum_and_a_division() -> None:
    graph = captured(CASES["gpt, adamw"]).graph
    (loss,) = [op for op in graph.ops if op.kind == "aten.nll_loss_forward.default"]
    assert loss.args[3] == 2
    made = graph.producer[graph.loss or 0]
    assert made is not None and graph.ops[made[0]].kind == "aten.div.Tensor"


# refusals


def refusal(
    step: Any, model: nn.Module | None = None, optimizer: Any = None, batch: Any = None
) -> str:
    model = mlp() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    with pytest.raises(CaptureError) as caught:
        capture(step, model, optimizer, vectors() if batch is None else batch)
    return str(caught.value)


def item_step(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = mse_step(model, batch)
    return (loss * torch.ones(8))[: int(loss.item()) + 1].sum()


def branch_step(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = mse_step(model, batch)
    return loss if loss > 0 else -loss


def nonzero_step(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return model(x[y[:, 0] > 0]).mean()


def rejecting_step(model: nn.Module, batch: Any) -> torch.Tensor:
    return mse_step(model, (torch._standard_gamma(batch[0].abs()), batch[1]))


def numpy_step(model: nn.Module, batch: Any) -> torch.Tensor:
    return mse_step(model, batch) * float(batch[0].numpy().sum())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "offset", "text"),
    [
        (item_step, 2, "reads a tensor's value as a Python number"),
        (branch_step, 2, r"torch.where instead of if"),
        (nonzero_step, 2, "value or shape depends on data"),
        (rejecting_step, 1, "random operator aten._standard_gamma"),
        (numpy_step, 1, "converts a tensor to NumPy"),
    ],
)
def test_what_depends_on_data_is_refused_with_its_line(step: Any, offset: int, text: str) -> None:
    message = refusal(step)
    assert text in message
    line = step.__code__.co_firstlineno + offset
    assert f"test_capture.py:{line}" in message


def test_results_that_are_no_loss_are_refused() -> None:
    assert "returns only tensors that are no scalars" in refusal(lambda m, b: m(b[0]))
    assert "returns no tensor" in refusal(lambda m, b: None)
    assert "no trainable parameter" in refusal(lambda m, b: mse_step(m, b).detach())
    assert "dtype torch.int64" in refusal(lambda m, b: mse_step(m, b).long())


def test_parameters_without_a_gradient_are_left_alone_with_a_note() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = capture(lambda m, b: m[0](b[0]).mean(), model, optimizer, vectors())
    (note,) = program.notes
    assert note.startswith("2.weight, 2.bias, 4.weight, 4.bias get no gradient")
    idle = refusal(
        lambda m, b: m(b[0]).mean(), model, torch.optim.SGD([nn.Parameter(torch.ones(1))])
    )
    assert "1 parameters that are not in the model" in idle


def test_steps_that_train_themselves_are_refused() -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = mse_step(model, batch)
        loss.backward(retain_graph=True)
        return loss

    assert "calls backward() itself" in refusal(step)


def test_optimizers_that_cannot_be_captured_are_refused() -> None:
    model = mlp()
    assert "LBFGS cannot be captured" in refusal(
        mse_step, model, torch.optim.LBFGS(model.parameters())
    )
    other = torch.optim.SGD(mlp().parameters(), lr=0.1)
    assert "6 parameters that are not in the model" in refusal(mse_step, model, other)
    idle = torch.optim.SGD(model.requires_grad_(False).parameters(), lr=0.1)
    assert "nothing to train" in refusal(mse_step, model, idle)


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(9, 4, sparse=True)
    message = refusal(lambda m, b: m(b).mean(), model, batch=torch.randint(9, (5,)))
    assert "layout torch.sparse_coo" in message and "sparse=False" in message


@pytest.mark.slow
def test_a_plain_tensor_that_is_changed_is_state() -> None:
    model = Writing()
    model.mask = torch.ones(3)

    def step(model: Any, batch: Any) -> torch.Tensor:
        model.mask.mul_(2)
        return mse_step(model, batch)

    program = capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), vectors())
    assert any("mask" in program.graph.values[v].name for v in program.bindings)
    assert torch.equal(model.mask, torch.ones(3))
