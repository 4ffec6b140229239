"""What a subscript is known to be."""

from __future__ import annotations

import ast

import pytest
from random_loops import function_of

from apportion.loops.loop_body import read_body
from apportion.loops.subscripts import UNKNOWN, WHOLE, Fixed, Index, Subscript, name_facts

N = 3


def classify(lines: str, subscript: str, dims: int = 2) -> Subscript:
    text = "def body(key, value, A):\n" + "".join(f"    {line}\n" for line in lines.split("; "))
    body = read_body(function_of(text, N=N))
    constants = {k: v for k, v in body.free.constants.items() if isinstance(v, int)}
    facts = name_facts(body.tree, "key", dims, constants)
    node = ast.parse(f"A[{subscript}]", mode="eval").body
    assert isinstance(node, ast.Subscript)
    return facts.classify(node.slice)


@pytest.mark.parametrize(
    ("lines", "subscript", "known"),
    [
        ("i, j = key", "i", Index(0)),
        ("i, j = key", "j - 2", Index(1, -2)),
        ("i, j = key", "2 + j", Index(1, 2)),
        ("i = key[0]", "i + 1", Index(0, 1)),
        ("pass", "key[1]", Index(1)),
        ("i, j = key; k = i + 1; m = k - 3", "m", Index(0, -2)),
        ("x = N", "x + 1", Fixed(4)),
        ("i, j = key; x = N", "i + x", Index(0, 3)),
        ("pass", "2", Fixed(2)),
        ("pass", "-1", Fixed(-1)),
        ("pass", ":", WHOLE),
        ("pass", "1:3", WHOLE),
        ("for t in range(4): x = t", "t", WHOLE),
        ("i, j = key", "3 - i", UNKNOWN),  # the released Orion takes it for i + 3
        ("i, j = key", "-i", UNKNOWN),
        ("i, j = key", "2 * i", UNKNOWN),
        ("i, j = key", "i + j", UNKNOWN),
        ("i, j = key", "i % 3", UNKNOWN),
        ("i, j = key; i = i + 1", "i", UNKNOWN),
        ("i, j = key; i += 1", "i", UNKNOWN),
        ("i, j = key; k = i; k = j", "k", UNKNOWN),
        ("key = (1, 2); i, j = key", "i", UNKNOWN),
        ("i, j = value", "i", UNKNOWN),
        ("x = value", "x", UNKNOWN),
        ("x = True", "True", UNKNOWN),
        ("pass", "key[2]", UNKNOWN),
        ("for t in range(4): t = 2", "t", UNKNOWN),
    ],
)
def test_classes(lines: str, subscript: str, known: Subscript) -> None:
    assert classify(lines, subscript) == known


def test_the_key_of_one_dim_is_a_number() -> None:
    assert classify("pass", "key + 1", dims=1) == Index(0, 1)
    assert classify("pass", "key[0]", dims=1) == UNKNOWN
