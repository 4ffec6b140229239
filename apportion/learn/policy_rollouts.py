"""policy rollouts: what one problem teaches a policy.

In: a problem, the tensors of a policy, a PolicyTask. Out: the gradient of its loss, and how good
the placements were. Placements are sampled in compiled code, which records what the policy saw; the
gradient is one pass of the twin in torch.

    REINFORCE  the step time of each sample, as -log, less the mean over the samples of the problem,
               by their deviation, weighs the log probability of its choices; an entropy bonus
    improving  the best of the samples and of two heuristics goes through a little local search,
               and the log probability of the choices of what that makes of it counts as well:
               every choice gets its own signal, and the policy learns to begin where the search
               would end
    imitation  the log probability of the choices of a placement that is known to be good
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from apportion.columns import Floats, Ints
from apportion.learn.policy_twin import base_twin, encode_twin, scores_twin, twin_graph
from apportion.learn.varied_problem import varied_problem
from apportion.place import (
    PLACERS,
    Decoded,
    PlacementProblem,
    PolicyGraph,
    PolicyNetwork,
    StepObjective,
    by_first_use,
    decode,
    encode,
    first_scores,
    local_search,
    policy_graph,
    unit_features,
)

ROWS = 48_000  # devices that samples of one task look at, about: what limits their number
LEAST_SAMPLES, MOST_SAMPLES = 6, 24
HEURISTICS = ("list-schedule", "blocks")
AT_ONCE = 40_000  # rows of one pass of the twin: what limits memory

Gradient = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class PolicyTask:
    """One lesson: a problem by number, varied by `seed` (or as it is: None); with `label` to be
    imitated, else to be sampled."""

    problem: int
    variant: int | None
    seed: int
    entropy: float = 0.003
    improving: int = 0  # evaluations of local search
    weight: float = 0.0  # of what it makes
    label: Ints | None = None


@dataclass(frozen=True, eq=False)
class TaskResult:
    """What a lesson taught: the gradient, and the mean over samples of log(time / time on one
    device), the best, after improving, the entropy of choices, and what the best heuristic has; of
    imitation the loss as `mean`."""

    gradient: dict[str, Gradient]
    mean: float
    best: float
    improved: float
    entropy: float
    known: float = 0.0


def task_problem(problem: PlacementProblem, task: PolicyTask) -> PlacementProblem:
    """The variant that a task is about."""
    return problem if task.variant is None else varied_problem(problem, task.variant)


def learn_task(
    problem: PlacementProblem, tensors: Mapping[str, Floats], task: PolicyTask
) -> TaskResult:
    """The gradient that one task gives."""
    it = task_problem(problem, task)
    graph = policy_graph(it)
    features = unit_features(it, graph)
    network = PolicyNetwork(tensors, {})
    base = first_scores(network, encode(network, graph, features))
    if task.label is not None:
        place = by_first_use(graph, task.label)
        seen = [decode(graph, base, network.head, follow=place, record=True)]
        gradient, loss, entropy = _gradient(tensors, graph, features, seen, np.ones(1), 0.0)
        return TaskResult(gradient, loss, loss, loss, entropy)
    seen = _samples(graph, base, network, task)
    objective = StepObjective(it)
    alone = min(
        objective.score(np.where(graph.allowed[:, d], d, graph.allowed.argmax(axis=1)))
        for d in range(len(it.devices))
    )
    logs = np.log(np.array([objective.score(each.place) for each in seen]) / alone)
    spread, improved, known = logs.std(), float(logs.min()), 0.0
    weights = np.clip((logs.mean() - logs) / max(spread, 1e-9), -3, 3) / len(seen)
    entropies = np.full(len(seen), task.entropy / len(seen))
    if task.improving:
        best = seen[int(logs.argmin())].place
        listed = [PLACERS[name](objective, budget=1.0).placement for name in HEURISTICS]
        known = float(np.log(min(objective.score(each) for each in listed) / alone))
        made = local_search(
            objective,
            seed=task.seed % (1 << 31),
            starts=[best, *listed],
            evaluations=task.improving,
        ).placement
        improved = float(np.log(objective.score(made) / alone))
        place = by_first_use(graph, made)
        seen.append(decode(graph, base, network.head, follow=place, record=True))
        weights, entropies = np.append(weights, task.weight), np.append(entropies, 0.0)
    gradient, _, entropy = _gradient(tensors, graph, features, seen, weights, entropies)
    mean, least = float(logs.mean()), float(logs.min())
    return TaskResult(gradient, mean, least, improved, entropy, known)


def _samples(
    graph: PolicyGraph, base: Floats, network: PolicyNetwork, task: PolicyTask
) -> list[Decoded]:
    """Placements by the policy's own probabilities."""
    random = np.random.default_rng(task.seed)
    u, k = graph.allowed.shape
    count = int(np.clip(ROWS // max(u * k, 1), LEAST_SAMPLES, MOST_SAMPLES))
    return [
        decode(graph, base, network.head, noise=random.gumbel(size=(u, k)), record=True)
        for _ in range(count)
    ]


def _gradient(
    tensors: Mapping[str, Floats],
    graph: PolicyGraph,
    features: Floats,
    seen: list[Decoded],
    weights: Floats,
    entropies: Floats | float,
) -> tuple[dict[str, Gradient], float, float]:
    """Gradients of the sum over samples of -weight * log p - entropy * H, both means over the
    choices of a sample; that sum without the bonus, and the mean of H."""
    entropies = np.broadcast_to(entropies, weights.shape)
    it = {
        name: torch.from_numpy(tensor.astype(np.float32)).requires_grad_()
        for name, tensor in tensors.items()
    }
    base = base_twin(it, encode_twin(it, twin_graph(graph, features)))
    cut = base.detach().requires_grad_()
    order = torch.from_numpy(graph.order)
    u, k = graph.allowed.shape
    group = max(1, AT_ONCE // max(u * k, 1))
    loss_sum = entropy_sum = 0.0
    for first in range(0, len(seen), group):
        some = seen[first : first + group]
        shown = torch.from_numpy(np.stack([each.features for each in some]))
        is_open = torch.from_numpy(np.stack([each.open for each in some]))
        chosen = torch.from_numpy(np.stack([each.place[graph.order] for each in some]))
        part = slice(first, first + group)
        weight = torch.from_numpy(weights[part].astype(np.float32))
        bonus = torch.from_numpy(entropies[part].astype(np.float32))
        scores = scores_twin(it, cut[order], shown, is_open)
        log_p = torch.log_softmax(scores, dim=-1)
        own = log_p.gather(-1, chosen[..., None])[..., 0].mean(dim=-1)
        mixed = -(log_p.exp() * log_p.masked_fill(~is_open, 0.0)).sum(dim=-1).mean(dim=-1)
        loss = -(weight * own).sum()
        (loss - (bonus * mixed).sum()).backward()
        loss_sum += float(loss.detach())
        entropy_sum += float(mixed.detach().sum()) / len(seen)
    assert cut.grad is not None
    base.backward(cut.grad)
    gradient = {
        name: np.zeros(t.shape, np.float32) if t.grad is None else t.grad.numpy()
        for name, t in it.items()
    }
    return gradient, loss_sum, entropy_sum
