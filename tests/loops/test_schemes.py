"""Dependence vectors and schemes, against brute force and against the released analysis."""

from __future__ import annotations

from itertools import product

import pytest
from loop_oracle import judge
from random_loops import RandomLoop, function_of, random_loop
from released_orion import released_scheme

from apportion.loops import dependence, schemes
from apportion.loops.dependence import Distances, lexicographically_positive
from apportion.loops.loop_body import read_body
from apportion.loops.plan_loop import analyse_body

RANDOM_LOOPS = 400  # benchmarks/loops_soundness.py tries 20,000


def analysis(lines: str, dims: int, arrays: dict[str, int], ordered: bool = False) -> object:
    text = f"def body(key, value, {', '.join(arrays)}):\n" + "".join(
        f"    {line}\n" for line in lines.split("; ")
    )
    return analyse_body(read_body(function_of(text)), dict(arrays), dims, ordered)


def vectors(found: object) -> set[str]:
    return {f"{each.array}{each}" for each in found.dependences.vectors}  # type: ignore[attr-defined]


def kinds(found: object) -> set[str]:
    return {str(each) for each in found.schemes}  # type: ignore[attr-defined]


def test_matrix_factorisation_is_2d() -> None:
    found = analysis("u, i = key; W[:, u] += H[:, i]; H[:, i] += W[:, u]", 2, {"W": 2, "H": 2})
    assert vectors(found) == {"W(0, +)", "H(+, 0)"}
    assert kinds(found) == {"2D, space k0, time k1", "2D, space k1, time k0"}


def test_topic_models_are_2d_once_the_sums_are_buffered() -> None:
    lines = "c, w, d = key; D[d, value] += 1; T[w, value] += 1; S[value] += 1"
    arrays = {"D": 2, "T": 2, "S": 1}
    assert not kinds(analysis(lines, 3, arrays))
    text = "def body(key, value, D, T, S):\n    " + lines.replace("; ", "\n    ") + "\n"
    body = read_body(function_of(text))
    found = analyse_body(body, dict(arrays), 3, False, ("S",))
    assert {"2D, space k2, time k1", "2D, space k1, time k2"} <= {str(s) for s in found.schemes}


def test_sparse_regression_has_no_scheme() -> None:
    found = analysis("for t in range(3): W[int(value) + t] += 1", 1, {"W": 1})
    assert vectors(found) == {"W(+)"} and not kinds(found)


def test_a_stencil_is_skewed() -> None:
    lines = "i, j = key; A[i + 1, j + 1] = A[i, j + 2] + A[i + 1, j]"
    found = analysis(lines, 2, {"A": 2}, ordered=True)
    assert vectors(found) == {"A(1, -1)", "A(0, 1)"}
    assert kinds(found) == {"unimodular, space k0, time k1+1*k0"}


def test_writes_that_nobody_reads_may_come_in_any_order_unless_the_loop_is_ordered() -> None:
    free = analysis("i = key; A[int(value)] = i", 1, {"A": 1})
    assert kinds(free) == {"1D on k0"} and free.dependences.racing == ("A",)  # type: ignore[attr-defined]
    assert not kinds(analysis("i = key; A[int(value)] = i", 1, {"A": 1}, ordered=True))


@pytest.mark.parametrize("distance", list(product((None, -1, 0, 2), repeat=3)))
def test_lexicographically_positive(distance: Distances) -> None:
    found = list(lexicographically_positive(distance))
    for d in product(range(-3, 4), repeat=3):
        signs = (d, tuple(-x for x in d))
        meant = any(
            all(w is None or w == x for w, x in zip(distance, s, strict=True)) for s in signs
        )
        positive = d > (0, 0, 0)
        covered = any(all(r.holds(x) for r, x in zip(v, d, strict=True)) for v in found)
        assert covered == (meant and positive)


@pytest.mark.slow
def test_random_loops_against_brute_force() -> None:
    divided = 0
    for seed in range(RANDOM_LOOPS):
        loop = random_loop(seed)
        verdict = judge(loop)
        assert not verdict.wrong, f"seed {seed}: {verdict.wrong[0]}\n{loop.text}"
        divided += bool(verdict.analysis.schemes)
    assert divided > RANDOM_LOOPS / 3, "hardly any loop could be divided: nothing was tested"


@pytest.mark.slow
def test_what_the_release_finds_is_found() -> None:
    found = 0
    for seed in range(RANDOM_LOOPS):
        loop = random_loop(seed)
        arrays: dict[str, int | None] = {k: len(v) for k, v in loop.arrays.items()}
        known = analyse_body(read_body(loop.function), arrays, len(loop.shape), loop.ordered)
        theirs = released_scheme(known.references.found, len(loop.shape), loop.ordered)
        found += bool(theirs)
        if theirs and not known.schemes:
            assert loop.ordered and len(loop.shape) == 3 and theirs == "2d"  # theirs is wrong there
    assert found > RANDOM_LOOPS / 4


# The oracle sees what is wrong: each of these would be, were it done so


def _wrong(loops: int = 200) -> int:
    return sum(bool(judge(random_loop(seed)).wrong) for seed in range(loops))


@pytest.mark.slow
def test_the_oracle_notices_a_lost_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dependence.lexicographically_positive
    monkeypatch.setattr(dependence, "lexicographically_positive", lambda d: list(whole(d))[:1])
    assert _wrong()


@pytest.mark.slow
def test_the_oracle_notices_the_program_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def rotating(vectors: object, dims: int, ordered: bool) -> object:
        return schemes.permitted_schemes(vectors, dims, False)  # type: ignore[arg-type]

    monkeypatch.setattr("apportion.loops.plan_loop.permitted_schemes", rotating)
    assert _wrong()


@pytest.mark.slow
def test_the_oracle_notices_the_skew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemes, "_least_skew", lambda vectors, space, time: 0)
    assert _wrong()


def test_the_oracle_notices_reflected_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "def body(key, value, A):\n    i = key\n    A[3 - i] = A[i] + 1.0\n"
    loop = RandomLoop(
        text, (4,), {"A": (6,)}, tuple((k,) for k in range(4)), (0,) * 4, False, function_of(text)
    )
    assert not judge(loop).analysis.schemes
    from apportion.loops import subscripts

    plain = subscripts._sum
    lost = lambda left, right, sign: plain(left, right, 1)  # noqa: E731
    monkeypatch.setattr(subscripts, "_sum", lost)
    assert judge(loop).wrong
