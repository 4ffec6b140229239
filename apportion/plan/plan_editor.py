"""PlanEditor: a Plan whose cuts are changed by hand, one after the other.

Part of the room plan. A Plan comes in; then changes of single operators, or of operators with their
backward and update, are listed, tried and kept. What a change does to the step is answered by delta
simulation at once; `edited_plan` lowers and simulates the whole as any other Plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from apportion.plan.alternatives import OpAlternatives
from apportion.plan.candidates import PlanCosts, PlanRequest, scored
from apportion.plan.explain import StrategyChange, trials_of
from apportion.plan.make_plan import made_plan
from apportion.plan.plan import Plan, SimulatedStep
from apportion.search import METHODS, Problem, SearchResult
from apportion.simulate import Delta
from apportion.split import Choice, Strategy

EDITED = "edited"


@dataclass(frozen=True, slots=True)
class ChangeEffect:
    """A step with a change, by the measure of delta simulation: its seconds and how many more these
    are, the bytes that move, and what the fullest device holds across the step."""

    step_seconds: float
    step_difference: float
    bytes_moved: int
    bytes_difference: int
    held_bytes: int
    held_difference: int


class PlanEditor:
    """A Plan with its changes. `pinned` are Ops that are not to be changed, by later changes or by
    searches; `version` counts what was changed; `step_seconds` is what a step takes as measured by
    delta simulation."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.space = plan, plan.space
        self.live = Delta(self.space, plan.strategy, plan.cluster, plan.cost)
        self.around = OpAlternatives(self.space, len(plan.cluster.devices))
        self.pinned: set[int] = set()
        self.version, self.step_seconds = 0, self.live.step_seconds
        self.settled = plan
        self._settled_at = 0
        self._known: dict[int, list[StrategyChange]] = {}
        self._now = (self.live.bytes_moved, int(self.live.held.max()))

    @property
    def strategy(self) -> Strategy:
        """The Strategy as it is now."""
        return self.live.strategy

    def choice(self, op: int) -> Choice:
        """The Choice of an Op now."""
        return self.live.lowering.choices[op]

    def words(self, op: int, choice: Choice) -> str:
        """A Choice in words."""
        cuts = []
        for axis in self.around.axes(op):
            parts = 1
            for position in axis.positions:
                parts *= choice.parts[position]
            if parts > 1:
                cuts.append(f"{axis.name} ({axis.kind}) in {parts}")
        how = " and ".join(cuts) or "whole"
        copies = f", {choice.replicas} times" if choice.replicas > 1 else ""
        return f"{how}{copies} on {_runs(choice.devices)}"

    # Changes

    def changes(self, op: int) -> list[StrategyChange]:
        """What an Op can be changed to, alone and with its backward and update. Nothing pinned is
        touched."""
        if not 0 <= op < len(self.space.graph.ops):
            raise ValueError(f"there is no operator {op}; there are {len(self.space.graph.ops)}")
        if op not in self._known:
            step = SimulatedStep(self.plan, space=self.space)
            now = replace(self.plan, strategy=self.strategy, simulated=step)
            found = trials_of(self.around, now, op)
            self._known[op] = [c for c in found if self.pinned.isdisjoint(c.choices)]
        return self._known[op]

    def effect(self, change: StrategyChange) -> ChangeEffect:
        """What a change does; nothing is changed."""
        before = self.live.step_ns
        self.live.change(change.choices, change.layouts)
        try:
            return self._effect(before)
        finally:
            self.live.undo()

    def keep(self, change: StrategyChange) -> ChangeEffect:
        """Changes the Plan."""
        if not self.pinned.isdisjoint(change.choices):
            raise ValueError("an operator of this change is pinned; take the pin away first")
        before = self.live.step_ns
        self.live.change(change.choices, change.layouts)
        found = self._effect(before)
        self.live.keep()
        self._now, self.step_seconds = (found.bytes_moved, found.held_bytes), found.step_seconds
        self._renewed()
        return found

    def _effect(self, before: int) -> ChangeEffect:
        live, (moved, held) = self.live, self._now
        moved_now, held_now = live.bytes_moved, int(live.held.max())
        return ChangeEffect(
            live.step_seconds, (live.step_ns - before) / 1e9,
            moved_now, moved_now - moved, held_now, held_now - held,
        )  # fmt: skip

    def pin(self, ops: Iterable[int], pinned: bool) -> None:
        """Pins Ops as they are, or frees them."""
        several = set(ops)
        for op in several:
            if not 0 <= op < len(self.space.graph.ops):
                raise ValueError(f"there is no operator {op} to pin")
        self.pinned = self.pinned | several if pinned else self.pinned - several
        self._renewed(changed=False)

    def _renewed(self, changed: bool = True) -> None:
        self.version += 1
        self._known.clear()
        if not changed and self._settled_at == self.version - 1:
            self._settled_at = self.version

    # Plans

    @property
    def is_settled(self) -> bool:
        """Whether `settled` is the Plan with all changes."""
        return self._settled_at == self.version

    def edited_plan(self) -> Plan:
        """The Plan with all changes, simulated as a whole."""
        if not self.is_settled:
            at, found = self.version, SearchResult(self.strategy, space=self.space)
            self.settled = judged_plan(self.plan, found, EDITED)
            self._settled_at = at
        return self.settled


def search_again(plan: Plan, pinned: frozenset[int], budget: float, seed: int = 0) -> Plan:
    """A better Plan by walks that begin at this one, in which pinned Ops are as they are now."""
    request = _request(plan, seed)
    problem = Problem(request.space, plan.cluster, plan.cost, plan.memory_limit)
    starts = ((plan.strategy, request.space),)
    how = {"budget": budget, "seed": seed, "starts": starts, "pinned": pinned}
    return judged_plan(plan, METHODS["flexflow"](problem, **how), "flexflow", budget)


def judged_plan(plan: Plan, found: SearchResult, method: str, budget: float = 0.0) -> Plan:
    """The Plan with another Strategy, lowered and simulated as a whole."""
    request = _request(plan, plan.seed)
    made = made_plan(request, scored(request, method, found, 0.0), budget)
    return replace(made, model=plan.model, memory=plan.memory)


def _request(plan: Plan, seed: int) -> PlanRequest:
    costs = PlanCosts(plan.cost)
    policy = plan.strategy.communication.policy
    return PlanRequest(
        plan.space, plan.cluster, costs, plan.memory_limit, seed, communication=policy
    )


def _runs(devices: Iterable[int]) -> str:
    """Devices, neighbours as a range."""
    found: list[list[int]] = []
    for device in sorted(set(devices)):
        if found and device == found[-1][1] + 1:
            found[-1][1] = device
        else:
            found.append([device, device])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in found]
    return ", ".join(shown if len(shown) < 7 else [*shown[:5], "..."])
