"""train policy: the training of `policy`, from files of problems to a file of the policy.

In: files of PlacementProblems, a budget in seconds. Out: a policy file, written again and again,
and beside it the state of the training, from which it goes on later.

    labels     good placements of variants of the problems, by local search from several starts
    imitation  a few epochs on these: what a policy that knows nothing would find only slowly
    REINFORCE  samples of further variants, until the budget is spent (policy_rollouts.py)

Gradients of the tasks of an update are summed in their order, so that the result is the same
whatever the number of processes, and the same if a training of so many updates is interrupted in
between. What is kept in the end is a moving average of the weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from apportion.columns import Floats, Ints
from apportion.learn.policy_rollouts import PolicyTask, TaskResult, learn_task, task_problem
from apportion.learn.worker_crew import WorkerCrew
from apportion.place import (
    PLACERS,
    PlacementProblem,
    PolicyNetwork,
    StepObjective,
    new_network,
    read_policy,
    save_network,
    tensor_shapes,
    write_policy,
)

STATE_KIND = "policy-training"
SAVE_SECONDS = 30.0
RATIOS = ("samples", "best", "improved")


@dataclass(frozen=True, slots=True)
class PolicyTraining:
    """How to train. `updates` and `label_seconds` limit by count instead of by the budget."""

    budget: float = 60.0
    seed: int = 0
    jobs: int = 1
    tasks: int = 32  # of one update
    rate: float = 1e-3  # of Adam
    entropy: float = 0.005
    improving: int = 1500  # evaluations of local search for the best sample of a task; 0: none
    weight: float = 0.5  # of what it makes, beside the samples
    average: float = 0.98  # how much of the average of weights each update keeps
    label_variants: int = 2  # of each problem
    label_seconds: float | None = None  # of each label; None: a fifth of the budget for all
    epochs: int = 20  # of imitation
    updates: int | None = None  # of REINFORCE


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Where a training stands: what phase, after how many seconds and updates, and smoothed
    figures. Of imitation the `loss`; then geometric means: of the times of `samples` relative to
    one device, of the `best` sample of each problem and what local search `improved` it to relative
    to the best heuristic; and the `entropy` of choices."""

    phase: str
    seconds: float
    updates: int
    figures: dict[str, float]


@dataclass(eq=False)
class TrainingState:
    """What a training goes on from."""

    weights: dict[str, Floats]
    average: dict[str, Floats]
    first: dict[str, Floats]  # Adam's moments
    second: dict[str, Floats]
    updates: int = 0  # in all, imitation included
    imitated: int = 0
    reinforced: int = 0
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)  # times as logarithms, smoothed
    curve: list[tuple[float, int, float]] = field(default_factory=list)


def new_state(seed: int) -> TrainingState:
    """Before anything is learned."""
    return state_of(new_network(seed))


def state_of(network: PolicyNetwork) -> TrainingState:
    """A training that begins with a network."""
    weights = {name: tensor.copy() for name, tensor in network.tensors.items()}
    first, second = ({name: np.zeros_like(t) for name, t in weights.items()} for _ in range(2))
    average = {name: tensor.copy() for name, tensor in weights.items()}
    return TrainingState(weights, average, first, second)


def train_policy(
    problems: Sequence[Path],
    out: Path,
    training: PolicyTraining,
    *,
    resume: Path | None = None,
    report: Callable[[TrainingProgress], None] | None = None,
) -> PolicyNetwork:
    """Train on the problems until the budget is spent; an interrupt keeps what is learned."""
    if not problems:
        raise ValueError("there are no problems to train on")
    began = time.perf_counter()
    state = new_state(training.seed) if resume is None else load_state(resume)
    names: list[str] = []
    try:
        with WorkerCrew(problems, training.jobs) as crew:
            names = [problem.name for problem in crew.own]
            run = _TrainingCall(crew, state, training, began, out, names, report)
            if state.reinforced == 0:
                run.imitate(run.labels())
            run.reinforce()
    except KeyboardInterrupt:
        pass
    state.seconds += time.perf_counter() - began
    save_state(out, state, training, names)
    return trained_network(state, training, names)


@dataclass(eq=False)
class _TrainingCall:
    """One call of train_policy."""

    crew: WorkerCrew
    state: TrainingState
    training: PolicyTraining
    began: float
    out: Path
    names: list[str]
    report: Callable[[TrainingProgress], None] | None
    saved: float = 0.0

    def elapsed(self) -> float:
        return time.perf_counter() - self.began

    def over(self) -> bool:
        return self.elapsed() >= self.training.budget

    def labels(self) -> list[PolicyTask]:
        """Tasks of imitation: variants of all problems, each with a good placement."""
        it = self.training
        if it.epochs == 0:
            return []
        count = len(self.crew.own) * it.label_variants
        each = it.label_seconds
        if each is None:
            each = 0.2 * it.budget * max(it.jobs, 1) / count
        tasks = [
            LabelTask(k, v * 1_000_003 + 7919 * k + it.seed if v else None, it.seed, each)
            for v in range(it.label_variants)
            for k in range(len(self.crew.own))
        ]
        found = self.crew.do(make_label, None, tasks)
        return [
            PolicyTask(task.problem, task.variant, 0, label=label)
            for task, label in zip(tasks, found, strict=True)
        ]

    def imitate(self, tasks: list[PolicyTask]) -> None:
        """So many epochs, in the order of a seed."""
        it = self.training
        for epoch in range(it.epochs if tasks else 0):
            order = np.random.default_rng([it.seed, epoch]).permutation(len(tasks))
            losses = []
            for first in range(0, len(tasks), it.tasks):
                if self.over():
                    return
                some = [tasks[k] for k in order[first : first + it.tasks]]
                results = self.crew.do(learn_task, self.state.weights, some)
                step(self.state, results, it)
                losses += [result.mean for result in results]
                self.state.imitated += 1
            self.tell("imitation", {"loss": float(np.mean(losses))})

    def reinforce(self) -> None:
        """Updates until the budget or their number is spent."""
        it, state = self.training, self.state
        while not self.over() and (it.updates is None or state.reinforced < it.updates):
            random = np.random.default_rng([it.seed, 1, state.reinforced])
            tasks = [
                PolicyTask(
                    int(k), int(random.integers(1 << 40)), int(random.integers(1 << 40)),
                    it.entropy, it.improving, it.weight,
                )
                for k in random.permutation(np.resize(np.arange(len(self.crew.own)), max(
                    it.tasks, len(self.crew.own))))[: it.tasks]
            ]  # fmt: skip
            results = self.crew.do(learn_task, state.weights, tasks)
            step(state, results, it)
            state.reinforced += 1
            found = {
                "samples": np.mean([result.mean for result in results]),
                "best": np.mean([result.best - result.known for result in results]),
                "improved": np.mean([result.improved - result.known for result in results]),
                "entropy": np.mean([result.entropy for result in results]),
            }
            for name, value in found.items():
                before = state.figures.get(name, float(value))
                state.figures[name] = 0.95 * before + 0.05 * float(value)
            self.tell("reinforce", state.figures)

    def tell(self, phase: str, figures: dict[str, float]) -> None:
        """Report; and save every so often."""
        state, seconds = self.state, self.elapsed()
        shown = shown_figures(figures)
        if self.report is not None:
            told = state.seconds + seconds
            self.report(TrainingProgress(phase, told, state.updates, shown))
        if seconds - self.saved >= SAVE_SECONDS:
            self.saved = seconds
            if phase == "reinforce":
                state.curve.append((state.seconds + seconds, state.updates, shown["samples"]))
            save_state(self.out, state, self.training, self.names)


def shown_figures(figures: dict[str, float]) -> dict[str, float]:
    """Logarithms of times as ratios; others as they are."""
    return {
        name: round(float(np.exp(value) if name in RATIOS else value), 4)
        for name, value in figures.items()
    }


def step(state: TrainingState, results: Sequence[TaskResult], training: PolicyTraining) -> None:
    """One step of Adam along the mean gradient, at most 1 long, and the average of weights."""
    state.updates += 1
    grown = {
        name: np.sum([r.gradient[name] for r in results], axis=0, dtype=np.float64) / len(results)
        for name in state.weights
    }
    length = float(np.sqrt(sum((g * g).sum() for g in grown.values())))
    shrink = min(1.0, 1.0 / max(length, 1e-12))
    keep = min(training.average, state.updates / (state.updates + 10))
    for name, gradient in grown.items():
        gradient = gradient * shrink
        first, second = state.first[name], state.second[name]
        first += 0.1 * (gradient - first)
        second += 0.001 * (gradient * gradient - second)
        ahead = first / (1 - 0.9**state.updates)
        spread = np.sqrt(second / (1 - 0.999**state.updates)) + 1e-8
        moved = state.weights[name] - training.rate * ahead / spread
        state.weights[name] = moved.astype(np.float32).astype(np.float64)
        state.average[name] += (1 - keep) * (state.weights[name] - state.average[name])


@dataclass(frozen=True, slots=True)
class LabelTask:
    """A problem's variant to find a good placement of."""

    problem: int
    variant: int | None
    seed: int
    seconds: float


def make_label(problem: PlacementProblem, shared: None, task: LabelTask) -> Ints:
    """The best placement that heuristics and then local search from the best of them find."""
    it = task_problem(problem, PolicyTask(task.problem, task.variant, task.seed))
    objective = StepObjective(it)
    starts = [
        PLACERS[name](objective, seed=task.seed).placement
        for name in ("single", "list-schedule")
        if name in PLACERS
    ]
    best = min(starts, key=objective.score)
    for name, share in (("local-search", 0.6), ("annealing", 0.4)):
        if name in PLACERS and task.seconds > 0:
            found = PLACERS[name](
                objective, budget=share * task.seconds, seed=task.seed, starts=[best]
            )
            best = min(best, found.placement, key=objective.score)
    return best


# Files


def trained_network(
    state: TrainingState, training: PolicyTraining, names: Sequence[str]
) -> PolicyNetwork:
    """What was learned, with what is known of it."""
    facts: dict[str, Any] = {
        "trained_on": sorted(set(names)),
        "updates": state.updates,
        "seconds": round(state.seconds, 1),
        "training": {**asdict(training), "jobs": None},
        "figures": shown_figures(state.figures),
    }
    return PolicyNetwork(dict(state.average), facts)


def state_path(out: Path) -> Path:
    """The file with the state of a training, beside that of its policy."""
    return out.with_name(out.name.removesuffix(".safetensors") + ".training.safetensors")


def save_state(
    out: Path, state: TrainingState, training: PolicyTraining, names: Sequence[str]
) -> None:
    """Write the policy, and beside it what training goes on from."""
    save_network(out, trained_network(state, training, names))
    parts = {"weights": state.weights, "average": state.average, "first": state.first,
             "second": state.second}  # fmt: skip
    tensors = {f"{part}/{name}": t for part, own in parts.items() for name, t in own.items()}
    facts = {
        key: getattr(state, key)
        for key in ("updates", "imitated", "reinforced", "seconds", "figures", "curve")
    }
    write_policy(state_path(out), STATE_KIND, tensors, facts)


def load_state(path: Path) -> TrainingState:
    """The state beside a policy, or in a file of its own; of a policy without one a training that
    begins with it."""
    from apportion.place import load_network

    beside = state_path(path)
    if not beside.exists() and read_policy(path).kind != STATE_KIND:
        state = state_of(load_network(path))
        return replace(state, reinforced=1, imitated=1)
    file = read_policy(beside if beside.exists() else path, STATE_KIND)
    shapes = tensor_shapes()
    parts: list[dict[str, Floats]] = []
    for part in ("weights", "average", "first", "second"):
        own = {name: file.tensors.get(f"{part}/{name}") for name in shapes}
        if any(own[name] is None or own[name].shape != shapes[name] for name in shapes):  # type: ignore[union-attr]
            raise ValueError(f"{path} is no state of a training of this release's policy")
        parts.append({name: np.array(t, np.float64) for name, t in own.items()})
    state = TrainingState(parts[0], parts[1], parts[2], parts[3])
    try:
        for key in ("updates", "imitated", "reinforced"):
            setattr(state, key, int(file.facts[key]))
        state.seconds = float(file.facts["seconds"])
        state.figures = {str(k): float(v) for k, v in file.facts["figures"].items()}
        state.curve = [(float(a), int(b), float(c)) for a, b, c in file.facts["curve"]]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"{path} does not say how far its training was") from None
    return state
