"""Explanation: what is known of an Op's Choice and of the alternatives to it; and how it reads.

Part of the room plan. explain.py fills it in.
`print` shows an Explanation as a page of text, `to_json` gives it as plain data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from apportion.plan.alternatives import OpAxis
from apportion.plan.plan import Plan

ALONE, GROUP = "alone", "group"
OPTIMAL, RESHARDING, MEMORY = "optimal", "resharding", "memory"
LEGALITY, SEARCH, BUDGET = "legality", "search", "budget"

MOST_NAMES = 4  # of other Ops that are listed
MOST_RUNS = 8  # of devices that are listed


@dataclass(frozen=True, slots=True)
class CutAxis:
    """An axis that is cut: `kind` is sample, parameter, attribute or reduction; `partial` says that
    partial values are left; `dims` are what it divides, such as `weight[0]`."""

    axis: str
    extent: int
    parts: int
    kind: str
    partial: bool
    dims: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NamedChoice:
    """A Choice with the names of its axes. `devices` are replica by replica, part by part."""

    cuts: tuple[CutAxis, ...]
    replicas: int
    devices: tuple[int, ...]

    def __str__(self) -> str:
        return _choice(self)


@dataclass(frozen=True, slots=True)
class ValueTraffic:
    """A Value that the Op reads or leaves. `other` makes it or reads it; `moved` are the bytes that
    come from other devices for this Op or, of what it leaves, for those that read it."""

    value: str
    type: str
    nbytes: int
    other: str
    moved: int


@dataclass(frozen=True, slots=True)
class OpTiming:
    """When the Op runs, how long on its busiest device, and how much later it could end without
    making the step longer, while messages keep their order."""

    start_seconds: float
    end_seconds: float
    busiest_seconds: float
    slack_seconds: float

    @property
    def critical(self) -> bool:
        """Whether it is on a critical path."""
        return self.slack_seconds == 0


@dataclass(frozen=True, slots=True)
class Alternative:
    """What another Choice would do to the step; differences are to the plan.

    scope            alone, or group: the Op with its Group, cut alike
    busiest_seconds  what the Op, or its Group, computes on its busiest device
    peak_bytes       estimated as the plan's, changed as far as slots and messages change
    over             bytes above the limit on the device that is most above its own; 0: it fits
    over_device      which device that is
    """

    choice: NamedChoice
    scope: str
    step_seconds: float
    step_difference: float
    bytes_moved: int
    bytes_difference: int
    busiest_seconds: float
    busiest_difference: float
    peak_bytes: tuple[int, ...]
    peak_difference: int
    over: int
    over_device: int | None

    @property
    def fits(self) -> bool:
        """Whether every device stays under its memory limit."""
        return self.over == 0


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why an Op has its Choice. `print` shows it, `to_json` gives it as plain data.

    others            further forward Ops of the module that was asked for, the heaviest first
    group             the Ops of its Group, first the one that the others follow
    compared_seconds  the plan's step by the costs by which alternatives are compared: fitted ones
                      where kernels were measured for the plan
    alternatives      the best ones, the fastest first; `tried` of `known` were simulated
    refused           axes that cannot be cut, and why
    constraint        what keeps the best alternative from being taken; `because` is a sentence
    """

    op: str
    index: int
    kind: str
    phase: str
    line: str
    module: str
    others: tuple[str, ...]
    group: tuple[str, ...]
    choice: NamedChoice
    reads: tuple[ValueTraffic, ...]
    leaves: tuple[ValueTraffic, ...]
    spent: OpTiming
    step_seconds: float
    compared_seconds: float
    bytes_moved: int
    peak_bytes: tuple[int, ...]
    memory_limit: tuple[int, ...] | None
    alternatives: tuple[Alternative, ...]
    tried: int
    known: int
    refused: tuple[tuple[str, str], ...]
    constraint: str
    because: str
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return _text(self)

    def to_json(self) -> dict[str, Any]:
        """All of it as plain JSON data."""
        data = asdict(self)
        data["choice"]["text"] = str(self.choice)
        data["spent"]["critical"] = self.spent.critical
        for row, meant in zip(data["alternatives"], self.alternatives, strict=True):
            row["fits"] = meant.fits
            row["choice"]["text"] = str(meant.choice)
        plain: dict[str, Any] = _plain(data)
        return plain


def _plain(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _plain(item) for key, item in data.items()}
    return [_plain(item) for item in data] if isinstance(data, tuple | list) else data


# As text


def _text(it: Explanation) -> str:
    """All of it, for a terminal."""
    return "\n".join([*_about(it), "", *_table(it), "", *_why(it)])


def _about(it: Explanation) -> list[str]:
    lines = [f"{it.op}: {it.kind}, {it.phase}, operator {it.index}"]
    where = ", ".join(part for part in (it.line, it.module and f"module {it.module}") if part)
    rows = [("where", where)] if where else []
    rows.append(("choice", _choice(it.choice)))
    rows += [("", _divides(cut)) for cut in it.choice.cuts]
    rows += [("reads", _row(read, "from")) for read in it.reads]
    rows += [("leaves", _row(left, "for")) for left in it.leaves]
    rows.append(("time", _time(it.spent, it.step_seconds)))
    if len(it.group) > 1:
        first, *rest = it.group
        others = _listed(name for name in rest if name != it.op)
        led = "" if first == it.op else f"that of {first}, whose choice is shown for it; "
        rows.append(("group", f"{led}with {others}"))
    if it.others:
        rows.append(("others", f"in what was asked for: {_listed(it.others)}"))
    return lines + [f"  {name:<8}{line}" for name, line in rows]


def _choice(it: NamedChoice) -> str:
    """A Choice in words."""
    where = _devices(it.devices)
    cuts = ", ".join(f"{cut.kind} axis {cut.axis} in {cut.parts}" for cut in it.cuts)
    if it.replicas > 1:
        return f"{cuts or 'whole'}, {it.replicas} times, on {where}"
    return f"{cuts}, on {where}" if cuts else f"whole on {where}"


def _short(it: NamedChoice) -> str:
    cuts = [f"{cut.kind} {cut.axis}:{cut.parts}" for cut in it.cuts] or ["whole"]
    times = f", {it.replicas} times" if it.replicas > 1 else ""
    return f"{', '.join(cuts)}{times} on {_runs(it.devices)}"


def _divides(cut: CutAxis) -> str:
    partial = ", leaves partial values" if cut.partial else ""
    divided = f", divides {_listed(cut.dims)}" if cut.dims else ""
    return f"axis {cut.axis} of {cut.extent:,}{divided}{partial}"


def _row(moved: ValueTraffic, how: str) -> str:
    named = moved.other.split(", ")
    size = f"{moved.value} {moved.type}, {nbytes(moved.nbytes)}, {how} {_listed(named)}"
    return f"{size}; {nbytes(moved.moved)} move" if moved.moved else f"{size}; nothing moves"


def _time(spent: OpTiming, step: float) -> str:
    share = spent.busiest_seconds / step if step else 0.0
    ready = "on a critical path"
    if not spent.critical:
        ready = f"could end {seconds(spent.slack_seconds)} later without making the step longer"
    return (
        f"{seconds(spent.busiest_seconds)} on its busiest device ({share:.2%} of the step), "
        f"from {seconds(spent.start_seconds)} to {seconds(spent.end_seconds)}; {ready}"
    )


_HEADS = ("step", "change", "moved", "change", "peak", "change", "fits", "what", "choice")


def _table(it: Explanation) -> list[str]:
    now = (
        seconds(it.compared_seconds), "", nbytes(it.bytes_moved), "",
        nbytes(max(it.peak_bytes)), "", _fits(_over(it)), "as planned", _short(it.choice),
    )  # fmt: skip
    rows = [_HEADS, now, *(_alternative(one) for one in it.alternatives)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(_HEADS) - 1)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[:6], widths[:6], strict=True)]
        cells += [cell.ljust(width) for cell, width in zip(row[6:-1], widths[6:], strict=True)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    tried = f"{it.tried}" if it.tried == it.known else f"{it.tried} that were tried, of {it.known}"
    best = f"the best {len(it.alternatives)} of {tried}" if it.alternatives else "none"
    return [f"alternatives: {best}", *lines]


def _over(it: Explanation) -> int:
    limits = it.memory_limit or it.peak_bytes
    return max(0, *(peak - most for peak, most in zip(it.peak_bytes, limits, strict=True)))


def _alternative(it: Alternative) -> tuple[str, ...]:
    before = it.step_seconds - it.step_difference
    return (
        seconds(it.step_seconds), f"{it.step_difference / before:+.2%}" if before else "",
        nbytes(it.bytes_moved), _change(it.bytes_difference), nbytes(max(it.peak_bytes)),
        _change(it.peak_difference), _fits(it.over), it.scope, _short(it.choice),
    )  # fmt: skip


def _fits(over: int) -> str:
    return f"{nbytes(over)} over" if over else "yes"


def _why(it: Explanation) -> list[str]:
    lines = [f"{it.constraint}: {it.because}"]
    lines += [f"axis {name} cannot be cut: {why}" for name, why in it.refused]
    return lines + [f"note: {note}" for note in it.notes]


# Reasons


def missed(it: Alternative, plan: Plan) -> str:
    """A faster alternative that fits was not found."""
    return (
        f"{_so(it)}, would make the step {_percent(it)} shorter and fits; "
        f"{plan.method} did not try it, does not go by the step's time, or ran out of its budget"
    )


def too_large(it: Alternative, plan: Plan) -> str:
    """The faster alternatives do not fit."""
    device = 0 if it.over_device is None else it.over_device
    return (
        f"{_so(it)}, would make the step {_percent(it)} shorter, but needs {nbytes(it.over)} more "
        f"than the limit of device {device} ({plan.cluster.devices[device].name})"
    )


def moves_more(it: Alternative) -> str:
    """What would be computed faster costs more to move."""
    return (
        f"{_so(it)}, would compute {seconds(-it.busiest_difference)} less "
        f"on the busiest device, but move {nbytes(it.bytes_difference)} more, and the step would "
        f"take {seconds(it.step_difference)} longer"
    )


def undivided(axes: Sequence[OpAxis], reason: str) -> str:
    """Nothing of an Op can be cut."""
    why = reason or "; ".join(f"{axis.name}: {axis.refused}" for axis in axes)
    return f"none of its axes can be cut ({why or 'it has none'}), and no other devices are better"


def best_there_is(it: Alternative, spent: OpTiming) -> str:
    """No alternative is faster."""
    free = "" if spent.critical else "; it is not on a critical path"
    if not it.step_difference:
        more = "moves as much" if not it.bytes_difference else f"moves {_more(it.bytes_difference)}"
        return f"{_so(it)}, takes as long and {more}{free}"
    longer = seconds(it.step_difference)
    return f"the nearest, {_so(it)}, takes {longer} longer{free}"


def _so(it: Alternative) -> str:
    return f"its group with {it.choice}" if it.scope == "group" else str(it.choice)


def _percent(it: Alternative) -> str:
    share = -it.step_difference / (it.step_seconds - it.step_difference)
    return f"{share:.1%}" if share >= 0.001 else f"{100 * share:.2g}%"


def _more(difference: int) -> str:
    return f"{nbytes(abs(difference))} {'more' if difference > 0 else 'less'}"


# Words


def _devices(them: Sequence[int]) -> str:
    """Devices in their order, stretches of neighbours as one."""
    return f"{'device' if len(them) == 1 else 'devices'} {_runs(them)}"


def _runs(them: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for device in them:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    names = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    if len(names) > MOST_RUNS:
        names = [*names[:MOST_RUNS], f"... ({len(set(them))} devices)"]
    return ",".join(names)


def _listed(names: Iterable[str]) -> str:
    them = list(names)
    if len(them) <= MOST_NAMES:
        return ", ".join(them)
    return f"{', '.join(them[:MOST_NAMES])} and {len(them) - MOST_NAMES} more"


def seconds(number: float) -> str:
    """Four digits and a unit."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if abs(number) * factor >= 1:
            return f"{number * factor:.4g} {unit}"
    return f"{number * 1e9:.4g} ns"


def nbytes(count: int) -> str:
    """Three digits and a unit."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "KB")):
        if abs(count) >= 1000**power:
            return f"{count / 1000**power:.3g} {unit}"
    return f"{count} B"


def _change(count: int) -> str:
    return f"{'+' if count > 0 else ''}{nbytes(count)}" if count else "0"
