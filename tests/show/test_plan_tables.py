"""Tables about plans: 80 columns, no broken word, equal devices once, no folders, only text."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import replace

import pytest
from graphs import captured
from rich.table import Table

import apportion as ap
from apportion.catalogue import known_models
from apportion.plan.make_plan import compare_methods, make_plan
from apportion.plan.plan import Plan
from apportion.run.ways_out import WayOut
from apportion.show import cluster_tables, plan_tables, streams, tables
from apportion.show.plain_table import PlainTable, plain_console, plain_table, printable
from apportion.simulate import peak
from apportion.split.space import Space


def made(method: str = "data", place: str = "8xh100", spec: str = "gpt2:tiny,batch=8") -> Plan:
    return make_plan(captured(spec)[0], ap.cluster(place), method, 1.0, seed=3)


def shown(items: list[Table | str], width: int = 80) -> str:
    """What a terminal of some width shows."""
    screen = io.StringIO()
    console = plain_console()
    console.file, console.width = screen, width
    for item in items:
        console.print(item)
    return screen.getvalue()


@pytest.mark.slow
def test_no_word_is_broken_at_80_columns() -> None:
    plan = made("fsdp")
    text = shown(plan_tables.planned(plan))
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
    wide = shown(plan_tables.planned(plan), 400)
    assert set(re.findall(r"\S+", text)) <= set(re.findall(r"\S+", wide))


@pytest.mark.slow
def test_nor_in_other_tables() -> None:
    """Names of operators are as long as columns of sentences are; these make room for them."""
    graph = captured("gpt2:tiny")[0].graph
    kinds = tables.inventory(Space(graph))
    plans = compare_methods(graph, ap.cluster("4xk80"), ["fsdp-keep", "allrow-greedy"], 0.0)
    way = WayOut("--recompute auto --host-state auto", "fsdp", 1.2, 10**10, 8 * 10**10, True)
    other = replace(way, options="--batch 1024", about="1032 does not fit", fits=False)
    for several in (
        [tables.operators_by_kind(kinds, {}), tables.summary("gpt2:tiny", graph, kinds)],
        plan_tables.compared(plans),
        plan_tables.ways([way, other]),
        [tables.models(known_models(), {})],
        cluster_tables.described(ap.cluster("flexflow-k80")),
    ):
        text, wide = shown(several), shown(several, 400)
        assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
        assert set(re.findall(r"\S+", text)) <= set(re.findall(r"\S+", wide))


@pytest.mark.slow
def test_long_names_are_broken_after_dots() -> None:
    plan = made("fsdp")
    most = peak(0, plan.timeline.curves[0], plan.tasks, plan.space.graph, 2)
    name = "log_softmax_backward_data.backward.log_softmax_of.another"
    long = replace(most, causes=tuple(replace(cause, op=name) for cause in most.causes))
    text = shown(plan_tables.causes(long))
    assert "\u2026" not in text and "log_softmax_backward_data.backward." in text.split()
    assert plan_tables._breakable(name).replace(" ", "") == name
    assert plan_tables._breakable("x" * 100) == "x" * 100


@pytest.mark.slow
def test_equal_devices_are_said_once() -> None:
    plan = made()
    plan = replace(plan, predicted=replace(plan.predicted, peak_bytes=(3 * 10**9,) * 8))
    assert "3.00 GB on each of 8 devices, of 80.00 GB" in shown([plan_tables.predicted(plan)])
    uneven = replace(plan.predicted, peak_bytes=(3 * 10**9,) * 7 + (10**9,))
    text = shown([plan_tables.predicted(replace(plan, predicted=uneven))])
    assert "1.00 GB to 3.00 GB on 8 devices, of 80.00 GB" in text


@pytest.mark.slow
def test_files_are_named_without_folders() -> None:
    text = shown(plan_tables.planned(made()))
    assert "gpt2.py:" in text and "/gpt2.py" not in text


@pytest.mark.slow
def test_bounds_of_different_quantities_are_apart() -> None:
    plans = compare_methods(captured("mlp:tiny")[0], ap.cluster("4xk80"), ["exact", "optcnn"], 1.0)
    table, *lines = plan_tables.compared(plans)
    assert isinstance(table, Table)
    assert "bound" not in [column.header for column in table.columns]
    assert [line for line in lines if isinstance(line, str) and line.startswith("bound of exact: ")]


@pytest.mark.slow
def test_the_first_lines_say_whether_it_fits_and_what_was_decided() -> None:
    first, second, third, *_ = plan_tables.planned(made("fsdp"))
    assert str(first).startswith("fits: ") and "tokens/s/GPU" in str(first)
    assert second == "a plan on 8xh100, fsdp"
    assert third == (
        "Data parallel over 8 devices; parameters and optimizer state cut over 8, gathered for the "
        "forward and again for the backward."
    )


HOSTILE = "\x1b[31mred\x1b[0m [bold]loud[/bold] :smile: \u202eturned"


def test_names_are_only_text() -> None:
    table = plain_table("name")
    table.add_row(HOSTILE)
    text = shown([table, PlainTable(title=HOSTILE)])
    assert "\x1b" not in text and "\u202e" not in text
    assert "[bold]loud[/bold] :smile:" in text and "\\x1b[31mred" in text
    assert printable("a\tb\nc\u2028") == "a\tb\nc\\u2028"


def test_what_is_printed_is_only_text(capsys: pytest.CaptureFixture[str]) -> None:
    streams.say(HOSTILE)
    streams.note(HOSTILE)
    said = capsys.readouterr()
    for text in said:
        assert "\x1b" not in text and "[bold]loud[/bold] :smile:" in text


def test_a_terminal_wraps_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    words = "a sentence of words that do not fit into forty columns of a terminal"
    streams.say(words)
    lines = screen.getvalue().splitlines()
    assert len(lines) == 2 and " ".join(line.strip() for line in lines) == words
