"""Linear algebra: matrices are opaque, and what is solved for is cut along its columns too.

All dimensions but the last one or two are a batch, broadcast between the operands. Outputs that a
call does not ask for are empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from apportion.describe.descriptions import describe
from apportion.describe.errors import Undescribed
from apportion.describe.interval import Affine
from apportion.describe.language import Access, Operand, Output, axes, axis, f, opaque, reduce
from apportion.describe.ops.reduction import WHOLE, norm_reducer

Slice = tuple[Operand, int]
"""An operand, and how many of its last dimensions are a matrix or a vector."""


def _batch(x: Operand, core: int, batch: Sequence[Affine], *place: Any) -> Access:
    """`x` at a place of the batch, and at `place` in its last dimensions (all of them)."""
    lead = x.shape[: x.ndim - core]
    skip = len(batch) - len(lead)
    index = [0 if n == 1 else batch[skip + d] for d, n in enumerate(lead)]
    return x[(*index, *(place or (WHOLE,) * core))]


def _common(slices: Sequence[Slice]) -> tuple[int, ...]:
    """The shape of the batch."""
    leads = [x.shape[: x.ndim - core] for x, core in slices]
    rank = max(map(len, leads))
    wide = [(1,) * (rank - len(lead)) + lead for lead in leads]
    return tuple(max(several) if min(several) else 0 for several in zip(*wide, strict=True))


def _axes_of(shape: Sequence[int], common: Sequence[int], number: int) -> list[Affine]:
    """The axes of the batch of output `number`: its own where it has extent 1 alone."""
    skip = len(common) - len(shape)
    if skip < 0:
        raise Undescribed("an output of another rank than the batch of its inputs")
    return [
        axis(f"one{number}_{d}" if n == 1 and common[skip + d] > 1 else f"b{skip + d}")
        for d, n in enumerate(shape)
    ]


def _results(
    slices: Sequence[Slice],
    shapes: Sequence[tuple[int, ...]],
    cores: Sequence[int],
    first: int = 0,
    beside: Sequence[Slice] = (),
) -> tuple[Output | None, ...]:
    """Opaque functions of a place of the batch, the last `cores` dimensions of each one matrix.
    `first` is the number of the first; `beside` are operands of other outputs. The last shapes may
    be left out, as are outputs that are absent."""
    common = _common([*slices, *beside])
    batch = axes("b", len(common))
    found: list[Output | None] = []
    for number, (shape, core) in enumerate(zip(shapes, cores, strict=False), first):
        if shape == (0,):
            found.append(None)
            continue
        place = axes(f"m{number}_", core)
        lead = _axes_of(shape[: len(shape) - core], common, number)
        source = opaque(*(_batch(x, c, batch) for x, c in slices))
        found.append(Output.of((*lead, *place), source[place]))
    return tuple(found)


_FACTORS = {
    "_linalg_det": (0, 2, 1),
    "_linalg_slogdet": (0, 0, 2, 1),
    "_linalg_svd": (2, 1, 2),
    "_linalg_eigh": (1, 2),
    "linalg_eig": (1, 2),
    "linalg_cholesky_ex": (2, 0),
    "linalg_inv_ex": (2, 0),
    "linalg_ldl_factor_ex": (2, 1, 0),
    "linalg_lu": (2, 2, 2),
    "linalg_lu_factor_ex": (2, 1, 0),
    "linalg_matrix_exp": (2,),
    "linalg_qr": (2, 2),
    "cholesky": (2,),
    "cholesky_inverse": (2,),
    "geqrf": (2, 1),
}
"""Functions of one matrix, and how many dimensions of each result belong to it."""


def _factors(cores: tuple[int, ...]) -> Any:
    def formula(x: Operand, *, out: Any) -> Any:
        return _results([(x, 2)], out, cores)

    return formula


for _name, _cores in _FACTORS.items():
    describe(f"aten.{_name}")(_factors(_cores))


@describe("aten.linalg_householder_product")
def householder_product(x: Any, tau: Any, *, out: Any) -> Any:
    return _results([(x, 2), (tau, 1)], out, (2,))


@describe("aten.lu_unpack")
def lu_unpack(x: Any, pivots: Any, *, out: Any) -> Any:
    return _results([(x, 2), (pivots, 1)], out, (2, 2, 2))


@describe("aten.linalg_pinv.atol_rtol_tensor")
def pinv(x: Any, *tolerances: Any, out: Any) -> Any:
    given = [(t, 0) for t in tolerances if isinstance(t, Operand)]
    return _results([(x, 2), *given], out, (2,))


# Solutions


def _solution(
    slices: Sequence[Slice], b: Operand, shape: tuple[int, ...], left: Any = True, width: int = 2
) -> Output:
    """The solution for the right-hand side `b`: a vector, or of `width` 2 a matrix whose columns
    (rows if not `left`) are apart."""
    common = _common([*slices, (b, width)])
    r, c = axis("r"), axis("c")
    lead = _axes_of(shape[: len(shape) - width], common, 0)
    found = _for_side(slices, b, axes("b", len(common)), left, width)[r]
    if width == 1:
        return Output.of((*lead, r), found)
    return Output.of((*lead, r, c) if left else (*lead, c, r), found)


def _for_side(
    slices: Sequence[Slice], b: Operand, batch: Sequence[Affine], left: Any, width: int
) -> Any:
    """A function of the system and of one column (row if not `left`) of the right-hand side."""
    c = axis("c")
    place = (WHOLE,) if width == 1 else (WHOLE, c) if left else (c, WHOLE)
    return opaque(*(_batch(x, k, batch) for x, k in slices), _batch(b, width, batch, *place))


def _width(a: Operand, b: Operand) -> int:
    """torch's rule whether the right-hand side of a system is a vector (1) or a matrix (2)."""
    return 1 if b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1]) else 2


@describe("aten._linalg_solve_ex")
def solve(a: Any, b: Any, left: Any = True, *, out: Any) -> Any:
    width = _width(a, b)
    factors = _results([(a, 2)], out[1:], (2, 1, 0), 1, [(b, width)])
    return _solution([(a, 2)], b, out[0], left, width), *factors


@describe("aten.linalg_solve_triangular")
def solve_triangular(a: Any, b: Any, upper: Any, left: Any = True, *, out: Any) -> Any:
    return _solution([(a, 2)], b, out[0], left)


@describe("aten.triangular_solve")
def triangular_solve(b: Any, a: Any, *, out: Any) -> Any:
    return _solution([(a, 2)], b, out[0]), *_results([(a, 2)], out[1:], (2,), 1, [(b, 2)])


@describe("aten.cholesky_solve")
def cholesky_solve(b: Any, a: Any, *, out: Any) -> Any:
    return _solution([(a, 2)], b, out[0])


@describe("aten.linalg_lu_solve")
def lu_solve(lu: Any, pivots: Any, b: Any, left: Any = True, *, out: Any) -> Any:
    return _solution([(lu, 2), (pivots, 1)], b, out[0], left)


@describe("aten.linalg_ldl_solve")
def ldl_solve(ld: Any, pivots: Any, b: Any, *, out: Any) -> Any:
    return _solution([(ld, 2), (pivots, 1)], b, out[0])


@describe("aten.ormqr")
def ormqr(a: Any, tau: Any, c: Any, left: Any = True, *, out: Any) -> Any:
    return _solution([(a, 2), (tau, 1)], c, out[0], left)


@describe("aten.linalg_lstsq")
def lstsq(a: Any, b: Any, rcond: Any, driver: Any, *, out: Any) -> Any:
    width = _width(a, b)
    rows, columns = a.shape[-2:]
    residuals: Output | None = None
    if out[1] != (0,):
        common = _common([(a, 2), (b, width)])
        side = axis("c" if width == 2 else "one")
        found = _for_side([(a, 2)], b, axes("b", len(common)), True, width)
        residuals = Output.of((*_axes_of(out[1][:-1], common, 1), side), found)
    elif rows > columns and driver not in (None, "gelsy"):
        raise Undescribed("whether there are residuals depends on the ranks of all matrices")
    ranks = _results([(a, 2)], out[2:], (0, 1), 2, [(b, width)])
    return _solution([(a, 2)], b, out[0], True, width), residuals, *ranks


# Products and distances of vectors


@describe("aten.linalg_cross")
def cross(a: Any, b: Any, dim: Any = -1) -> Any:
    rank = max(a.ndim, b.ndim)
    d = dim % rank

    def slices(x: Operand, i: Sequence[Affine]) -> Access:
        skip = rank - x.ndim
        return x[
            tuple(
                WHOLE if k + skip == d else 0 if n == 1 else i[k + skip]
                for k, n in enumerate(x.shape)
            )
        ]

    return lambda *i: opaque(slices(a, i), slices(b, i))[i[d]]


@describe("aten._cdist_forward")
def cdist(a: Any, b: Any, p: Any, mode: Any) -> Any:
    """The distance of every row of `a` from every row of `b`."""
    batch = axes("b", len(_common([(a, 2), (b, 2)])))
    i, j, k = axis("i"), axis("j"), axis("k")
    reducer = norm_reducer(p)
    if reducer is None:
        rows = _batch(a, 2, batch, i, WHOLE), _batch(b, 2, batch, j, WHOLE)
        # Many rows are multiplied instead, which rounds otherwise: a part must be of one kind.
        products = p == 2 and not mode and max(a.shape[-2], b.shape[-2]) > 25
        return Output.of((*batch, i, j), opaque(*rows, products))
    pair = f("distance", _batch(a, 2, batch, i, k), _batch(b, 2, batch, j, k))
    return Output.of((*batch, i, j), reduce(reducer, (k,), pair), k=a.shape[-1])


@describe("aten._euclidean_dist")
def euclidean_dist(a: Any, b: Any) -> Any:
    return cdist(a, b, 2, None)


@describe("aten._cdist_backward")
def cdist_backward(grad: Any, a: Any, b: Any, p: Any, dist: Any) -> Any:
    if not grad.shape[:-2] == a.shape[:-2] == b.shape[:-2] == dist.shape[:-2]:
        raise Undescribed("batches that are broadcast")
    batch = axes("b", a.ndim - 2)
    i, j, k = axis("i"), axis("j"), axis("k")
    parts = grad[(*batch, i, j)], a[(*batch, i, k)], b[(*batch, j, k)], dist[(*batch, i, j)]
    return Output.of((*batch, i, k), reduce("sum", (j,), f("pull", *parts)))


@describe("aten._pdist_forward")
def pdist(x: Any, p: Any) -> Any:
    """The distances between all pairs of rows."""
    k, reducer = axis("k"), norm_reducer(p)
    if reducer is None:
        return lambda pair: opaque(x[:, :])[pair]
    return lambda pair: reduce(reducer, (k,), opaque(x[:, k])[pair])


@describe("aten._pdist_backward")
def pdist_backward(grad: Any, x: Any, p: Any, dist: Any) -> Any:
    return lambda i, k: opaque(grad[:], x[:, k], dist[:])[i]
