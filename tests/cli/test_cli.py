"""The command line: its surface, its exit statuses, and what goes to which stream."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pytest
import typer
from method_rows import row

from apportion import zoo
from apportion.cli import main as cli
from apportion.quantity import parse_size_limit
from apportion.search import METHODS, help_text
from apportion.version import VERSION

STABLE = {
    *("model", "cluster", "method", "step_seconds", "search_seconds", "peak_bytes"),
    *("bytes_moved", "ops", "feasible", "lower_bound", "lower_bound_of", "notes"),
    *("curve", "figures", "measured", "tried", "communication"),
}
MORE = {"cost", "peak_causes", "decision", "model_flops_utilisation", "throughput"}
PLAN = ["plan", "mlp:tiny", "--cluster", "local:2", "--method", "data"]


def call(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout, stderr."""
    capfd.readouterr()
    status = cli.status(arguments)
    out, err = capfd.readouterr()
    return status, out, err


def call_json(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status, out, err = call(capfd, *arguments, "--json")
    assert out.count("\n") == 1, err
    return status, json.loads(out)


def surface() -> dict[str, set[str]]:
    """The arguments and options of every command; those of a group have its name before theirs."""
    group: Any = typer.main.get_command(cli.app)
    found = {}
    for name, command in group.commands.items():
        inner = getattr(command, "commands", {})
        for words, it in [(name, command), *((f"{name} {word}", it) for word, it in inner.items())]:
            found[words] = {option for parameter in it.params for option in parameter.opts}
    return found


def test_the_surface_is_what_it_was() -> None:
    """Other programs call these: a change here is a change of the contract."""
    assert surface() == {
        "models": {"name", "--ops", "--json"},
        "show": {"model", "--ops", "--json"},
        "clusters": {"name", "--json"},
        "ops": {
            *("--verify", "--op", "--model", "--share", "--every", "--blind", "--workers"),
            *("--out", "--json"),
        },
        "plan": {
            *("model", "--cluster", "--method", "--budget", "--memory-limit", "--seed", "--out"),
            *("--trace", "--calibrate", "--measure", "--certify", "--policy", "--costs"),
            *("--compile", "--batch", "--seq", "--precision", "--json", "--wire"),
            *("--recompute", "--offload", "--communication", "--staleness", "--accumulate"),
            *("--host-state", "--devices"),
        },
        "compare": {
            *("model", "--cluster", "--methods", "--budget", "--memory-limit", "--seed"),
            *("--batch", "--seq", "--precision", "--recompute", "--offload", "--communication"),
            *("--calibrate", "--policy", "--costs", "--compile", "--json", "--accumulate"),
            "--host-state",
        },
        "place": {
            *("source", "--format", "--devices", "--cluster", "--objective", "--contiguous"),
            *("--method", "--budget", "--seed", "--memory-limit", "--expert", "--policy"),
            *("--out", "--export", "--json"),
        },
        "policy": set(),
        "policy train": {
            *("--models", "--clusters", "--out", "--budget", "--kind", "--resume", "--seed"),
            *("--jobs", "--json"),
        },
        "policy show": {"policy", "--json"},
        "policy evaluate": {"policy", "model", "--cluster", "--budget", "--seed", "--json"},
        "loops": set(),
        "loops show": {"loop", "--cluster", "--json"},
        "calibrate": {
            *("models", "--cluster", "--procs", "--budget", "--device", "--seed", "--out"),
            *("--json", "--hosts", "--interface"),
        },
        "simulate": {"plan", "--trace", "--chakra", "--costs", "--json"},
        "report": {"plan", "--out", "-o", "--trace"},
        "explain": {"plan", "op", "--alternatives", "--budget", "--json"},
        "run": {
            *("model", "--plan", "--procs", "--method", "--steps", "--seed", "--check"),
            *("--timeout", "--trace", "--calibrate", "--measure", "--policy", "--compile"),
            *("--fast", "--share-gpu", "--batch", "--seq", "--precision", "--json"),
            *("--memory-limit", "--recompute", "--offload", "--communication", "--staleness"),
            *("--accumulate", "--host-state", "--save", "--save-every", "--keep", "--resume"),
            "--metrics",
        },
        "serve": {"plans", "--port", "--open"},
        "export": {"plan", "--layout", "--model", "--out", "-o", "--json"},
        "import": {
            *("model", "layout", "--cluster", "--memory-limit", "--costs", "--compile", "--seed"),
            *("--batch", "--seq", "--precision", "--accumulate", "--calibrate", "--out", "--json"),
        },
    }


@pytest.mark.parametrize("command", surface())
def test_help_teaches_by_example(capfd: pytest.CaptureFixture[str], command: str) -> None:
    status, out, _ = call(capfd, *command.split(), "--help")
    assert status == 0
    assert f"Example: apportion {command}" in " ".join(out.split())


def test_a_group_without_a_command_shows_its_help(capfd: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capfd, "policy")
    assert status == 2
    assert "Example: apportion policy" in out and not err


def test_help_names_every_method() -> None:
    assert [line.split(":")[0] for line in help_text().split("\n\n")] == ["auto", *METHODS]


def test_no_arguments_show_the_help(capfd: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capfd)
    assert status == 0 and "simulate" in out


@pytest.mark.slow
def test_models_lists_the_zoo(capfd: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capfd, "models")
    assert status == 0 and all(model.name in out for model in zoo.known())
    assert "124,439,808" in out and "Llama-3.1-8B" in out
    status, facts = call_json(capfd, "models")
    assert status == 0 and [m["name"] for m in facts["models"]] == [m.name for m in zoo.known()]
    sizes = {m["name"]: m["parameters"] for m in facts["models"]}
    assert sizes["mlp"] == 4 * (1024 * 1024 + 1024) and sizes["gpt2"] == 124_439_808
    assert all(m["source"] and "operators" not in m for m in facts["models"])
    published = {m["name"]: m for m in facts["published"]}
    assert published["meta-llama/Llama-3.1-8B"]["parameters"] == 8_030_261_248
    _, alone = call_json(capfd, "models", "llama-3.1-8b-instruct")
    assert alone == {"models": [], "published": [published["meta-llama/Llama-3.1-8B"]]}


@pytest.mark.slow
def test_one_model_is_shown_with_its_settings(capfd: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capfd, "models", "mlp")
    assert status == 0 and re.search(r"width +1024 +10\b", out) and "gpt2" not in out
    status, out, err = call(capfd, "models", "mlp", "--ops", "--json")
    (facts,) = json.loads(out)["models"]
    assert status == 0 and err == "capturing mlp, 1 of 1\n"
    assert facts["operators"] == call_json(capfd, "show", "mlp")[1]["ops"] > 40
    assert (facts["defaults"]["width"], facts["tiny"]["width"]) == (1024, 10)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("fly", "No such command 'fly'"),
        ("plan", "Missing argument 'MODEL'"),
        ("plan mlp:tiny", "Missing option '--cluster'"),
        ("plan mlp:tiny --cluster local:2 --fast", "No such option: --fast"),
        ("plan mlp:tiny --cluster local:2 --method best", "best"),
        ("plan mlp:tiny --cluster local:0", "local:0"),
        ("plan mlp:tiny --cluster nowhere", "nowhere"),
        ("plan mlp:tiny --cluster local:2 --memory-limit 16", "'16' is not a size"),
        ("plan mlp:tiny --cluster local:2 --memory-limit 0GB", "'0GB' is not a size"),
        ("plan mlp:tiny --cluster local:2 --measure 0", "--measure"),
        ("plan mlp:tiny --cluster local:2 --offload some", "cannot offload 'some'"),
        ("run mlp:tiny --plan p.json --offload auto", "Give either --plan, or --procs"),
        ("plan mlp:tiny --cluster 8xh100 --measure 2", "this machine has no such devices"),
        ("plan mlp:tiny --cluster local:2 --out no/such/p.json", "There is no folder"),
        ("plan nothing --cluster local:2", "Unknown model 'nothing'"),
        ("plan mlp:depth=1 --cluster local:2", "'depth=1' is not a setting of mlp"),
        ("plan none.py:make --cluster local:2", "There is no file 'none.py'"),
        ("compare mlp:tiny --cluster local:2 --methods single,best", "best"),
        ("compare mlp:tiny --cluster local:2 --methods ,", "''"),
        ("simulate none.json", "none.json: No such file"),
        ("run mlp:tiny --procs 0", "--procs"),
        ("run mlp:tiny --procs two", "--procs"),
        ("run mlp:tiny --steps 0", "--steps"),
        ("run mlp:tiny --procs 2 --method best", "best"),
        ("run mlp:tiny --plan p.json --procs 2", "Give either --plan, or --procs"),
        ("run mlp:tiny --plan p.json --measure 2", "Give either --plan, or --procs"),
        ("run mlp:tiny --plan none.json", "none.json: No such file"),
        ("show nothing", "Unknown model 'nothing'"),
        ("models nothing", "Unknown model 'nothing'"),
        ("models train.py:make", "Unknown model 'train.py:make'"),
        ("clusters nowhere", "nowhere"),
    ],
)
def test_wrong_requests_get_one_sentence(
    capfd: pytest.CaptureFixture[str], arguments: str, sentence: str
) -> None:
    status, out, err = call(capfd, *arguments.split())
    assert (status, out) == (2, "")
    assert sentence in err and err.count("\n") == 1 and err.startswith("apportion: ")


def test_failed_work_and_interruption(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> NoReturn:
        raise RuntimeError("Rank 1 died.")

    def interrupt() -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("apportion.catalogue.known_models", fail)
    assert call(capfd, "models") == (1, "", "apportion: Rank 1 died.\n")
    monkeypatch.setattr("apportion.catalogue.known_models", interrupt)
    assert call(capfd, "models") == (130, "", "apportion: Interrupted.\n")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("7B", 7), ("2KB", 2000), ("1.5 MB", 1_500_000), ("16GB", 16 * 10**9)),
        *(("2KiB", 2048), ("512MiB", 512 * 2**20), ("80gib", 80 * 2**30), ("none", math.inf)),
    ],
)
def test_sizes(text: str, size: float) -> None:
    assert parse_size_limit(text) == size


@pytest.mark.slow
def test_show_and_lists(capfd: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capfd, "show", "mlp:tiny", "--ops")
    assert status == 0 and "fingerprint" in out and "aten." in out
    status, out, _ = call(capfd, "clusters")
    assert status == 0 and out
    status, out, _ = call(capfd, "clusters", "local:3")
    assert status == 0 and "process x 3" in out and "3 processes share" in out
    status, facts = call_json(capfd, "clusters")
    assert status == 0 and "p2.8xlarge" in facts["clusters"]
    status, facts = call_json(capfd, "clusters", "2x4xk80")
    assert status == 0 and len(facts["devices"]) == 8
    assert [pair["to"] for pair in facts["pairs"]] == ["node0/gpu1", "node1/gpu0"]
    status, out, _ = call(capfd, "ops")
    assert status == 0 and "aten.mm" in out


def test_show_counts_what_a_step_does(capfd: pytest.CaptureFixture[str]) -> None:
    """Three Linear modules of 10 by 10 on 7 samples: each is one product forward, and backward one
    for its weights and, but for the first, one for its input."""
    status, facts = call_json(capfd, "show", "mlp:tiny")
    assert status == 0 and facts["parameters"] == 3 * 110
    assert facts["begin"]["parameter"] == {"values": 6, "elements": 330, "bytes": 4 * 330}
    kinds = {kind["kind"]: kind for kind in facts["kinds"]}
    assert facts["ops"] == sum(kind["count"] for kind in kinds.values())
    assert facts["flops"] == sum(kind["flops"] for kind in kinds.values())
    assert facts["bytes"] == sum(kind["bytes"] for kind in kinds.values())
    assert kinds["aten.mm.default"]["count"] == 3 + 2
    assert kinds["aten.mm.default"]["flops"] == 5 * 2 * 7 * 10 * 10
    assert kinds["aten.mm.default"]["bytes"] == 5 * 4 * (70 + 70 + 100)
    assert kinds["aten.mm.default"]["axes"] == {axis: {"of": 5, "cut": 5} for axis in "ijk"}
    assert kinds["aten.t.default"]["flops"] == kinds["aten.t.default"]["bytes"] == 0


@pytest.mark.slow
def test_show_tells_which_axes_can_be_cut(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, out, _ = call(capfd, "show", "gpt2:tiny")
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert status == 0 and lines["aten._log_softmax"].rstrip().endswith("i0 not i1")
    (tmp_path / "train.py").write_text(UNDESCRIBED)
    status, facts = call_json(capfd, "show", f"{tmp_path}/train.py:make")
    (turn,) = [kind for kind in facts["kinds"] if kind["kind"] == "mine.turn.default"]
    assert status == 0 and (turn["count"], turn["undescribed"], turn["axes"]) == (4, 4, {})
    status, out, _ = call(capfd, "show", f"{tmp_path}/train.py:make")
    assert "4 unsplit: no description" in " ".join(out.split())


def test_plan_as_a_table(capfd: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capfd, *PLAN)
    assert status == 0
    for label in ("step time", "peak memory", "bytes moved", "search time", "feasible"):
        assert label in out


def test_plan_save_and_simulate_agree(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = str(tmp_path / "p.json")
    status, facts = call_json(capfd, *PLAN, "--out", file)
    assert status == 0
    assert facts.keys() == STABLE | MORE
    assert (facts["model"], facts["cluster"], facts["method"]) == ("mlp:tiny", "local:2", "data")
    assert len(facts["peak_bytes"]) == 2 and facts["feasible"] is True
    assert call_json(capfd, "simulate", file) == (0, facts)


@pytest.mark.slow
def test_broken_plan_files_are_refused(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    assert cli.status([*PLAN, "--out", str(file)]) == 0
    whole = file.read_text()
    for text in ("", whole[: len(whole) // 2], "[]", '{"schema": 1}', "\0"):
        file.write_text(text)
        for command in (["simulate", str(file)], ["run", "mlp:tiny", "--plan", str(file)]):
            status, out, err = call(capfd, *command)
            assert (status, out, err.count("\n")) == (2, "", 1), text


@pytest.mark.slow
def test_what_does_not_fit_keeps_its_figures(capfd: pytest.CaptureFixture[str]) -> None:
    status, facts = call_json(capfd, *PLAN, "--memory-limit", "1B")
    assert status == 1 and facts["feasible"] is False and facts["bytes_moved"] > 0
    compare = ["compare", "mlp:tiny", "--cluster", "local:2", "--methods", "single,data"]
    status, table = call_json(capfd, *compare, "--memory-limit", "1B")
    assert status == 1 and [row["feasible"] for row in table["results"]] == [False, False]


@pytest.mark.slow
def test_compare(capfd: pytest.CaptureFixture[str]) -> None:
    compare = ["compare", "mlp:tiny", "--cluster", "local:2", "--methods", "single,data"]
    status, table = call_json(capfd, *compare)
    assert status == 0
    assert [row["method"] for row in table["results"]] == ["single", "data"]
    assert all(row.keys() == STABLE for row in table["results"])
    status, out, _ = call(capfd, *compare)
    assert status == 0 and "single" in out and "data" in out


@pytest.mark.slow
def test_compare_marks_the_best_row(capfd: pytest.CaptureFixture[str]) -> None:
    compare = [
        "compare",
        "mlp:tiny",
        "--cluster",
        "local:2",
        "--budget",
        "1",
        "--methods",
        "data,single,auto",
    ]
    status, table = call_json(capfd, *compare)
    seconds = {row["method"]: row["step_seconds"] for row in table["results"]}
    assert status == 0 and seconds[table["best"]] == min(seconds.values()) == seconds["auto"]
    status, out, _ = call(capfd, *compare)
    (line,) = [line for line in out.splitlines() if line.rstrip().endswith("best")]
    assert line.startswith(table["best"]) and "auto: auto took single of data, " in out


@pytest.mark.slow
def test_compare_leaves_out_what_is_not_for_the_cluster(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from apportion.search import UnsuitableMethod

    def never(problem: Any, **how: Any) -> NoReturn:
        raise UnsuitableMethod("it needs a machine of its own")

    monkeypatch.setitem(METHODS, "never", row("never", never))
    compare = ["compare", "mlp:tiny", "--cluster", "local:3", "--methods"]
    status, table = call_json(capfd, *compare, "data,never")
    assert status == 0 and [row["method"] for row in table["results"]] == ["data"]
    status, out, err = call(capfd, *compare, "data,never")
    assert status == 0 and "never" not in out
    assert err == "note: never is left out: it needs a machine of its own\n"
    status, out, err = call(capfd, *compare, "never")
    assert (status, out) == (2, "") and "it needs a machine of its own" in err


@pytest.mark.slow
def test_bounds_and_notes_are_shown(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from apportion.search.baselines.data import data

    def proven(problem: Any, **how: Any) -> Any:
        bound, of = 1234.0, "bytes moved, over grids of two"
        return replace(data(problem), lower_bound=bound, bound_of=of, notes=("level 1 is exact",))

    monkeypatch.setitem(METHODS, "proven", row("proven", proven))
    where = ["mlp:tiny", "--cluster", "local:2"]
    status, facts = call_json(capfd, "plan", *where, "--method", "proven")
    assert (status, facts["lower_bound"], facts["notes"]) == (0, 1234.0, ["level 1 is exact"])
    assert facts["lower_bound_of"] == "bytes moved, over grids of two"
    status, out, _ = call(capfd, "plan", *where, "--method", "proven")
    assert "1.23 KB: bytes moved, over grids of two" in out and "note: level 1 is exact" in out
    status, out, _ = call(capfd, "compare", *where, "--methods", "data,proven")
    assert "bound of proven: 1.23 KB, bytes moved, over grids of two" in out
    assert "proven: level 1 is exact" in out


def test_a_plan_is_lowered_and_simulated_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def counted(home: str, name: str) -> None:
        module = import_module(home)
        real = getattr(module, name)

        def call_it(*given: Any, **named: Any) -> Any:
            calls.append(name)
            return real(*given, **named)

        monkeypatch.setattr(module, name, call_it)

    for home in ("apportion.plan.candidates", "apportion.plan.plan"):
        counted(home, "runnable")
        counted(home, "simulate")
    counted("apportion.plan.auto", "simulate")
    assert call(capfd, *PLAN)[0] == 0
    assert sorted(calls) == ["runnable", "simulate"]


@pytest.mark.slow
def test_ctrl_c_ends_a_search_with_the_best_so_far(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:

    def interrupt(problem: Any, **how: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setitem(METHODS, "tofu", row("tofu", interrupt))
    where = ["mlp:tiny", "--cluster", "local:2"]
    status, facts = call_json(capfd, "plan", *where)
    assert status == 0 and "interrupted: this is the best so far" in facts["notes"]
    status, out, err = call(capfd, "compare", *where, "--methods", "data,tofu,fsdp")
    assert status == 0 and "data" in out and "fsdp" not in out
    assert err == "note: interrupted; methods not tried: tofu, fsdp\n"
    assert call(capfd, "plan", *where, "--method", "tofu")[0] == 130


@pytest.mark.slow
def test_what_does_not_fit_is_explained(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = str(tmp_path / "p.json")
    status, out, _ = call(capfd, *PLAN, "--memory-limit", "1B", "--out", file)
    assert status == 1 and "note: the plan by data does not fit: it needs " in out
    assert "note: not even 1,024 such devices of 1 B would do" in out
    assert "does not fit" in call(capfd, "simulate", file)[1]  # the nearest plan was written
    status, facts = call_json(capfd, *PLAN, "--memory-limit", "none")
    assert status == 0 and facts["feasible"] is True
    compare = ["compare", "mlp:tiny", "--cluster", "local:2", "--methods", "single,data"]
    status, out, _ = call(capfd, *compare, "--memory-limit", "1B")
    assert status == 1 and out.count("no plan fits") == 1 and "best" not in out


UNDESCRIBED = """
import torch


def step(model, batch):
    turned = turn(model(batch), 1)
    return (turned * turn(turned, 0)).mean()


@torch.library.custom_op("mine::turn", mutates_args=())
def turn(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.flip(dim)


turn.register_fake(lambda x, dim: torch.empty_like(x))
turn.register_autograd(
    lambda ctx, grad: (turn(grad, ctx.dim), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "dim", inputs[1]),
)


def make():
    model = torch.nn.Linear(4, 6)
    return step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 4)
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["plan", "compare"])
def test_an_operator_that_runs_unsplit_is_noted_once(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    (tmp_path / "train.py").write_text(UNDESCRIBED)
    call_it = [command, f"{tmp_path}/train.py:make", "--cluster", "local:2", "--json"]
    status, out, err = call(capfd, *call_it, "--budget", "1")
    assert status == 0 and json.loads(out)
    (line,) = [line for line in err.splitlines() if "turn.default" in line]
    assert line == (
        "note: mine.turn.default runs unsplit (4 operators, first at "
        f"{tmp_path}/train.py:6): it has no description (ap.describe)"
    )
    # Beside notes only what says that the machine is being measured and loops are being compiled,
    # where nothing is kept yet.
    said = ("note: ", "measuring ", "compiling ")
    assert [line for line in err.splitlines() if not line.startswith(said)] == []


@pytest.mark.slow
def test_what_a_users_file_prints_is_kept_from_the_json(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(
        "from apportion import zoo\n"
        "def make():\n"
        "    print('hello')\n"
        "    it = zoo.load('mlp:tiny')\n"
        "    return it.step, it.model, it.optimizer, it.batch\n"
    )
    where = [f"{tmp_path}/train.py:make", "--cluster", "local:2", "--budget", "0"]
    status, facts = call_json(capfd, "plan", *where)
    assert status == 0 and facts["model"] == f"{tmp_path}/train.py:make"


def test_the_version_is_told() -> None:
    found = subprocess.run(
        [sys.executable, "-c", "from apportion.cli.main import main; main(['--version'])"],
        capture_output=True,
        text=True,
    )
    assert (found.returncode, found.stdout) == (0, f"apportion {VERSION}\n")
