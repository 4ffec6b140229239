"""Tables about Plans for the terminal: what one decides and costs, several side by side, a run.

Part of the room show. Plans and Runs come in, tables and lines go out. They fit into 80 columns
without breaking a word, say once what is equal on all devices, and leave out folders of files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from rich.table import Table

from apportion.show.plain_table import plain_table
from apportion.show.tables import bytes_text, seconds_text, yes_or_no

if TYPE_CHECKING:
    from apportion.plan import Plan
    from apportion.run import Run, WayOut
    from apportion.simulate import Cause, Peak

SHOWN_CAUSES = 6  # of a peak
SHOWN_METHODS = 6
LONG_NAME = 40  # characters that a name may have without a place to break it
ACTIVITIES = ("computes", "assembles", "exchanges", "waits")


def planned(plan: Plan) -> list[Table | str]:
    """What a Plan decides and is expected to cost, why its fullest device is full, and how sure
    that is."""
    from apportion.simulate import peak, shares

    cost, line = plan.cost, plan.timeline
    parts = shares(plan.tasks, plan.cluster, cost).items()
    sure = ", ".join(f"{share:.0%} {source}" for source, share in parts if share)
    fullest = max(range(len(line.curves)), key=line.peak_bytes.__getitem__)
    most = peak(fullest, line.curves[fullest], plan.tasks, plan.space.graph, SHOWN_CAUSES)
    held = sorted(most.categories.items(), key=lambda item: -item[1])
    kinds = ", ".join(f"{name} {bytes_text(nbytes)}" for name, nbytes in held if nbytes)
    shown: list[Table | str] = [*expected(plan)]
    if most.causes:
        shown += ["", *causes(most), f"in all: {kinds}"]
    shown += ["", f"times: {sure}; cost model {cost.name}: {cost.provenance}"]
    return [*shown, *tried(plan), *(f"note: {note}" for note in plan.notes)]


def tried(plan: Plan) -> list[Table | str]:
    """The best plan of each method, the best of all first, where several were tried."""
    if not plan.tried:
        return []
    table = plain_table("methods tried", "step time", "peak memory", "bytes moved", "fits")
    for row in plan.tried[:SHOWN_METHODS]:
        figures = (seconds_text(row.step_seconds), bytes_text(row.peak_bytes))
        table.add_row(row.method, *figures, bytes_text(row.bytes_moved), yes_or_no(row.fits))
    return [table, ""]


def expected(plan: Plan) -> list[Table | str]:
    """What a Plan decides, what it is expected to cost, and the trials that it was kept for, if
    there were any."""
    from apportion.plan import decision

    title = f"{plan.model or 'a plan'} on {plan.cluster.name}, {plan.method}"
    kept = [trials(plan)] if plan.measured else []
    return [verdict(plan), title, f"{decision(plan)}.", "", predicted(plan), *kept]


def verdict(plan: Plan) -> str:
    """Whether a Plan fits, by its fullest device, how fast it is, and what share of the devices'
    rates it uses."""
    from apportion.plan import throughput, utilisation

    peaks = plan.predicted.peak_bytes
    limits = plan.memory_limit or peaks
    fullest = max(range(len(peaks)), key=lambda device: peaks[device] - limits[device])
    held = bytes_text(peaks[fullest])
    if plan.memory_limit is None:
        fits = f"without a limit: {held}"
    else:
        word = "fits" if plan.feasible else "does not fit"
        fits = f"{word}: {held} of {bytes_text(limits[fullest])}"
    said = [f"{seconds_text(plan.predicted.step_seconds)} a step"]
    if (done := throughput(plan)) is not None:
        said.append(f"{_rate(done.per_device)} {done.unit}/s/{_device(plan)}")
    if (used := utilisation(plan)) <= 1:
        said.append(f"{used:.0%} MFU")
    return f"{fits}; {', '.join(said)}"


def _rate(rate: float) -> str:
    """A rate to three digits at least, in whole numbers if these are enough."""
    return f"{rate:,.{0 if rate >= 100 else 1 if rate >= 10 else 2}f}"


def _device(plan: Plan) -> str:
    return "process" if {device.kind for device in plan.cluster.devices} == {"cpu"} else "GPU"


def predicted(plan: Plan) -> Table:
    """What a Plan is expected to cost."""
    from apportion.plan import throughput, utilisation

    table = plain_table("", "predicted")
    table.add_row("step time", seconds_text(plan.predicted.step_seconds))
    if (done := throughput(plan)) is not None:
        words = f"{_rate(done.per_device)} on each device, {_rate(done.per_second)} in all"
        table.add_row(f"{done.unit} a second", words)
    table.add_row("peak memory", _peaks(plan))
    table.add_row("bytes moved", bytes_text(plan.predicted.bytes_moved))
    table.add_row("model FLOPs utilisation", _share(utilisation(plan)))
    table.add_row("search time", seconds_text(plan.search_seconds))
    if plan.lower_bound is not None:
        table.add_row("bound", f"{_bound(plan)}: {plan.lower_bound_of or 'what was minimised'}")
    table.add_row("feasible", yes_or_no(plan.feasible))
    return table


def _share(used: float) -> str:
    """A share of what devices can do. Kernels that were measured may be faster than a machine is
    taken to be, and then nobody knows of what it is a share."""
    return f"{used:.1%}" if used <= 1 else "not known: kernels are faster than this machine's rates"


def trials(plan: Plan) -> Table:
    """The plans that ran before one was kept: a step as predicted and as measured."""
    table = plain_table("by", "predicted", "measured", "error", "")
    table.title = "plans that were run"
    for trial in plan.measured:
        error = trial.predicted_seconds / trial.measured_seconds - 1
        figures = (seconds_text(trial.predicted_seconds), seconds_text(trial.measured_seconds))
        table.add_row(trial.method, *figures, f"{error:+.1%}", "kept" if trial.chosen else "")
    return table


def causes(peak: Peak) -> list[Table | str]:
    """What fills a device at its peak."""
    when = f"{seconds_text(peak.time_ns / 1e9)} into the step" if peak.task >= 0 else "as it begins"
    during = f", in {peak.op}" if peak.op else ""
    title = f"device {peak.device} holds most, {bytes_text(peak.nbytes)}, {when}{during}:"
    table = plain_table("bytes", "share", "category", "what it is")
    for cause in peak.causes:
        share = f"{cause.nbytes / peak.nbytes:.0%}"
        table.add_row(bytes_text(cause.nbytes), share, cause.category, _cause(cause))
    count, nbytes = peak.others
    if count:
        rest = (bytes_text(nbytes), f"{nbytes / peak.nbytes:.0%}", "", f"{count} others")
        table.add_row(*rest)
    return [title, table]


def _cause(cause: Cause) -> str:
    """What is there, by the operator that made it, and the line without its folder."""
    made = _breakable(cause.op or cause.name)
    if cause.op and cause.name.partition(" ")[0] in ("all-gather", "reduce-scatter", "all-to-all"):
        made = f"{cause.name} for {made}"
    where = PurePath(cause.line).name if cause.line else ""
    return ", ".join(part for part in (made, cause.type, where) if part)


def _breakable(name: str) -> str:
    """A name with spaces after some dots if it is long, so that a line can end there."""
    head, dot, _ = name[:LONG_NAME].rpartition(".")
    if len(name) <= LONG_NAME or not dot:
        return name
    return f"{head}. {_breakable(name[len(head) + 1 :])}"


def side_by_side(plans: Sequence[Plan]) -> Table:
    """One row per Plan; the fastest that fits is marked."""
    heads = ("step time", "peak memory", "bytes moved", "search time", "feasible", "")
    table, best = plain_table("method", *heads), fastest(plans)
    for plan in plans:
        table.add_row(
            plan.method,
            seconds_text(plan.predicted.step_seconds),
            bytes_text(max(plan.predicted.peak_bytes)),
            bytes_text(plan.predicted.bytes_moved),
            seconds_text(plan.search_seconds),
            yes_or_no(plan.feasible),
            "best" if plan is best else "",
        )
    return table


def compared(plans: Sequence[Plan]) -> list[Table | str]:
    """Plans side by side, what the best of them decides, their bounds, each with what it is a bound
    of, and their notes."""
    from apportion.plan import decision

    best = fastest(plans)
    decided = [f"{best.method}: {decision(best)}."] if best is not None else []
    bounds = [
        f"bound of {p.method}: {_bound(p)}, {p.lower_bound_of or 'of what was minimised'}"
        for p in plans
        if p.lower_bound is not None
    ]
    notes = [f"{plan.method}: {note}" for plan in plans for note in plan.notes]
    return [side_by_side(plans), *decided, *bounds, *notes]


def fastest(plans: Sequence[Plan]) -> Plan | None:
    """Of the Plans that fit the fastest, of equal ones that which moves less."""
    fit = [plan for plan in plans if plan.feasible]
    return min(fit, key=lambda p: (p.predicted.step_seconds, p.predicted.bytes_moved), default=None)


def ways(several: Sequence[WayOut]) -> list[Table | str]:
    """What would fit instead, each way with what it would give."""
    if not several:
        return []
    table = plain_table("what would fit", "fits", "step time", "peak memory", "of", "by")
    for way in sorted(several, key=lambda way: not way.fits):
        figures = (seconds_text(way.step_seconds), bytes_text(way.peak_bytes))
        named = f"{way.options} ({way.about})" if way.about else way.options
        table.add_row(named, yes_or_no(way.fits), *figures, bytes_text(way.limit), way.method)
    return ["", table]


def _bound(plan: Plan) -> str:
    """The lower bound in its unit, as far as its description begins with it."""
    if plan.lower_bound is None:
        return ""
    words = plan.lower_bound_of.lower().split()
    if "bytes" in words[:2]:
        return bytes_text(math.floor(plan.lower_bound))
    return seconds_text(plan.lower_bound) if "seconds" in words[:2] else f"{plan.lower_bound:.6g}"


def measured(plan: Plan, run: Run) -> list[Table | str]:
    """Measured beside predicted; after a check the verdict on the last line."""
    table = plain_table("a step", "predicted", "measured", "error")
    for row in run.comparison:
        figures = (row.predicted, row.measured)
        both = [seconds_text(x) if row.unit == "s" else bytes_text(int(x)) for x in figures]
        error = "" if row.error is None else f"{row.error:+.1%}"
        table.add_row(f"a device {row.name}" if row.name in ACTIVITIES else row.name, *both, error)
    shown: list[Table | str] = [table, "losses: " + " ".join(f"{x:.6f}" for x in run.losses)]
    if run.saved:
        shown.append(
            f"saved: {run.saved}; a save held a step up by {seconds_text(run.save_seconds)}, and "
            f"holds {bytes_text(max(run.save_bytes))} of a device beside its steps"
        )
    shown += [f"note: {note}" for note in run.notes]
    if run.equal is not None:
        shown += [
            f"largest difference from a single device, in float64: {run.max_abs_loss_diff:.1e} "
            f"of the losses, {run.max_rel_param_diff:.1e} of parameters and state",
            *([f"not equal: {run.reason}"] if run.reason else []),
            f"equal: {yes_or_no(run.equal)}",
        ]
    return shown


def _peaks(plan: Plan) -> str:
    """What devices hold at their peaks; what is the same on all is said once."""
    peaks = plan.predicted.peak_bytes
    low, high = bytes_text(min(peaks)), bytes_text(max(peaks))
    limits = plan.memory_limit or ()
    of = f", of {bytes_text(limits[0])}" if len(set(limits)) == 1 else ""
    if len(peaks) == 1:
        return f"{high}{of}"
    if low == high:
        return f"{high} on each of {len(peaks)} devices{of}"
    return f"{low} to {high} on {len(peaks)} devices{of}"
