"""Verdict: what verify/ finds about one operator call, cut by cut.

    right     the recombined parts equal the whole
    wrong     they differ: a wrong training run
    raised    a part's kernel raised, or gave another shape
    refused   the analysis does not allow the cut

What the blind search finds and no right cut covers is *missing*; if the analysis refused just that
cut, it was *falsely refused*.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from apportion.verify.blind_search import BlindSplit

RIGHT, WRONG, RAISED, REFUSED = "right", "wrong", "raised", "refused"
OPENED = " (opened)"  # at the end of the name of an axis that is cut inside a composite


@dataclass(frozen=True, slots=True)
class AxisCut:
    """One axis of a call, cut into `parts`: the dimensions along which each input is cut, and what
    the parts leave of each output (a dimension to concatenate, a reducer, `same`)."""

    axis: str
    parts: int
    status: str
    inputs: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[str, ...] = ()
    why: str = ""

    def __str__(self) -> str:
        reads = ", ".join(
            f"input {k} dim {'x'.join(map(str, dims))}"
            for k, dims in enumerate(self.inputs)
            if dims
        )
        leaves = ", ".join(
            f"output {k} {'dim ' + how if how.isdigit() else how}"
            for k, how in enumerate(self.outputs)
        )
        text = f" ({self.why})" if self.why else ""
        return f"{self.axis}: {reads or 'no input'} cut; {leaves or 'nothing left'}{text}"


@dataclass(frozen=True)
class Verdict:
    """All that was found about one call.

    kinds        the operators that a captured step would contain for the call
    undescribed  kinds that run whole, and why
    pairs        two axes cut at once: how many such cuts have each status
    finds        splits that the blind search found; `missing` are those that no right cut covers
    falsely      axes whose cut was refused though the blind search found it
    crashed      attempts that killed their process
    failure      why nothing could be checked, or ""
    """

    target: str
    key: str
    kinds: tuple[str, ...] = ()
    undescribed: dict[str, str] = field(default_factory=dict)
    cuts: tuple[AxisCut, ...] = ()
    pairs: dict[str, int] = field(default_factory=dict)
    finds: int = 0
    missing: tuple[BlindSplit, ...] = ()
    falsely: tuple[str, ...] = ()
    crashed: int = 0
    searched: bool = False
    failure: str = ""

    @property
    def splits(self) -> bool:
        """Whether some cut is right and none is wrong."""
        return any(c.status == RIGHT for c in self.cuts) and not self.bad

    @property
    def bad(self) -> tuple[AxisCut, ...]:
        return tuple(c for c in self.cuts if c.status in (WRONG, RAISED))


def share_of(key: str) -> int:
    """0 or 1: descriptions are tuned on calls of share 0, figures are reported on share 1."""
    return zlib.crc32(key.encode()) & 1
