"""Kernels make the same calls whatever their data are; those that cannot are listed."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from apportion.execute import kernels
from apportion.execute.kernels.base import OWN, UNTRACEABLE, Context, kernel

CONTEXT = Context(0, 0, lambda expression: 1.0)
LABELS = torch.tensor([0, 4, -100, 2])
SCORES = torch.zeros(4, 2)
PLACES = torch.tensor([0, 5, 3, 5])

CASES: dict[str, tuple[str, Sequence[Any]]] = {
    "labels": ("aten.nll_loss_forward.default", (SCORES, LABELS, None, 1, -100, 2, 5)),
    "gradient of labels": (
        "aten.nll_loss_backward.default",
        (torch.ones(()), SCORES, LABELS, None, 1, -100, torch.ones(()), 2, 5),
    ),
    "put": (
        "apportion.index_put",
        (torch.zeros(3, 2), [PLACES, None], torch.ones(4, 2), True, (2, 0), (6, 2)),
    ),
    "renorm": ("apportion.embedding_renorm", (torch.ones(3, 2), PLACES, 1.0, 2.0, 2, 6)),
    "embedding": ("apportion.embedding", (torch.ones(3, 2), PLACES, 2, 6)),
    "gather": ("apportion.gather", (torch.ones(3), 0, PLACES, 2, 6)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_part_runs_without_data_and_makes_the_same_shapes(case: str) -> None:
    kind, args = CASES[case]
    wanted = [tuple(t.shape) for t in kernel(kind)(CONTEXT, list(args))]
    with FakeTensorMode() as mode:
        fake = tree_map(
            lambda a: mode.from_tensor(a) if isinstance(a, torch.Tensor) else a, list(args)
        )
        found = [tuple(t.shape) for t in kernel(kind)(CONTEXT, fake)]
    assert found == wanted


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("both", [True, False])
def test_what_is_put_elsewhere_is_dropped(accumulate: bool, both: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    rows = torch.tensor([[0, 5], [3, -2]])
    columns = torch.tensor([1, -1]) if both else None
    values = torch.randn(2, 2) if both else torch.randn(2, 2, 4)
    whole = torch.ops.aten.index_put.default(x, [rows, columns], values, accumulate)
    for low, high in ((0, 2), (2, 5), (5, 6)):
        given = (x[low:high], [rows, columns], values, accumulate, (low, 0), (6, 4))
        (found,) = kernel("apportion.index_put")(CONTEXT, given)
        assert torch.equal(found, whole[low:high])


def test_both_dimensions_may_be_cut() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    rows, columns = torch.tensor([0, 5, 3]), torch.tensor([1, 3, 1])
    values = torch.randn(3)
    whole = torch.ops.aten.index_put.default(x, [rows, columns], values, True)
    for low in (0, 3):
        for left in (0, 2):
            part = x[low : low + 3, left : left + 2]
            given = (part, [rows, columns], values, True, (low, left), (6, 4))
            (found,) = kernel("apportion.index_put")(CONTEXT, given)
            assert torch.equal(found, whole[low : low + 3, left : left + 2])


def test_a_part_of_a_table_is_scaled_as_the_whole() -> None:
    torch.manual_seed(0)
    table = torch.randn(6, 2)
    whole = torch.ops.aten.embedding_renorm.default(table, PLACES, 0.5, 2.0)
    for low in (0, 3):
        given = (table[low : low + 3], PLACES, 0.5, 2.0, low, 6)
        (found,) = kernel("apportion.embedding_renorm")(CONTEXT, given)
        assert torch.equal(found, whole[low : low + 3])


LOOKS = {"bool", "item", "tolist", "nonzero", "numpy", "unique", "masked_select"}


def test_no_kernel_looks_at_data_in_python() -> None:
    """Calls by which Python would learn what a tensor holds. UNTRACEABLE lists the exceptions."""
    found = []
    for path in sorted(Path(kernels.__file__).parent.glob("*.py")):
        if path.name == "grouped.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", "") or getattr(node.func, "id", "")
                if name in LOOKS:
                    found.append(f"{path.name}:{node.lineno} {name}")
    assert found == []
    assert OWN.keys() >= UNTRACEABLE
