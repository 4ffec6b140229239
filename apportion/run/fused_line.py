"""What fused kernels cost, from whole steps.

Part of the room run. A table of generated code comes in, and steps that torch's compiler has made
kernels for; the CostTable of that mode goes out.

    seconds of a step = replay + sum over families (pace * calls of libraries' kernels)
                      + kernels * per kernel + bytes that fusion leaves * per byte

Calls of libraries take what they take in generated code, times a pace of their family: a compiler
may lay out what they read and write otherwise, and pads sides of products that are odd.
Convolutions that were measured in the order of a compiler's images (channels_last.py) take that,
and their lines are made from these.
Coefficients are those that make relative deviations small, with weak beliefs of their own
(`BELIEFS`) where steps say nothing. What a step takes beyond its line is shared out over all of its
calls, so that steps that were measured are met; the table has these shares, and the line for what
was not measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from apportion.columns import Floats
from apportion.lower import TaskGraph
from apportion.machine import (
    FUSED_LINE,
    INDUCTOR,
    REPLAY,
    Cluster,
    CostLine,
    CostModel,
    CostTable,
    Fit,
    KernelMeasurement,
    cost_fit,
    fused_name,
)
from apportion.simulate import fused_traffic, nanoseconds

FAMILIES = ("product", "odd product", "convolution", "attention", "other")
BELIEFS = {"replay": 5e-5, "kernel": 2e-6, "byte": 1 / 3.5e12}  # of an H200, where nothing else is
PACE, FIRM = 1.0, 0.25  # a pace is believed to be 1, as firmly as this share of a step says
FAR = 0.02  # from generated code, for a call of a library to be listed


@dataclass(frozen=True)
class FusedStep:
    """The tasks of a step for one device, and the seconds that it took."""

    tasks: TaskGraph
    cluster: Cluster
    seconds: float


def kernel_family(kind: str) -> str:
    """The family whose pace calls of a library's kernel have."""
    if cost_fit.family(kind) != cost_fit.family("aten.mm.default"):
        return "other"
    if "conv" in kind:
        return "convolution"
    if "sdpa" in kind or "attention" in kind:
        return "attention"
    return "odd product" if kind.endswith(cost_fit.ODD) else "product"


def fused_table(
    generated: CostTable,
    steps: Sequence[FusedStep],
    day: str = "",
    turned: Mapping[str, KernelMeasurement] = MappingProxyType({}),
) -> CostTable:
    """The table of steps that were compiled with fusion; `turned` are calls of libraries that were
    measured in the memory order that the compiler gives them."""
    before, generated = generated, _laid_over(generated, turned)
    rows = np.array([_row(generated, step) for step in steps])
    found = _coefficients(rows, np.array([step.seconds for step in steps]))
    seconds: dict[str, list[float]] = defaultdict(list)
    sizes: dict[str, KernelMeasurement] = {}
    for step, row in zip(steps, rows, strict=True):
        beyond = (step.seconds - found[0]) / max(float(row[1:] @ found[1:]), 1e-9)
        _share(generated, step, found * min(max(beyond, 0.5), 2.0), seconds, sizes)
    works = dict(turned)
    for name, some in seconds.items():
        own = float(f"{max(float(np.mean(some)), 1e-9):.4g}")
        known = before.works.get(name)
        other = known is None or sizes[name].workspace != known.workspace
        if known is None or other or abs(own - known.seconds) > FAR * known.seconds:
            works[name] = sizes[name]._replace(seconds=own)
    errors = np.abs(rows @ found / np.array([step.seconds for step in steps]) - 1)
    each, per_byte = found[-2:].tolist()
    line = CostLine(0.0, each, per_byte, float(np.median(errors)), len(steps))
    return CostTable(
        replace(generated.condition, mode=INDUCTOR),
        day,
        works=works,
        fits=_paced(generated, dict(zip(FAMILIES, found[1:-2], strict=True))),
        lines={FUSED_LINE: line},
        issue={REPLAY: float(f"{found[0]:.4g}")},
    )


def _laid_over(generated: CostTable, turned: Mapping[str, KernelMeasurement]) -> CostTable:
    """A table in which calls were measured again, with lines through these alone."""
    lines = {n: f for n, f in cost_fit.fits(turned).items() if not n.startswith("family:")}
    works, fits = {**generated.works, **turned}, {**generated.fits, **lines}
    return replace(generated, works=works, fits=fits)


def _priced(generated: CostTable, step: FusedStep) -> Floats:
    """Seconds of every task in generated code."""
    kind = step.cluster.devices[0].kind
    cost = CostModel("generated", "", 0.5, {kind: generated})
    priced: Floats = nanoseconds(step.tasks, step.cluster, cost) / 1e9
    return priced


def _family_of_tasks(step: FusedStep) -> list[int]:
    works = [FAMILIES.index(kernel_family(cost_fit.fit_kind(w))) for w in step.tasks.works]
    return [works[w] if w >= 0 else FAMILIES.index("other") for w in step.tasks.work.tolist()]


def _row(generated: CostTable, step: FusedStep) -> list[float]:
    """1, the seconds of each family of libraries' kernels, fused kernels, and their bytes."""
    traffic, priced = fused_traffic(step.tasks), _priced(generated, step)
    alone, family = ~traffic.fused, np.array(_family_of_tasks(step))
    paced = [float(priced[alone & (family == k)].sum()) for k in range(len(FAMILIES))]
    return [1.0, *paced, float(traffic.kernels.sum()), float(traffic.nbytes.sum())]


def _coefficients(rows: Floats, seconds: Floats) -> Floats:
    """The non-negative coefficients of the head of this file."""
    beliefs = [BELIEFS["replay"], *(PACE for _ in FAMILIES), BELIEFS["kernel"], BELIEFS["byte"]]
    usual = float(np.median(seconds))
    held = np.diag([usual / belief for belief in beliefs])  # each alone would take a usual step
    given = np.concatenate([rows / seconds[:, None], held / usual * FIRM])
    wanted = np.concatenate([np.ones(len(seconds)), np.full(len(beliefs), FIRM)])
    scale = np.abs(given).max(axis=0)
    answer = np.linalg.lstsq(given / scale, wanted, rcond=None)[0] / scale
    found: Floats = np.maximum(answer, 0.2 * np.array(beliefs))
    return found


def _share(
    generated: CostTable,
    step: FusedStep,
    found: Floats,
    seconds: dict[str, list[float]],
    sizes: dict[str, KernelMeasurement],
) -> None:
    """Adds what each call of a step takes, by these coefficients."""
    tasks, traffic, priced = step.tasks, fused_traffic(step.tasks), _priced(generated, step)
    family, pace = _family_of_tasks(step), found[1:-2]
    for task, work in enumerate(tasks.work.tolist()):
        if work < 0 or not tasks.nbytes[task]:
            continue
        name = tasks.works[work]
        if traffic.fused[task]:
            name = fused_name(name)
            own = traffic.kernels[task] * found[-2] + traffic.nbytes[task] * found[-1]
        else:
            own = priced[task] * pace[family[task]]
        seconds[name].append(float(own))
        known = generated.works.get(name)
        sizes[name] = known or KernelMeasurement(
            0.0, float(tasks.flops[task]), int(tasks.nbytes[task]), int(tasks.itemsize[task])
        )


def _paced(generated: CostTable, pace: dict[str, float]) -> dict[str, Fit]:
    """The lines of libraries' kernels at their pace."""
    found = {}
    for name, fit in generated.fits.items():
        kind = name.rpartition("/")[0]
        own = pace["product" if kind == "family:dense" else kernel_family(kind)]
        if cost_fit.family(kind) == "family:dense" or kind == "family:dense":
            found[name] = fit._replace(
                launch=fit.launch * own, per_flop=fit.per_flop * own, per_byte=fit.per_byte * own
            )
    return found
