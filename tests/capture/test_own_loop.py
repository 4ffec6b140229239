"""Steps in the form of a user's own loop: the captured Graph does what the loop does in PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from cases_loops import LOOPS, SGD, Training, loss_of, made, net, pairs, plain, with_net
from helpers_capture import run

from apportion import graph as g
from apportion.capture.build_graph import RESULT
from apportion.capture.capture import capture
from apportion.capture.program import Program, bound_tensor, live_state_of
from apportion.capture.trace import CaptureError


def take_step(training: Training) -> Any:
    """One step as PyTorch takes it, by whoever knows nothing of apportion."""
    step, model, optimizer, batch = training
    if getattr(step, "__code__", loss_of.__code__).co_argcount == 3 and not hasattr(
        step, "__self__"
    ):
        return step(model, optimizer, batch)
    if hasattr(step, "__self__"):
        return step(model, batch)
    optimizer.zero_grad()
    loss = step(model, batch)
    loss.backward()
    optimizer.step()
    return loss


def loss_in(result: Any) -> float | None:
    if isinstance(result, dict):
        result = result["loss"]
    return None if result is None else float(result.detach())


@pytest.mark.parametrize("name", LOOPS)
def test_the_graph_does_what_the_loop_does(name: str) -> None:
    program = capture(*made(name))
    g.verify(program.graph)
    losses, state = run(program, [program.batch] * 3)
    other = made(name)
    results = [loss_in(take_step(other)) for _ in range(3)]
    if results[0] is not None:
        assert losses == pytest.approx(results, rel=1e-9)
    live = live_state_of(other[0], other[1], other[2])
    trained = 0
    for value, binding in program.bindings.items():
        if binding.role != RESULT:
            torch.testing.assert_close(
                state[value], bound_tensor(live, binding), rtol=1e-9, atol=1e-12
            )
            trained += binding.state is None
    assert trained


def test_captured_objects_are_as_before() -> None:
    training = made("averaged")
    before = copy.deepcopy(training[1].state_dict())
    average = training[0].__closure__[0].cell_contents
    mean = copy.deepcopy(average.state_dict())
    program = capture(*training)
    assert not program.notes
    for model, state in ((training[1], before), (average, mean)):
        for name, tensor in model.state_dict().items():
            assert type(tensor) is torch.Tensor and torch.equal(tensor, state[name])
    assert "step" not in vars(training[2])
    assert training[2].param_groups[0]["params"][0] is training[1][0].weight
    assert not training[2].state
    assert all(p.grad is None for p in training[1].parameters())


def names_of(program: Program) -> set[str]:
    return {binding.name for binding in program.bindings.values()}


@pytest.mark.slow
def test_what_the_step_refers_to_is_named_by_its_variable() -> None:
    assert "criterion.log" in names_of(capture(*made("criterion in the closure")))
    assert "scale" in names_of(capture(*made("parameter in the closure")))
    assert "teacher.0.weight" in names_of(capture(*made("partial with a teacher")))
    assert "criterion.log" in names_of(capture(*made("method of a trainer")))
    assert "average.2.bias" in names_of(capture(*made("averaged")))
    assert "judge.0.weight" in names_of(capture(*made("adversarial")))


def test_parameters_without_a_gradient_are_left_with_a_note() -> None:
    program = capture(*made("unused, own loop"))
    (note,) = program.notes
    assert note.startswith("idle.0.weight, idle.0.bias, idle.2.weight, idle.2.bias get no gradient")
    assert not [n for n in names_of(program) if n.startswith("idle")]


def test_gradients_are_clipped_in_parts_that_add_up() -> None:
    kinds = [op.kind for op in capture(*made("clip_grad_norm_")).graph.ops]
    assert "apportion.square_sum" in kinds
    assert "aten.linalg_vector_norm.default" not in kinds


def test_phases_of_a_loop() -> None:
    graph = capture(*made("averaged")).graph
    phases = [op.phase for op in graph.ops]
    assert phases == sorted(phases, key=g.PHASES.index)
    means = [op for op in graph.ops if op.phase == g.UPDATE and op.kind != "apportion.update"]
    assert {op.kind for op in means} == {"aten.mul.Tensor", "aten.add.Tensor"}
    clipped = capture(*made("clip_grad_norm_")).graph
    assert {op.phase for op in clipped.ops if op.name.startswith("clip")} == {g.BACKWARD}


# results


@dataclass
class Report:
    loss: torch.Tensor
    parts: dict[str, torch.Tensor]
    logits: torch.Tensor
    note: str = "fine"


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def returning(make: Callable[[torch.Tensor, torch.Tensor], Any]) -> Program:
    def step(model: Any, batch: Any) -> Any:
        out = model(batch[0])
        return make(F.mse_loss(out, batch[1]), out)

    torch.manual_seed(0)
    return capture(*with_net(step))


def test_scalars_beside_the_loss_are_results() -> None:
    program = returning(lambda loss, out: Report(loss, {"mean": out.mean().detach()}, out))
    assert program.results is not None and program.results.names == ("loss", "parts.mean")
    _, state = run(program, [program.batch])
    scalars = {"parts.mean": state[program.returned["parts.mean"] or 0]}
    names = program.results.names
    report = program.results.filled(lambda k: scalars.get(names[k], "the loss"))
    assert isinstance(report, Report) and report.loss == "the loss" and report.note == "fine"
    expected = program.model(program.batch[0]).mean()
    assert float(report.parts["mean"]) == pytest.approx(float(expected.detach()))
    assert report.logits is None
    assert program.notes == (
        "of what the step returns, logits is left out; a divided step returns scalars only",
    )


def test_which_scalar_is_the_loss() -> None:
    pair = returning(lambda loss, out: Pair(loss, out.mean().detach()))
    assert pair.results is not None and pair.results.loss == 0
    named = returning(lambda loss, out: {"mean": out.mean().detach(), "loss": loss})
    assert named.results is not None and named.results.loss == 1
    counted = returning(lambda loss, out: ((out > 0).sum(), loss))
    assert counted.results is not None and counted.results.loss == 1
    alone = returning(lambda loss, out: loss)
    assert alone.results is not None and alone.results.filled(lambda _: 5) == 5
    silent = capture(*made("accumulated"))
    assert silent.results is not None and silent.results.loss is None


# refusals


def refusal(training: Training) -> str:
    with pytest.raises(CaptureError) as caught:
        capture(*training)
    return str(caught.value)


def test_a_loop_that_never_clears_its_gradients_is_refused() -> None:
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        loss_of(model, batch).backward()
        optimizer.step()

    message = refusal(with_net(step))
    assert "adds to the gradient that the step before has left" in message
    assert "optimizer.zero_grad()" in message


def test_schedulers_and_new_settings_are_refused_and_undone() -> None:
    training = with_net(None)
    scheduler = torch.optim.lr_scheduler.StepLR(training[2], 1)

    def scheduled(model: Any, optimizer: Any, batch: Any) -> None:
        plain()(model, optimizer, batch)
        scheduler.step()

    line = scheduled.__code__.co_firstlineno + 2
    message = refusal((scheduled, *training[1:]))
    assert f"calls StepLR.step() at {__file__.rpartition('/')[2]}" in message.replace(
        "tests/capture/", ""
    )
    assert f":{line};" in message and "after runner.step" in message
    assert training[2].param_groups[0]["lr"] == 0.1

    def slower(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5
        plain()(model, optimizer, batch)

    assert "changes lr of group 0 of SGD" in refusal((slower, *training[1:]))
    assert training[2].param_groups[0]["lr"] == 0.1


def test_forms_that_are_none_are_refused() -> None:
    assert "takes 4 arguments" in refusal(with_net(lambda a, b, c, d: None))
    assert "takes 1 arguments" in refusal(with_net(lambda a: None))
    nothing = refusal(with_net(lambda model, batch: loss_of(model, batch).backward()))
    assert "calls backward() itself and no parameter is updated" in nothing
    model = net()
    both = (SGD(model.parameters(), lr=0.1), SGD(model.parameters(), lr=0.2))
    assert "two optimizers hold the same parameter" in refusal((loss_of, model, both, pairs()))
    assert "it must be a torch.optim.Optimizer" in refusal((loss_of, model, "sgd", pairs()))
    assert "the model has a str as 1" in refusal((loss_of, (model, "x"), both[0], pairs()))
