"""Explanations: every figure of an alternative is that of a full simulation, and the reason that is
given holds."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import captured

import apportion as ap
from apportion.cli import main as cli
from apportion.lower.lower import lower
from apportion.lower.task_graph import (
    Storage,
)
from apportion.lower.task_kinds import (
    COLLECTIVE,
    TRANSFER,
)
from apportion.plan import explain as explaining
from apportion.plan.alternatives import OpAlternatives
from apportion.plan.explain import StrategyChange
from apportion.plan.explanation import ALONE, GROUP, Explanation
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan, SimulatedStep
from apportion.simulate.delta.delta import Delta
from apportion.simulate.network import network
from apportion.simulate.schedule import Network, Times, schedule_compiled
from apportion.simulate.simulate import simulate
from apportion.simulate.slack import slack
from apportion.simulate.timeline import Timeline
from apportion.split.strategy import Choice, Layout, Strategy, unsplit_choice, verify_strategy
from apportion.work_clock import WORK_CLOCK


@cache
def made(method: str = "data", spec: str = "mlp:tiny", machine: str = "2x2xk80") -> Plan:
    """A Plan without what kernels allocate beside their results: alternatives do not know that."""
    found = make_plan(captured(spec)[0], ap.cluster(machine), method, seed=3)
    return replace(found, storage=Storage()).simulate()


def with_choices(plan: Plan, choices: dict[int, Choice]) -> Plan:
    """The Plan with other Choices."""
    several = tuple(choices.get(k, c) for k, c in enumerate(plan.strategy.choices))
    changed = replace(plan, strategy=replace(plan.strategy, choices=several))
    return changed.simulate()


def changed(strategy: Strategy, trial: StrategyChange) -> Strategy:
    """What a trial makes of a Strategy, worked out here anew."""
    choices = tuple(trial.choices.get(k, c) for k, c in enumerate(strategy.choices))
    layouts = {v: y for v, y in strategy.layouts.items() if v not in trial.layouts}
    more: dict[int, Layout] = {v: y for v, y in trial.layouts.items() if y is not None}
    return replace(strategy, choices=choices, layouts=layouts | more)


def line_of(plan: Plan, strategy: Strategy) -> Timeline:
    tasks = lower(plan.space, strategy, len(plan.cluster.devices))
    return simulate(tasks, plan.cluster, plan.cost)


def heavy(plan: Plan) -> int:
    """A forward Op with a Group."""
    around = OpAlternatives(plan.space, len(plan.cluster.devices))
    ops = plan.space.graph.ops
    return max(
        (k for k, op in enumerate(ops) if op.phase == "forward"),
        key=lambda k: (len(around.group(k)), around.effects.flops(k)),
    )


# Figures


@pytest.mark.slow
@pytest.mark.parametrize("method", ["data", "tofu", "random", "op-placement"])
def test_every_step_time_is_that_of_a_full_simulation(method: str) -> None:
    plan = made(method)
    around = OpAlternatives(plan.space, len(plan.cluster.devices))
    live = Delta(plan.space, plan.strategy, plan.cluster, plan.cost)
    trials = explaining.trials_of(around, plan, heavy(plan))[::3]
    done, tried = explaining.simulated(live, trials)
    assert len(done) == tried == len(trials) > 10
    assert {trial.scope for trial in done} == {ALONE, GROUP}
    for trial in done:
        line = line_of(plan, changed(plan.strategy, trial))
        assert (trial.step_ns, trial.bytes_moved) == (line.end_ns.max(), line.bytes_moved)
    assert done == sorted(done, key=lambda t: (t.step_ns, t.bytes_moved))
    assert live.strategy == plan.strategy, "a trial was not undone"


@pytest.mark.parametrize("method", ["data", "tofu"])
def test_only_the_best_are_worked_out_where_only_these_are_wanted(method: str) -> None:
    plan = made(method)
    around = OpAlternatives(plan.space, len(plan.cluster.devices))
    live = Delta(plan.space, plan.strategy, plan.cluster, plan.cost)
    trials = explaining.trials_of(around, plan, heavy(plan))
    everything, _ = explaining.simulated(live, trials)
    seen: dict[tuple[object, ...], StrategyChange] = {}
    for trial in everything:
        seen.setdefault(trial.looks, trial)
    for count in (1, 5, 12):
        best, tried = explaining.simulated(live, trials, count)
        assert tried == len(trials)
        assert [t.cost for t in best] == [t.cost for t in list(seen.values())[:count]]
        assert len({t.looks for t in best}) == count


@pytest.mark.slow
@pytest.mark.parametrize("method", ["data", "tofu", "random"])
def test_what_is_shown_is_what_the_alternative_does(method: str) -> None:
    plan = made(method)
    op = heavy(plan)
    found = plan.explain(op, alternatives=6)
    around = OpAlternatives(plan.space, len(plan.cluster.devices))
    live = Delta(plan.space, plan.strategy, plan.cluster, plan.cost)
    trials, _ = explaining.simulated(live, explaining.trials_of(around, plan, op), 6)
    assert len(found.alternatives) == 6 and found.tried == found.known > 20
    now, held = line_of(plan, plan.strategy), np.array(plan.predicted.peak_bytes)
    for shown, trial in zip(found.alternatives, trials, strict=True):
        line = line_of(plan, changed(plan.strategy, trial))
        assert (shown.scope, shown.choice.devices) == (trial.scope, trial.choices[op].devices)
        assert shown.step_seconds == line.step_seconds
        difference = line.step_seconds - now.step_seconds
        assert shown.step_difference == pytest.approx(difference, abs=1e-12)
        assert shown.bytes_moved == line.bytes_moved
        assert shown.bytes_difference == line.bytes_moved - plan.predicted.bytes_moved
        peaks = held + np.array(line.peak_bytes) - np.array(now.peak_bytes)
        assert shown.peak_bytes == tuple(peaks.tolist())
        assert shown.peak_difference == peaks.max() - held.max()


def test_what_is_read_and_left_moves_as_the_messages_do() -> None:
    plan = made("random")
    tasks, fetched = lower(plan.space, plan.strategy, len(plan.cluster.devices)), 0
    for op in range(len(plan.space.graph.ops)):
        reads, leaves = explaining._moved(plan, op)
        fetched += sum(row.moved for row in reads)
        assert all(row.moved >= 0 for row in leaves)
    moves = np.isin(tasks.kind, (TRANSFER, COLLECTIVE))
    fetches = moves & (tasks.op < len(plan.space.graph.ops)) & (tasks.position % 2 == 1)
    assert fetched == tasks.nbytes[fetches].sum()
    assert 0 < fetched < tasks.bytes_moved, "nothing is laid out, or nothing is fetched"


# Alternatives


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "spec"), [("tofu", "gpt2:tiny"), ("random", "gpt2:tiny"), ("data", "lenet:tiny")]
)
def test_alternatives_are_legal_and_each_there_once(method: str, spec: str) -> None:
    plan = made(method, spec)
    around = OpAlternatives(plan.space, 4)
    now = plan.strategy.choices
    for op in range(0, len(now), 7):
        several = around.choices(op, now)
        assert len(several) == len(set(several)) and now[op] not in several
        trials = explaining.trials_of(around, plan, op)
        for trial in trials[:: len(trials) // 5 + 1]:
            verify_strategy(plan.space, changed(plan.strategy, trial), 4)


@pytest.mark.slow
def test_alternatives_cut_every_axis_that_can_be_cut() -> None:
    plan = made("tofu", "gpt2:tiny")
    around = OpAlternatives(plan.space, 4)
    for op in range(0, len(plan.space.graph.ops), 11):
        axes = around.axes(op)
        wanted = {axis.name for axis in axes if not axis.refused and axis.extent >= 4}
        several = [plan.strategy.choices[op], *around.choices(op, plan.strategy.choices)]
        cuts = {cut.axis for c in several for cut in explaining._named(axes, c).cuts}
        assert wanted <= cuts
        assert not any(axis.refused and axis.name in cuts for axis in axes)
        devices = {c.devices for c in several if c.count == 1}
        assert (0, 1, 2, 3) in devices and any(len(them) == 1 for them in devices)


def test_a_group_is_the_forward_op_its_backward_ops_and_its_updates() -> None:
    plan = made()
    ops = plan.space.graph.ops
    around = OpAlternatives(plan.space, 4)
    op = heavy(plan)
    group = around.group(op)
    phases = [ops[k].phase for k in group]
    assert group[0] == op and {"forward", "backward", "update"} == set(phases)
    assert {k for k, meant in enumerate(ops) if meant.forward == op} <= set(group)
    for member in group:
        assert around.group(member) == group
    parameters = {ops[k].parameter for k in group if ops[k].phase == "update"}
    read = {v for k in group if ops[k].phase == "forward" for v in ops[k].inputs}
    assert parameters and parameters <= read


def test_a_group_follows_its_forward_op() -> None:
    """Under data parallelism all of it is where data parallelism puts it."""
    plan = made("data")
    around = OpAlternatives(plan.space, 4)
    op = heavy(plan)
    followed = around.following(op, plan.strategy.choices[op], around.group(op))
    assert followed == {k: plan.strategy.choices[k] for k in around.group(op)}


def test_axes_have_their_kinds() -> None:
    plan = made("tofu")
    around = OpAlternatives(plan.space, 4)
    op = next(k for k, meant in enumerate(plan.space.graph.ops) if "addmm" in meant.kind)
    kinds = {axis.name: (axis.kind, axis.partial) for axis in around.axes(op)}
    assert kinds == {"i": ("sample", False), "j": ("parameter", False), "k": ("reduction", True)}
    back = [k for k in around.group(op) if plan.space.graph.ops[k].kind == "aten.mm.default"]
    found = {(axis.kind, axis.partial) for axis in around.axes(back[-1])}
    assert found == {("sample", True), ("parameter", False)}


# Slack


def in_order(net: Network, times: Times, late: int, by: int) -> int:
    """When all ends if one item takes longer, messages being served in the order that they had."""
    ready = net.release.copy()
    np.maximum.at(ready, net.next, np.repeat(times[1], np.diff(net.next_start)))
    begin, end = net.release.copy(), np.zeros(len(ready), np.int64)
    free = np.zeros(net.links, np.int64)
    for item in np.lexsort((np.arange(len(ready)), ready)).tolist():
        hops = range(net.hop_start[item], net.hop_start[item + 1])
        end[item] = begin[item] + (0 if hops else net.duration[item])
        for hop in hops:
            turn = max(begin[item], free[net.hop_link[hop]])
            free[net.hop_link[hop]] = turn + net.hop_occupancy[hop] + net.hold[item]
            end[item] = max(end[item], turn + net.hop_occupancy[hop] + net.latency[item])
        end[item] += by if item == late else 0
        for later in net.next[net.next_start[item] : net.next_start[item + 1]]:
            begin[later] = max(begin[later], end[item])
    return int(end.max())


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["2x2xk80", "4xh100", "3xh200"])
def test_slack_is_what_an_item_can_be_late(machine: str) -> None:
    plan = made("random", machine=machine)
    net = network(plan.tasks, plan.cluster, plan.cost)
    times = schedule_compiled(net)
    step, left = times[1].max(), slack(net, times)
    assert in_order(net, times, 0, 0) == step and len(net.hop_link)
    assert left.min() == 0 and left.max() > 0 and (left >= 0).all()
    for item in range(0, len(left), 5):
        assert in_order(net, times, item, int(left[item])) == step
        assert in_order(net, times, item, int(left[item]) + 1) == step + 1


# Reasons


def spoiled(plan: Plan, op: int) -> Plan:
    """The Plan with one Group whole on one device."""
    around = OpAlternatives(plan.space, len(plan.cluster.devices))
    choice = unsplit_choice(plan.space, op, (1,))
    return with_choices(plan, around.following(op, choice, around.group(op)))


BIG = "mlp:batch=4096"


@pytest.mark.slow
def test_a_bad_choice_has_its_better_alternative_named() -> None:
    plan = made("data", BIG, "4xh100")
    bad = spoiled(plan, heavy(plan))
    assert bad.predicted.step_seconds > plan.predicted.step_seconds
    found = bad.explain(heavy(plan))
    best = found.alternatives[0]
    assert found.constraint == "search"
    assert best.fits and best.step_seconds <= line_of(plan, plan.strategy).step_seconds
    assert "shorter" in found.because and str(best.choice) in found.because
    assert bad.method in found.because


@pytest.mark.slow
def test_what_does_not_fit_is_bound_by_memory() -> None:
    plan = made("data", BIG, "4xh100")
    bad = spoiled(plan, heavy(plan))
    limit = tuple(p if d != 1 else 10**12 for d, p in enumerate(bad.predicted.peak_bytes))
    bound = replace(bad, memory_limit=limit)
    found = bound.explain(heavy(plan))
    faster = [it for it in found.alternatives if it.step_difference < 0]
    assert found.constraint == "memory" and faster and not any(it.fits for it in faster)
    first = faster[0]
    assert first.over_device is not None
    assert first.over == first.peak_bytes[first.over_device] - limit[first.over_device] > 0
    assert f"device {first.over_device}" in found.because
    free = replace(bad, memory_limit=None).explain(heavy(plan))
    assert free.constraint == "search" and all(it.fits for it in free.alternatives)


def improved(plan: Plan, op: int) -> Plan:
    """The Plan after the best alternative of an Op has been taken as long as one is faster."""
    steps = [line_of(plan, plan.strategy).step_seconds]
    while True:
        live = Delta(plan.space, plan.strategy, plan.cluster, plan.cost)
        trials = explaining.trials_of(OpAlternatives(plan.space, 4), plan, op)
        (best,), _ = explaining.simulated(live, trials, 1)
        if best.step_ns >= live.step_ns:
            assert steps == sorted(set(steps), reverse=True)
            return plan
        assert plan.explain(op, alternatives=1).constraint == "search"
        plan = with_choices(plan, best.choices)
        steps.append(line_of(plan, plan.strategy).step_seconds)


def test_a_choice_that_nothing_beats_is_said_to_be_optimal() -> None:
    plan = made()
    found = improved(plan, heavy(plan)).explain(heavy(plan))
    assert found.constraint == "optimal"
    assert f"none of the {found.known} alternatives is faster" in found.because
    assert all(it.step_difference >= 0 for it in found.alternatives)
    assert not any(it.busiest_difference < 0 < it.bytes_difference for it in found.alternatives)


@pytest.mark.slow
def test_what_moves_too_much_is_bound_by_resharding() -> None:
    plan = made("data", BIG, "4xh100")
    found = improved(spoiled(plan, heavy(plan)), heavy(plan)).explain(heavy(plan))
    assert found.constraint == "resharding"
    assert f"none of the {found.known} alternatives is faster" in found.because
    lighter = next(it for it in found.alternatives if it.busiest_difference < 0)
    assert lighter.step_difference > 0 and lighter.bytes_difference > 0
    assert str(lighter.choice) in found.because and "more" in found.because


def test_one_device_leaves_no_alternative() -> None:
    found = made("single", machine="1xh100").explain(0)
    assert found.constraint == "legality" and found.alternatives == () and found.known == 0
    assert "only one device" in str(found)


@pytest.mark.slow
def test_axes_that_cannot_be_cut_say_why() -> None:
    plan = made("data", "gpt2:tiny")
    op = next(k for k, m in enumerate(plan.graph.ops) if "native_layer_norm.default" in m.kind)
    found = plan.explain(op, alternatives=2)
    assert [name for name, why in found.refused if why] == ["i2"]
    assert f"axis i2 cannot be cut: {found.refused[0][1]}" in str(found)


def test_a_budget_that_ends_is_told() -> None:
    plan = made("tofu")
    found = plan.explain(heavy(plan), budget=0.0)
    assert found.tried == 1 < found.known and len(found.alternatives) == 1
    assert f"1 of {found.known}" in " ".join(found.notes)


def test_what_was_hardly_tried_is_not_said_to_be_optimal() -> None:
    plan = made()
    best = improved(plan, heavy(plan))
    found = best.explain(heavy(plan), budget=0.0)
    assert found.constraint == "budget"
    assert f"none of the 1 alternatives that were tried, of {found.known}," in found.because
    assert f"the best 1 of 1 that were tried, of {found.known}" in str(found)


@pytest.mark.slow
def test_the_budget_does_not_run_while_loops_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the first explanation on a machine, where the first alternative takes a minute."""
    plan, real, calls = made("tofu"), Delta.change, list[int]()

    def compiles_first(self: Delta, *how: Any) -> int:
        calls.append(1)
        if len(calls) == 1:
            WORK_CLOCK.stop()
            time.sleep(0.5)
            WORK_CLOCK.go_on()
        return real(self, *how)

    monkeypatch.setattr(Delta, "change", compiles_first)
    assert plan.explain(heavy(plan), budget=0.45).tried > 1


def test_measured_kernels_are_told() -> None:
    plan = made("data")
    slower = replace(plan.timeline, end_ns=plan.timeline.end_ns + 5)
    step = SimulatedStep(plan, plan.space, plan.tasks, slower)
    told = replace(plan, simulated=step)
    assert "measured" in " ".join(told.explain(0, alternatives=1).notes)
    assert plan.explain(0, alternatives=1).notes == ()


# Names


def test_ops_are_named_by_name_number_or_module() -> None:
    plan = made("data", "gpt2:tiny")
    name = "blocks.0.attn.qkv.addmm"
    index = next(k for k, op in enumerate(plan.graph.ops) if op.name == name)
    assert explaining.find(plan, name) == explaining.find(plan, index) == (index, ())
    assert explaining.find(plan, str(index)) == (index, ())
    first, others = explaining.find(plan, "blocks.0.attn.qkv")
    assert first == index and "blocks.0.attn.qkv.view" in others
    inside, _ = explaining.find(plan, "blocks.1")
    assert plan.graph.ops[inside].module.startswith("blocks.1")
    assert plan.graph.ops[inside].phase == "forward"


@pytest.mark.slow
def test_an_opened_op_is_found_by_the_name_it_was_captured_with() -> None:
    plan = made("random", "gpt2:tiny")
    assert plan.strategy.opening
    origin = plan.strategy.opening[0]
    found, _ = explaining.find(plan, plan.graph.ops[origin].name)
    assert plan.space.origins[found] == origin


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("blocks.0.attn.kqv", "nearest names are .*blocks.0.attn.qkv"),
        ("", "no operator or module"),
        ("99999", "numbered 0 to"),
        (-1, "numbered 0 to"),
    ],
)
def test_unknown_names_get_the_nearest(name: str | int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made("data", "gpt2:tiny").explain(name)


def test_at_least_one_alternative_is_shown() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        made().explain(0, alternatives=0)


# What it looks like


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "p.json"
    made("tofu").save(path)
    return path


@pytest.mark.slow
def test_a_loaded_plan_is_explained_alike_and_without_torch(file: Path) -> None:
    plan = made("tofu")
    op = plan.space.graph.ops[0].name
    code = (
        "import json, sys\n"
        "from apportion.plan.plan import Plan\n"
        f"found = Plan.load({str(file)!r}).explain({op!r}, budget=1e9)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "print(json.dumps(found.to_json()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found: Explanation = plan.explain(op, budget=1e9)
    assert json.loads(done.stdout) == found.to_json()


def test_the_text_says_all_of_it() -> None:
    plan = made("tofu")
    found = plan.explain(heavy(plan), alternatives=4)
    text = str(found)
    for part in (found.op, found.line, str(found.choice), found.because, found.constraint):
        assert part in text
    for moved in (*found.reads, *found.leaves):
        assert moved.value in text
    table = text.split("alternatives:")[1].split("\n\n")[0].splitlines()
    assert len(table) == 1 + 1 + 1 + 4


def test_the_command(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    assert cli.status(["explain", str(file), "0", "--alternatives", "3"]) == 0
    out, _ = capfd.readouterr()
    assert "alternatives: the best 3" in out
    assert cli.status(["explain", str(file), "0", "--alternatives", "3", "--json"]) == 0
    out, _ = capfd.readouterr()
    facts = json.loads(out)
    assert out.count("\n") == 1 and len(facts["alternatives"]) == 3
    assert facts["method"] == "tofu" and facts["op"] == made("tofu").space.graph.ops[0].name


@pytest.mark.parametrize(("plan", "op"), [("p.json", "nothing"), ("no.json", "0"), (".", "0")])
def test_bad_requests_get_one_sentence(
    file: Path, capfd: pytest.CaptureFixture[str], plan: str, op: str
) -> None:
    capfd.readouterr()
    assert cli.status(["explain", str(file.parent / plan), op]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("apportion: ") and err.count("\n") == 1
