"""Every family of the transformers package with a training loss, at tiny size: is it captured, and
does it train as plain PyTorch does under plans for two devices?

    python benchmarks/families.py --out families.json           all of them
    python benchmarks/families.py --only llama,bert --verbose   some, with tracebacks
    python benchmarks/families.py --slice 2/8 --out 2.json      every eighth, from the second on
    python benchmarks/families.py --page 1.json 2.json          docs/families.md from results

A family is `hf:NAME,tiny`. Each is tried in a process of its own with a time limit, by the methods
data, tofu and random. Outcomes: equal; refused, in a sentence; wrong; traceback; timeout; and
invalid, where the model does not train in plain PyTorch either with the batch that was made for it.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from apportion import zoo
from apportion.capture.capture import capture
from apportion.capture.trace import CaptureError
from apportion.machine.cluster import cluster
from apportion.run.check import check
from apportion.run.plan_here import plan
from apportion.search.baselines.random_strategy import draw
from apportion.split.space import Space
from apportion.zoo.hf import hf_names

DEVICES, STEPS, SEED = 2, 2, 3
PAGE = Path(__file__).parent.parent / "docs" / "families.md"


class Invalid(Exception):
    """The model does not train in plain PyTorch."""


def attempt(family: str) -> dict[str, Any]:
    """Loads, captures and runs one family; raises what stands in the way."""
    spec = f"hf:{family},tiny"
    try:
        it = zoo.load(spec, SEED)
    except ValueError as error:
        raise Invalid(str(error)) from error
    facts = {"class": type(it.model).__name__}
    try:
        loss = it.step(copy.deepcopy(it.model), it.batch)
        loss.backward()
    except Exception as error:
        raise Invalid(f"{type(error).__name__}: {error}") from error
    if not torch.isfinite(loss.detach()):
        facts["note"] = f"the loss is {float(loss.detach())}"
    program = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)
    facts["ops"] = len(program.graph.ops)
    facts["notes"] = list(program.notes)
    where, space = cluster(f"local:{DEVICES}"), Space(program.graph)
    made = plan(program, where, "data", 5.0, calibrate=False)
    plans = {
        "data": made,
        "tofu": plan(program, where, "tofu", 5.0, calibrate=False),
        "random": replace(made, strategy=draw(space, DEVICES, Random(SEED))),
    }
    wrong = []
    for method, each in plans.items():
        found = check(program, each, STEPS, SEED)
        if not found.equal:
            wrong.append(f"{method}: {found.reason or found.worst} {found.max_rel_param_diff:.1e}")
    return facts | {"outcome": "wrong" if wrong else "equal", "sentence": "; ".join(wrong)}


def outcome_of(family: str, verbose: bool) -> dict[str, Any]:
    try:
        return attempt(family)
    except Invalid as error:
        if verbose:
            traceback.print_exc()
        return {"outcome": "invalid", "sentence": _one_line(error)}
    except (CaptureError, ValueError) as error:
        if verbose:
            traceback.print_exc()
        return {"outcome": "refused", "sentence": _one_line(error)}
    except Exception as error:
        if verbose:
            traceback.print_exc()
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        return {
            "outcome": "traceback",
            "sentence": f"{type(error).__name__} at {place}: {_one_line(error)}",
        }


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]


def _child(family: str, limit: float, verbose: bool, pipe: Any) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 1))
    warnings.simplefilter("ignore")
    if not verbose:
        sys.stderr = sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    pipe.send(outcome_of(family, verbose))


def run_one(family: str, limit: float, verbose: bool) -> dict[str, Any]:
    """One family in a process of its own."""
    context = multiprocessing.get_context("fork")  # all packages are loaded already
    ours, theirs = context.Pipe(duplex=False)
    began = time.perf_counter()
    process = context.Process(target=_child, args=(family, limit, verbose, theirs))
    process.start()
    theirs.close()
    try:
        facts = ours.recv() if ours.poll(20 * limit) else {"outcome": "timeout", "sentence": ""}
    except EOFError:  # killed, by its limit
        facts = {"outcome": "timeout", "sentence": f"more than {limit:g} seconds of a processor"}
    process.kill()
    process.join()
    return {"family": family} | facts | {"seconds": round(time.perf_counter() - began, 1)}


def page(results: list[dict[str, Any]], version: str, known: int) -> str:
    """docs/families.md."""
    tried = [r for r in results if r["outcome"] != "invalid"]
    counts = Counter(r["outcome"] for r in results)
    equal = counts["equal"]
    lines = [
        "# Families of the transformers package",
        "",
        f"Families of transformers {version} that have a class with a training loss, at tiny",
        "size (`hf:NAME,tiny`): captured, and run for two devices under the plans of `data`,",
        "`tofu` and a random one, against plain PyTorch by `apportion.check`. Made by",
        "`benchmarks/families.py`.",
        "",
        f"{len(results)} of {known} families were tried; {len(tried)} of them train in plain",
        "PyTorch with the batch that is made from their config. Of these",
        f"{equal} are equal ({100 * equal / len(tried):.1f}%).",
        "",
        "| outcome | families |",
        "|---|---|",
        *(f"| {name} | {count} |" for name, count in counts.most_common()),
        "",
        "## Equal",
        "",
        ", ".join(r["family"] for r in results if r["outcome"] == "equal") + ".",
        "",
        "## Others",
        "",
        "| family | class | outcome | what is said |",
        "|---|---|---|---|",
    ]
    for r in results:
        if r["outcome"] != "equal":
            said = r["sentence"].replace("|", "\\|")
            lines.append(f"| {r['family']} | {r.get('class', '')} | {r['outcome']} | {said} |")
    return "\n".join(lines) + "\n"


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", help="families, with commas between them")
    parser.add_argument("--slice", default="1/1", help="K/N: every Nth family from the Kth on")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds of a processor for each")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--again", type=Path, help="those of this result that are not equal")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--page", type=Path, nargs="+")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if options.page:
        write_page(options.page)
        return
    if options.only:
        names = options.only.split(",")
    elif options.again:
        before = json.loads(options.again.read_text())
        names = [r["family"] for r in before if r["outcome"] != "equal"]
    else:
        first, step = map(int, options.slice.split("/"))
        names = list(hf_names())[first - 1 :: step]
    results = []
    for number, name in enumerate(names, 1):
        results.append(run_one(name, options.limit, options.verbose))
        r = results[-1]
        shown = f"{number}/{len(names)} {name} {r['outcome']} {r['seconds']}s {r['sentence'][:200]}"
        print(shown, flush=True)
        if options.out:
            options.out.write_text(json.dumps(results, indent=1))
    print(dict(Counter(r["outcome"] for r in results)))


def write_page(files: Iterable[Path]) -> None:
    import transformers

    found: dict[str, Any] = {}
    for file in files:  # later files win
        found.update({r["family"]: r for r in json.loads(file.read_text())})
    results = [found[name] for name in sorted(found)]
    PAGE.write_text(page(results, transformers.__version__, len(hf_names())))


if __name__ == "__main__":
    main()
