"""Signatures of calls, tables in files, fits, and what becomes of measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from graphs import captured

from apportion.cli.calibrate_models import facts, measured, shown
from apportion.lower.task_graph import (
    TaskGraph,
)
from apportion.lower.task_kinds import (
    ASSEMBLE,
    COMPUTE,
)
from apportion.machine.cluster import cluster
from apportion.machine.cost_fit import family, fit, fits, line
from apportion.machine.cost_model import (
    ASSUMED,
    FITTED,
    MEASURED,
)
from apportion.machine.cost_table import (
    Condition,
    CostFile,
    CostLine,
    CostTable,
    Fit,
    KernelMeasurement,
    ReferenceTime,
    from_json,
    load_cost_file,
    save_cost_file,
    to_json,
)
from apportion.run.calibrate import NOISY, Calibrator, lower_strategy
from apportion.run.cost_cache import (
    QUANTILE,
    cache_file,
    cached_costs,
    condition_of,
    keep_costs,
    measured_cost,
)
from apportion.run.measured_table import (
    WAITING,
    exchange_line_of,
    exchanges_in_step,
    with_exchanges,
    with_rehearsal,
)
from apportion.run.rehearse import ExchangeTimes, RehearsalTimes
from apportion.run.renewal import count_missing
from apportion.run.step_source import StepSource, source_of, tensors_of_graph
from apportion.search.baselines.random_strategy import draw
from apportion.simulate.durations import (
    feeds,
    sources,
)
from apportion.simulate.simulate import simulate
from apportion.split.strategy import Strategy


def random_piece(spec: str = "gpt2:tiny", devices: int = 2, seed: int = 0) -> TaskGraph:
    program, space = captured(spec)
    return lower_strategy(program.graph, draw(space, devices, Random(seed)), devices).tasks


# Signatures


@pytest.mark.slow
def test_every_task_that_works_has_a_signature() -> None:
    tasks = random_piece()
    works = np.isin(tasks.kind, [COMPUTE, ASSEMBLE])
    assert ((tasks.work >= 0) == works).all()
    assert len(set(tasks.works)) == len(tasks.works) < works.sum()
    kinds = {w.partition("(")[0] for w in tasks.works}
    assert {"aten.mm.default", "apportion.assemble"} <= kinds | {"aten.addmm.default"}


@pytest.mark.slow
def test_a_signature_says_shapes_strides_and_types() -> None:
    tasks = random_piece()
    assert any("float64[" in w and ":" in w for w in tasks.works)  # a transposed one
    by_work: dict[int, set[tuple[float, int]]] = {}
    for k in np.flatnonzero(tasks.kind == COMPUTE).tolist():
        row = by_work.setdefault(int(tasks.work[k]), set())
        row.add((float(tasks.flops[k]), int(tasks.nbytes[k])))
    assert all(len(found) == 1 for found in by_work.values())  # equal calls do equal work


@pytest.mark.slow
def test_signatures_do_not_depend_on_where_or_when() -> None:
    one, two = random_piece(), random_piece()
    assert one.works == two.works
    assert one.work.tolist() == two.work.tolist()


# Files


def full_table() -> CostTable:
    return CostTable(
        Condition("cpu", 1, 2),
        measured="2026-01-31",
        noise=0.03,
        works={"aten.mm.default() #1": KernelMeasurement(1e-3, 2.0, 3, 4)},
        fits={"aten.mm.default/4": Fit(1e-6, 1e-9, 0.0, 0.1, 4)},
        lines={"exchange": CostLine(1e-4, 1e-5, 1e-9, 0.1, 14)},
        issue={"": 1e-5},
        references={"matmul": ReferenceTime(1e-3, 0.1)},
        provisional=("exchange",),
    )


def test_a_file_says_what_was_written(tmp_path: Path) -> None:
    file = CostFile("a machine", "2.0", (full_table(), CostTable(Condition("h200"))))
    save_cost_file(file, tmp_path / "t.json")
    again = load_cost_file(tmp_path / "t.json")
    assert to_json(again) == to_json(file)
    assert again.table(Condition("cpu", 1, 2)).works == full_table().works
    assert not again.table(Condition("cpu", 1, 4)).works
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda d: d.update(format="a plan"), "does not say that it is one"),
        (lambda d: d.update(version=99), "version 99"),
        (lambda d: d.pop("tables"), "field 'tables' is missing"),
        (lambda d: d["tables"][0].update(colour="red"), "colour"),
        (lambda d: d["tables"][0]["condition"].update(threads="two"), "condition.threads"),
        (lambda d: d["tables"][0]["works"].update(x=[1.0, 2.0]), "works.x"),
        (lambda d: d["tables"][0]["works"].update(x=[-1.0, 2.0, 3, 4, 0]), "-1.0 is less than 0"),
        (lambda d: d["tables"][0]["issue"].update(x=-1.0), "-1.0 is less than 0"),
        (lambda d: d["tables"][0]["references"].update(matmul=[0.0, 0.1]), "0.0 is less than"),
        (lambda d: d["tables"][0].update(provisional=[1]), "provisional"),
    ],
)
def test_a_file_that_is_wrong_is_refused(change: object, complaint: str, tmp_path: Path) -> None:
    data = to_json(CostFile("a machine", "2.0", (full_table(),)))
    change(data)  # type: ignore[operator]
    (tmp_path / "t.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=complaint) as error:
        load_cost_file(tmp_path / "t.json")
    assert "t.json" in str(error.value)


def test_a_file_that_says_no_mode_was_measured_with_the_interpreter(tmp_path: Path) -> None:
    data = to_json(CostFile("a machine", "2.0", (full_table(),)))
    assert "mode" not in data["tables"][0]["condition"]
    del data["tables"][0]["references"], data["tables"][0]["provisional"]
    (tmp_path / "t.json").write_text(json.dumps(data))
    found = load_cost_file(tmp_path / "t.json")
    assert found.table(Condition("cpu", 1, 2, "none")).works == full_table().works
    assert not found.table(Condition("cpu", 1, 2, "generated")).works


@pytest.mark.parametrize("text", ["", "[1", "[]", "3"])
def test_a_file_that_is_no_table_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ValueError, match=r"t\.json"):
        load_cost_file(tmp_path / "t.json")
    with pytest.raises(ValueError, match="cannot be read"):
        load_cost_file(tmp_path / "none.json")


def test_the_cache_keeps_tables_by_condition(calibrating: Path) -> None:
    assert cache_file().parent == calibrating
    assert cached_costs().tables == ()
    keep_costs(full_table())
    keep_costs(CostTable(Condition("cpu", 1, 4)))
    keep_costs(replace(full_table(), noise=0.5))
    assert len(cached_costs().tables) == 2
    assert cached_costs().table(Condition("cpu", 1, 2)).noise == 0.5
    cache_file().write_text("not JSON")
    assert cached_costs().tables == ()  # measured anew rather than an error


def test_two_commands_that_measure_at_once_keep_what_both_have_measured(calibrating: Path) -> None:
    whole = full_table()
    ((one, first),) = whole.works.items()
    two, second = one.replace("mm", "bmm"), first
    assert one != two
    before = replace(whole, works={"gone": first}, provisional=())
    keep_costs(before)
    keep_costs(replace(before, works={one: first}, provisional=(one,)), before)
    keep_costs(replace(before, works={two: second}), before)
    found = cached_costs().table(whole.condition)
    assert found.works == {one: first, two: second}  # what both have thrown away stays away
    assert found.provisional == (one,)


def test_the_cache_is_under_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("APPORTION_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(cache_file()).startswith("/somewhere/apportion/costs-")
    monkeypatch.setenv("APPORTION_CACHE", "/elsewhere")
    assert cache_file().parent == Path("/elsewhere")


# Fits


def test_a_fit_finds_what_was_planted() -> None:
    rng = Random(0)
    sizes = [(10 ** rng.uniform(3, 9), 10 ** rng.uniform(3, 8)) for _ in range(40)]
    works = [KernelMeasurement(2e-6 + a * 5e-11 + b * 3e-10, a, int(b), 4) for a, b in sizes]
    found = fit(works)
    assert found[:3] == pytest.approx((2e-6, 5e-11, 3e-10), rel=1e-3)
    assert found.error < 1e-3
    assert found.points == 40


def test_a_fit_says_how_wrong_it_is() -> None:
    rng = Random(0)
    works = [KernelMeasurement(1e-3 * rng.uniform(0.5, 1.5), 1e6, 1000, 4) for _ in range(40)]
    assert 0.1 < fit(works).error < 0.5


def test_no_coefficient_is_negative() -> None:
    rng = Random(1)
    works = [
        KernelMeasurement(10 ** rng.uniform(-6, -2), 10 ** rng.uniform(0, 9), 1000, 4)
        for _ in range(30)
    ]
    assert min(fit(works)) >= 0


def test_fits_are_by_kind_size_and_family() -> None:
    works = {
        f"aten.mm.default() #{k}": KernelMeasurement(1e-3 * (k + 1), 1e6 * (k + 1), 10, 4)
        for k in range(5)
    }
    works |= {f"aten.add.Tensor() #{k}": KernelMeasurement(1e-3, 10.0, 10, 4) for k in range(2)}
    works |= {f"aten.mm.default() h{k}": KernelMeasurement(1e-4, 1e6, 10, 2) for k in range(2)}
    assert set(fits(works)) == {"aten.mm.default/4", "family:dense/4"}
    assert family("aten.convolution_backward.default") == "family:dense"
    assert family("apportion.grouped_mm") == family("apportion.grouped_outer") == "family:dense"
    assert family("apportion.update") == "family:other"


def test_a_line_through_boxes_and_bytes() -> None:
    rows = [(b, n, 1e-5 + b * 2e-6 + n * 1e-10) for b in (1, 2, 5, 9) for n in (10, 10**4, 10**7)]
    found = line(rows)
    assert found[:3] == pytest.approx((1e-5, 2e-6, 1e-10), rel=1e-3)
    assert line([]).points == 0


# From rehearsals to a table


def rehearsed(tasks: TaskGraph, seconds: dict[int, float], rounds: int = 4) -> list[RehearsalTimes]:
    """Answers in which every task took so long in each round, by its work."""
    answers = []
    for device in range(tasks.devices):
        mine = np.flatnonzero(np.isin(tasks.kind, [COMPUTE, ASSEMBLE]) & (tasks.device == device))
        row = [seconds[int(tasks.work[k])] for k in mine]
        ones, ends = [1.0] * rounds, [1e-5] * rounds
        answers.append(RehearsalTimes(mine, np.array([row] * rounds), ends, [], [], ones))
    return answers


@pytest.mark.slow
def test_what_was_measured_is_what_is_predicted() -> None:
    tasks = random_piece(devices=1)
    seconds = {k: 1e-6 * (k + 1) for k in range(len(tasks.works))}
    table = with_rehearsal(CostTable(Condition("cpu")), tasks, rehearsed(tasks, seconds))
    assert count_missing(table, tasks) == 0
    (feed,) = feeds(tasks)
    assert table.works[feed[0]].seconds == pytest.approx(1e-5)
    place = cluster("local:1")
    found = simulate(tasks, place, measured_cost(table)).step_seconds
    assert found == pytest.approx(sum(seconds[int(w)] for w in tasks.work) + 1e-5, rel=1e-3)
    assert set(sources(tasks, place, measured_cost(table)).tolist()) == {MEASURED}


@pytest.mark.slow
def test_other_strategies_are_partly_measured_and_else_fitted() -> None:
    tasks, other = random_piece(seed=0), random_piece(seed=1)
    seconds = {k: 1e-6 * (k + 1) for k in range(len(tasks.works))}
    table = with_rehearsal(CostTable(Condition("cpu")), tasks, rehearsed(tasks, seconds))
    assert 0 < count_missing(table, other) < len(other.works)
    found = sources(other, cluster("local:2"), measured_cost(table))
    assert {MEASURED, FITTED} <= set(found.tolist())


@pytest.mark.slow
def test_a_disturbed_round_does_not_count() -> None:
    tasks = random_piece(devices=1)
    seconds = dict.fromkeys(range(len(tasks.works)), 1e-5)
    (answer,) = rehearsed(tasks, seconds, rounds=9)
    answer.seconds[0] *= 50
    answer.seconds[1, ::3] *= 50
    table = with_rehearsal(CostTable(Condition("cpu")), tasks, [answer])
    assert all(w.seconds == pytest.approx(1e-5) for s, w in table.works.items() if "feed" not in s)


@pytest.mark.slow
def test_works_together_take_what_a_round_takes() -> None:
    """Of each task the low quantile, but their sum is the low quantile of whole rounds."""
    tasks = random_piece(devices=1)
    (answer,) = rehearsed(tasks, dict.fromkeys(range(len(tasks.works)), 1e-5), rounds=20)
    rng = np.random.default_rng(0)
    answer = replace(answer, seconds=answer.seconds * rng.uniform(1, 2, answer.seconds.shape))
    table = with_rehearsal(CostTable(Condition("cpu")), tasks, [answer])
    count = np.bincount(tasks.work[tasks.work >= 0], minlength=len(tasks.works))
    total = sum(n * table.works[w].seconds for n, w in zip(count, tasks.works, strict=True))
    assert total == pytest.approx(np.quantile(answer.seconds.sum(axis=1), QUANTILE))


@pytest.mark.slow
def test_noise_is_the_spread_of_the_reference() -> None:
    tasks = random_piece(devices=1)
    (answer,) = rehearsed(tasks, dict.fromkeys(range(len(tasks.works)), 1e-5))
    quiet = with_rehearsal(CostTable(Condition("cpu")), tasks, [answer])
    noisy = replace(answer, reference=[1.0, 1.0, 2.0, 2.0])
    assert quiet.noise == 0
    assert with_rehearsal(CostTable(Condition("cpu")), tasks, [noisy]).noise > NOISY


def test_exchanges_are_timed_from_when_the_last_process_has_come() -> None:
    def took(messages: int, nbytes: int) -> int:
        return 100_000 + 10_000 * messages + nbytes

    sizes = [1 << k for k in (10, 14, 16, 18, 20, 22, 24)]
    ends = [took(2, 2 * n) for n in sizes] + [took(1, n) for n in sizes]
    late = np.array([[(700, 700 + end) for end in ends]] * 5)
    early = np.array([[(0, 700 + end) for end in ends]] * 5)
    table = with_exchanges(
        CostTable(Condition("cpu", 1, 2)), 2, [[ExchangeTimes(late), ExchangeTimes(early)]]
    )
    assert table.lines["exchange"][:3] == pytest.approx((1e-4, 1e-5, 1e-9), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("longer", [20_000_000, 50_000_000])
def test_a_rehearsed_step_takes_what_its_rounds_took(longer: int) -> None:
    """Exchanges take what is left, with what processes wait for each other."""
    tasks, place = random_piece("mlp:tiny"), cluster("local:2")
    seconds = dict.fromkeys(range(len(tasks.works)), 1e-6)
    used = 10_000_000
    rounds = [(n, 100 * device, longer, used) for device in range(2) for n in range(4)]
    rounds[0] = (0, 0, 9 * longer, used)  # one was disturbed
    answers = [replace(a, rounds=rounds) for a in rehearsed(tasks, seconds)]
    table = with_rehearsal(CostTable(condition_of(place)), tasks, answers)
    found = simulate(tasks, place, measured_cost(table)).step_seconds
    assert found == pytest.approx(longer / 1e9, rel=0.05)
    beside_others = with_rehearsal(CostTable(condition_of(place)), tasks, answers, disturbed=True)
    found = simulate(tasks, place, measured_cost(beside_others)).step_seconds
    assert found == pytest.approx(WAITING * used / 1e9, rel=0.05)


def test_the_exchanges_of_a_step_are_counted_where_most_is_moved() -> None:
    tasks = random_piece("mlp:tiny")
    found = exchanges_in_step(tasks)
    moving = tasks.is_message
    assert len(found) == len(set(tasks.position[moving].tolist()))
    assert sum(nbytes for _, nbytes in found) == tasks.nbytes[moving].sum()  # there are two only


def test_exchanges_cost_what_several_steps_say() -> None:
    """In steps an exchange costs more than alone, each far more, and a byte as much."""

    def step(count: int, messages: int, nbytes: int) -> float:
        return 8e-4 * count + 5e-5 * messages + 1e-9 * nbytes

    alone = {
        f"apportion.exchange({m} {n})": KernelMeasurement(1e-4 + 2e-5 * m + 1e-9 * n, m, n, 0)
        for m in (1, 2, 6)
        for n in (1 << 10, 1 << 16, 1 << 22)
    }
    assert exchange_line_of(alone)[:3] == pytest.approx((1e-4, 2e-5, 1e-9), rel=1e-3)
    sizes = [(50, 100, 1_000_000), (3, 6, 40_000_000), (200, 1200, 10_000_000)]
    steps = {
        f"apportion.step_exchanges({c} {m} {n})": KernelMeasurement(step(c, m, n), m, n, 0, c)
        for c, m, n in sizes
    }
    found = exchange_line_of(alone | steps)
    for c, m, n in (*sizes, (20, 60, 5_000_000)):
        guess = c * found.each + m * found.per_box + n * found.per_byte
        assert guess == pytest.approx(step(c, m, n), rel=0.2)
    one = exchange_line_of(alone | dict([next(iter(steps.items()))]))
    assert 50 * one.each + 100 * one.per_box + 1e6 * one.per_byte == pytest.approx(
        step(*sizes[0]), rel=1e-6
    )
    assert one.each / one.per_byte == pytest.approx(1e-4 / 1e-9, rel=1e-3)


# Calibrator


def test_what_is_known_is_not_measured_again(calibrating: Path) -> None:
    tasks = random_piece("mlp:tiny")
    place = cluster("local:2")
    seconds = dict.fromkeys(range(len(tasks.works)), 1e-6)
    empty = CostTable(condition_of(place), references={"matmul": ReferenceTime(1e-3, 0.0)})
    keep_costs(with_rehearsal(empty, tasks, rehearsed(tasks, seconds)))
    notes: list[str] = []
    with Calibrator(StepSource(captured("mlp:tiny")[0].graph), place, 20.0, notes.append) as prices:
        cost = prices.cost(Strategy(()), tasks)
        assert not prices.processes.running
    assert cost.name == "calibrated"
    assert notes == []


def test_without_a_budget_nothing_is_measured(calibrating: Path) -> None:
    tasks = random_piece("mlp:tiny")
    source = source_of(captured("mlp:tiny")[0])
    with Calibrator(source, cluster("local:2"), 0.0, pytest.fail) as prices:
        assert prices.cost(Strategy(()), tasks) is ASSUMED


@pytest.mark.parametrize(
    ("field", "complaint"), [("memory", "GB of memory"), ("time", "would take")]
)
def test_what_is_too_large_is_not_measured(
    field: str, complaint: str, calibrating: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if field == "memory":
        monkeypatch.setattr("apportion.run.calibrate.free_memory", lambda: 1.0)
    notes: list[str] = []
    budget = 20.0 if field == "memory" else 1e-9
    source = source_of(captured("mlp:tiny")[0])
    with Calibrator(source, cluster("local:2"), budget, notes.append) as prices:
        assert prices.cost(Strategy(()), random_piece("mlp:tiny")) is ASSUMED
    (note,) = notes
    assert complaint in note


def test_planning_goes_on_when_measuring_fails(
    calibrating: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("rank 1 was ended by signal SIGKILL")

    monkeypatch.setattr("apportion.run.pool.ProcessPool", fails)
    notes: list[str] = []
    source = source_of(captured("mlp:tiny")[0])
    with Calibrator(source, cluster("local:2"), 20.0, notes.append) as prices:
        for _ in range(2):
            assert prices.cost(Strategy(()), random_piece("mlp:tiny")) is ASSUMED
    assert [note for note in notes if "rank 1 was ended" in note] == notes[1:]
    assert len(notes) == 2


def test_a_source_gives_the_batch() -> None:
    program = captured("gpt2:tiny")[0]
    given = source_of(program).given
    assert given.keys() >= {value for value, _ in program.inputs}
    step = tensors_of_graph(program.graph, given)
    for index, value in enumerate(program.graph.values):
        if value.role in ("parameter", "optimizer state", "input"):
            made = step.tensor(index)
            assert tuple(made.shape) == value.shape
            assert str(made.dtype) == f"torch.{value.dtype}"
            assert value.role != "optimizer state" or (made >= 0).all()


# The command


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"device": "tpu"}, "neither cpu nor cuda"),
        pytest.param(
            {"device": "cuda"},
            "no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
        ({"cluster": "8xh100"}, "only processes of this machine"),
        ({"cluster": "local:2", "procs": 2}, "either --cluster or --procs"),
    ],
)
def test_wrong_requests(given: dict[str, object], complaint: str) -> None:
    usual = {"cluster": None, "procs": None, "device": "cpu"} | given
    with pytest.raises(ValueError, match=complaint):
        measured(("mlp:tiny",), budget=1.0, seed=0, out=None, note=print, **usual)  # type: ignore[arg-type]


def test_a_table_is_shown() -> None:
    table = full_table()
    assert facts(table)["works"] == 1
    assert facts(table)["lines"]["exchange"]["points"] == 14
    text = " ".join(x for x in shown(table) if isinstance(x, str))
    assert "exchange: 100 us + 10.0 us per box or message + 1.00 GB/s" in text
    assert json.dumps(facts(table))


def test_from_json_takes_only_its_own() -> None:
    with pytest.raises(ValueError, match="does not say"):
        from_json([])
