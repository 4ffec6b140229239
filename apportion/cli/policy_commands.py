"""The commands about learned placers: policy train, show and evaluate.

Part of the room cli. Models come in and a policy file goes out, or the other way round. Everything
heavy is imported inside the commands.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from apportion.cli.options import AsJson, Budget, ClusterName, Model, Seed
from apportion.cli.requests import capture_without_data, check_outputs
from apportion.show import answer, note, stdout_kept, warnings_noted

if TYPE_CHECKING:
    from apportion.place import PlacementProblem

policy_app = typer.Typer(
    name="policy",
    help="Train, show, evaluate learned placers.\n\nExample: apportion policy show p.safetensors",
    no_args_is_help=True,
)

PolicyPath = Annotated[Path, typer.Argument(metavar="POLICY", help="A policy file (safetensors).")]
OUR_KIND = "policy"


@policy_app.command("train")
def train_command(
    models: Annotated[
        str,
        typer.Option("--models", metavar="A,B", help="Models to train on; settings after a colon."),
    ],
    clusters: Annotated[
        str, typer.Option("--clusters", metavar="C,D", help="Clusters to place them on.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The policy file to write.")],
    budget: Budget = 300.0,
    kind: Annotated[
        str, typer.Option("--kind", metavar="K", help="policy, placeto or gdp.")
    ] = OUR_KIND,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="FILE", help="Go on with what this file has learned."),
    ] = None,
    seed: Seed = 0,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", metavar="N", min=1, help="Processes. Default: one per core."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a placer on models and clusters, for so many seconds.

    The curve is printed while it learns: step times of samples relative to one
    device, of the best ones relative to heuristics. The file is written every
    half minute and at Ctrl-C; beside it lies what --resume goes on from.

    Example: apportion policy train --models nmt:tiny --clusters p2.8xlarge --out p.safetensors
    """
    trainers = {OUR_KIND: _train_policy, "placeto": _train_placeto, "gdp": _train_gdp}
    if kind not in trainers:
        raise ValueError(f"There is no training of kind {kind!r}; known are {', '.join(trainers)}.")
    check_outputs(out)
    if resume is not None and not resume.is_file():
        raise ValueError(f"There is no file {resume} to go on from.")
    with stdout_kept(as_json), warnings_noted():
        problems = captured_problems(split_specs(models), split_specs(clusters), seed)
        facts = trainers[kind](problems, out, budget, resume, seed, jobs)
    answer(as_json, {"policy": str(out), "kind": kind, **facts}, [f"wrote {out}"])


def _train_policy(
    problems: list[PlacementProblem],
    out: Path,
    budget: float,
    resume: Path | None,
    seed: int,
    jobs: int | None,
) -> dict[str, Any]:
    """Train `policy`; the facts of what it has learned."""
    from apportion.learn import PolicyTraining, TrainingProgress, train_policy
    from apportion.machine import usable_cores
    from apportion.place import save_problem

    latest = [0.0]

    def report(at: TrainingProgress) -> None:
        if at.seconds - latest[0] >= 2.0:
            latest[0] = at.seconds
            figures = ", ".join(f"{name} {value:.3f}" for name, value in at.figures.items())
            note(f"{at.phase}: {at.seconds:.0f} s, {at.updates} updates, {figures}")

    training = PolicyTraining(budget=budget, seed=seed, jobs=jobs or usable_cores())
    with TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.npz" for number in range(len(problems))]
        for path, problem in zip(paths, problems, strict=True):
            save_problem(path, problem)
        return dict(train_policy(paths, out, training, resume=resume, report=report).facts)


def _train_placeto(
    problems: list[PlacementProblem],
    out: Path,
    budget: float,
    resume: Path | None,
    seed: int,
    jobs: int | None,
) -> dict[str, Any]:
    """Train Placeto's policy, on problems with one number of devices."""
    from apportion.learn import EpisodeReport, load_placeto, train_placeto
    from apportion.machine import usable_cores

    latest = [0.0]

    def report(at: EpisodeReport) -> None:
        if at.seconds - latest[0] >= 2.0:
            latest[0] = at.seconds
            note(f"placeto: {at.seconds:.0f} s, {at.episodes} episodes, best {at.best:.3f}")

    before = None if resume is None else load_placeto(resume)
    made = train_placeto(
        problems, budget=budget, seed=seed, workers=jobs or usable_cores(), report=report,
        resume=before, out=out,
    )  # fmt: skip
    return {"trained_on": list(made.trained_on)}


def _train_gdp(
    problems: list[PlacementProblem],
    out: Path,
    budget: float,
    resume: Path | None,
    seed: int,
    jobs: int | None,
) -> dict[str, Any]:
    """Train GDP's policy on a batch of problems."""
    from apportion.learn import load_gdp, save_gdp, train_gdp
    from apportion.place import PlacerProgress

    best: list[float] = []

    def report(at: PlacerProgress) -> None:
        if at.best is not None and (not best or at.best < best[-1]):
            best.append(at.best)
            note(f"gdp: {at.evaluations} placements, best {at.best:.6g}")

    before = None if resume is None else load_gdp(resume)
    made = train_gdp(problems, budget=budget, seed=seed, report=report, resume=before)
    save_gdp(out, made)
    return {"trained_on": [problem.name for problem in problems]}


def split_specs(text: str) -> list[str]:
    """Names with settings, divided by commas: `a:x=1,y=2,b` are two."""
    found: list[str] = []
    for part in text.split(","):
        if found and ":" not in part and (part == "tiny" or "=" in part):
            found[-1] += f",{part}"
        elif part:
            found.append(part)
    if not found:
        raise ValueError(f"{text!r} names nothing.")
    return found


def captured_problems(models: list[str], clusters: list[str], seed: int) -> list[PlacementProblem]:
    """The step of every model on every cluster, one unit for a forward operator."""
    from apportion.machine import cluster, default_cost
    from apportion.place import captured_problem
    from apportion.split import Space

    machines = [cluster(name) for name in clusters]
    found = []
    for model in models:
        space = Space(capture_without_data(model, seed).graph)
        for name, machine in zip(clusters, machines, strict=True):
            cost = default_cost(machine)
            found.append(captured_problem(space, machine, cost, name=f"{model}@{name}"))
            note(f"captured {model} for {name}: {found[-1].units} units")
    return found


@policy_app.command("show")
def show_policy_command(policy: PolicyPath, as_json: AsJson = False) -> None:
    """Show what a policy file is: its kind, what it was trained on, figures, size.

    Example: apportion policy show p.safetensors
    """
    from apportion.place import read_policy
    from apportion.show import policy_tables

    file = read_policy(policy)
    facts = {
        "policy": str(policy),
        "kind": file.kind,
        "bytes": policy.stat().st_size,
        "parameters": sum(int(tensor.size) for tensor in file.tensors.values()),
        "facts": file.facts,
    }
    answer(as_json, facts, policy_tables(facts))


@policy_app.command("evaluate")
def evaluate_command(
    policy: PolicyPath,
    model: Model,
    cluster: ClusterName,
    budget: Budget = 1.0,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Compare a policy with single, list scheduling and local search on a model.

    What the policy proposes without any training on this model is compared with
    local search at the same number of simulated placements; then both get the
    budget of local search.

    Example: apportion policy evaluate p.safetensors gnmt:tiny --cluster p2.8xlarge
    """
    from apportion.place import evaluate_policy, load_network
    from apportion.show import policy_comparison

    with stdout_kept(as_json), warnings_noted():
        network = load_network(policy)
        (problem,) = captured_problems([model], [cluster], seed)
        found = evaluate_policy(problem, network, budget, seed)
    facts = {"policy": str(policy), "model": model, "cluster": cluster, **found}
    answer(as_json, facts, policy_comparison(facts))
