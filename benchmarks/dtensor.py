"""What DTensor covers and what apportion covers, side by side, for the torch that is installed.

    python benchmarks/dtensor.py                          every 20th call of PyTorch's database
    python benchmarks/dtensor.py --every 5 --json         more of them, as one JSON object
    python benchmarks/dtensor.py --entry mm --entry cumsum        only these entries of it
    apportion ops --verify --json > ops.json
    python benchmarks/dtensor.py --verified ops.json      and the results of that survey

Operators, splits and lines of code are counted alike on both sides; docs/dtensor.md says how.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from dtensor_rules import (
    WHOLE,
    Signature,
    ask,
    meshes,
    nontrivial,
    registered,
    registered_overloads,
    unread,
)
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import _ops as rules_of_dtensor

import apportion
from apportion.describe import ops
from apportion.describe.descriptions import find_description, reason_unsplit
from apportion.verify.crash_proof import attempt
from apportion.verify.sample import Sample
from apportion.verify.survey import core_operators
from apportion.verify.torch_samples import entries, entry_name, samples_of_entry
from apportion.verify.verdict import RIGHT, Verdict
from apportion.verify.verify_call import verify

# Calls


def sampled(every: int, limit: int, names: Sequence[str]) -> tuple[list[Sample], int]:
    """Every so many-th distinct call of each overload in the database, from the largest on; and the
    number of distinct calls. Raises ValueError if an entry is unknown."""
    known = {entry_name(entry): entry for entry in entries()}
    for name in names:
        if name not in known:
            raise ValueError(f"PyTorch's operator database has no entry {name!r}.")
    found: dict[str, dict[str, Sample]] = {}
    for name in names or known:
        for sample in samples_of_entry(known[name], limit):
            found.setdefault(str(sample.target), {}).setdefault(sample.key, sample)
    chosen: list[Sample] = []
    for calls in found.values():
        chosen += sorted(calls.values(), key=_elements, reverse=True)[::every]
    return chosen, sum(map(len, found.values()))


def _elements(sample: Sample) -> int:
    return sum(t.numel() for t in sample.tensors)


# apportion


def ours(verdict: Verdict, unseen: Sequence[int]) -> set[Signature]:
    """The splits in two parts that were run and are right."""
    found = set()
    for cut in verdict.cuts:
        if cut.parts == 2 and cut.status == RIGHT:
            inputs = tuple("x".join(map(str, dims)) or WHOLE for dims in cut.inputs)
            outputs = tuple(h if h.replace("x", "").isdigit() else WHOLE for h in cut.outputs)
            found.add(unread((inputs, outputs), unseen))
    return set(filter(nontrivial, found))


def described(verdict: Verdict) -> bool:
    """Whether every operator that the call is lifted to has a description."""
    return not (verdict.failure or verdict.undescribed)


# Counts


@dataclass
class Operator:
    """What the sampled calls of one overload showed, on both sides."""

    dtensor: bool = False
    dtensor_splits: bool = False
    described: bool = False
    reasoned: bool = False
    splits: bool = False


@dataclass
class Totals:
    """Sums over the sampled calls."""

    calls: int = 0
    dtensor_calls: int = 0
    dtensor_splits: int = 0
    dtensor_any_size: int = 0
    dtensor_linear: int = 0
    our_calls: int = 0
    splits: int = 0
    wrong: int = 0
    both: int = 0
    dtensor_only: Counter[str] = field(default_factory=Counter)
    ours_only: Counter[str] = field(default_factory=Counter)
    held: Counter[str] = field(default_factory=Counter)
    dtensor_wrong: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, answer: dict[str, Any], verdict: Verdict) -> None:
        """Counts one call. What is compared is DTensor's splits if all sizes were even."""
        ruled, mine = _signatures(answer, "any_size"), ours(verdict, answer.get("unread", ()))
        self.calls += 1
        self.dtensor_calls += bool(answer.get("splits"))
        self.dtensor_splits += len(answer.get("splits", ()))
        self.dtensor_any_size += len(ruled)
        self.dtensor_linear += answer.get("linear", 0)
        self.our_calls += bool(mine)
        self.splits += len(mine)
        self.wrong += len(verdict.bad)
        self.both += len(ruled & mine)
        self.dtensor_only[name] += len(ruled - mine)
        self.ours_only[name] += len(mine - ruled)
        self.held.update(answer.get("held", {}))
        self.dtensor_wrong[name] += len(answer.get("wrong", ()))


def count(
    samples: Sequence[Sample], answers: Sequence[Any], verdicts: Sequence[Verdict]
) -> tuple[dict[str, Operator], Totals]:
    """Operators and splits of the sampled calls."""
    operators: dict[str, Operator] = {}
    totals = Totals()
    for sample, answer, verdict in zip(samples, answers, verdicts, strict=True):
        name = str(sample.target)
        operator = operators.setdefault(name, Operator())
        answer = answer or {"failure": "the process died"}
        operator.dtensor |= not answer["failure"]
        operator.dtensor_splits |= bool(answer.get("any_size"))
        operator.described |= described(verdict)
        operator.reasoned |= bool(verdict.undescribed) and all(
            map(reason_unsplit, verdict.undescribed)
        )
        operator.splits |= bool(ours(verdict, answer.get("unread", ())))
        totals.add(name, answer, verdict)
    return operators, totals


def _signatures(answer: dict[str, Any], key: str) -> set[Signature]:
    return {(tuple(inputs), tuple(outputs)) for inputs, outputs in answer.get(key, ())}


def overload(name: str) -> Any:
    """The operator of `aten.add.Tensor`."""
    namespace, packet, kind = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), kind)


def takes_tensors(name: str) -> bool:
    return any("Tensor" in str(a.type) for a in overload(name)._schema.arguments)


def covered(
    names: Sequence[str], operators: dict[str, Operator], statuses: dict[str, str]
) -> dict[str, dict[str, int]]:
    """Of these overloads: how many each side knows, and how many it splits in the sampled calls."""
    unseen = Operator()
    seen = [operators.get(name, unseen) for name in names]
    known = [registered(overload(name)) for name in names]
    lone = [
        find_description(name) or find_description(name.removesuffix(".default")) for name in names
    ]
    rows = {
        "overloads": {"dtensor": len(names), "apportion": len(names)},
        "not_in_the_sample": dict.fromkeys(
            ("dtensor", "apportion"), sum(name not in operators for name in names)
        ),
        "own_rule_or_description": {
            "dtensor": known.count("rule"),
            "apportion": sum(d is not None for d in lone),
        },
        "handled": {
            "dtensor": sum(o.dtensor or k == "rule" for o, k in zip(seen, known, strict=True)),
            "apportion": sum(o.described or d is not None for o, d in zip(seen, lone, strict=True)),
        },
        "some_split": {
            "dtensor": sum(o.dtensor_splits for o in seen),
            "apportion": sum(o.splits for o in seen),
        },
        "stated_reason_for_none": {"apportion": sum(o.reasoned for o in seen)},
    }
    if statuses:
        checked = sum(statuses.get(name) == "split" for name in names)
        rows["checked_split_in_the_survey"] = {"apportion": checked}
    return rows


# Lines


def code_lines(path: Path) -> int:
    """Lines with code: no blank lines, comments or docstrings."""
    held: set[int] = set()
    fresh = True  # at the beginning of a statement
    layout = (
        tokenize.NEWLINE, tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT,
        tokenize.ENCODING, tokenize.ENDMARKER,
    )  # fmt: skip
    text = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in layout:
            fresh = fresh or token.type == tokenize.NEWLINE
        elif not (token.type == tokenize.STRING and fresh):
            held.update(range(token.start[0], token.end[0] + 1))
            fresh = False
    return len(held)


_DERIVATION = (
    "_common_rules", "_einsum_strategy", "autogen", "single_dim_strategy", "utils", "__init__",
)  # fmt: skip
_LANGUAGE = (
    "describe/language", "describe/descriptions", "describe/watched_extents", "describe/formula",
    "describe/errors", "describe/interval", "split/part", "split/partial", "split/restriction",
    "split/derive", "split/space", "split/atoms", "split/open_composites", "lower/termwise",
)  # fmt: skip


def lines_of_code() -> dict[str, dict[str, int]]:
    """What is written per operator, and what derives splits from it, on both sides."""
    theirs = Path(rules_of_dtensor.__file__).parent
    own = Path(apportion.__file__).parent
    rules = [p for p in theirs.glob("*.py") if p.stem not in (*_DERIVATION, "strategy_validation")]
    parts: dict[str, tuple[list[Path], list[Path]]] = {
        "rules_or_descriptions": (rules, list((own / "describe" / "ops").glob("*.py"))),
        "decompositions": (
            [theirs.parent / "_decompositions.py"],
            list((own / "capture" / "decompose").glob("*.py")),
        ),
        "own_kernels": (
            [theirs.parent / "_tp_conv.py", theirs.parent / "_nonlinear_redux.py"],
            list((own / "execute" / "kernels").glob("*.py")),
        ),
        "derivation": (
            [*(theirs / f"{n}.py" for n in _DERIVATION), theirs.parent / "_sharding_prop.py"],
            [own / f"{n}.py" for n in _LANGUAGE],
        ),
    }
    rows = {
        name: {"dtensor": sum(map(code_lines, a)), "apportion": sum(map(code_lines, b))}
        for name, (a, b) in parts.items()
    }
    both = ("dtensor", "apportion")
    rows["total"] = {side: sum(row[side] for row in rows.values()) for side in both}
    return rows


# The comparison


def compare(
    every: int, limit: int, names: Sequence[str], statuses: dict[str, str]
) -> dict[str, Any]:
    """All figures of one run, as JSON."""
    assert ops.__all__
    began = time.perf_counter()
    torch.set_num_threads(1)
    samples, calls = sampled(every, limit, names)
    with_tensors = [s for s in samples if s.tensors]
    mesh = meshes()
    work = [partial(ask, sample, mesh) for sample in with_tensors]
    answers = []
    for done, answer in enumerate(attempt(work), start=1):
        answers.append(answer)
        progress(f"DTensor: {done} of {len(work)} calls")
    verdicts: list[Verdict] = []
    for start in range(0, len(with_tensors), 20):
        verdicts += verify(with_tensors[start : start + 20], blind=False)
        progress(f"apportion: {len(verdicts)} of {len(work)} calls")
    progress("")
    operators, totals = count(with_tensors, answers, verdicts)
    core = [
        name for name in core_operators()
        if takes_tensors(name) and (not names or name in operators)
    ]  # fmt: skip
    return {
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "every": every,
        "distinct_calls": calls,
        "overloads_without_tensors": len({str(s.target) for s in samples if not s.tensors}),
        "operators": {
            "core": covered(core, operators, statuses),
            "database": covered(sorted(operators), operators, statuses),
        },
        "registered_by_dtensor": registered_overloads(),
        "splits": _split_facts(totals),
        "only_dtensor_knows": sorted(
            name for name, o in operators.items() if o.dtensor_splits and not o.splits
        ),
        "only_apportion_knows": sorted(
            name for name, o in operators.items() if o.splits and not o.dtensor_splits
        ),
        "lines": lines_of_code(),
        "seconds": round(time.perf_counter() - began, 1),
    }


def _split_facts(totals: Totals) -> dict[str, Any]:
    def top(counts: Counter[str]) -> dict[str, int]:
        return {name: n for name, n in counts.most_common(15) if n}

    return {
        "calls": totals.calls,
        "calls_with_a_split": {"dtensor": totals.dtensor_calls, "apportion": totals.our_calls},
        "splits": {"dtensor": totals.dtensor_splits, "apportion": totals.splits},
        "splits_if_sizes_were_even": {"dtensor": totals.dtensor_any_size},
        "with_partial_inputs": {"dtensor": totals.dtensor_linear},
        "in_both": totals.both,
        "only_dtensor": sum(totals.dtensor_only.values()),
        "only_dtensor_by_operator": top(totals.dtensor_only),
        "only_apportion": sum(totals.ours_only.values()),
        "only_apportion_by_operator": top(totals.ours_only),
        "run_on_slices": {
            "dtensor": dict(totals.held),
            "apportion": {"right": totals.splits, "wrong": totals.wrong},
        },
        "not_right_on_slices": top(totals.dtensor_wrong),
    }


# Output


def progress(text: str) -> None:
    print(f"\r{text:<78}{'' if text else chr(13)}", end="", file=sys.stderr, flush=True)


def tables(facts: dict[str, Any]) -> list[Table | str]:
    """The figures for people."""
    shown: list[Table | str] = []
    named = {"core": "core ATen overloads", "database": "overloads in the operator database"}
    for part, rows in facts["operators"].items():
        table = _table(f"{rows['overloads']['dtensor']} {named[part]} that take a tensor")
        for name in list(rows)[1:]:
            _row(table, name, rows[name])
        shown.append(table)
    splits = facts["splits"]
    table = _table(f"Splits on 2 devices of {splits['calls']} calls")
    for name in ("calls_with_a_split", "splits", "splits_if_sizes_were_even"):
        _row(table, name, splits[name])
    _row(table, "in both", dict.fromkeys(("dtensor", "apportion"), splits["in_both"]))
    _row(table, "only on this side", {
        "dtensor": splits["only_dtensor"], "apportion": splits["only_apportion"],
    })  # fmt: skip
    _row(table, "with_partial_inputs", splits["with_partial_inputs"])
    for how in ("right", "wrong", "not run"):
        sides = {side: held.get(how, 0) for side, held in splits["run_on_slices"].items()}
        _row(table, f"run on slices: {how}", sides)
    shown.append(table)
    table = _table("Lines of code")
    for name, row in facts["lines"].items():
        _row(table, name, row)
    return [*shown, table, *_remarks(facts)]


def _remarks(facts: dict[str, Any]) -> Iterator[str]:
    splits = facts["splits"]
    yield "overloads DTensor has rules for: {total}, {mutable} of them in place or with out".format(
        **facts["registered_by_dtensor"]
    )
    for title, counts in (
        ("splits only DTensor has", splits["only_dtensor_by_operator"]),
        ("splits only apportion has", splits["only_apportion_by_operator"]),
        ("DTensor's splits that do not hold on slices", splits["not_right_on_slices"]),
    ):
        told = ", ".join(f"{name} {n}" for name, n in counts.items())
        yield f"{title}, by operator: {told or 'none'}"
    for side in ("dtensor", "apportion"):
        names = facts[f"only_{side}_knows"]
        told = ", ".join(names) or "none"
        yield f"operators that only {side} splits in these calls, {len(names)}: {told}"
    yield (
        f"torch {facts['torch']}, {facts['date']}, every {facts['every']}. of "
        f"{facts['distinct_calls']} calls, {facts['seconds']} s"
    )


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("DTensor", justify="right")
    table.add_column("apportion", justify="right")
    return table


def _row(table: Table, name: str, sides: dict[str, int]) -> None:
    cells = (str(sides[s]) if s in sides else "" for s in ("dtensor", "apportion"))
    table.add_row(name.replace("_", " "), *cells)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--every", type=int, default=20, help="of an overload's calls")
    parser.add_argument("--samples", type=int, default=12, help="inputs of each database entry")
    parser.add_argument("--entry", action="append", default=[], help="of the database, as cumsum")
    parser.add_argument("--verified", type=Path, help="what `apportion ops --verify --json` wrote")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.every < 1:
        parser.error("--every must be at least 1")
    statuses = {}
    if options.verified is not None:
        survey = json.loads(options.verified.read_text(encoding="utf-8"))
        statuses = {name: o["status"] for name, o in survey["operators"].items()}
    try:
        facts = compare(options.every, options.samples, options.entry, statuses)
    except ValueError as error:
        parser.error(str(error))
    if options.json:
        print(json.dumps(facts, indent=1))
        return 0
    console = Console()
    for item in tables(facts):
        console.print(item, highlight=False, soft_wrap=isinstance(item, str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
