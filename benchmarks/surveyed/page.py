"""The page docs/programs.md: what became of every program of the survey, from its JSON rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

TITLES = {"program": "Third-party programs", "idiom": "Idioms on a small network"}
ORDER = ("equal", "remedied", "refused", "traceback", "wrong", "changed", "timeout")
MEANINGS = {
    "equal": "captured, and equal to plain PyTorch under every plan tried",
    "remedied": "refused by one sentence, and equal once what it says is done",
    "refused": "refused by one sentence, and what it says was not done or was not enough",
    "traceback": "ended by an error that is no such sentence",
    "wrong": "different from plain PyTorch",
    "changed": "a live object is not as it was before capture",
    "timeout": "not done within the limit of time or memory",
}


def page(rows: list[dict[str, Any]], registered: Mapping[str, int]) -> str:
    """The whole page; `registered` says how many entries of each kind the survey has."""
    tried = [row for row in rows if row["outcome"] in ORDER]
    commits = sorted({str(row.get("commit", "")) for row in tried})
    lines = [
        "# Programs that nobody wrote for apportion",
        "",
        "What `benchmarks/programs.py` finds: each program is built at tiny size, run by plain",
        "PyTorch, captured, planned for two devices and run divided in one process, and compared;",
        "what capture might have touched is compared before and after. This page is written by",
        "`python benchmarks/programs.py --out FILE --page docs/programs.md`.",
        "",
        *_followed(tried),
        *_fixed(tried),
        f"Measured at {', '.join(commits)}.",
        "",
        *_figures(tried),
        "",
        *_missing(rows, registered),
    ]
    for kind, title in TITLES.items():
        lines += ["", f"## {title}", ""]
        lines += _listed([row for row in tried if row["kind"] == kind])
    left = Counter(row["outcome"] for row in rows if row["outcome"] not in ORDER)
    lines += [
        "", "## Not tried", "",
        f"{left['skipped']} programs whose packages are not installed, and {left['invalid']} that "
        "plain PyTorch itself does not run here (a package that lacks something).", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _followed(tried: list[dict[str, Any]]) -> list[str]:
    """A sentence on how many refusals were put to the test."""
    refused = [row for row in tried if row["outcome"] in ("remedied", "refused")]
    followed = sum(row["outcome"] == "remedied" for row in refused)
    if not refused:
        return []
    return [
        f"What a refusal says to do was done for {followed} of {len(refused)} refused programs.",
        "What comes of it (`benchmarks/surveyed/remedies.py`) was judged like any other program;",
        "the last column of the tables says what was done.",
        "",
    ]


def _fixed(tried: list[dict[str, Any]]) -> list[str]:
    """A sentence on the programs that name tensors which are the same in every step."""
    names = [r["name"] for r in tried if any(n.startswith("fixed: ") for n in r.get("notes", ()))]
    if not names:
        return []
    return [
        "A graph that is the same in every step and decides shapes is named to capture",
        f"(`fixed=[...]`) by {len(names)} of them: {', '.join(sorted(names))}.",
        "",
    ]


def _missing(rows: list[dict[str, Any]], registered: Mapping[str, int]) -> list[str]:
    """A sentence for each kind of which a part has not been run."""
    seen = Counter(row["kind"] for row in rows)
    return [
        f"{TITLES[kind]}: {count - seen[kind]} of {count} have not been run for this page."
        for kind, count in registered.items()
        if count > seen[kind]
    ]


def _figures(tried: list[dict[str, Any]]) -> list[str]:
    kinds = [kind for kind in TITLES if any(row["kind"] == kind for row in tried)]
    lines = [f"| outcome | {' | '.join(TITLES[k] for k in kinds)} | what it means |"]
    lines.append("|---|" + "---:|" * len(kinds) + "---|")
    for outcome in ORDER:
        counts = [
            sum(row["kind"] == kind and row["outcome"] == outcome for row in tried)
            for kind in kinds
        ]
        lines.append(f"| {outcome} | {' | '.join(map(str, counts))} | {MEANINGS[outcome]} |")
    totals = [sum(row["kind"] == kind for row in tried) for kind in kinds]
    lines.append(f"| all | {' | '.join(map(str, totals))} | |")
    return lines


def _listed(rows: list[dict[str, Any]]) -> list[str]:
    rows = sorted(rows, key=lambda row: row["name"].lower())
    equal = [row["name"] for row in rows if row["outcome"] == "equal"]
    methods = sorted({method for row in rows for method in row["plans"]})
    checked = sum(bool(row.get("checked")) for row in rows)
    lines = [
        f"Plans by {', '.join(methods) or 'no method'}; {checked} of {len(rows)} were also judged "
        "by `ap.check`.",
        "",
    ]
    lines += [f"Equal ({len(equal)}): " + ", ".join(f"`{name}`" for name in equal) + "."]
    told = [row["name"] for row in rows if row["outcome"] == "equal" and row.get("fixed")]
    if told:
        names = ", ".join(f"`{name}`" for name in told)
        lines += ["", f"Of these, {len(told)} were captured with `fixed=[...]`: {names}."]
    others = [row for row in rows if row["outcome"] != "equal"]
    if others:
        lines += ["", "| program | outcome | what it says | what was done |", "|---|---|---|---|"]
        for row in others:
            said = " ".join(str(row["sentence"]).split()).replace("|", "\\|")
            done = row.get("remedy", "")
            lines.append(f"| `{row['name']}` | {row['outcome']} | {said} | {done} |")
    return lines
