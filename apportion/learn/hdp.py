"""hdp: hierarchical device placement: operators into groups, groups onto devices, by REINFORCE.

In: an objective. Out: the best placement that training on it sees (Mirhoseini et al., ICLR 2018;
constants of its public release, which are in HdpSettings).

    cost      sqrt(seconds of a step), and sqrt(100) for a placement that does not fit
    baseline  a moving average of costs, which begins with that of a failure
    loss      (cost - baseline) * (log p of the devices + log p of the groups)

The release stops drawing after 500 steps. What is left of a budget goes to another start, from
another seed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from apportion.columns import Ints
from apportion.learn.best_placement import BestPlacement
from apportion.learn.hdp_network import HdpNetwork, HdpShape, group_vectors, hdp_graph
from apportion.learn.torch_adam import give_moments, kept_moments
from apportion.place import (
    PlacementObjective,
    PlacementResult,
    PlacerProgress,
    Report,
    read_policy,
    write_policy,
)

KIND = "hdp"


@dataclass(frozen=True, slots=True)
class HdpSettings:
    """The release's."""

    failure: float = 10.0  # sqrt(100 seconds)
    keep: float = 0.9  # of the baseline, at every step
    learning_rate: float = 0.1
    decay: float = 0.95
    decay_every: int = 50
    decay_after: int = 400
    norm: float = 1.0
    noise: float = 0.5  # of the grouper's logits, in their root mean square
    noise_steps: int = 750
    ignore_failures_after: int = 1000
    stop_sampling: int = 500
    groups: int | None = None  # min(256, 20 for each device)
    hidden: int = 512
    overlap: bool = True

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        times = max(0, step - self.decay_after) // self.decay_every
        return self.learning_rate * float(self.decay**times)


class HdpTraining:
    """Network, optimizer, baseline and random numbers while training is under way."""

    def __init__(
        self,
        objective: PlacementObjective,
        seed: int,
        device: str,
        settings: HdpSettings | None = None,
    ) -> None:
        self.settings = settings = settings or HdpSettings()
        self.problem, self.seed = objective.problem, seed
        self.graph = hdp_graph(self.problem).to(device)
        count = len(self.problem.devices)
        groups = settings.groups or min(256, 20 * count)
        types = self.graph.type_counts.shape[1]
        shape = HdpShape(count, groups, types, settings.hidden, overlap=settings.overlap)
        self.network = HdpNetwork(shape, seed).to(device)
        self.adam = torch.optim.Adam(self.network.parameters(), lr=settings.learning_rate)
        self.random = torch.Generator().manual_seed(seed)
        self.steps, self.baseline = 0, settings.failure
        allowed = self.problem.columns.allowed
        self.elsewhere = allowed.argmax(axis=1)

    def draw_groups(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A group for every unit, and the log-probability of all of them."""
        logits = self.network.group_logits(self.graph)
        if self.steps < self.settings.noise_steps:
            spread = self.settings.noise * logits.detach().square().mean().sqrt()
            noise = torch.randn(logits.shape, generator=self.random)
            logits = logits + spread * noise.to(logits.device)
        scores = logits.log_softmax(dim=1)
        sums = scores.detach().exp().cumsum(dim=1)
        draws = torch.rand(len(scores), 1, generator=self.random).to(scores.device)
        group = (sums < draws * sums[:, -1:]).sum(dim=1)
        return group, scores.gather(1, group[:, None]).sum()

    def step(self, seen: BestPlacement) -> None:
        """Draw a placement, judge it, and learn from it."""
        settings = self.settings
        group, group_chance = self.draw_groups()
        vectors = group_vectors(self.network.shape, self.graph, group)
        devices, device_chance = self.network.place(vectors, self.random)
        cost, fits = self.cost(devices[group].cpu().numpy(), seen)
        self.steps += 1
        if not fits and self.steps > settings.ignore_failures_after:
            return
        gain = cost - self.baseline
        self.baseline = settings.keep * self.baseline + (1 - settings.keep) * cost
        for row in self.adam.param_groups:
            row["lr"] = settings.rate(self.steps)
        self.adam.zero_grad()
        (gain * (device_chance + group_chance)).backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), settings.norm)
        self.adam.step()

    def cost(self, placement: Ints, seen: BestPlacement) -> tuple[float, bool]:
        """sqrt(seconds), or that of a failure. A unit whose group is where it cannot run goes to
        the first device that can run it."""
        can = self.problem.columns.allowed[np.arange(len(placement)), placement]
        seconds, fits = seen.judge(np.where(can, placement, self.elsewhere))
        return (float(np.sqrt(seconds)) if fits else self.settings.failure), fits


def place_with_hdp(
    objective: PlacementObjective,
    *,
    budget: float = 60.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
    evaluations: int | None = None,
    settings: HdpSettings | None = None,
) -> PlacementResult:
    """The best placement that training sees within seconds or an exact number of simulated
    placements. `starts` are not used."""
    began = time.perf_counter()
    seen = BestPlacement(objective, began)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    training, runs = HdpTraining(objective, seed, device, settings), 1
    interrupted = False
    try:
        while seen.used == 0 or (
            time.perf_counter() - began < budget
            and (evaluations is None or seen.used < evaluations)
        ):
            if training.steps >= training.settings.stop_sampling:
                training = HdpTraining(objective, seed + 1000 * runs, device, settings)
                runs += 1
            training.step(seen)
            if report is not None:
                report(PlacerProgress(seen.value, None, seen.used))
    except KeyboardInterrupt:
        interrupted = True
    best = training.elsewhere if seen.best is None else seen.best
    return PlacementResult(
        best,
        curve=tuple(seen.curve),
        figures={"evaluations": float(seen.used), "runs": float(runs)},
        interrupted=interrupted,
    )


def save_hdp(path: Path, training: HdpTraining) -> None:
    """Write all that resuming needs."""
    tensors = {name: it.cpu().numpy() for name, it in training.network.state_dict().items()}
    moments = kept_moments(training.adam, training.network)
    tensors |= {f"adam.{name}": it.numpy() for name, it in moments.items()}
    tensors["random"] = training.random.get_state().numpy()
    facts = {
        "settings": asdict(training.settings),
        "steps": training.steps,
        "baseline": training.baseline,
        "seed": training.seed,
        "trained_on": [training.problem.name],
    }
    write_policy(path, KIND, tensors, facts)


def resume_hdp(path: Path, objective: PlacementObjective, device: str = "cpu") -> HdpTraining:
    """Training of the same problem, as if it had never stopped. Raises ValueError, in one sentence,
    if the file is not of that."""
    file = read_policy(path, KIND)
    try:
        facts = file.facts
        made = HdpTraining(objective, int(facts["seed"]), device, HdpSettings(**facts["settings"]))
        tensors = {name: torch.from_numpy(it) for name, it in file.tensors.items()}
        made.random.set_state(tensors.pop("random"))
        adam = {name: tensors.pop(name) for name in list(tensors) if name.startswith("adam.")}
        made.network.load_state_dict(tensors)
        give_moments(
            made.adam, made.network, {name.removeprefix("adam."): it for name, it in adam.items()}
        )
        made.steps, made.baseline = int(facts["steps"]), float(facts["baseline"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"{path} does not fit this problem: {first}") from None
    return made
