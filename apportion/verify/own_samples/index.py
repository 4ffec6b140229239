"""Own inputs: reading and writing at places given by data."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from apportion.verify.sample import Sample, aten, sample_of

randn, randint = torch.randn, torch.randint


def samples() -> Iterator[Sample]:
    """Extents that differ, so that no two dimensions can be mistaken for each other."""
    yield from _embeddings()
    yield from _bags()
    yield from _reads()
    yield from _scatters()
    yield from _along()
    yield from _puts()
    yield from _searches()


def _embeddings() -> Iterator[Sample]:
    for shape in ((4, 5), (7,), ()):
        ids = randint(11, shape)
        yield sample_of(aten.embedding.default, randn(11, 6), ids)
        yield sample_of(aten.embedding.default, randn(11, 6), ids.int(), 3)
        for padding, by_frequency in ((-1, False), (3, False), (-1, True), (4, True)):
            yield sample_of(
                aten.embedding_dense_backward.default,
                randn(*shape, 6), ids, 11, padding, by_frequency,
            )  # fmt: skip
    yield sample_of(aten.embedding_renorm.default, randn(11, 6), randint(11, (5,)), 1.0, 2.0)


def _bags() -> Iterator[Sample]:
    ids, starts, factors = randint(11, (9,)), torch.tensor([0, 2, 5, 5]), randn(9)
    for mode in (0, 1, 2):
        weights = factors if mode == 0 else None
        given = (randn(11, 6), ids, starts, False, mode, False, weights)
        yield sample_of(aten._embedding_bag.default, *given)
        yield sample_of(aten._embedding_bag_forward_only.default, *given)
        yield sample_of(aten._embedding_bag.default, *given, False, 3)
        _, bag_of, sizes, largest = aten._embedding_bag.default(*given, False, 3)
        yield sample_of(
            aten._embedding_bag_dense_backward.default,
            randn(4, 6), ids, bag_of, sizes, largest, 11, False, mode, weights, 3,
        )  # fmt: skip
    bag_of = torch.tensor([0, 0, 1, 1, 1, 3, 3, 3, 3])
    yield sample_of(
        aten._embedding_bag_per_sample_weights_backward.default,
        randn(4, 6), randn(11, 6), ids, starts, bag_of, 0,
    )  # fmt: skip


def _reads() -> Iterator[Sample]:
    yield sample_of(aten.gather.default, randn(5, 7, 4), 1, randint(7, (5, 6, 4)))
    yield sample_of(aten.gather.default, randn(5, 7, 4), -3, randint(5, (8, 7, 4)))
    yield sample_of(aten.gather.default, randn(6, 7, 5), 1, randint(7, (4, 9, 3)))
    yield sample_of(aten.gather.default, randn(7), 0, randint(7, (4,)))
    yield sample_of(aten.index_select.default, randn(5, 7, 4), 1, randint(7, (6,)))
    yield sample_of(aten.index_select.default, randn(5, 7), -1, randint(7, (9,)).int())
    x, rows, columns = randn(5, 7, 4, 6), randint(-5, 5, (3, 1)), randint(-6, 6, (8,))
    for index in (
        [rows],
        [None, randint(-7, 7, (3, 5))],
        [None, None, randint(4, (9,))],
        [rows, randint(7, (3, 8))],
        [None, randint(7, (3, 1)), randint(-4, 4, (8,))],
        [rows, None, None, columns],
        [rows, None, randint(4, (8,)).int()],
        [torch.tensor(2), None, randint(4, (5,))],
    ):
        yield sample_of(aten.index.Tensor, x, index)
        yield sample_of(aten._unsafe_index.Tensor, x, index)
    mask = torch.rand(5, 7) < 0.5
    yield sample_of(aten.index.Tensor, x, [mask])
    yield sample_of(aten.index.Tensor, x, [None, torch.rand(7) < 0.5])
    yield sample_of(
        aten._unsafe_masked_index.default, randn(5, 7), torch.rand(6, 8) < 0.5,
        [randint(-9, 9, (6, 1)), randint(-9, 9, (8,))], 0.5,
    )  # fmt: skip
    yield sample_of(aten.take.default, randn(5, 7, 3), randint(-105, 105, (6, 4)))
    yield sample_of(aten.masked_select.default, randn(5, 7), mask)


def _scatters() -> Iterator[Sample]:
    x, other = randn(6, 7, 5), randn(6, 9, 5)
    for d, index, source in (
        (1, randint(7, (6, 9, 5)), other),
        (-2, randint(7, (4, 8, 5)), other),
        (0, randint(6, (3, 7, 5)), randn(4, 8, 5)),
        (2, randint(5, (6, 7, 8)), randn(6, 7, 8)),
    ):
        # No two values for one place, where it is left open which of them stays.
        size = x.shape[d]
        once = torch.rand(*index.shape[:d], size, *index.shape[d % 3 + 1 :]).argsort(d)
        once = once.narrow(d, 0, min(size, index.shape[d]))
        yield sample_of(aten.scatter.src, x, d, once, source)
        yield sample_of(aten.scatter.value, x, d, index, 0.5)
        yield sample_of(aten.scatter_add.default, x, d, index, source)
        for how in ("add", "multiply"):
            yield sample_of(aten.scatter.reduce, x, d, index, source, reduce=how)
            yield sample_of(aten.scatter.value_reduce, x, d, index, 0.5, reduce=how)
        for how in ("sum", "prod", "mean", "amax", "amin"):
            for own in (True, False):
                yield sample_of(aten.scatter_reduce.two, x, d, index, source, how, include_self=own)


def _along() -> Iterator[Sample]:
    x, source = randn(6, 7, 5), randn(6, 9, 5)
    index = randint(7, (9,))
    once = torch.randperm(7)[:4]
    yield sample_of(aten.index_add.default, x, 1, index, source)
    yield sample_of(aten.index_add.default, x, -2, index.int(), source, alpha=2)
    yield sample_of(aten.index_copy.default, x, 1, once, randn(6, 4, 5))
    yield sample_of(aten.index_fill.int_Scalar, x, 1, index, 0.5)
    yield sample_of(aten.index_fill.int_Tensor, x, 1, index, torch.tensor(0.5))
    for how in ("prod", "mean", "amax", "amin"):
        for own in (True, False):
            yield sample_of(aten.index_reduce.default, x, 1, index, source, how, include_self=own)


def _puts() -> Iterator[Sample]:
    x = randn(5, 7, 4, 6)
    once = torch.randperm(7)[:3] - 7
    for index, shape in (
        ([randint(-5, 5, (3,))], (3, 7, 4, 6)),
        ([None, randint(-7, 7, (3, 8))], (5, 3, 8, 4, 6)),
        ([None, randint(-7, 7, (3, 8))], (8, 1, 6)),
        ([None, randint(-7, 7, (3, 1)), randint(4, (8,))], (5, 3, 8, 6)),
        ([randint(5, (3, 1)), None, None, randint(-6, 6, (8,))], (3, 8, 7, 4)),
        ([randint(5, (9,)), None, randint(-4, 4, (9,))], (9, 7, 6)),
        ([randint(5, (9,))], ()),
    ):
        yield sample_of(aten.index_put.default, x, index, randn(shape), True)
        yield sample_of(aten._unsafe_index_put.default, x, index, randn(shape), True)
    yield sample_of(aten.index_put.default, x, [None, once], randn(5, 3, 4, 6))
    yield sample_of(aten.index_put.default, x, [None, once], randn(4, 1))
    yield sample_of(aten.index_put.default, x, [None, once, torch.tensor([2])], randn(3, 6))
    mask = torch.rand(7, 4) < 0.5
    yield sample_of(aten.index_put.default, x, [None, mask], torch.tensor(0.5))
    yield sample_of(aten.index_put.default, x, [None, mask], randn(6), True)
    yield sample_of(aten.index_put.default, x, [None, mask], randn(5, int(mask.sum()), 6))
    yield sample_of(
        aten._unsafe_masked_index_put_accumulate.default, randn(5, 7), torch.rand(6, 8) < 0.5,
        [randint(-9, 9, (6, 1)), randint(-9, 9, (8,))], randn(6, 8),
    )  # fmt: skip
    flat = torch.randperm(105).reshape(3, 35)[:, :8] - 50
    yield sample_of(aten.put.default, randn(5, 7, 3), flat, randn(3, 8))
    yield sample_of(aten.put.default, randn(5, 7, 3), flat, randn(3, 8), True)
    yield sample_of(aten.masked_scatter.default, randn(5, 7), torch.rand(5, 7) < 0.5, randn(40))


def _searches() -> Iterator[Sample]:
    line, lines = randn(9).sort()[0], randn(5, 9).sort()[0]
    for right in (False, True):
        yield sample_of(aten.searchsorted.Tensor, line, randn(4, 6), right=right)
        yield sample_of(aten.searchsorted.Tensor, lines, randn(5, 6), right=right)
        yield sample_of(aten.searchsorted.Scalar, line, 0.1, right=right)
        yield sample_of(aten.bucketize.Tensor, randn(4, 6), line, right=right)
        yield sample_of(aten.bucketize.Scalar, 0.1, line, right=right)
    unsorted = randn(5, 9)
    yield sample_of(
        aten.searchsorted.Tensor, unsorted, randn(5, 6), side="right", sorter=unsorted.argsort()
    )
