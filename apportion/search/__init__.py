"""SEARCHES: every way to find a Strategy, by name. One algorithm a file, one signature:

search(problem, *, budget, seed) -> SearchResult
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from apportion.search.data import data
from apportion.search.equalchop import equalchop
from apportion.search.expert import expert
from apportion.search.fsdp import fsdp
from apportion.search.greedy import allrow_greedy, spartan
from apportion.search.icml18 import icml18
from apportion.search.megatron import megatron
from apportion.search.owt import owt
from apportion.search.placement import op_placement
from apportion.search.problem import Problem, SearchResult, Unsuitable
from apportion.search.random import random
from apportion.search.seconds import tofu_seconds
from apportion.search.single import single
from apportion.search.tofu import tofu, tofu_paper
from apportion.splits import Space
from apportion.strategy import Strategy


def optcnn(problem: Problem, *, budget: float = 30.0, seed: int = 0) -> SearchResult:
    """optcnn.py, which is imported when it is called: it needs scipy, and that takes its time."""
    from apportion.search.optcnn import optcnn as search

    return search(problem, budget=budget, seed=seed)


def exact(problem: Problem, *, budget: float = 30.0, seed: int = 0) -> SearchResult:
    """exact.py, which is imported when it is called, as optcnn."""
    from apportion.search.exact import exact as search

    return search(problem, budget=budget, seed=seed)


def flexflow(
    problem: Problem,
    *,
    budget: float = 30.0,
    seed: int = 0,
    starts: Sequence[tuple[Strategy, Space]] = (),
) -> SearchResult:
    """flexflow.py, which is imported when it is called: it needs the compiled simulator."""
    from apportion.search.flexflow import flexflow as search

    return search(problem, budget=budget, seed=seed, starts=starts)


SEARCHES: dict[str, Callable[..., SearchResult]] = {
    "single": single,
    "data": data,
    "fsdp": fsdp,
    "owt": owt,
    "megatron": megatron,
    "expert": expert,
    "op-placement": op_placement,
    "allrow-greedy": allrow_greedy,
    "spartan": spartan,
    "equalchop": equalchop,
    "icml18": icml18,
    "tofu": tofu,
    "tofu-seconds": tofu_seconds,
    "tofu-paper": tofu_paper,
    "optcnn": optcnn,
    "exact": exact,
    "flexflow": flexflow,
    "random": random,
}

__all__ = [
    "SEARCHES",
    "Problem",
    "SearchResult",
    "Unsuitable",
    "allrow_greedy",
    "data",
    "equalchop",
    "exact",
    "expert",
    "flexflow",
    "fsdp",
    "icml18",
    "megatron",
    "op_placement",
    "optcnn",
    "owt",
    "random",
    "single",
    "spartan",
    "tofu",
    "tofu_paper",
    "tofu_seconds",
]
