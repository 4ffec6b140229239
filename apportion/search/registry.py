"""registry: METHODS, every way to find a Strategy, one row each. One algorithm a file, one call:

    search(problem, *, budget, seed) -> SearchResult

To add a method, write its file and add its row here; `plan`, `compare`, `auto` and `--help` follow.
This module imports no method: a row names its function, which is imported when it is first called,
so that `--help` comes at once and a method pays only for what it needs itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apportion.search.problem import Problem, SearchResult


@dataclass(frozen=True, slots=True)
class Method:
    """A row of METHODS.

    search        the function, or where it is: "module:function" in this room
    help          what `--help` says of it
    auto          its place among those that auto tries, which go by rising numbers; None: not tried
    baseline      what people do by hand: auto tries it whatever the budget, as long as that takes
                  ten seconds or nothing fits; others are tried only while budget is left
    share         how much of auto's budget it may use: less than 1 where it would spend all on a
                  proof
    takes_starts  it can begin with what auto has found before (an argument `starts`), and goes on
                  while that improves; auto ends it when it has not done so for a while
    compiling     what its loops take to compile before it is of use, in seconds, 0 once that is
                  done: a function "module:function"; auto leaves it out if that is too much
    takes_policy  it can begin with what was learned before (an argument `policy`, a file)
    compared      it is among those that are compared if none are named: not what needs an extra, or
                  trains for as long as the budget allows
    options       further arguments of the function, the same in every call
    """

    search: str | Callable[..., SearchResult]
    help: str
    auto: int | None = None
    baseline: bool = False
    share: float = 1.0
    takes_starts: bool = False
    compiling: str = ""
    takes_policy: bool = False
    compared: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, problem: Problem, **how: Any) -> SearchResult:
        """The Strategy that the method finds; how: budget in seconds, seed, starts, policy."""
        search = self.search
        if isinstance(search, str):
            search = _function(f"search.{search}")
        return search(problem, **self.options, **how)

    def compile_seconds(self) -> float:
        """What its loops take to compile yet, before it is of use."""
        return float(_function(self.compiling)()) if self.compiling else 0.0


def _function(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    return getattr(import_module(f"apportion.{module}"), name)  # type: ignore[no-any-return]


def _placer(help: str, name: str, **row: Any) -> Method:
    """The row of a placer of place/: nothing is cut."""
    options = {"placer": name} | ({"refines": True} if row.pop("refines", False) else {})
    return Method("placement:placement", f"placement: {help}", options=options, **row)


# The one registry of methods. It is a plain dict, so that whoever has a method of their own can add
# its row before the command line is imported; nothing in the package changes it.
METHODS: dict[str, Method] = {
    "single": Method(
        "baselines.single:single", "everything on one device", auto=30, baseline=True
    ),
    "data": Method(
        "baselines.data:data", "data parallelism: the batch cut, parameters everywhere",
        auto=10, baseline=True,
    ),
    "ssp": Method(
        "baselines.ssp:ssp",
        "data parallelism on parameters that may be --staleness steps old: not the same result",
        compared=False,
    ),
    "fsdp": Method(
        "baselines.fsdp:fsdp",
        "data parallelism, parameters and state cut, gathered for each pass (ZeRO-3)",
        auto=20, baseline=True,
    ),
    "fsdp-keep": Method(
        "baselines.fsdp:fsdp_keep", "as fsdp, with what is gathered kept for the backward",
        auto=22, baseline=True,
    ),
    "zero2": Method(
        "baselines.fsdp:zero2",
        "data parallelism with optimizer state cut and gradients summed where it is (ZeRO-2)",
        auto=24, baseline=True,
    ),
    "owt": Method(
        "baselines.owt:owt",
        "one weird trick: convolutions by data, dense layers by their features",
        auto=50, baseline=True,
    ),
    "megatron": Method(
        "baselines.megatron:megatron",
        "the expert's plan of transformers: layers cut within a node, data across nodes",
        auto=40, baseline=True,
    ),
    "expert": Method(
        "baselines.expert:expert",
        "by kind of network: owt, GNMT's layers over a node's devices, or megatron",
        auto=60, baseline=True,
    ),
    "op-placement": Method(
        "baselines.op_placement:op_placement", "whole layers, on the devices in turn",
        auto=80,
    ),
    "allrow-greedy": Method(
        "levels.greedy:allrow_greedy",
        "all tensors along their first dimension, each operator its best",
        auto=90,
    ),
    "spartan": Method(
        "levels.greedy:spartan",
        "the largest tensors first, each with the operators around it (Spartan)",
        auto=100,
    ),
    "equalchop": Method(
        "levels.equalchop:equalchop", "as tofu, with one cut of everything into all devices",
        auto=110,
    ),
    "icml18": Method(
        "levels.icml18:icml18", "as tofu, without cuts of axes that are summed over",
        auto=120,
    ),
    "tofu": Method(
        "levels.tofu:tofu", "recursive, for the fewest bytes moved (Tofu)", auto=70
    ),
    "tofu-seconds": Method(
        "levels.tofu_seconds:tofu_seconds",
        "the same, for the fewest seconds on the links of the cluster", auto=130,
    ),
    "tofu-paper": Method("levels.tofu:tofu_paper", "tofu, counted as in the paper"),
    "optcnn": Method(
        "layers.optcnn:optcnn", "the fewest seconds added up over layers, exactly (OptCNN)",
        auto=140,
    ),
    "exact": Method(
        "levels.exact:exact", "all levels of tofu jointly, with a proven bound",
        auto=150, share=1 / 12,
    ),
    "flexflow": Method(
        "walks.flexflow:flexflow",
        "random walks over all choices, judged by the simulated step (FlexFlow)",
        auto=160, takes_starts=True, compiling="simulate.delta.delta:delta_compile_seconds",
    ),
    "random": Method(
        "baselines.random_strategy:random", "a legal plan drawn at random, for tests"
    ),
    "placement": _placer("the best by several placers, refined by the simulator", "auto",
                         refines=True),
    "blocks": _placer("contiguous blocks of operators, balanced", "blocks"),
    "m-topo": _placer("operators in order, each device filled to its share (Baechi)", "m-topo"),
    "m-etf": _placer("the operator that can start first, where it can (Baechi)", "m-etf"),
    "m-sct": _placer("as m-etf, with favourite children by a linear program (Baechi)", "m-sct"),
    "list-schedule": _placer(
        "the best of several orders, by earliest finish", "list-schedule", auto=145
    ),
    "metis": _placer("the graph cut by METIS (extra partition)", "metis", compared=False),
    "scotch": _placer("the graph cut by Scotch (extra partition)", "scotch", compared=False),
    "local-search": _placer(
        "local search with restarts, then refined by the simulator", "local-search", refines=True
    ),
    "restarts": _placer("local search from many random starts", "restarts", compared=False),
    "annealing": _placer(
        "simulated annealing with moves of blocks", "annealing", compared=False
    ),
    "brkga": _placer("a genetic algorithm with biased random keys", "brkga", compared=False),
    "policy": _placer(
        "by a trained policy, then a short local search", "policy", takes_policy=True
    ),
    "placeto": _placer(
        "learned by improving a placement node by node (Placeto)", "placeto",
        takes_policy=True, compared=False,
    ),
    "gdp": _placer(
        "learned with graph embeddings and attention (GDP)", "gdp",
        takes_policy=True, compared=False,
    ),
    "colocrl": _placer(
        "learned by a recurrent network over groups (ColocRL)", "colocrl",
        takes_policy=True, compared=False,
    ),
    "hdp": _placer("learned by a grouper and a placer (HDP)", "hdp", compared=False),
}  # fmt: skip


def tried_by_auto() -> list[str]:
    """The methods that auto tries, in its order."""
    places = {name: method.auto for name, method in METHODS.items() if method.auto is not None}
    return sorted(places, key=places.__getitem__)


def compared_by_default() -> list[str]:
    """The methods that are compared if none are named."""
    return [name for name, method in METHODS.items() if method.compared]


def help_text() -> str:
    """One paragraph for auto and for each method."""
    auto = "the best plan by any of the others, as the simulator judges"
    rows = {"auto": auto, **{name: method.help for name, method in METHODS.items()}}
    return "\n\n".join(f"{name}: {text}." for name, text in rows.items())
