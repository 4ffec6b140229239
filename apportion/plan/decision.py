"""What a Plan decides, in one sentence: how most of the work is divided, where the state is, which
modules differ from that, and what is recomputed or offloaded.

Part of the room plan. A Plan comes in, a sentence goes out. How work is divided is read off the
forward Ops that use parameters, by what each cut divides:

    samples  an axis of the batch
    weights  an axis of a parameter, whether it is summed over or not
    other    any other axis: positions, heads, channels of an image
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from apportion.graph import BACKWARD, FORWARD, OPTIMIZER_STATE, PARAMETER
from apportion.plan.alternatives import SAMPLE, OpAlternatives
from apportion.plan.plan import Plan

MOST_EXCEPTIONS = 2
LEAST_SHARE = 0.02  # of the parameters that a module has which is named as an exception
SAMPLES, WEIGHTS, OTHER = "samples", "weights", "other axes"


@dataclass(frozen=True, slots=True)
class WorkDivision:
    """How an Op is divided: parts by what they divide, replicas, and how many devices work."""

    samples: int
    weights: int
    other: int
    replicas: int
    devices: int

    def __str__(self) -> str:
        cuts = {SAMPLES: self.samples, WEIGHTS: self.weights, OTHER: self.other}
        said = [f"{what} cut in {parts}" for what, parts in cuts.items() if parts > 1]
        if not said:
            return f"whole on each of {self.devices}" if self.devices > 1 else "whole"
        if self.samples == self.devices:
            return f"data parallel over {self.samples}"
        if self.weights == self.devices:
            return f"weights cut over {self.weights}"
        if self.samples > 1:
            said[0] = f"data parallel over {self.samples}"
        times = [f"{self.replicas} times"] if self.replicas > 1 else []
        return ", ".join([*said, *times])


def decision(plan: Plan) -> str:
    """What a Plan decides, in one sentence."""
    uses = _uses_of_parameters(plan)
    parts = [*_most(plan, uses), *_state(plan, uses), *_exceptions(plan, uses), *_memory(plan)]
    if plan.strategy.communication.overlaps:
        parts.append("the next step begins while gradients travel")
    text = "; ".join(parts)
    return text[:1].upper() + text[1:]


@dataclass(frozen=True, slots=True)
class _ParameterUse:
    """A forward Op that uses parameters: what it does, how many bytes of them, and how."""

    op: int
    flops: float
    nbytes: int
    division: WorkDivision
    devices: tuple[int, ...]


class WorkDivisions:
    """How the Ops of a Plan are divided; equal calls are looked at once."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.around = OpAlternatives(plan.space, len(plan.cluster.devices))
        self.weights = self.around.groups.from_parameters
        values = plan.space.graph.values
        self.names = {values[v].name for v in self.weights}
        self.known: dict[object, WorkDivision] = {}

    def of(self, index: int) -> WorkDivision:
        """How an Op is divided."""
        graph, choice = self.plan.space.graph, self.plan.strategy.choices[index]
        op = graph.ops[index]
        inputs = tuple((graph.values[v].shape, v in self.weights) for v in op.inputs)
        key = (op.kind, op.phase, inputs, op.args, choice)
        if key not in self.known:
            self.known[key] = self._division(index)
        return self.known[key]

    def _division(self, op: int) -> WorkDivision:
        choice = self.plan.strategy.choices[op]
        counts = {SAMPLES: 1, WEIGHTS: 1, OTHER: 1}
        for axis in self.around.axes(op):
            parts = math.prod(choice.parts[k] for k in axis.positions)
            cut = {dim.rpartition("[")[0] for dim in axis.dims}
            what = SAMPLES if axis.kind == SAMPLE else WEIGHTS if cut & self.names else OTHER
            counts[what] *= parts
        cuts = (counts[SAMPLES], counts[WEIGHTS], counts[OTHER])
        return WorkDivision(*cuts, choice.replicas, len(set(choice.devices)))


def _uses_of_parameters(plan: Plan) -> list[_ParameterUse]:
    space, graph = plan.space, plan.space.graph
    divisions = WorkDivisions(plan)
    weights = divisions.weights
    found = []
    for index, op in enumerate(graph.ops):
        read = [v for v in op.inputs if v in weights]
        if op.phase != FORWARD or not read or weights.issuperset(op.outputs):
            continue
        choice = plan.strategy.choices[index]
        flops = space.split(index, (1,) * len(choice.parts)).parts[0].flops
        nbytes = sum(graph.values[v].nbytes for v in read)
        devices = tuple(sorted(set(choice.devices)))
        found.append(_ParameterUse(index, flops, nbytes, divisions.of(index), devices))
    return found


def _most(plan: Plan, uses: Sequence[_ParameterUse]) -> list[str]:
    """How most of the work is divided."""
    count = len(plan.cluster.devices)
    used = {device for choice in plan.strategy.choices for device in choice.devices}
    if len(used) == 1:
        (device,) = used
        return [f"everything on device {device}" if count > 1 else "everything on the one device"]
    most = _main_division(uses)
    if most is None:
        return [f"work divided over {len(used)} of {count} devices"]
    if most.devices == 1:
        homes = {device for use in uses for device in use.devices}
        return [f"layers whole, placed on {len(homes)} of {count} devices"]
    of = "" if most.devices == count else f" of {count}"
    parts = (most.samples, most.weights, most.other)
    alone = most.devices in parts or max(parts) == 1
    return [f"{most}{of} devices" if alone else f"{most}, on {most.devices}{of} devices"]


def _main_division(uses: Sequence[_ParameterUse]) -> WorkDivision | None:
    weight: Counter[WorkDivision] = Counter()
    for use in uses:
        weight[use.division] += int(use.flops) + 1
    return weight.most_common(1)[0][0] if weight else None


def _state(plan: Plan, uses: Sequence[_ParameterUse]) -> list[str]:
    """Where parameters and optimizer state are, by how many copies there are of each byte, if they
    are cut though most of the work uses them whole."""
    tasks, graph, count = plan.tasks, plan.space.graph, len(plan.cluster.devices)
    most = _main_division(uses)
    if most is None or most.devices == 1 or most.weights == most.devices:
        return []
    begin = np.flatnonzero(tasks.slot_first == -1)
    there: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    for slot in begin.tolist():
        role = graph.values[int(tasks.slot_value[slot])].role
        there[role] += int(tasks.slot_nbytes[slot])
    for value, made in zip(graph.values, graph.producer, strict=True):
        if made is None:
            whole[value.role] += value.nbytes
    copies = {role: there[role] / whole[role] for role in whole if whole[role]}
    cut = [
        name
        for role, name in ((PARAMETER, "parameters"), (OPTIMIZER_STATE, "optimizer state"))
        if role in copies and copies[role] < max(1.0 + 0.1 * (count - 1), 1.2)
    ]
    if not cut:
        return []
    gathered = ""
    if cut[0] == "parameters" and plan.strategy.refetched:
        gathered = ", gathered for the forward and again for the backward"
    return [f"{' and '.join(cut)} cut over {count}{gathered}"]


def _exceptions(plan: Plan, uses: Sequence[_ParameterUse]) -> list[str]:
    """The modules with most parameters that are divided in another way than most of the work."""
    most, ops = _main_division(uses), plan.space.graph.ops
    if most is None or most.devices == 1:
        return []
    total = sum(use.nbytes for use in uses) or 1
    sizes: Counter[tuple[str, WorkDivision]] = Counter()
    for use in uses:
        if use.division != most:
            module = re.sub(r"\.\d+(?=\.|$)", ".*", ops[use.op].module) or ops[use.op].name
            sizes[module, use.division] += use.nbytes
    return [
        f"{module}: {how}" + ("" if how.devices in (1, most.devices) else f" on {how.devices}")
        for (module, how), nbytes in sizes.most_common(MOST_EXCEPTIONS)
        if nbytes >= LEAST_SHARE * total
    ]


def _memory(plan: Plan) -> list[str]:
    """What is computed again, and what lies on the host."""
    found = []
    if plan.recomputed:
        found.append(f"{_layers(plan)} computed again in the backward")
    if plan.offloaded:
        found.append(f"{len(plan.offloaded)} activations wait in the host's memory")
    return found


def _layers(plan: Plan) -> str:
    """The numbered modules that recomputed Ops are in, or how many Ops these are. Copies stand in
    the backward, so that the forward's Ops have their numbers in both Graphs."""
    ops = plan.graph.ops
    first = next((k for k, op in enumerate(ops) if op.phase == BACKWARD), len(ops))
    every = {_layer(op.module) for op in ops[:first]} - {""}
    mine = {_layer(ops[k].module) for k in plan.recomputed if k < first} - {""}
    if not mine:
        return f"{len(plan.recomputed)} operators"
    return f"{len(mine)} of {len(every)} layers"


def _layer(module: str) -> str:
    """The path of a module up to its first number: `blocks.3` of `blocks.3.mlp.up`."""
    found = re.match(r".*?\.\d+(?=\.|$)", module)
    return found[0] if found else ""
