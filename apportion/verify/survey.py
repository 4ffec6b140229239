"""survey: verdicts over PyTorch's operator database and our own samples, counted.

What `apportion ops --verify` runs, and the last file of verify/.
Entries are verified by several processes at once, each of which runs kernels in processes of its
own that may die.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import torch

from apportion import zoo
from apportion.capture import capture, capture_as, torch_private
from apportion.catalogue import known_models
from apportion.describe import ops, reason_unsplit
from apportion.process_start import away_from_working_directory
from apportion.verify import own_samples
from apportion.verify.entry_index import entries_calling
from apportion.verify.sample import Sample
from apportion.verify.torch_samples import entries, entry_name, samples_of_entry
from apportion.verify.verdict import RAISED, REFUSED, RIGHT, WRONG, Verdict, share_of
from apportion.verify.verify_call import verify
from apportion.verify.verify_step import verify_step

OWN = "own inputs"
STEP = "step of "  # before the name of a model
TUNE, REPORT, ALL = "tune", "report", "all"


@dataclass(frozen=True, slots=True)
class SurveyRequest:
    """What to verify: `ops` are prefixes of operator names (none: all)."""

    ops: tuple[str, ...] = ()
    share: str = ALL
    samples: int = 12
    blind: bool = True
    models: tuple[str, ...] = ()
    """Steps to verify instead of calls; none: the database, our own inputs, and the zoo's tiny
    models."""
    every: int = 1
    """Only every so many-th call of an entry."""

    def wants(self, sample: Sample) -> bool:
        name = str(sample.target)
        if self.ops and not any(name == o or name.startswith(o + ".") for o in self.ops):
            return False
        return self.share == ALL or share_of(sample.key) == (self.share == REPORT)


def verify_entry(name: str, request: SurveyRequest) -> list[Verdict]:
    """The verdicts on the calls of one entry, or on our own samples."""
    assert ops.__all__
    torch.set_num_threads(1)
    if name.startswith(STEP):
        return _verify_model(name.removeprefix(STEP))
    if name == OWN:
        found: Iterable[Sample] = own_samples.samples()
    else:
        entry = next(e for e in entries() if entry_name(e) == name)
        found = samples_of_entry(entry, request.samples)
    wanted = [s for s in found if request.wants(s)]
    wanted = wanted[share_of(name) % request.every :: request.every]
    return verify(wanted, blind=request.blind) if wanted else []


def _verify_model(spec: str) -> list[Verdict]:
    it = zoo.load(spec, seed=0, meta=False)
    program = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm, it.fixed)
    return verify_step(capture_as(program, torch.float64), spec)


def verified(request: SurveyRequest, workers: int, note: Callable[[str], None]) -> SurveySummary:
    """The summary of a request over the whole database and our own samples."""
    if request.share not in (TUNE, REPORT, ALL):
        raise ValueError(f"there is no share {request.share!r}; shares: {TUNE}, {REPORT}, {ALL}")
    steps = request.models
    if not steps and not request.ops:
        steps = tuple(f"{model.name}:tiny" for model in known_models())
    names = [f"{STEP}{spec}" for spec in steps]
    if not request.models:
        names += [OWN, *_entries(request, note)]
    summary, began = SurveySummary(request), time.perf_counter()

    def progress(done: int, name: str) -> None:
        if (done % 50 == 0 or done == len(names)) and len(names) > 20:
            seconds = time.perf_counter() - began
            note(f"{done} of {len(names)} entries, {summary.total.calls:,} calls, {seconds:.0f} s")

    for name, verdicts in survey(names, request, workers, progress):
        summary.add(name, verdicts)
    if not summary.total.calls:
        raise ValueError(f"no call of {' or '.join(request.ops)} is known")
    return summary


def _entries(request: SurveyRequest, note: Callable[[str], None]) -> list[str]:
    """The entries of the database that a request needs."""
    every = [entry_name(entry) for entry in entries()]
    if not request.ops:
        return every
    calling = entries_calling(request.ops)
    if calling is None:
        note(
            f"nothing is known of the operator database of torch {torch.__version__}: all of its "
            f"{len(every)} entries are run to find the calls, which takes minutes"
        )
        return every
    return [name for name in every if name in calling]


def survey(
    names: Sequence[str],
    request: SurveyRequest,
    workers: int = 0,
    progress: Callable[[int, str], None] = lambda done, name: None,
) -> Iterator[tuple[str, list[Verdict]]]:
    """The verdicts of many entries, in any order."""
    count = min(workers or os.cpu_count() or 1, len(names))
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"))
    try:
        with away_from_working_directory():
            names_of = {pool.submit(verify_entry, name, request): name for name in names}
        for done, future in enumerate(as_completed(names_of), start=1):
            progress(done, names_of[future])
            yield names_of[future], future.result()
    except BrokenProcessPool:
        raise RuntimeError("a process that verified operators was killed; verify again") from None
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass
class VerdictCounts:
    """Verdicts added up; equal calls of several entries count once."""

    calls: int = 0
    right: int = 0
    wrong: int = 0
    raised: int = 0
    refused: int = 0
    falsely: int = 0
    finds: int = 0
    missing: int = 0
    crashed: int = 0
    searched: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    undescribed: Counter[str] = field(default_factory=Counter)
    seen: set[str] = field(default_factory=set)

    def add(self, verdict: Verdict) -> None:
        """VerdictCounts a verdict, once."""
        if verdict.key in self.seen:
            return
        self.seen.add(verdict.key)
        self.calls += 1
        statuses = Counter(c.status for c in verdict.cuts) + Counter(verdict.pairs)
        self.right += statuses[RIGHT]
        self.wrong += statuses[WRONG]
        self.raised += statuses[RAISED]
        self.refused += statuses[REFUSED]
        self.falsely += len(verdict.falsely)
        self.finds += verdict.finds
        self.missing += len(verdict.missing)
        self.crashed += verdict.crashed
        self.searched += verdict.searched
        if verdict.failure:
            self.failures[verdict.failure] += 1
        self.undescribed.update(verdict.undescribed.keys())

    @property
    def status(self) -> str:
        """What is known of an operator whose calls were counted."""
        if self.wrong or self.raised:
            return WRONG
        if self.right:
            return SPLIT
        if self.finds or sum(self.failures.values()) == self.calls:
            return NOTHING
        if self.undescribed and not all(reason_unsplit(kind) for kind in self.undescribed):
            return NOTHING
        return REASON if self.undescribed or self.refused else SMALL

    def json(self) -> dict[str, int]:
        """The figures by name."""
        return {name: getattr(self, name) for name in FIGURES}


FIGURES = (
    "calls", "right", "wrong", "raised", "refused", "falsely", "finds", "missing", "crashed",
    "searched",
)  # fmt: skip
SPLIT, REASON, SMALL, NOTHING = "split", "reason", "nothing to cut", "neither"
"""Of an operator: some checked split; a stated reason, or refusals, that blind search does not
contradict; calls without an axis longer than 1; or neither of these."""


@dataclass
class SurveySummary:
    """All verdicts of a survey, counted by operator and by entry."""

    request: SurveyRequest = field(default_factory=SurveyRequest)
    total: VerdictCounts = field(default_factory=VerdictCounts)
    operators: dict[str, VerdictCounts] = field(default_factory=dict)
    entries: dict[str, tuple[str, ...]] = field(default_factory=dict)
    bad: list[tuple[str, str]] = field(default_factory=list)
    shares: dict[str, VerdictCounts] = field(
        default_factory=lambda: {TUNE: VerdictCounts(), REPORT: VerdictCounts()}
    )
    """The same by share: descriptions were tuned on one, figures are honest on the other."""

    def add(self, entry: str, verdicts: Sequence[Verdict]) -> None:
        """Adds the verdicts of an entry."""
        self.entries[entry] = tuple(sorted({v.target for v in verdicts}))
        for verdict in verdicts:
            if verdict.key not in self.total.seen:
                self.bad += [(str(cut), verdict.key) for cut in verdict.bad]
                if {WRONG, RAISED} & verdict.pairs.keys():
                    self.bad.append((f"two axes: {verdict.pairs}", verdict.key))
            self.total.add(verdict)
            self.shares[REPORT if share_of(verdict.key) else TUNE].add(verdict)
            self.operators.setdefault(verdict.target, VerdictCounts()).add(verdict)

    @property
    def database(self) -> list[str]:
        """The entries that are PyTorch's."""
        return [name for name in self.entries if name != OWN and not name.startswith(STEP)]

    def entry_status(self, entry: str) -> str:
        """The worst of its operators."""
        order = (SPLIT, SMALL, REASON, NOTHING, WRONG)
        found = [self.operators[name].status for name in self.entries[entry]]
        return max(found, key=order.index, default=NOTHING)

    def core(self) -> dict[str, str]:
        """The status of every core operator of this torch with static tensor outputs."""
        unseen = VerdictCounts()
        return {name: self.operators.get(name, unseen).status for name in core_operators()}

    def lines(self) -> list[str]:
        """The findings in sentences: what is wrong, and how much is covered."""
        bad = [f"WRONG {cut} | {key}" for cut, key in self.bad]
        if self.request.ops or self.request.models:
            return bad
        entries = Counter(self.entry_status(e) for e in self.database)
        core = Counter(self.core().values())
        return [
            *bad,
            f"of {sum(entries.values())} database entries: {_in_words(entries)}",
            f"of {sum(core.values())} core operators: {_in_words(core)}",
        ]

    def json(self) -> dict[str, Any]:
        """All figures."""
        return {
            "torch": torch.__version__,
            "date": date.today().isoformat(),
            "total": self.total.json(),
            "shares": {name: counts.json() for name, counts in self.shares.items()},
            "failures": dict(self.total.failures),
            "bad": [{"cut": cut, "call": key} for cut, key in self.bad],
            "core": self.core(),
            "entries": {e: self.entry_status(e) for e in self.database},
            "operators": {
                name: {**counts.json(), "status": counts.status}
                for name, counts in sorted(self.operators.items())
            },
        }


def _in_words(statuses: Counter[str]) -> str:
    named = {
        SPLIT: "with a checked split",
        SMALL: "with nothing to cut in their calls",
        REASON: "unsplit for a checked reason",
        NOTHING: "with neither",
        WRONG: "with a wrong split",
    }
    return ", ".join(f"{statuses[s]} {text}" for s, text in named.items() if statuses[s])


def page(summary: SurveySummary) -> str:
    """The Summary as a page of Markdown."""
    total, request = summary.total, summary.request
    columns = (*summary.shares.values(), total)
    rows = [
        f"| {name} | {' | '.join(f'{getattr(c, name):,}' for c in columns)} |" for name in FIGURES
    ]
    odd = [
        f"| `{name}` | {c.status} | {c.calls} | {c.right} | {c.finds} | {c.missing} |"
        for name, c in sorted(summary.operators.items())
        if c.status != SPLIT or c.missing
    ]
    return "\n".join(
        [
            "# Splits against kernels",
            "",
            f"`apportion ops --verify`, torch {torch.__version__}, {date.today().isoformat()}: "
            f"PyTorch's operator database (up to {request.samples} samples an entry, forward and "
            "backward), our own inputs, and the steps of the zoo's tiny models. Descriptions were "
            "tuned on one share of the calls; the other is the honest one.",
            "",
            "| | share tune | share report | all |",
            "|---|---|---|---|",
            *rows,
            f"| missing, of finds | {' | '.join(map(_missing, columns))} |",
            f"| falsely refused, of good cuts | {' | '.join(map(_falsely, columns))} |",
            "",
            *(f"- {line}" for line in summary.lines()),
            "",
            "Operators without a checked split, or with a split that was missed:",
            "",
            "| operator | status | calls | right | finds | missing |",
            "|---|---|---|---|---|---|",
            *odd,
            "",
        ]
    )


def core_operators() -> list[str]:
    """Overloads with the tag core that return tensors whose shapes do not depend on data."""
    found = []
    for name in torch_private.all_operator_names():
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if namespace != "aten":
            continue
        op = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if op is None or torch.Tag.core not in op.tags or torch_private.schema(op).is_mutable:
            continue
        tensors = any("Tensor" in str(r.type) for r in torch_private.schema(op).returns)
        if tensors and torch.Tag.dynamic_output_shape not in op.tags:
            found.append(str(op))
    return sorted(found)


def _missing(counts: VerdictCounts) -> str:
    return f"{100 * counts.missing / (counts.finds or 1):.1f}%"


def _falsely(counts: VerdictCounts) -> str:
    return f"{100 * counts.falsely / (counts.right + counts.falsely or 1):.2f}%"
