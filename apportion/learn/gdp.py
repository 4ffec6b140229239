"""gdp: placement by a policy that decides for all units at once, trained by PPO (arXiv 1910.01578).

In: one problem (GDP-one) or several (GDP-batch: one policy, rewards averaged over graphs). Out: a
GdpPolicy, which places other problems as it is (zero-shot) or after a few more updates
(fine-tuning, `start`); and the best placement that training saw of each.

    reward     -sqrt(seconds of a step); -10 for a placement that is over a memory limit
    advantage  the reward, less the mean of the update's placements of the graph, over their
               standard deviation
    loss       PPO's with the ratio of each unit clipped on its own: a ratio of whole placements is
               a product of as many factors as there are units, and leaves every clip at once

What GDP does not print is in GdpSettings. A policy is tied to its number of devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from apportion.columns import Floats, Ints
from apportion.learn.best_placement import BestPlacement
from apportion.learn.gdp_file import load_gdp
from apportion.learn.gdp_graph import gdp_graph, side_by_side
from apportion.learn.gdp_network import GdpNetwork, GdpShape, slots_of
from apportion.learn.gdp_policy import GdpPolicy
from apportion.learn.torch_adam import give_moments, kept_moments
from apportion.place import (
    PlacementObjective,
    PlacementProblem,
    PlacementResult,
    PlacerProgress,
    Report,
    StepObjective,
)

SAME = 1e-3  # rewards that differ by less of their mean count as equal
PATIENCE = 10  # updates in a row without different placements after which a policy has settled
INVALID = -10.0  # the reward of a placement that does not fit: that of a step of 100 s


@dataclass(frozen=True, slots=True)
class GdpSettings:
    """How a policy is trained. An update evaluates `rollouts` placements of each graph, and the
    most likely one, which only counts for the result. The more units a graph has, the less of the
    reward is due to each, and the less their entropy may count against that: it is divided by the
    number of units (by 33 at least)."""

    rollouts: int = 32
    epochs: int = 4
    clip: float = 0.2
    learning_rate: float = 3e-3
    entropy: float = 10.0  # over the units of the graph; see below
    entropy_decay: float = 0.98  # per update
    norm: float = 1.0  # the most that a gradient may be long


def train_gdp(
    problems: Sequence[PlacementProblem],
    *,
    updates: int | None = None,
    evaluations: int | None = None,
    budget: float | None = None,
    seed: int = 0,
    report: Report | None = None,
    resume: GdpPolicy | None = None,
    start: GdpPolicy | None = None,
    superposition: bool = True,
    device: str = "cpu",
    settings: GdpSettings | None = None,
    shape: GdpShape | None = None,
    objective: Callable[[PlacementProblem], PlacementObjective] = StepObjective,
    patience: int | None = None,
    searches: tuple[BestPlacement, ...] | None = None,
) -> GdpPolicy:
    """A policy for all these problems, after so many updates, simulated placements (of all problems
    together, exactly) or seconds, whichever comes first. `resume` continues as if training had
    never stopped; `start` begins anew from a policy's weights (fine-tuning). With `patience` it
    also ends once that many updates in a row drew placements that are all but the same; `searches`
    are those of an earlier training, which go on and whose evaluations count."""
    if updates is None and evaluations is None and budget is None:
        raise ValueError("training needs a limit: updates, evaluations or a budget in seconds")
    if not problems:
        raise ValueError("training needs at least one problem")
    most = max(len(problem.devices) for problem in problems)
    old = resume or start
    network = GdpNetwork(shape or GdpShape(most, superposition=superposition), seed)
    if old is not None:
        network = GdpNetwork(old.network.shape, seed)
        network.load_state_dict(old.network.state_dict())
    if network.shape.devices < most:
        raise ValueError(f"the policy places on {network.shape.devices} devices, not on {most}")
    began = time.perf_counter()
    training = _Training(
        network.to(device),
        searches or tuple(BestPlacement(objective(problem), began) for problem in problems),
        settings or GdpSettings(),
        seed,
        resume,
    )
    limits = _Limits(updates, evaluations, budget, began, report, patience)
    interrupted = False
    try:
        while training.update(limits):
            pass
    except KeyboardInterrupt:
        interrupted = True
    return training.policy(interrupted)


@dataclass
class _Limits:
    """When training ends, and who hears of it."""

    updates: int | None
    evaluations: int | None
    budget: float | None
    began: float
    report: Report | None
    patience: int | None

    def late(self) -> bool:
        """Whether the budget of seconds is used up."""
        return self.budget is not None and time.perf_counter() - self.began >= self.budget

    def over(self, updates: int, used: int) -> bool:
        """Whether nothing more may be done."""
        return (
            (self.updates is not None and updates >= self.updates)
            or (self.evaluations is not None and used >= self.evaluations)
            or self.late()
        )


class _Training:
    """Network, optimizer and random numbers while training is under way."""

    def __init__(
        self,
        network: GdpNetwork,
        searches: tuple[BestPlacement, ...],
        settings: GdpSettings,
        seed: int,
        resume: GdpPolicy | None,
    ) -> None:
        self.network, self.searches, self.settings = network, searches, settings
        self.device = str(next(network.parameters()).device)
        graphs = [gdp_graph(it.objective.problem) for it in searches]
        self.graph = side_by_side(graphs).to(self.device)
        self.slots = slots_of(self.graph, network.shape)
        sizes = torch.tensor(self.graph.sizes).repeat_interleave(torch.tensor(self.graph.sizes))
        self.share = 1 / (sizes * len(searches))
        self.entropy = (settings.entropy / sizes.clamp(min=33)).to(self.device)
        self.random = torch.Generator().manual_seed(seed)
        self.random_state = self.random.get_state()  # after the last update that was finished
        self.updates = 0
        self.done = 0  # updates of this training, without those that it resumes
        self.still = 0  # updates in a row whose placements did not differ
        self.adam = torch.optim.Adam(network.parameters(), lr=settings.learning_rate)
        if resume is not None:
            self.updates = resume.updates
            self.random_state = resume.random_state
            self.random.set_state(resume.random_state)
            give_moments(self.adam, network, resume.moments)

    def update(self, limits: _Limits) -> bool:
        """Sample placements of every graph and take PPO's steps; False where a limit was met."""
        if limits.over(self.done, sum(it.used for it in self.searches)):
            return False
        if limits.patience is not None and self.still >= limits.patience:
            return False
        with torch.no_grad():
            logits = self.network(self.graph, self.slots).cpu()
        likely = logits.argmax(dim=1)
        placements = sample(logits, self.settings.rollouts, self.random)
        gains, differ = [], False
        every = torch.cat([likely[None], placements]).split(self.graph.sizes, dim=1)
        for search, rows in zip(self.searches, every, strict=True):
            rewards = []
            for placement in rows.numpy():
                if limits.over(self.done, sum(it.used for it in self.searches)):
                    return False
                rewards.append(reward(*search.judge(np.ascontiguousarray(placement))))
            drawn = np.array(rewards[1:])
            differ |= bool(drawn.std() > SAME * abs(drawn.mean()))
            own = torch.from_numpy(advantage(drawn)).float()
            gains.append(own[:, None].expand(-1, rows.shape[1]))
        chances = logits.log_softmax(dim=1).gather(1, placements.T).T
        parts = (placements, chances, torch.cat(gains, dim=1), self.share)
        places, old, gain, share = [part.to(self.device) for part in parts]
        weight = self.entropy * self.settings.entropy_decay**self.updates
        for _ in range(self.settings.epochs):
            self.adam.zero_grad()
            now = self.network(self.graph, self.slots)
            ppo_loss(now, places, old, gain, share, self.settings.clip, weight).backward()
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.settings.norm)
            self.adam.step()
            if limits.late():
                break
        self.updates += 1
        self.done += 1
        self.still = 0 if differ else self.still + 1
        self.random_state = self.random.get_state()
        if limits.report is not None:
            best = float(np.mean([it.value for it in self.searches]))
            used = sum(it.used for it in self.searches)
            limits.report(PlacerProgress(best, None, used))
        return True

    def policy(self, interrupted: bool) -> GdpPolicy:
        """What has been learned so far."""
        moments = kept_moments(self.adam, self.network)
        names = tuple(it.objective.problem.name for it in self.searches)
        return GdpPolicy(
            self.network.cpu(), moments, self.random_state, self.updates, names, self.searches,
            interrupted,
        )  # fmt: skip


def reward(seconds: float, fits: bool) -> float:
    """-sqrt(seconds of a step), or that of a placement that cannot run."""
    return -float(np.sqrt(seconds)) if fits else INVALID


def advantage(rewards: Floats) -> Floats:
    """How much better than the others of its update each placement is, in standard deviations; in
    no less than a thousandth of the mean: differences between placements that are all but the same
    teach nothing."""
    least = SAME * abs(rewards.mean())
    gains: Floats = (rewards - rewards.mean()) / max(rewards.std(), least, 1e-12)
    return gains


def sample(logits: torch.Tensor, count: int, random: torch.Generator) -> torch.Tensor:
    """count x u devices, each unit's by itself."""
    below = logits.softmax(dim=1).cumsum(dim=1)[:, :-1].contiguous()
    drawn = torch.rand(count, len(logits), generator=random)
    if below.shape[1] == 0:
        return torch.zeros(drawn.shape, dtype=torch.int64)
    chosen = [(row[:, None] >= below).sum(dim=1) for row in drawn]
    last = (logits > -1e8).long().cumsum(dim=1).argmax(dim=1)  # rounding may pass the last one
    return torch.minimum(torch.stack(chosen), last)


def ppo_loss(
    logits: torch.Tensor,
    placements: torch.Tensor,
    chances: torch.Tensor,
    gains: torch.Tensor,
    share: torch.Tensor,
    clip: float,
    entropy: torch.Tensor,
) -> torch.Tensor:
    """PPO's loss of r placements (r x u). `chances` are their log-probabilities when they were
    drawn, `gains` the advantages of each unit's graph, `share` (u) what each unit counts: graphs
    count alike, and alike the units of a graph. Less the units' entropies, times `entropy` (u)."""
    scores = logits.log_softmax(dim=1)
    ratio = (scores.gather(1, placements.T).T - chances).exp()
    surrogate = torch.minimum(ratio * gains, ratio.clamp(1 - clip, 1 + clip) * gains)
    spread = -(scores.exp() * scores).sum(dim=1)
    return -(share * (surrogate.mean(dim=0) + entropy * spread)).sum()


def apply_gdp(policy: GdpPolicy, problem: PlacementProblem, device: str = "cpu") -> Ints:
    """The policy's most likely placement of a problem, by one pass through the network."""
    if len(problem.devices) > policy.network.shape.devices:
        raise ValueError(
            f"the policy places on {policy.network.shape.devices} devices, and the problem has "
            f"{len(problem.devices)}"
        )
    network = policy.network.to(device)
    with torch.no_grad():
        placement: Ints = network(gdp_graph(problem).to(device)).argmax(dim=1).cpu().numpy()
    network.cpu()
    return placement


def place_with_gdp(
    objective: PlacementObjective,
    *,
    budget: float = 60.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
    evaluations: int | None = None,
    policy: Path | None = None,
) -> PlacementResult:
    """The best placement that training on this one problem sees within the budget, from scratch or
    from a saved policy; again from another seed once it has settled. `starts` are not used: a
    policy's samples are all that it is judged by."""
    start = None
    if policy is not None:
        start = load_gdp(policy)
    began, runs, updates = time.perf_counter(), 0, 0
    made, left = None, budget
    while made is None or (
        left > 0
        and not made.interrupted
        and (evaluations is None or made.searches[0].used < evaluations)
    ):
        made = train_gdp(
            [objective.problem], evaluations=evaluations, budget=left, seed=seed + 1000 * runs,
            report=report, start=start, device="cuda" if torch.cuda.is_available() else "cpu",
            objective=lambda _: objective, patience=PATIENCE,
            searches=None if made is None else made.searches,
        )  # fmt: skip
        runs, updates = runs + 1, updates + made.updates
        left = budget - (time.perf_counter() - began)
    (search,) = made.searches
    placement = search.best
    if placement is None:
        placement = apply_gdp(made, objective.problem)
    figures = {"updates": updates, "evaluations": search.used, "runs": runs}
    return PlacementResult(
        placement, curve=tuple(search.curve), figures=figures, interrupted=made.interrupted
    )
