"""Every family of the transformers package with a training loss, at tiny size: is it captured, and
does it train as plain PyTorch does under plans for two devices?

    python benchmarks/families.py --out families.json           all of them
    python benchmarks/families.py --only llama,bert --verbose   some, with tracebacks
    python benchmarks/families.py --rest --out families.json    those that the file has not yet
    python benchmarks/families.py --methods random --out r.json one plan each
    python benchmarks/families.py --again families.json         those that are not equal in it
    python benchmarks/families.py --page 1.json 2.json          docs/families.md from results

A family is `hf:NAME,tiny`. Each is tried in a process of its own with a time limit, by the methods
data, tofu and random, in an order by chance, so that what was tried when it is stopped is a fair
sample; the results are written one by one. Outcomes: equal; refused, in a sentence; wrong;
traceback; timeout; and invalid, where the model does not train in plain PyTorch either with the
batch that was made for it.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import multiprocessing
import os
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

from apportion import columns, zoo
from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.capture.trace import CaptureError
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.run.check import Check, eager_run, judged
from apportion.run.noise import EagerRun
from apportion.run.one_process import train_in_one_process
from apportion.search.baselines.random_strategy import draw
from apportion.search.problem import Problem
from apportion.search.registry import METHODS
from apportion.split.space import Space
from apportion.split.strategy import Strategy
from apportion.zoo.hf import hf_names

DEVICES, STEPS, SEED = 2, 2, 3
PAGE = Path(__file__).parent.parent / "docs" / "families.md"


class Invalid(Exception):
    """The model does not train in plain PyTorch."""


def attempt(family: str, methods: Sequence[str]) -> dict[str, Any]:
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
    facts["methods"] = list(methods)
    where, space = cluster(f"local:{DEVICES}"), Space(program.graph)
    problem = Problem(space, where, default_cost(where))
    _, whole = eager_run(program, STEPS, SEED)
    wrong = []
    for method in methods:
        found = _checked(program, _strategy(method, problem), whole)
        if not found.equal:
            wrong.append(f"{method}: {found.reason or found.worst} {found.max_rel_param_diff:.1e}")
    return facts | {"outcome": "wrong" if wrong else "equal", "sentence": "; ".join(wrong)}


def _strategy(method: str, problem: Problem) -> Strategy:
    if method == "random":
        return draw(problem.space, DEVICES, Random(SEED))
    return METHODS[method](problem, budget=60.0, seed=SEED).strategy


def _checked(program: Program, strategy: Strategy, whole: EagerRun) -> Check:
    """As `apportion.check`, without a plan's predictions, which cost as much."""
    given = (program, strategy, DEVICES, whole.batches, SEED)
    own = train_in_one_process(*given)
    try:
        wide = train_in_one_process(*given, wide=True)
    except ValueError as error:
        return judged(program, whole, own, None, SEED, str(error))
    return judged(program, whole, own, wide, SEED)


def outcome_of(family: str, methods: Sequence[str], verbose: bool) -> dict[str, Any]:
    try:
        return attempt(family, methods)
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


def _child(family: str, methods: Sequence[str], limit: float, verbose: bool, pipe: Any) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 1))
    warnings.simplefilter("ignore")
    if not verbose:
        sys.stderr = sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    facts = outcome_of(family, methods, verbose)
    pipe.send(facts | {"seconds": round(time.process_time(), 1)})


def run_one(family: str, methods: Sequence[str], limit: float, verbose: bool) -> dict[str, Any]:
    """One family in a process of its own."""
    context = multiprocessing.get_context("fork")  # all packages are loaded already
    ours, theirs = context.Pipe(duplex=False)
    began = time.perf_counter()
    process = context.Process(target=_child, args=(family, methods, limit, verbose, theirs))
    process.start()
    theirs.close()
    try:
        facts = ours.recv() if ours.poll(20 * limit) else {"outcome": "timeout", "sentence": ""}
    except EOFError:  # killed, by its limit
        facts = {"outcome": "timeout", "sentence": f"more than {limit:g} seconds of a processor"}
    process.kill()
    process.join()
    return {"family": family, "seconds": round(time.perf_counter() - began, 1)} | facts


def page(results: list[dict[str, Any]], version: str, known: Sequence[str]) -> str:
    """docs/families.md."""
    tried = [r for r in results if r["outcome"] != "invalid"]
    counts = Counter(r["outcome"] for r in results)
    equal = counts["equal"]
    plans = Counter(", ".join(r["methods"]) for r in results if r["outcome"] == "equal")
    rest = sorted(set(known) - {r["family"] for r in results})
    lines = [
        "# Families of the transformers package",
        "",
        f"Families of transformers {version} that have a class with a training loss, at tiny",
        "size (`hf:NAME,tiny`): captured, run divided over two devices, and compared with plain",
        "PyTorch as `apportion.check` does. Made by `benchmarks/families.py`, which tries them in",
        "an order by chance.",
        "",
        f"{len(results)} of {len(known)} families were tried; {len(tried)} of them train in plain",
        "PyTorch with the batch that is made from their config. Of these",
        f"{equal} are equal ({100 * equal / max(1, len(tried)):.1f}%).",
        *(f"{count} of the equal ones were run under {names}." for names, count in plans.items()),
        "",
        "| outcome | families |",
        "|---|---|",
        *(f"| {name} | {count} |" for name, count in counts.most_common()),
        f"| not tried | {len(rest)} |",
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
    lines += ["", "## Not tried", "", ", ".join(rest) + "."] if rest else []
    return "\n".join(lines) + "\n"


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", help="families, with commas between them")
    parser.add_argument("--rest", action="store_true", help="keep what --out has, try the rest")
    parser.add_argument("--packages", type=Path, help="a folder with packages that some need")
    parser.add_argument("--methods", default="data,tofu,random")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds of a processor for each")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--again", type=Path, help="those of this result that are not equal")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--page", type=Path, nargs="+")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if options.page:
        write_page(options.page)
        return
    if options.packages:
        sys.path.append(str(options.packages))
    methods = options.methods.split(",")
    kept = json.loads(options.out.read_text()) if options.rest and options.out.exists() else []
    names = _names(options.only, options.again, {r["family"] for r in kept})
    results = {r["family"]: r for r in kept}
    if len(names) > 1:
        columns.compile_at_once()
        outcome_of(
            "bert", methods, False
        )  # loads and compiles what all need, for the processes to inherit
    gc.collect()
    gc.freeze()  # what is loaded by now is not looked through again and again in each process
    for number, name in enumerate(names, 1):
        r = results[name] = run_one(name, methods, options.limit, options.verbose)
        shown = f"{number}/{len(names)} {name} {r['outcome']} {r['seconds']}s {r['sentence'][:200]}"
        print(shown, flush=True)
        if options.out:
            options.out.write_text(json.dumps(list(results.values()), indent=1))
    print(dict(Counter(r["outcome"] for r in results.values())))


def _names(only: str | None, again: Path | None, done: set[str]) -> list[str]:
    """The families to try, in their order."""
    if only:
        return only.split(",")
    if again:
        before = json.loads(again.read_text())
        names = [r["family"] for r in before if r["outcome"] != "equal"]
    else:
        names = list(hf_names())
        Random(SEED).shuffle(names)
    return [name for name in names if name not in done]


def write_page(files: Iterable[Path]) -> None:
    import transformers

    found: dict[str, Any] = {}
    for file in files:  # later files win
        found.update({r["family"]: r for r in json.loads(file.read_text())})
    results = [found[name] for name in sorted(found)]
    PAGE.write_text(page(results, transformers.__version__, hf_names()))


if __name__ == "__main__":
    main()
