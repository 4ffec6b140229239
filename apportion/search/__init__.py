"""SEARCHES: every way to find a Strategy, by name. One algorithm a file, one signature:

search(problem, *, budget, seed) -> SearchResult
"""

from __future__ import annotations

from collections.abc import Callable

from apportion.search.data import data
from apportion.search.fsdp import fsdp
from apportion.search.problem import Problem, SearchResult, Unsuitable
from apportion.search.random import random
from apportion.search.single import single
from apportion.search.tofu import tofu, tofu_paper

SEARCHES: dict[str, Callable[..., SearchResult]] = {
    "single": single,
    "data": data,
    "fsdp": fsdp,
    "tofu": tofu,
    "tofu-paper": tofu_paper,
    "random": random,
}

__all__ = [
    "SEARCHES",
    "Problem",
    "SearchResult",
    "Unsuitable",
    "data",
    "fsdp",
    "random",
    "single",
    "tofu",
    "tofu_paper",
]
