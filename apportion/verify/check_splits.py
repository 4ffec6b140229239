"""check_splits: what can be cut of an operator or a function, checked by running it.

The part of verify/ that users call, for operators that they describe themselves:

report = ap.check_splits(torch.ops.aten.mm.default, a, b)
report.splits         the axes that can be cut, each checked in 2 and 3 parts, uneven ones too
report.wrong          cuts that were derived and are wrong: a description is
report.missing        cuts that hold, found by blind search, and were not derived
report.unsplittable   axes and operators that cannot be cut, and why
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from apportion.capture import CaptureError, torch_private
from apportion.describe import find_description
from apportion.verify.blind_search import BlindSplit
from apportion.verify.sample import sample_of
from apportion.verify.torch_samples import resolve_overload
from apportion.verify.verdict import OPENED, REFUSED, RIGHT, AxisCut, Verdict
from apportion.verify.verify_call import verify


@dataclass(frozen=True, slots=True)
class Unsplittable:
    """An axis that cannot be cut, or an operator that runs whole."""

    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


@dataclass(frozen=True)
class SplitReport:
    """What `check_splits` found. Every item prints as one line."""

    splits: list[AxisCut]
    wrong: list[AxisCut]
    missing: list[BlindSplit]
    unsplittable: list[Unsplittable]
    operators: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for title, items in (
            ("can be cut", self.splits),
            ("WRONG", self.wrong),
            ("missing", self.missing),
            ("cannot be cut", self.unsplittable),
        ):
            yield from (f"{title}: {item}" for item in items)


def check_splits(op: Callable[..., Any], *args: Any, **kwargs: Any) -> SplitReport:
    """Every way to cut an operator (an ATen overload, or any function of tensors that is traced to
    ATen), run in pieces and compared with the whole, and a blind search for others.

    Values are compared in float64 where the kernels have it. Raises ValueError if the call cannot
    be traced or fails.
    """
    op = torch_private.overload_of_custom_op(op)
    if isinstance(op, torch_private.OpOverloadPacket):
        op = _overload(op, args, kwargs)
    sample = sample_of(op, *args, **kwargs)
    sample = replace(sample, tensors=tuple(t.detach() for t in sample.tensors))
    plain = isinstance(op, torch_private.OpOverload)
    name = op if plain else getattr(op, "__name__", str(op))
    try:
        sample.call()
    except Exception as error:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{name} fails on these inputs: {text}") from None
    (verdict,) = verify([sample])
    if " is described at " in verdict.failure:
        raise ValueError(verdict.failure)
    if verdict.failure:
        raise ValueError(f"{name} cannot be checked: {verdict.failure}")
    return report_of(verdict)


def _overload(packet: Any, args: Any, kwargs: Any) -> Any:
    """The overload that a call of torch.ops.aten.name resolves to."""
    found = resolve_overload(packet, args, kwargs)
    if found is None:
        raise CaptureError(f"{packet} has no overload for these arguments")
    return found


def report_of(verdict: Verdict) -> SplitReport:
    """A Verdict, one item per axis."""
    by_axis: dict[str, list[AxisCut]] = {}
    for number, cut in enumerate(verdict.cuts):
        same = by_axis.get(cut.axis)
        if same and same[-1].parts >= cut.parts:  # another axis of that name
            by_axis[f"{cut.axis} {number}"] = [cut]
        else:
            by_axis.setdefault(cut.axis, []).append(cut)
    splits: list[AxisCut] = []
    wrong: list[AxisCut] = []
    unsplittable: list[Unsplittable] = []
    inner = {(c.axis.removesuffix(OPENED), c.inputs) for c in verdict.cuts if OPENED in c.axis}
    for cuts in by_axis.values():
        bad = [c for c in cuts if c.status not in (RIGHT, REFUSED)]
        right = [c for c in cuts if c.status == RIGHT]
        wrong += [_with_description_line(c) for c in bad[:1]]
        if right and not bad:
            if (cuts[0].axis, right[0].inputs) not in inner:  # opened, the same cut goes further
                splits.append(right[0])
        elif not bad and not any(cuts[0].axis == axis for axis, _ in inner):
            unsplittable.append(Unsplittable(f"axis {cuts[0].axis}", cuts[0].why))
    unsplittable += [Unsplittable(kind, why) for kind, why in verdict.undescribed.items()]
    if not verdict.cuts and not unsplittable:
        unsplittable += [
            Unsplittable(kind, "it has no axis longer than 1") for kind in verdict.kinds
        ]
    return SplitReport(splits, wrong, list(verdict.missing), unsplittable, verdict.kinds)


def _with_description_line(cut: AxisCut) -> AxisCut:
    """With the line of the description that a wrong cut was derived from."""
    description = find_description(cut.why.partition(":")[0])
    return cut if description is None else replace(cut, why=f"{cut.why}; {description.where}")
