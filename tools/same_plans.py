"""Whether two versions of the package make the same plans: record with one, compare with the other.

    python tools/same_plans.py record before.json      # in a checkout of the earlier version
    python tools/same_plans.py compare before.json     # in this one

A plan is the same if its saved file is, apart from how long the search took. Only public names are
used, so that the script runs with any version. Methods that search until a time is up are left out:
what they find depends on how fast the machine was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

METHODS = (
    "single", "data", "fsdp", "owt", "megatron", "expert", "op-placement", "allrow-greedy",
    "spartan", "equalchop", "icml18", "tofu", "tofu-seconds", "tofu-paper", "optcnn",
    "random",
)  # fmt: skip

# Models, the clusters they are planned for, and by which methods
MATRIX: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("gpt2:tiny", ("8xh100", "2x4xh100", "p2.8xlarge", "6xh100"), METHODS),
    ("lenet", ("4xh100", "flexflow-k80"), METHODS),
    ("mlp", ("3xh100", "p2.8xlarge"), METHODS),
    ("mlp", ("2xh100", "4xh100"), ("exact",)),
    ("lenet", ("2xh100",), ("exact",)),
    ("resnet50:tiny", ("4xh100",), METHODS),
    ("rnnlm:tiny", ("4xh100",), METHODS),
    ("transformer-moe:tiny", ("4xh100",), METHODS),
    ("bert:tiny", ("4xh100",), METHODS),
    ("transformer-xl:tiny", ("2xh100",), ("data", "tofu", "optcnn", "random")),
    ("inception-v3:tiny", ("4xh100",), ("data", "owt", "tofu", "optcnn", "random")),
    ("deepspeech:tiny", ("4xh100",), ("data", "tofu", "random")),
    ("wgan-gp:tiny", ("2xh100",), ("data", "tofu", "random")),
    ("gpt2:layers=4,width=256,heads=4,vocab=1000,seq=64,batch=8", ("8x8xh100",), ("fsdp", "tofu")),
    ("nmt", ("flexflow-p100",), ("data", "expert")),
)
TIMES = ("search_seconds", "curve")  # fields of a plan that say how long something took


def digests(only: str) -> Iterator[tuple[str, str]]:
    """For every row of the matrix what a plan is, or how it was refused, in a few letters."""
    import apportion as ap
    from apportion import zoo

    for model, clusters, methods in MATRIX:
        if only not in model:
            continue
        it = zoo.load(model)
        program = ap.capture(it.step, it.model, it.optimizer, it.batch)
        for cluster in clusters:
            for method in methods:
                yield f"{model} on {cluster} by {method}", digest(ap, program, cluster, method)


def digest(ap: Any, program: Any, cluster: str, method: str) -> str:
    """A hash of the saved plan without its times, and its predicted seconds to look at."""
    try:
        plan = ap.plan(program, ap.cluster(cluster), method=method, budget=600.0)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        saved = json.loads(path.read_text())
    for name in TIMES:
        saved.pop(name)
    text = json.dumps(saved, sort_keys=True)
    return f"{hashlib.sha256(text.encode()).hexdigest()[:20]} {plan.predicted.step_seconds!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="models whose name contains this")
    options = parser.parse_args()
    known = json.loads(options.file.read_text()) if options.command == "compare" else {}
    found, different, begun = {}, 0, time.monotonic()
    for name, text in digests(options.only):
        found[name] = text
        mark = "" if options.command == "record" else "same"
        if options.command == "compare" and known.get(name) != text:
            mark, different = f"DIFFERENT, was {known.get(name)}", different + 1
        print(f"{time.monotonic() - begun:7.1f} s  {name}: {text} {mark}", flush=True)
    if options.command == "record":
        options.file.write_text(json.dumps(found, indent=1) + "\n")
    else:
        print(f"{len(found)} plans, {different} different")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
