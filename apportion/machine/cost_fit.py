"""Fits: seconds of calls that were not measured, from those that were.

A step of machine/ between cost_table.py and cost_model.py.

    seconds = launch + flops * per_flop + bytes * per_byte        none of the three below zero

The deviation that is made small is the relative one, so that small calls count as much as large
ones. There is a fit for each kind of Op and size of element, where enough calls were measured, and
one for each family of kinds: where launch and rates are all that is known of a kernel, the share of
a rate that it reaches grows with its size as x / (x + a), and that is what such a line says. Kinds
that are not bound by arithmetic have no term for it: their flops are as good as a second count of
their bytes, but would tell other devices a wrong pace.

Calls for which libraries are known to have slower kernels are kinds of their own (`fit_kind`):
products in half precision with a side that is no multiple of 8, and convolutions of few channels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import numpy as np

from apportion.columns import Floats
from apportion.machine.cost_table import (
    CostLine,
    Fit,
    KernelMeasurement,
    fused_name,
    kind_of_signature,
)

DENSE = (
    "mm", "bmm", "addmm", "baddbmm", "mm_total", "convolution", "convolution_backward",
    "conv_backward_input", "conv_backward_weight", "conv_backward_both", "conv_transpose",
    "sdpa", "sdpa_backward", "sdpa_lse", "sdpa_values", "grouped_mm", "grouped_outer",
)  # fmt: skip
OTHER = "family:other"
FUSED = fused_name("")  # shares of a kernel are not on one line
ODD, THIN = "~odd", "~thin"
ALIGNED, FEW_CHANNELS = 8, 16
FEWEST = 4  # works for a fit of a kind
LEFT_OUT = 12  # at most so many fits to see how well one does on works that it was not made from


def fit_kind(signature: str) -> str:
    """The kind whose line a call is on: its Op's, or of calls that are slower than most of it."""
    kind = kind_of_signature(signature)
    if family(kind) == OTHER:
        return kind
    given = re.findall(r"(\w+)\[([\d,]*)", signature.partition("(")[2])
    shapes = [(name, [int(n) for n in sizes.split(",") if n]) for name, sizes in given]
    if "conv" in kind:
        channels = [sizes[1] for _, sizes in shapes[:2] if len(sizes) > 2]
        return f"{kind}{THIN}" if channels and min(channels) < FEW_CHANNELS else kind
    half = any(name in ("bfloat16", "float16") for name, _ in shapes)
    odd = any(n % ALIGNED for _, sizes in shapes if len(sizes) > 1 for n in sizes[-2:])
    return f"{kind}{ODD}" if half and odd else kind


def family(kind: str) -> str:
    """`family:dense` for kinds that are bound by arithmetic, else `family:other`."""
    kind = kind.partition("~")[0]
    name = kind.split(".")[1] if "." in kind else kind
    return "family:dense" if name in DENSE or "attention" in name else OTHER


def key(name: str, itemsize: int) -> str:
    """The name of a fit in a table: `aten.mm.default/4`."""
    return f"{name}/{itemsize}"


def fits(works: Mapping[str, KernelMeasurement], folds: int = LEFT_OUT) -> dict[str, Fit]:
    """A Fit for each kind and size of element with enough works, and for each family; how well each
    does is seen by at most so many fits without some of its works (0: on all of them)."""
    groups: dict[str, list[KernelMeasurement]] = {}
    for signature, work in works.items():
        kind = fit_kind(signature)
        if kind.startswith(FUSED):
            continue
        if family(kind) == OTHER and work.nbytes:
            work = work._replace(flops=0.0)
        groups.setdefault(key(kind, work.itemsize), []).append(work)
        if work.flops or work.nbytes:  # views say nothing about others
            groups.setdefault(key(family(kind), work.itemsize), []).append(work)
    enough = {name: found for name, found in sorted(groups.items()) if len(found) >= FEWEST}
    return {name: fit(found, folds) for name, found in enough.items()}


def fit(works: Sequence[KernelMeasurement], folds: int = LEFT_OUT) -> Fit:
    """The line through works, and how far it is from works left out in turn (the median), or from
    all of them if there are no folds."""
    rows = np.array([(1.0, w.flops, w.nbytes) for w in works])
    seconds = np.array([w.seconds for w in works])
    best = nonnegative_least_squares(rows, seconds)
    folds = min(len(works), folds)
    errors = np.abs(rows @ best / seconds - 1)
    for fold in range(folds):
        out = np.arange(len(works)) % folds == fold
        guess = rows[out] @ nonnegative_least_squares(rows[~out], seconds[~out])
        errors[out] = np.abs(guess / seconds[out] - 1)
    launch, per_flop, per_byte = best.tolist()
    return Fit(launch, per_flop, per_byte, float(np.median(errors)), len(works))


def line(samples: Iterable[tuple[int, int, float]]) -> CostLine:
    """The Line through (boxes, bytes, seconds)."""
    given = np.array(list(samples), np.float64).reshape(-1, 3)
    if not len(given):
        return CostLine(0.0, 0.0, 0.0, 0.0, 0)
    rows = np.column_stack([np.ones(len(given)), given[:, 0], given[:, 1]])
    found = nonnegative_least_squares(rows, given[:, 2])
    error = float(np.median(np.abs(rows @ found / given[:, 2] - 1)))
    each, per_box, per_byte = found.tolist()
    return CostLine(each, per_box, per_byte, error, len(given))


def nonnegative_least_squares(rows: Floats, seconds: Floats) -> Floats:
    """Non-negative coefficients that make the relative deviations small.

    The best of all sets of columns whose own least squares have no negative coefficient: columns
    are few, and scipy takes half a second to import.
    """
    relative = rows / seconds[:, None]
    scale = np.abs(relative).max(axis=0)
    scale[scale == 0] = 1.0
    scaled, count = relative / scale, rows.shape[1]
    best, least_error = np.zeros(count), float(len(seconds))
    for size in range(1, count + 1):
        for columns in combinations(range(count), size):
            found = np.linalg.lstsq(scaled[:, columns], np.ones(len(seconds)), rcond=None)[0]
            error = float(((scaled[:, columns] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least_error * (1 - 1e-9):  # arithmetic before bytes
                best, least_error = np.zeros(count), error
                best[list(columns)] = found
    answer: Floats = best / scale
    return answer
