"""Files as an adversary, a bad disk or a careless edit would leave them: are they all refused in a
sentence, or else harmless?

    python benchmarks/hostile_files.py --count 10000            # all kinds of file, 2 processes
    python benchmarks/hostile_files.py --kinds plan --seed 7 --count 500

Every mutant of a good file is read as a user's would be. Right are two ends: one short sentence
(ValueError), or a file that is taken, whose numbers are finite and not negative, whose figures are
those that the simulator gives, and which can be simulated, shown, explained and saved. Anything
else is a defect and is printed with its seed: another exception, a sentence that echoes the file, a
reader that takes more than SECONDS or more than 2 GB.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from hostile_mutants import FileKind, json_mutant, mutated_bytes, tensors_mutant
from hostile_states import state_kinds

SECONDS = 20.0  # that one mutant may take
MOST_BYTES = 2 << 30
LONGEST = 700  # characters of a sentence


# Kinds of file


def plan_mutant(text: bytes, rng: Random) -> bytes:
    """As an adversary would: the fingerprint is that of the changed graph, as far as it has one."""
    found = json_mutant(text, rng)
    if rng.random() < 0.3:
        return found
    try:
        from apportion.graph import from_json

        data = json.loads(found)
        data["fingerprint"] = from_json(data["graph"]).fingerprint
        return json.dumps(data).encode("utf-8", "surrogatepass")
    except (ValueError, KeyError, TypeError, RecursionError):
        return found


def toml_mutant(text: bytes, rng: Random) -> bytes:
    """Values of lines replaced, lines lost, repeated or put elsewhere."""
    if rng.random() < 0.15:
        return mutated_bytes(text, rng)
    lines = text.decode().splitlines()
    for _ in range(rng.choice([1, 1, 2])):
        where, kind = rng.randrange(len(lines)), rng.randrange(5)
        if kind == 0 and "=" in lines[where]:
            key, _, _ = lines[where].partition("=")
            odd = ["-1", "nan", "inf", "1e999", "9" * 400, '""', '"-5 GB"', '"9e999 GB/s"', "[]"]
            odd += ["{}", "true", '"\\u001b[31m"', f'"{"a" * 400_000}"', "0", '"1 parsec"', "1e300"]
            lines[where] = f"{key}= {rng.choice([*odd, '[' * 3000 + ']' * 3000])}"
        elif kind == 1:
            del lines[where]
        elif kind == 2:
            lines.insert(where, lines[rng.randrange(len(lines))])
        elif kind == 3:
            lines[where] = lines[where].replace("1", "-1").replace("2", "1e400")
        else:
            lines.insert(where, rng.choice(["[[device]]", "x = 1", "]]", "[switch]", "\x1b[31m"]))
    return "\n".join(lines).encode()


# What a file that is taken must be


def check_numbers(item: Any, what: str = "it") -> None:
    """Raises AssertionError for a number that is not finite or less than -1, which stands for
    nothing in places."""
    if isinstance(item, bool | str | bytes | None):
        return
    if isinstance(item, int | float):
        assert math.isfinite(item), f"{what} is {item}"
        return
    if is_dataclass(item) and not isinstance(item, type):
        for each in fields(item):
            if each.init and each.name not in ("graph", "strategy"):
                check_numbers(getattr(item, each.name), f"{what}.{each.name}")
    elif isinstance(item, dict):
        for key, each in item.items():
            check_numbers(each, f"{what}.{str(key)[:40]}")
    elif isinstance(item, list | tuple):
        for each in item:
            check_numbers(each, what)


def check_not_negative(numbers: Any, what: str) -> None:
    assert all(0 <= x < math.inf for x in numbers), f"{what} has {min(numbers)} or {max(numbers)}"


def use_plan(plan: Any, path: Path, rng: Random) -> None:
    """Its figures are those of a simulation, and whatever commands do with it works."""
    from apportion.plan.plan import Plan, prediction_of
    from apportion.plan.plan_file import plan_to_json
    from apportion.plan.stale import stale_prediction
    from apportion.show import plan_facts, plan_tables, why_facts
    from apportion.show.report import page
    from apportion.simulate import simulate

    check_numbers(plan)
    found = prediction_of(simulate(plan.tasks, plan.cluster, plan.cost))
    if plan.staleness is not None:
        found = stale_prediction(replace(plan, predicted=found))
    assert plan.predicted == found
    told = plan.predicted
    check_not_negative(
        (told.step_seconds, *told.peak_bytes, told.bytes_moved, *told.busy), "figures"
    )
    check_not_negative(
        [n for *_, n in (*plan.storage.slots, *plan.storage.workspace)] or [0], "storage"
    )
    check_not_negative(
        (plan.search_seconds, plan.lower_bound or 0, *(plan.memory_limit or ())), "plan"
    )
    for table in plan.cost.tables.values():
        use_table(table)
    json.dumps(plan_facts(plan) | why_facts(plan), allow_nan=False)
    plan_tables.planned(plan)
    if rng.random() < 0.3:
        page(plan)
        plan.explain(rng.randrange(len(plan.space.graph.ops)), 2, 0.05)
    plan.save(path)
    again, plain = Plan.load(path), replace(plan, notes=())
    assert plan_to_json(replace(again, notes=())) == plan_to_json(plain), "read again it is another"


def use_table(table: Any) -> None:
    check_numbers(table)
    for row in (*table.works.values(), *table.fits.values(), *table.lines.values()):
        check_not_negative(row, "a row")
    check_not_negative([*table.issue.values(), table.resident, table.noise], "the table")


def use_costs(file: Any, path: Path, rng: Random) -> None:
    from apportion.machine.cost_table import load_cost_file, save_cost_file, to_json

    for table in file.tables:
        use_table(table)
    save_cost_file(file, path)
    assert to_json(load_cost_file(path)) == to_json(file)


def use_cluster(cluster: Any, path: Path, rng: Random) -> None:
    from apportion.machine import default_cost
    from apportion.machine.topology import cluster_from_json, cluster_to_json
    from apportion.show import cluster_tables

    check_numbers(cluster)
    for device in cluster.devices:
        rates = [rate for _, rate in device.flops]
        check_not_negative((device.memory_bytes, device.memory_bandwidth, *rates), device.name)
    assert cluster_from_json(json.loads(json.dumps(cluster_to_json(cluster)))) == cluster
    default_cost(cluster)
    cluster_tables.described(cluster)
    json.dumps(cluster_tables.facts(cluster), allow_nan=False)


def use_graph(graph: Any, path: Path, rng: Random) -> None:
    from apportion.graph import from_json, to_json

    assert from_json(json.loads(json.dumps(to_json(graph)))) == graph
    str(graph)


def use_policy(policy: Any, path: Path, rng: Random) -> None:
    from apportion.show import policy_tables

    facts = {"policy": "p", "kind": policy.kind, "bytes": 1, "parameters": 1, "facts": policy.facts}
    json.dumps(facts, allow_nan=False)
    policy_tables(facts)


def read_graph_file(path: Path) -> Any:
    from apportion.checked import parse_json
    from apportion.graph import from_json

    return from_json(parse_json(path.read_bytes()))


def read_cluster_json(path: Path) -> Any:
    from apportion.checked import parse_json
    from apportion.machine.topology import cluster_from_json

    return cluster_from_json(parse_json(path.read_bytes()))


def read_policy_file(path: Path) -> Any:
    from apportion.place import load_network, read_policy

    found = read_policy(path)
    load_network(path)
    return found


def kinds() -> dict[str, FileKind]:
    """Good files of every kind."""
    from apportion.machine import cluster as cluster_of
    from apportion.machine.cluster_file import PRESETS
    from apportion.machine.cost_model import SHIPPED
    from apportion.machine.cost_table import load_cost_file, to_json
    from apportion.machine.topology import cluster_to_json
    from apportion.plan.plan import Plan

    plans = good_plans()
    graphs = [json.dumps(json.loads(plan)["graph"]).encode() for plan in plans[:2]]
    clusters = [json.dumps(cluster_to_json(cluster_of(c))).encode() for c in ("2xh100", "2x2xk80")]
    table = to_json(load_cost_file(sorted(SHIPPED.glob("*.json"))[0]))
    for each in table["tables"]:
        each["works"] = dict(list(each["works"].items())[:8])
    policies = Path(str(sys.modules["apportion"].__file__)).parent / "place/policy/policies"
    policy = sorted(policies.glob("*.safetensors"))[0].read_bytes()
    presets = [(PRESETS / f"{name}.toml").read_bytes() for name in ("h100", "flexflow-k80")]
    costs = (json.dumps(table).encode(),)
    return {
        "plan": FileKind("plan", tuple(plans), plan_mutant, Plan.load, use_plan),
        "graph": FileKind("graph", tuple(graphs), json_mutant, read_graph_file, use_graph),
        "cluster": FileKind(
            "cluster", tuple(clusters), json_mutant, read_cluster_json, use_cluster
        ),
        "toml": FileKind("toml", tuple(presets), toml_mutant, _toml_cluster, use_cluster, "toml"),
        "costs": FileKind("costs", costs, json_mutant, load_cost_file, use_costs),
        "policy": FileKind("policy", (policy,), tensors_mutant, read_policy_file, use_policy),
        **state_kinds(plans[0]),
    }


def _toml_cluster(path: Path) -> Any:
    from apportion.machine import cluster

    return cluster(str(path))


def good_plans() -> list[bytes]:
    """Plans of several kinds: data and cut layers, recomputed and offloaded, state on the host and
    operators in another order, steps that overlap, stale parameters."""
    from apportion.cli.requests import capture_without_data
    from apportion.machine import cluster
    from apportion.plan.make_plan import make_plan
    from apportion.plan.plan import MethodFigures, PlanTrial
    from apportion.plan.stale import with_staleness

    found = []
    program = capture_without_data("mlp:tiny", 0)
    for place, method, how in (
        ("2xk80", "data", {}),
        ("2xh100", "tofu", {}),
        ("2xh100", "fsdp", {"recompute": "full", "offload": "full"}),
        ("2x1xk80", "data", {"communication": "p3"}),
        ("2xh100", "fsdp", {"host_state": "host", "recompute": "auto", "offload": "auto"}),
        ("2xh100", "data", {"host_state": "device"}),
        ("2xk80", "ssp", {}),
    ):
        made = with_staleness(make_plan(program, cluster(place), method, 1.0, **how), 2)
        rows = (MethodFigures("data", 0.5, 10, 20, True),)
        made = replace(
            made, tried=rows, curve=((0.1, 0.5), (0.2, 0.4)), figures={"proposals": 3.0},
            measured=(PlanTrial("data", 0.5, 0.6, True),), model="mlp:tiny", notes=("a note",),
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            made.save(path := Path(folder, "p.json"))
            found.append(path.read_bytes())
    return found


# Judging


def judge(kind: FileKind, seed: int, folder: Path) -> tuple[str, str]:
    """What comes of one mutant: refused, taken or a defect; and a sentence."""
    rng = Random(f"{kind.name} {seed}")
    mutant = kind.mutant(rng.choice(kind.good), rng)
    path = folder / f"{kind.name}-{seed}.{kind.suffix}"
    path.write_bytes(mutant)
    try:
        taken = kind.read(path)
    except ValueError as error:
        said = str(error)
        if len(said) > LONGEST + len(str(path)) or "\n" in said or "\x1b" in said or "\x00" in said:
            return "defect", f"not one short sentence: {said[:200]!r}"
        return "refused", said
    except Exception as error:
        return "defect", f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        path.unlink(missing_ok=True)
    try:
        kind.use(taken, folder / f"again-{os.getpid()}", rng)
    except Exception as error:
        return "defect", f"taken, then {type(error).__name__}: {str(error)[:200]}"
    return "taken", ""


def judge_apart(kind: FileKind, seeds: list[int], folder: Path) -> list[tuple[int, str, str]]:
    """The same in a process of its own, with limits on time and memory for each mutant."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        base = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (base + MOST_BYTES,) * 2)
        signal.signal(signal.SIGALRM, _too_long)
        for seed in seeds:
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            try:
                row = (seed, *judge(kind, seed, folder))
            except TimeoutError:
                row = (seed, "defect", f"takes more than {SECONDS:g} s")
            except BaseException as error:
                row = (seed, "defect", f"{type(error).__name__}: {str(error)[:200]}")
            signal.setitimer(signal.ITIMER_REAL, 0)
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - held
            if grown > MOST_BYTES:
                row = (seed, "defect", f"takes {grown:,} bytes")
            os.write(writing, json.dumps(row).encode() + b"\n")
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as lines:
        rows = [tuple(json.loads(line)) for line in lines]
    _, status = os.waitpid(child, 0)
    done = {row[0] for row in rows}
    left = [seed for seed in seeds if seed not in done]
    if left:
        rows.append((left[0], "defect", f"its process ended with status {status}"))
        rows += judge_apart(kind, left[1:], folder) if left[1:] else []
    return rows


def _too_long(*_: Any) -> None:
    raise TimeoutError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--count", type=int, default=1000, help="mutants of each kind of file")
    parser.add_argument("--kinds", default="", help="plan,graph,record,... (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    every = kinds()
    total: Counter[str] = Counter()
    for name in given.kinds.split(",") if given.kinds else every:
        began, counts = time.perf_counter(), Counter[str]()
        with tempfile.TemporaryDirectory() as folder:
            for first in range(0, given.count, 200):
                seeds = [given.seed + k for k in range(first, min(first + 200, given.count))]
                for seed, what, why in judge_apart(every[name], seeds, Path(folder)):
                    counts[what] += 1
                    if what == "defect":
                        print(f"{name} {seed}: {why}", flush=True)
        total += counts
        seconds = time.perf_counter() - began
        print(f"{name}: {dict(counts)} in {seconds:.0f} s", flush=True)
    print(f"in all {total.total():,}: {dict(total)}")
    return 1 if total["defect"] else 0


if __name__ == "__main__":
    sys.exit(main())
