"""capture: the captured Graph means what plain PyTorch does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apportion import graph as g
from apportion.capture import (
    CaptureError,
    Program,
    batch_leaves,
    capture,
    capture_as,
    cast_batch,
    check_settings,
    eager_steps,
    setting,
    state_tensor,
)
from tests.helpers_capture import begin, run, run_graph


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.heads, self.dropout = heads, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (
            y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).split(c, dim=2)
        )
        rate = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(width), Attention(width, heads, dropout)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, dropout: float = 0.0, width: int = 8, vocab: int = 11) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(6, width)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Block(width, 2, dropout) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1])))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def mse_step(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def token_step(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def vectors(*shape: int) -> Any:
    return torch.randn(5, *(shape or (4,))), torch.randn(5, 3)


def tokens() -> Any:
    y = torch.randint(11, (3, 6))
    y[0, 2] = -100
    return {"x": torch.randint(11, (3, 6)), "y": y}


@dataclass
class Case:
    step: Callable[..., Any]
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: Callable[[], Any] = vectors
    clip_norm: float | None = None
    random: bool = False


def sgd(**settings: Any) -> Any:
    return lambda model: torch.optim.SGD(model.parameters(), lr=0.1, **settings)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)


def adam(**settings: Any) -> Any:
    return lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, **settings)


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)  # type: ignore[index]
    return model


def batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


class Output:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class Writing(nn.Module):
    """Mutates views, keeps a counter, reassigns a buffer, holds a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("last", torch.zeros(()))
        self.mask = torch.tensor([1.0, 0.0, 2.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x) * self.mask.to(x.dtype)
        y[:, 0] = y[:, 1] * 2
        y[0].mul_(3)
        self.count[1] += 1
        self.last = y.detach().mean()
        return y + torch.tensor(0.5, dtype=x.dtype) * self.count.sum() + self.last


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(x).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 5, num_layers=2, batch_first=True)
        self.out = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(x)[0][:, -1])


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Tanh())
        self.out = nn.Sequential(nn.Linear(8, 3), nn.Dropout(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        return self.out(checkpoint(self.inner, x, use_reentrant=False))


def noisy_step(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    x = x + 0.1 * torch.randn_like(x) + torch.rand(4, dtype=x.dtype)
    return (
        F.mse_loss(model(x), y, reduction="none") * torch.bernoulli(torch.full_like(y, 0.5))
    ).sum()


def weighted_step(model: nn.Module, batch: Any) -> torch.Tensor:
    weight = torch.tensor([0.2, 0.5, 1.5], dtype=batch[0].dtype)
    target = (batch[1].detach()[:, 0] > 0).long()
    return F.cross_entropy(model(batch[0]), target, weight=weight, label_smoothing=0.1)


class Renormed(nn.Module):
    """Changes parameters in the forward pass: one that is trained, one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 3, max_norm=0.5)
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(1.5)
        return self.embed((x.abs().sum(1) * 2).long().clamp(max=10)) * self.scale


CASES = {
    "mlp, plain sgd": Case(mse_step, mlp, sgd()),
    "mlp, momentum": Case(mse_step, mlp, sgd(momentum=0.9, weight_decay=0.01)),
    "mlp, nesterov": Case(mse_step, mlp, sgd(momentum=0.9, nesterov=True, maximize=True)),
    "mlp, tensor lr": Case(
        mse_step, mlp, lambda m: torch.optim.SGD(m.parameters(), lr=torch.tensor(0.125))
    ),
    "mlp, adam amsgrad": Case(mse_step, mlp, adam(amsgrad=True, weight_decay=0.1)),
    "gpt, adamw": Case(token_step, GPT, adamw, tokens),
    "gpt, clipped": Case(token_step, GPT, adamw, tokens, clip_norm=0.05),
    "mlp, not clipped": Case(mse_step, mlp, sgd(), clip_norm=1e6),
    "frozen": Case(mse_step, frozen, sgd(momentum=0.9)),
    "batch norm": Case(mse_step, batch_norm, sgd(momentum=0.9), lambda: vectors(2, 4, 4)),
    "output object": Case(lambda m, b: Output(mse_step(m, b)), mlp, sgd()),
    "output dict": Case(lambda m, b: {"loss": mse_step(m, b)}, mlp, sgd()),
    "mutations": Case(mse_step, Writing, sgd()),
    "changed parameters": Case(mse_step, Renormed, sgd(momentum=0.9)),
    "lstm": Case(mse_step, Recurrent, sgd(), lambda: vectors(6, 4)),
    "weighted loss": Case(weighted_step, mlp, sgd()),
    "gpt with dropout": Case(token_step, lambda: GPT(0.1), adamw, tokens, 1.0, random=True),
    "encoder layer": Case(mse_step, Encoder, sgd(), lambda: vectors(6, 4), random=True),
    "noise": Case(noisy_step, mlp, adam(), random=True),
    "checkpoint": Case(mse_step, Checkpointed, sgd(), random=True),
}


def captured(case: Case, dtype: torch.dtype = torch.float64) -> Program:
    torch.manual_seed(0)
    model = case.model().to(dtype)
    batch = cast_batch(case.batch(), dtype)
    return capture(case.step, model, case.optimizer(model), batch, case.clip_norm)


def batches(case: Case, dtype: torch.dtype = torch.float64) -> list[Any]:
    torch.manual_seed(1)
    return [cast_batch(case.batch(), dtype) for _ in range(3)]


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


# settings and state


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
    assert setting(optimizer, decay) == pytest.approx(1 - 1e-2 * 0.1)
    optimizer.param_groups[0]["lr"] = 0.5
    assert setting(optimizer, decay) == pytest.approx(1 - 0.5 * 0.1)
    assert setting(optimizer, ("**", ("get", 0, "betas", 1), ("neg", 2))) == pytest.approx(
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
    first, second = f"tests/test_capture.py:{start + 1}", f"tests/test_capture.py:{start + 2}"
    lines = {op.name: op.line for op in program.graph.ops}
    assert lines["layers.0.add"].endswith(first)
    assert lines["layers.0.mlp.0.addmm"].endswith(second)
    inside = Attention.forward.__code__.co_firstlineno
    assert lines["layers.0.attn.sdpa"].endswith(f"tests/test_capture.py:{inside + 6}")
    assert all(op.line for op in program.graph.ops if op.phase == g.FORWARD)


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
    return loss * loss.item()


def branch_step(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = mse_step(model, batch)
    return loss if loss > 0 else -loss


def nonzero_step(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return model(x[y[:, 0] > 0]).mean()


def permuting_step(model: nn.Module, batch: Any) -> torch.Tensor:
    return mse_step(model, (batch[0][torch.randperm(5)], batch[1]))


def numpy_step(model: nn.Module, batch: Any) -> torch.Tensor:
    return mse_step(model, batch) * float(batch[0].numpy().sum())


@pytest.mark.parametrize(
    ("step", "offset", "text"),
    [
        (item_step, 2, "reads a tensor's value as a Python number"),
        (branch_step, 2, r"torch.where instead of if"),
        (nonzero_step, 2, "value or shape depends on data"),
        (permuting_step, 1, "random operator aten.randperm"),
        (numpy_step, 1, "converts a tensor to NumPy"),
    ],
)
def test_what_depends_on_data_is_refused_with_its_line(step: Any, offset: int, text: str) -> None:
    message = refusal(step)
    assert text in message
    line = step.__code__.co_firstlineno + offset
    assert f"test_capture.py:{line}" in message


def test_results_that_are_no_loss_are_refused() -> None:
    assert "returns a loss of shape (5, 3)" in refusal(lambda m, b: m(b[0]))
    assert "returns NoneType" in refusal(lambda m, b: None)
    assert "no trainable parameter" in refusal(lambda m, b: mse_step(m, b).detach())
    assert "dtype torch.int64" in refusal(lambda m, b: mse_step(m, b).long())


def test_parameters_without_a_gradient_are_all_named() -> None:
    message = refusal(lambda m, b: m[0](b[0]).mean())
    assert "no gradient: 2.weight, 2.bias, 4.weight, 4.bias;" in message
    assert "requires_grad_(False)" in message


def test_steps_that_train_themselves_are_refused() -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = mse_step(model, batch)
        loss.backward(retain_graph=True)
        return loss

    assert "calls backward() itself" in refusal(step)


def test_optimizers_that_cannot_be_captured_are_refused() -> None:
    model = mlp()
    message = refusal(mse_step, model, torch.optim.RMSprop(model.parameters()))
    assert message == "RMSprop cannot be captured; supported are SGD, Adam, AdamW"
    dampened = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.1)
    assert "set dampening=0" in refusal(mse_step, model, dampened)
    other = torch.optim.SGD(mlp().parameters(), lr=0.1)
    assert "6 parameters that are not in the model" in refusal(mse_step, model, other)
    idle = torch.optim.SGD(model.requires_grad_(False).parameters(), lr=0.1)
    assert "nothing to train" in refusal(mse_step, model, idle)


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(9, 4, sparse=True)
    message = refusal(lambda m, b: m(b).mean(), model, batch=torch.randint(9, (5,)))
    assert "layout torch.sparse_coo" in message and "sparse=False" in message


def test_changing_a_plain_tensor_is_refused() -> None:
    model = Writing()
    model.mask = torch.ones(3)

    def step(model: Any, batch: Any) -> torch.Tensor:
        model.mask.mul_(2)
        return mse_step(model, batch)

    assert "register it with register_buffer" in refusal(step, model)
    assert torch.equal(model.mask, torch.ones(3))
