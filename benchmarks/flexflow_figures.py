"""FlexFlow's published figures, and the tables that have ours beside them.

Jia, Zaharia and Aiken, "Beyond Data and Model Parallelism for Deep Neural Networks", MLSys 2019.
Throughputs were read off axes, to about 5%; the others are printed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from apportion.machine.cluster import cluster
from apportion.machine.topology import Cluster

Row = Mapping[str, Any]
Found = Mapping[tuple[str, str, int, str], Row]

MODELS = ("alexnet", "inception-v3", "resnet101", "rnntc", "rnnlm", "nmt")
METHODS = ("data", "expert", "optcnn", "tofu", "flexflow")
DEVICES = {"p100": (4, 8, 16), "k80": (4, 8, 16, 32, 64)}

# Samples a second of one P100, alone
SINGLE = dict(zip(MODELS, (2250, 149, 159, 550, 350, 358), strict=True))

# Samples a second for each of 16 P100: data, expert, FlexFlow
SIXTEEN = {
    "alexnet": (630, 950, 1570),
    "inception-v3": (111, 114, 138),
    "resnet101": (138, 138, 143),
    "rnntc": (235, 245, 365),
    "rnnlm": (168, 155, 234),
    "nmt": (172, 135, 246),
}

# Samples a second of 16 P100 together: OptCNN, FlexFlow
AGAINST_OPTCNN = {
    "inception-v3": (1930, 2208), "rnntc": (3791, 5846), "rnnlm": (2408, 3749), "nmt": (2659, 3923),
}  # fmt: skip

# NMT on 64 K80: seconds, GB, seconds of all tasks
NMT = {"data": (1.9, 65.8, 35.7), "expert": (2.6, 24.2, 28.2), "flexflow": (1.1, 12.1, 28.7)}

# Seconds of a whole search by full and by delta simulation
SEARCH = {
    "alexnet": ((0.11, 0.04), (0.40, 0.13), (1.4, 0.48), (5.3, 1.8), (18, 5.9)),
    "resnet101": ((1.4, 0.4), (4.5, 1.4), (22, 7.3), (107, 33), (515, 158)),
    "inception-v3": ((14, 4.1), (66, 17), (388, 77), (1746, 298), (8817, 1278)),
    "rnntc": ((16, 7.5), (91, 39), (404, 170), (1358, 516), (4404, 1489)),
    "rnnlm": ((21, 9.2), (76, 31), (327, 121), (1102, 342), (3406, 969)),
    "nmt": ((40, 16), (178, 65), (998, 328), (2698, 701), (8982, 2190)),
}


def central_seconds(where: Cluster, weight_bytes: int, by_node: bool) -> float:
    """The least that it takes to bring all gradients to one device, nothing hidden behind it.

    The gradients of all devices go to one device of the first node; `by_node`: to one device of
    each node first. FlexFlow's published code has both ways. Weights that come back are not
    counted.
    """
    hosts = [host.devices for host in where.hosts if host.devices]
    inside = len(hosts[0]) - 1
    outside = len(hosts) - 1 if by_node else len(where.devices) - len(hosts[0])
    seconds = 0.0
    if inside:
        seconds += inside * weight_bytes / _bandwidth(where, hosts[0][1], hosts[0][0])
    if outside:
        seconds += outside * weight_bytes / _bandwidth(where, hosts[1][0], hosts[0][0])
    return seconds


def _bandwidth(where: Cluster, sender: int, receiver: int) -> float:
    return min(where.links[link].bandwidth for link in where.routes[sender][receiver])


# Cells


def number(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.3g}" if figure < 1000 else f"{figure:.0f}"


def beside(ours: float | None, paper: float | None) -> str:
    """Both, and ours as a multiple of the paper's where there are both."""
    if ours is None or paper is None:
        return f"{number(ours)} / {number(paper)}"
    return f"{number(ours)} / {number(paper)} ({ours / paper:.2f})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(head), ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def samples(row: Row | None) -> float | None:
    """Samples a second for each device."""
    if row is None or "step_seconds" not in row:
        return None
    return float(row["batch"]) / row["devices"] / float(row["step_seconds"])


def _over(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def mean(several: Iterable[float]) -> float | None:
    """The geometric one."""
    logs = [math.log(one) for one in several]
    return math.exp(sum(logs) / len(logs)) if logs else None


# Tables


def tables(rows: Iterable[Row]) -> dict[str, str]:
    """Every table by name, of the rows that there are."""
    found = {(r["model"], r["machine"], r["devices"], r["method"]): r for r in rows}
    made = {
        "single": _single(found),
        "sixteen": _sixteen(found),
        "updates": _updates(found),
        "nmt": _nmt(found),
        "throughput": _throughput(found),
        "steps": _steps(found),
        "search": _search(found),
    }
    return {name: text for name, text in made.items() if text.count("\n") > 1}


def _single(found: Found) -> str:
    rows = []
    for model in MODELS:
        one = samples(found.get((model, "p100", 1, "single")))
        if one is not None:
            slow = samples(found.get((model, "k80", 1, "single")))
            rows.append([model, beside(one, SINGLE[model]), number(slow)])
    return table(["model", "one P100", "one K80"], rows)


def _sixteen(found: Found) -> str:
    head = [
        "model", "data", "expert", "optcnn", "tofu", "flexflow",
        "flexflow / data", "flexflow / expert", "flexflow / optcnn",
    ]  # fmt: skip
    rows = []
    for model in MODELS:
        ours = {m: samples(found.get((model, "p100", 16, m))) for m in METHODS}
        if not any(ours.values()):
            continue
        data, expert, best = SIXTEEN[model]
        before, after = AGAINST_OPTCNN.get(model, (None, None))
        rows.append([
            model,
            beside(ours["data"], data),
            beside(ours["expert"], expert),
            beside(ours["optcnn"], _over(before, 16)),
            number(ours["tofu"]),
            beside(ours["flexflow"], best),
            beside(_over(ours["flexflow"], ours["data"]), best / data),
            beside(_over(ours["flexflow"], ours["expert"]), best / expert),
            beside(_over(ours["flexflow"], ours["optcnn"]), _over(after, before)),
        ])  # fmt: skip
    return table(head, rows)


def _updates(found: Found) -> str:
    """What data parallelism takes beyond a step on one device, and four counts of what central
    updates would take: the same counts for every model."""
    rows = []
    for model in MODELS:
        one, all_of = (found.get((model, "p100", n, m)) for n, m in ((1, "single"), (16, "data")))
        alone, together = samples(one), samples(all_of)
        if one is None or alone is None or together is None:
            continue
        each = one["batch"]
        where, weights = cluster("flexflow-p100:16"), one["weight_bytes"]
        counts = [central_seconds(where, weights, by_node) for by_node in (True, False)]
        printed = each / SIXTEEN[model][0] - each / SINGLE[model]
        ways = [number(1e3 * k * seconds) for seconds in counts for k in (1, 2)]
        ours = each / together - each / alone
        rows.append(
            [model, number(weights / 1e6), number(1e3 * printed), number(1e3 * ours), *ways]
        )
    head = [
        "model", "MB of weights", "the paper", "ours", "by node, one way", "both ways",
        "by device, one way", "both ways",
    ]  # fmt: skip
    return table(head, rows)


def _nmt(found: Found) -> str:
    ours = {m: found.get(("nmt", "k80", 64, m)) for m in METHODS}
    data, rows = ours["data"], []
    for method, row in ours.items():
        if row is None or "step_seconds" not in row:
            continue
        paper = NMT.get(method, (None, None, None))
        figures = (row["step_seconds"], row["bytes_moved"] / 2**30, row["task_seconds"])
        shorter = fewer = "-"
        if data is not None:
            shorter = f"{data['step_seconds'] / row['step_seconds']:.2f}"
            fewer = f"{data['bytes_moved'] / max(row['bytes_moved'], 1):.2f}"
        rows.append([
            method, *(beside(o, p) for o, p in zip(figures, paper, strict=True)), shorter, fewer,
        ])  # fmt: skip
    head = ["method", "seconds", "GiB moved", "seconds of all tasks", "shorter than data by",
            "fewer bytes by"]  # fmt: skip
    return table(head, rows)


def _cells(found: Found) -> Iterator[tuple[str, str, int, dict[str, Row]]]:
    for machine, several in DEVICES.items():
        for model in MODELS:
            for devices in several:
                rows = {m: found.get((model, machine, devices, m), {}) for m in METHODS}
                here = {m: row for m, row in rows.items() if "step_seconds" in row}
                if here:
                    yield machine, model, devices, here


def _throughput(found: Found) -> str:
    rows, gains = [], []
    for machine, model, devices, here in _cells(found):
        rates = {method: samples(row) for method, row in here.items()}
        others = [r for method, r in rates.items() if method != "flexflow" and r]
        gain = _over(rates.get("flexflow"), max(others, default=None))
        gains += [gain] if gain else []
        shown = [number(rates.get(m)) for m in METHODS]
        rows.append([machine, model, str(devices), *shown, "-" if not gain else f"{gain:.3f}"])
    if gains:
        rows.append(["", "geometric mean", "", *["" for _ in METHODS], f"{mean(gains):.3f}"])
    return table(["machine", "model", "devices", *METHODS, "flexflow / best other"], rows)


def _steps(found: Found) -> str:
    rows = []
    for machine, model, devices, here in _cells(found):
        rows.append([machine, model, str(devices), *(_step(here.get(m)) for m in METHODS)])
    return table(["machine", "model", "devices", *METHODS], rows)


def _step(row: Row | None) -> str:
    if row is None:
        return "-"
    over = "" if row["fits"] else " (OOM)"
    return (
        f"{number(1e3 * row['step_seconds'])}, {number(row['bytes_moved'] / 1e9)}, "
        f"{number(row['task_seconds'])}{over}"
    )


def _search(found: Found) -> str:
    rows, ratios, printed = [], [], []
    for place, devices in enumerate(DEVICES["k80"]):
        for model in MODELS:
            walked = found.get((model, "k80", devices, "proposals"))
            if walked is None or "full_ms" not in walked:
                continue
            ratio = walked["full_ms"] / walked["delta_ms"]
            full, delta = SEARCH[model][place]
            ratios.append(ratio)
            printed.append(full / delta)
            made = found.get((model, "k80", devices, "flexflow"), {}).get("figures", {})
            count = made.get("proposals")
            rows.append([
                str(devices), model, number(walked["full_ms"]), number(walked["delta_ms"]),
                beside(ratio, full / delta), "-" if count is None else f"{int(count):,}",
                *_whole_search(count, walked), f"{number(full)} / {number(delta)}",
            ])  # fmt: skip
    if rows:
        means = beside(mean(ratios), mean(printed))
        rows.append(["", "geometric mean", "", "", means, *[""] * 4])
    head = ["devices", "model", "full, ms", "delta, ms", "ratio", "proposals of the search",
            "by full, s", "by delta, s", "the paper's full / delta, s"]  # fmt: skip
    return table(head, rows)


def _whole_search(count: float | None, walked: Row) -> list[str]:
    """Seconds of that many proposals both ways."""
    if count is None:
        return ["-", "-"]
    return [number(count * walked[how] / 1e3) for how in ("full_ms", "delta_ms")]


# The page


def page(text: str, found: Mapping[str, str]) -> str:
    """A Markdown text with its tables made anew: each stands between two comments that name it.
    Raises ValueError if it has no place for one."""
    for name, made in found.items():
        marks = f"<!-- table: {name} -->", f"<!-- end: {name} -->"
        pattern = re.escape(marks[0]) + ".*?" + re.escape(marks[1])
        body = f"{marks[0]}\n{made}\n{marks[1]}"
        text, count = re.subn(pattern, lambda _, body=body: body, text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"the page has {count} places for the table {name!r}, not one")
    return text
