"""check_splits: what it reports about right descriptions, and that wrong ones do not get by."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import apportion as ap
from apportion.capture.capture import capture
from apportion.describe import descriptions
from apportion.describe.errors import BadDescription
from apportion.describe.language import Max, Output, Sum, axis, f
from apportion.split.space import Space
from apportion.verify.check_splits import SplitReport

HERE = r"tests/verify/test_check_splits\.py:\d+"
NUMBERS = itertools.count()
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptions that a test writes are gone after it."""
    monkeypatch.setattr(descriptions, "DESCRIPTIONS", dict(descriptions.DESCRIPTIONS))


def made(kernel: Callable[..., Any]) -> Any:
    """A fresh operator of that kernel."""
    name = f"found::{kernel.__name__}{next(NUMBERS)}"
    custom = torch.library.custom_op(name, kernel, mutates_args=())
    custom.register_fake(kernel)
    return custom


def described(kernel: Callable[..., Any], description: Any, **keywords: Any) -> Any:
    """A fresh operator of that kernel, so described."""
    custom = made(kernel)
    ap.describe(custom._qualname, **keywords)(description)
    return custom


def axes(report: SplitReport) -> set[str]:
    return {cut.axis for cut in report.splits}


def twice(x: Tensor) -> Tensor:
    return 2 * x


def mean(x: Tensor) -> Tensor:
    return x.mean(1)


def largest(x: Tensor) -> Tensor:
    return x.amax(1)


def gated(x: Tensor) -> Tensor:
    return torch.relu(x.sum(1))


def placed(x: Tensor) -> Tensor:
    return x * torch.arange(1.0, x.shape[1] + 1)


def placed_from(x: Tensor, first: int) -> Tensor:
    return x * torch.arange(first + 1.0, first + x.shape[1] + 1)


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    return x + 1, x.sum(0)


# What is right


def test_a_product_is_cut_along_all_three_axes() -> None:
    report = ap.check_splits(torch.ops.aten.mm.default, X, torch.randn(6, 5))
    assert [str(cut) for cut in report.splits] == [
        "i: input 0 dim 0 cut; output 0 dim 0",
        "j: input 1 dim 1 cut; output 0 dim 1",
        "k: input 0 dim 1, input 1 dim 0 cut; output 0 sum",
    ]
    assert not (report.wrong or report.missing or report.unsplittable)
    assert report.operators == ("aten.mm.default",)
    assert str(report).splitlines()[0] == "can be cut: i: input 0 dim 0 cut; output 0 dim 0"


def test_a_packet_of_overloads_stands_for_the_one_that_fits() -> None:
    report = ap.check_splits(torch.ops.aten.add, X, 1.0)
    assert report.operators == ("aten.add.Tensor",) and len(report.splits) == 2


@pytest.mark.slow
def test_a_function_is_cut_through_all_its_operators() -> None:
    report = ap.check_splits(lambda x, w, b: torch.relu(x @ w + b).sum(0), X, X.t(), X[:, 0])
    assert [str(cut) for cut in report.splits] == [
        "i: input 0 dim 0 cut; output 0 sum",
        "j: input 1 dim 1, input 2 dim 0 cut; output 0 dim 0",
        "k: input 0 dim 1, input 1 dim 0 cut; output 0 same",
    ]
    assert len(report.operators) > 2 and not report.wrong


@pytest.mark.slow
def test_a_function_may_call_its_backward() -> None:
    def gradients(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        x, w = x.requires_grad_(), w.requires_grad_()
        y = torch.tanh(x @ w)
        return (y, *torch.autograd.grad(y.sum(), (x, w)))

    report = ap.check_splits(gradients, X.clone(), torch.randn(6, 5))
    assert [cut.outputs for cut in report.splits] == [
        ("0", "0", "sum"),
        ("1", "sum", "1"),
        ("same", "1", "0"),
    ]
    assert not report.wrong and "aten.tanh_backward.default" in report.operators


@pytest.mark.parametrize(
    ("function", "rest"),
    [
        (torch.softmax, (1,)),
        (torch.log_softmax, (1,)),
        (torch.nn.functional.layer_norm, ((6,), torch.randn(6), torch.randn(6))),
    ],
)
def test_what_normalises_is_opened_to_be_cut_there(function: Any, rest: Any) -> None:
    report = ap.check_splits(function, X, *rest)
    assert [(cut.axis, cut.inputs[0], cut.outputs) for cut in report.splits] == [
        ("i0", (0,), ("0",)),
        ("i1 (opened)", (1,), ("1",)),
    ]
    assert not (report.wrong or report.unsplittable)


def test_what_is_not_described_is_named_and_its_cuts_are_missing() -> None:
    report = ap.check_splits(made(twice), X)
    (name,) = report.operators
    assert [str(item) for item in report.unsplittable] == [f"{name}: no description"]
    assert [find.inputs for find in report.missing] == [(0,), (1,)]
    assert not report.splits


def test_an_axis_that_cannot_be_cut_comes_with_the_reason() -> None:
    inside = described(gated, lambda x: lambda i: f("relu", Sum(lambda k: x[i, k])))
    report = ap.check_splits(inside, X)
    assert axes(report) == {"i"} and not report.wrong
    (item,) = report.unsplittable
    assert item.what == "axis k" and item.why.endswith("is reduced inside, not at the root")


def summed(x: Tensor) -> Tensor:
    return x.sum(1)


def moved(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (6, 0))


@pytest.mark.parametrize(
    ("kernel", "description", "axis", "why"),
    [
        (
            summed,
            lambda x: lambda i: Sum(lambda k: x[i, k]) + Max(lambda k: x[i, k]),
            "axis k",
            "reductions at the root do not combine",
        ),
        (
            summed,
            lambda x: lambda i: Sum(lambda k: x[i, k]) + 1,
            "axis k",
            "a term beside the reduction cannot be counted once",
        ),
        (
            twice,
            lambda x: lambda i, j: ap.opaque(x[i, :])[j],
            "axis j",
            "axis j indexes an opaque result",
        ),
        (
            twice,
            lambda x: lambda i, j: f("constant", x[i, :]),
            "axis j",
            "nothing is read along axis j",
        ),
        (
            moved,
            lambda x: lambda i, j: x.padded(0)[i, j - 6],
            "axis j",
            "a part reads nothing but padding",
        ),
    ],
)
def test_the_reasons_for_which_cuts_are_refused(
    kernel: Any, description: Any, axis: str, why: str
) -> None:
    report = ap.check_splits(described(kernel, description), X)
    (item,) = report.unsplittable
    assert item.what == axis and item.why.endswith(f": {why}")
    assert axes(report) == {"i"} and not report.wrong


def test_accesses_that_disagree_refuse_both_axes() -> None:
    def symmetric(x: Tensor) -> Tensor:
        return x + x.t()

    custom = described(symmetric, lambda x: lambda i, j: x[i, j] + x[j, i])
    report = ap.check_splits(custom, X[:, :4])
    assert [item.what for item in report.unsplittable] == ["axis i", "axis j"]
    assert all("need different regions" in item.why for item in report.unsplittable)


def test_an_operator_without_axes_is_named_too() -> None:
    report = ap.check_splits(torch.median, X)
    assert not report.splits
    assert [str(item) for item in report.unsplittable] == [
        "aten.median.default: it has no axis longer than 1"
    ]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (torch.ops.aten.mm.default, r"aten\.mm\.default fails on these inputs: mat1 and mat2"),
        (lambda x, y: 1 / 0, r"<lambda> fails on these inputs: division by zero"),
        (
            lambda x, y: x.nonzero(),
            r"<lambda> cannot be checked: nonzero\(\) or an index by a mask gives",
        ),
        (lambda x, y: x * x.sum().item(), r"<lambda> cannot be checked: .*Python number"),
    ],
)
def test_a_call_that_cannot_be_checked_is_a_sentence(function: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        ap.check_splits(function, X, X)
    assert "\n" not in str(caught.value)


# What is wrong: found when it is registered


@pytest.mark.parametrize("nothing", [3, "x", None])
def test_a_description_must_be_a_function(nothing: Any) -> None:
    with pytest.raises(ValueError, match="a description is a function, not"):
        ap.describe("found::nothing")(nothing)


def test_a_description_takes_the_place_only_of_itself() -> None:
    def write(name: str) -> None:
        @ap.describe("found::again")
        def description(x: Any) -> Any:
            return lambda *i: f(name, x[i])

    write("first")
    before = descriptions.DESCRIPTIONS["found.again"].formula
    write("second")
    assert descriptions.DESCRIPTIONS["found.again"].formula is not before


# What is wrong: found when a Graph is analysed

P, Q, R = axis("p"), axis("q"), axis("r")


@pytest.mark.parametrize(
    ("description", "message"),
    [
        (lambda x: lambda i: x[i, 0], "output 0 has 2 dims, not 1"),
        (lambda x: lambda i, j, k: x[i, j], "output 0 has 2 dims, not 3"),
        (lambda x: lambda i, j: x[j, i], r"it reads \[0, 6\) along dim 0 of input 0, which is 4"),
        (lambda x: lambda i, j: x[i + 1, j], r"it reads \[1, 5\) along dim 0 of input 0"),
        (lambda x: lambda i, j: x[i, j - 1], r"it reads \[-1, 5\) along dim 1 of input 0"),
        (lambda x: lambda i, j: x[i, Q], "axis q of output 0 is neither one of its axes nor"),
        (lambda x: lambda i, j: f("at", Q, x[i, j]), "axis q of output 0 is neither"),
        (lambda x: lambda i, j: x[i], "that fails: input 0 has 2 dims, indexed with 1"),
        (lambda x: lambda i, j: x[i, j, 0], "that fails: input 0 has 2 dims, indexed with 3"),
        (lambda x: lambda i, j: x[i, j * 0.5], "that fails: .*'Affine' and 'float'"),
        (lambda x: lambda i, j: x[i, 1:2], "the whole dimension"),
        (lambda x: lambda i, j: Sum(lambda k, m: x[i, k + m]), "how long axis k is"),
        (lambda x: (lambda i, j: x[i, j],) * 2, "it gives 2 outputs, and the operator has 1"),
        (lambda x, y: lambda i, j: x[i, j], "missing 1 required positional argument: 'y'"),
        (lambda x: x, "a lambda over axes is needed, not this Operand"),
        (lambda x: lambda i, j: missing[i, j], "that fails: name 'missing' is not defined"),  # type: ignore[name-defined]  # noqa: F821
        (lambda x: Output.of((R, (P, Q)), x[R, (P, Q)]), r"extents of axes \['p', 'q'\] are not"),
        (lambda x: Output.of((R, (P, Q)), x[R, (P, Q)], p=4), "is 6 long along dim 1, not 4"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name_and_line(description: Any, message: str) -> None:
    custom = described(twice, description)
    name = custom._qualname.replace("::", r"\.")
    whole = rf"{name} is described at .*{HERE}, but .*{message}"
    with pytest.raises(ValueError, match=whole) as caught:
        ap.check_splits(custom, X)
    assert "\n" not in str(caught.value)


def test_several_outputs_need_several_lambdas() -> None:
    with pytest.raises(ValueError, match="it gives 1 outputs, and the operator has 2"):
        ap.check_splits(described(two, lambda x: lambda i, j: x[i, j]), X)


def test_a_local_rule_that_fails_is_named() -> None:
    custom = described(twice, lambda x: lambda i, j: x[i, j], local=lambda args, local: args[5])
    with pytest.raises(ValueError, match=rf"{HERE}, but its local rule fails: tuple index"):
        ap.check_splits(custom, X)


@pytest.mark.slow
def test_a_captured_step_is_refused_too() -> None:
    custom = described(twice, lambda x: lambda i, j: x[i + 1, j])

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad

    custom.register_autograd(backward)
    model = torch.nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = capture(lambda model, x: custom(model(x)).sum(), model, optimizer, X)
    with pytest.raises(BadDescription, match=rf"described at .*{HERE}, but it reads \[1, 5\)"):
        Space(program.graph)


# What is wrong: found by running it in parts


@pytest.mark.parametrize(
    ("kernel", "description", "axis", "left", "blame"),
    [
        (mean, lambda x: lambda i: Sum(lambda k: x[i, k]), "k", "sum", "differs by"),
        (largest, lambda x: lambda i: Sum(lambda k: x[i, k]), "k", "sum", "differs by"),
        (gated, lambda x: lambda i: Sum(lambda k: f("relu", x[i, k])), "k", "sum", "differs by"),
        (mean, lambda x: lambda i: Max(lambda k: x[i, k]), "k", "max", "differs by"),
        (placed, lambda x: lambda i, j: f("placed", x[i, j]), "j", "1", "differs by"),
    ],
)
def test_a_wrong_description_is_caught_where_it_is_wrong(
    kernel: Any, description: Any, axis: str, left: str, blame: str
) -> None:
    report = ap.check_splits(described(kernel, description), X)
    (cut,) = report.wrong
    assert (cut.axis, cut.outputs) == (axis, (left,))
    assert axes(report) == {"i"}  # samples are still right
    kind, _, rest = cut.why.partition(": ")
    assert (kind,) == report.operators
    assert rest.startswith(blame) and "; described at " in rest and "test_check_splits.py:" in rest
    assert f"WRONG: {cut}" in str(report).splitlines()


def test_a_wrong_shape_of_a_part_is_wrong() -> None:
    report = ap.check_splits(described(twice, lambda x: lambda i, j: x[j, i]), X[:, :4])
    assert [cut.axis for cut in report.wrong] == ["i", "j"]
    assert "shape (4, 2), not (2, 4)" in report.wrong[0].why
    assert [find.inputs for find in report.missing] == [(0,), (1,)]


@pytest.mark.parametrize(
    ("kernel", "description", "expected"),
    [
        (mean, lambda x: lambda i: Sum(lambda k: x[i, k]) / x.shape[1], {"i", "k"}),
        (largest, lambda x: lambda i: Max(lambda k: x[i, k]), {"i", "k"}),
        (gated, lambda x: lambda i: f("relu", Sum(lambda k: x[i, k])), {"i"}),
        (placed, lambda x: lambda i, j: f("placed", j, x[i, j]), {"i"}),
    ],
)
def test_said_rightly_it_is_right(kernel: Any, description: Any, expected: set[str]) -> None:
    report = ap.check_splits(described(kernel, description), X)
    assert axes(report) == expected and not report.wrong and not report.missing


def test_a_kernel_that_is_told_its_place_is_cut() -> None:
    custom = described(
        placed_from,
        lambda x, first: lambda i, j: f("placed", j + first, x[i, j]),
        local=lambda args, local: (args[0], args[1] + local.first("j")),
    )
    report = ap.check_splits(custom, X, 3)
    assert axes(report) == {"i", "j"} and not report.wrong


@pytest.mark.slow
def test_a_local_rule_that_forgets_the_place_is_refused() -> None:
    custom = described(
        placed_from,
        lambda x, first: lambda i, j: f("placed", j + first, x[i, j]),
        local=lambda args, local: args,
    )
    report = ap.check_splits(custom, X, 3)
    assert axes(report) == {"i"} and not report.wrong
    assert "does not compute the part" in report.unsplittable[0].why
