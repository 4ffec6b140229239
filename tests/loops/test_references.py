"""What a body does to arrays, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from random_loops import function_of

import apportion.loops as loops
from apportion.loops.loop_body import LoopError, read_body
from apportion.loops.references import collect_references


def found(lines: str, **names: object) -> list[str]:
    text = "def body(key, value, A, B):\n    i, j = key\n" + "".join(
        f"    {line}\n" for line in lines.split("; ")
    )
    body = read_body(function_of(text, **names), {"accumulate": loops.accumulate})
    references = collect_references(body, {"A": 2, "B": 1}, 2).found
    return [str(each).partition(" ")[2].partition(" ")[2] for each in references]


@pytest.mark.parametrize(
    ("lines", "known"),
    [
        ("x = A[i, j]", ["reads A[k0, k1]"]),
        ("A[i, j] = 1", ["writes A[k0, k1]"]),
        ("A[i, j] += B[j]", ["reads and writes A[k0, k1]", "reads B[k1]"]),
        ("A[i, int(B[j])] = 1", ["reads B[k1]", "writes A[k0, ?]"]),
        ("a = A[i]; a[j] = 1", ["writes A[k0]"]),
        ("a = A[:, i]; b = a; b += 1", ["reads and writes A[:, k0]"]),
        ("a = A[:, i]; x = a @ B[:]", ["reads A[:, k0]", "reads B[:]"]),
        ("a, b = A[:, i], B[j]", ["reads and writes A[:, k0]", "reads B[k1]"]),
        ("x = np.sqrt(A[:, i])", ["reads A[:, k0]"]),
        ("np.sqrt(A[:, i], A[:, j])", ["reads and writes A[:, k0]", "reads and writes A[:, k1]"]),
        ("np.sqrt(B[:], out=A[:, j])", ["reads and writes A[:, k1]", "reads and writes B[:]"]),
        ("x = A[:, i].sum()", ["reads A[:, k0]"]),
        ("x = helper(A[:, i])", ["reads and writes A[:, k0]"]),
        ("x = (A[:, i], 1)", ["reads and writes A[:, k0]"]),
        ("x = A[i, j] if B[j] > 0 else 0", ["reads B[k1]", "reads A[k0, k1]"]),
        ("for x in A[:, i]: B[j] = x", ["reads and writes A[:, k0]", "writes B[k1]"]),
        ("x = len(A) + A.shape[1] + A.ndim", []),
        ("A[:, i][2] = 1", ["writes A[:, k0]"]),
    ],
)  # fmt: skip
def test_references(lines: str, known: list[str]) -> None:
    def helper(x: object) -> object:
        return x

    assert sorted(found(lines, helper=helper)) == sorted(known)


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("x = A", "A is used as a whole"),
        ("x = helper(A)", "A is used as a whole"),
        ("x = A.T", "A is used as a whole"),
        ("A = 1", "A is an array of the loop; do not rebind it"),
        ("x = A[i, -1]", "the subscript -1 of A is negative"),
        ("x = A[i, j, 0]", "A has 2 dims, and A[i, j, 0] has 3 subscripts"),
        ("a = A[:, i]; a = A[:, j]", "a names a part of an array and is bound again"),
        ("a = A[:, i]; a = 1.0", "a names a part of an array and is bound again"),
        ("A[:, i].sort()", "the method sort of a part of an array may change it"),
        ("x = [y for y in A[:, i]]", "a comprehension cannot be in the body of a loop"),
        ("x = lambda y: y", "a lambda cannot be in the body of a loop"),
        ("global g", "global cannot be in the body of a loop"),
        ("del i", "del cannot be in the body of a loop"),
        ("x = unheard_of(1)", "unheard_of is not defined"),
        ("x = os.getpid()", "the module os cannot be used in a loop's body"),
        ("x = word", "word is a str, which a loop's body cannot refer to; pass it as an argument"),
    ],
)
def test_refusals(lines: str, sentence: str) -> None:
    import os

    def helper(x: object) -> object:
        return x

    with pytest.raises(LoopError, match=r"random loop \d+>:[23]: ") as error:
        found(lines, helper=helper, os=os, word="a")
    assert sentence in str(error.value)


def test_bodies_take_plain_parameters() -> None:
    ratings = loops.array.indices(3)
    with pytest.raises(LoopError, match="takes the key and the value of an element first"):
        loops.parallel(over=ratings)(function_of("def body(key):\n    pass\n"))
    with pytest.raises(LoopError, match="plain parameters only"):
        loops.parallel(over=ratings)(function_of("def body(key, value, *rest):\n    pass\n"))
    with pytest.raises(LoopError, match="written with def"):
        loops.parallel(over=ratings)(lambda key, value: None)
    with pytest.raises(LoopError, match="a loop goes over an array"):
        loops.parallel(over=np.zeros(3))(lambda key, value: None)  # type: ignore[arg-type]


def test_helpers_that_call_themselves_are_refused() -> None:
    def again(x: int) -> int:
        return again(x)

    with pytest.raises(LoopError, match="again calls itself"):
        found("x = again(1)", again=again)


def test_special_functions_have_a_meaning_in_bodies_only() -> None:
    with pytest.raises(LoopError, match="in the body of a loop only"):
        loops.accumulate("x", 1.0)
    with pytest.raises(LoopError, match="in the body of a loop only"):
        loops.uniform()
