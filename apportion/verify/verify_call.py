"""Verify: every derived split of a call against its kernel, and a blind search for others.

The main file of verify/: Samples go in, Verdicts (verdict.py) come out. A call is lifted to the
operators that a captured step would contain and cut along every axis (evaluated_call.py). A
BlindSplit is covered by a cut that leaves the same outputs and cuts the same inputs, inputs that
the kernel ignores aside; one that is not covered is missing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from apportion.capture import CaptureError, torch_private
from apportion.split import open_composites
from apportion.verify.blind_search import SAME, BlindSplit, candidates, ignored_inputs, try_cut
from apportion.verify.crash_proof import attempt
from apportion.verify.draws import draw
from apportion.verify.evaluated_call import EvaluatedCall, is_random
from apportion.verify.sample import Sample
from apportion.verify.verdict import OPENED, RAISED, REFUSED, RIGHT, WRONG, AxisCut, Verdict


def verify(samples: Sequence[Sample], *, blind: bool = True) -> list[Verdict]:
    """The verdicts on calls. Kernels run in disposable processes."""
    # Autograd's threads, which machines with a GPU have, do not survive a fork.
    plain = all(isinstance(sample.target, torch_private.OpOverload) for sample in samples)
    here = torch.cuda.is_available() and not plain
    checked = list(attempt([partial(_check_call, sample) for sample in samples], here=here))
    verdicts = [_verdict(sample, found) for sample, found in zip(samples, checked, strict=True)]
    if not blind:
        return verdicts
    searches = [
        None if found is None or found["failure"] or is_random(sample) else _BlindSearch(sample)
        for sample, found in zip(samples, checked, strict=True)
    ]
    work = [piece for search in searches if search for piece in search.work()]
    results = iter(attempt(work, here=here))
    for k, (search, found) in enumerate(zip(searches, checked, strict=True)):
        if search is not None:
            own = list(itertools.islice(results, 1 + len(search.ways)))
            verdicts[k] = search.conclude(verdicts[k], found["outlines"], own)
    return verdicts


def _verdict(sample: Sample, found: Any) -> Verdict:
    target, key = str(sample.target), sample.key
    if found is None:
        died = AxisCut("some cut", 2, RAISED, why=f"{target}: a kernel killed its process")
        return Verdict(target, key, cuts=(died,))
    if found["failure"]:
        return Verdict(target, key, failure=found["failure"])
    cuts = tuple(
        AxisCut(c["axis"], c["parts"], c["status"], tuple(map(tuple, c["inputs"])),
            tuple(c["outputs"]), c["why"])
        for c in found["cuts"]
    )  # fmt: skip
    return Verdict(target, key, tuple(found["kinds"]), found["undescribed"], cuts, found["pairs"])


def _check_call(sample: Sample) -> dict[str, Any]:
    try:
        case = EvaluatedCall(sample)
        cuts = [*_wrongly_lifted(case), *case.cuts()]
        cuts += _other_dtypes(sample, cuts)
    except (CaptureError, NotImplementedError, RuntimeError, ValueError, TypeError) as why:
        text = str(why) or type(why).__name__
        return {"failure": text.splitlines()[0][:200], "kinds": []}
    refused = {c.axis for c in cuts if c.status == REFUSED}
    if open_composites(case.lifted.graph) is not case.lifted.graph:
        inner = EvaluatedCall(sample, opening=True)
        cuts += [replace(c, axis=f"{c.axis}{OPENED}") for c in _wrongly_lifted(inner)]
        known = {(c.parts, c.inputs, c.outputs) for c in cuts if c.status == RIGHT}
        cuts += [
            replace(c, axis=f"{c.axis}{OPENED}")
            for c in inner.cuts()
            if c.status != REFUSED and (c.parts, c.inputs, c.outputs) not in known
        ]
    return {
        "failure": "",
        "kinds": [op.kind for op in case.lifted.graph.ops],
        "undescribed": case.space.undescribed,
        "cuts": [asdict(c) for c in cuts],
        "pairs": case.pairs(),
        "outlines": {name: case.outline(name) for name in refused},
    }


def _wrongly_lifted(case: EvaluatedCall) -> list[AxisCut]:
    """The whole, where the operators that stand for a call compute something else than it does."""
    why = case.lifting_error()
    return [AxisCut("the whole", 1, WRONG, why=f"{case.sample.target}: {why}")] if why else []


def _other_dtypes(sample: Sample, cuts: Sequence[AxisCut]) -> list[AxisCut]:
    """The first right cut again in the precision that was given, if its parts have other dtypes or
    shapes there."""
    first = next((c for c in cuts if c.status == RIGHT), None)
    case = EvaluatedCall(sample, as_given=True)
    if first is None or not case.lifted.graph.ops:
        return []
    for cut in case.cuts():
        if (cut.axis, cut.parts) == (first.axis, first.parts):
            odd = cut.status == RAISED or "differs by inf" in cut.why
            finite = all(bool(t.isfinite().all()) for t in sample.tensors if t.is_floating_point())
            return [replace(cut, axis=f"{cut.axis} (as given)")] if odd and finite else []
    return []


class _BlindSearch:
    """The blind search of one call: pieces of work, and what follows from their results."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.ways = list(candidates(sample))
        self.draws: list[Sequence[torch.Tensor]] = []

    def work(self) -> list[Callable[[], Any]]:
        return [self._ignored, *(partial(self._try, way) for way in self.ways)]

    def _drawn(self) -> list[Sequence[torch.Tensor]]:
        if not self.draws:
            self.draws = [draw(self.sample, seed) for seed in range(1, 7)]
        return self.draws

    def _ignored(self) -> list[int]:
        return sorted(ignored_inputs(self.sample, self._drawn()[0]))

    def _try(self, way: Any) -> list[list[str]]:
        return try_cut(self.sample, self._drawn(), way)

    def conclude(self, verdict: Verdict, outlines: dict[str, Any], results: list[Any]) -> Verdict:
        unseen = set(results[0] or ())
        finds = [
            BlindSplit(way, tuple(map(tuple, held)))
            for way, held in zip(self.ways, results[1:], strict=True)
            if held and any(d is not None and k not in unseen for k, d in enumerate(way))
        ]
        right = [(c.inputs, c.outputs) for c in verdict.cuts if (c.status, c.parts) == (RIGHT, 2)]
        if len(verdict.kinds) > 1:
            right += _combined_cuts(right)
        missing = tuple(find for find in finds if not _is_covered(find, right, unseen))
        falsely = tuple(
            name
            for name, outline in outlines.items()
            if outline and any(_is_covered(find, [outline], unseen) for find in missing)
        )
        crashed = sum(r is None for r in results)
        return replace(
            verdict, finds=len(finds), missing=missing, falsely=falsely, crashed=crashed,
            searched=True,
        )  # fmt: skip


def _combined_cuts(cuts: Sequence[Any]) -> list[Any]:
    """Two cuts at once, where each leaves outputs alone that the other one cuts."""
    found = []
    for (inputs, outputs), (others, leaves) in itertools.combinations(cuts, 2):
        if all(SAME in pair for pair in zip(outputs, leaves, strict=True)):
            reads = tuple(tuple(sorted({*a, *b})) for a, b in zip(inputs, others, strict=True))
            left = zip(outputs, leaves, strict=True)
            found.append((reads, tuple(b if a == SAME else a for a, b in left)))
    return found


def _is_covered(find: BlindSplit, cuts: Sequence[Any], unseen: set[int]) -> bool:
    return any(
        all(
            k in unseen or tuple(dims) == (() if d is None else (d,))
            for k, (dims, d) in enumerate(zip(inputs, find.inputs, strict=True))
        )
        and all(
            how == "?" or how in names for how, names in zip(outputs, find.outputs, strict=True)
        )
        for inputs, outputs in cuts
    )
