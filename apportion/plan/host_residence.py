"""Candidates whose state lies on the host: plans that fit because parameters are fetched when they
are read, and updated on the host or on the device.

Part of the room plan. A PlanRequest and what a method has chosen come in; out goes the same choice
with an order in which updates come early, with recomputed Ops and offloaded activations where these
are allowed, and with parameters on the host (memory/choose_on_host.py).

    none    all state stays on the device
    auto    what must lie on the host for the plan to fit, in the least time
    host    all large parameters lie on the host and are updated there
    device  all large parameters lie on the host and are updated on the device

What is recomputed, what is offloaded and what lies on the host are decided together: for several
sets of recomputed Ops, from none to all, a model of the step says what else has to leave the device
and what that costs. The best few are simulated, and a lower limit is tried where the model was
wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product

from apportion.describe import UPDATE_KIND
from apportion.machine import Link, host_rates, hosts_of
from apportion.memory import (
    DEVICE,
    HOST,
    OFFLOADED,
    ChunkModel,
    HostMaterial,
    HostWay,
    MemoryPlan,
    StepModel,
    before_host,
    choose_on_host,
    chunk_model,
    chunk_starts,
    decided,
    derived_ops,
    full_recompute,
    host_state,
    large_parameters,
    lowest_on_host,
    offloadable,
    quick_by_model,
    step_model,
    time_host_state,
    time_offloads,
    updates_early,
    views_of,
)
from apportion.plan.auto import Selection
from apportion.plan.candidate import Candidate
from apportion.plan.candidates import PlanRequest, excess, fits, now, ranking_key, state_bytes
from apportion.plan.memory_notes import memory_notes
from apportion.plan.memory_pins import RESIDENT, MemoryPins
from apportion.plan.planned_memory import with_memory
from apportion.plan.recomputation import AUTO, FULL, KEEP, best_decided

HOST_STATE_MODES = (KEEP, AUTO, HOST, DEVICE)
LOOKAHEADS = (2, 1, 3)  # chunks
ROUNDS, MORE_ROUNDS = 4, 8  # simulations of one set of recomputed Ops; while nothing fits
STEP = 1 / 256  # of a limit, by which it is lowered besides after these rounds
SLACK = 0.1  # of a limit that may be left over: using it takes another simulation
BUDGETS = (0.35, 0.65)  # of what recomputation can save, sets that are tried between none and all
WORTH = 0.01  # of a step's time that another set must promise to save
NO_LIMIT = 1 << 62
FEW_DECISIONS = 300  # so many are all simulated


def check_host_state(mode: str) -> None:
    """Raises ValueError unless there is such a way to keep state on the host."""
    if mode not in HOST_STATE_MODES:
        raise ValueError(
            f"cannot keep state on the host as {mode!r}; choose {', '.join(HOST_STATE_MODES)}"
        )


@dataclass(frozen=True)
class MemoryModes:
    """What may be done about memory, each by the name of its mode."""

    recompute: str = KEEP
    offload: str = KEEP
    host_state: str = KEEP
    pins: MemoryPins = field(default_factory=MemoryPins)

    @property
    def forced(self) -> bool:
        """Whether something is to be done even if the plan fits."""
        asked = FULL in (self.recompute, self.offload) or self.host_state in (HOST, DEVICE)
        return asked or bool(self.pins)


def replace_on_host(
    request: PlanRequest,
    chosen: Selection,
    modes: MemoryModes,
    ends: float = math.inf,
) -> Selection:
    """The choice with state on the host, where that is wanted; where it is decided what must be,
    for what other methods found too, until the moment `ends`."""
    if chosen.interrupted or (not modes.forced and fits(request, chosen.best)):
        return chosen

    def decide(start: Candidate) -> Candidate:
        return _Residence(request, start, modes, ends).best()

    return best_decided(request, chosen, not modes.forced, decide, ends)


class _Residence:
    """Decisions about one Candidate."""

    def __init__(
        self,
        request: PlanRequest,
        start: Candidate,
        modes: MemoryModes,
        ends: float = math.inf,
    ) -> None:
        self.request, self.start, self.modes, self.ends = request, start, modes, ends
        over = excess(request, start)
        self.device = max(range(len(over)), key=over.__getitem__)
        self.graph = request.space.source
        self.modelled: dict[int, tuple[Candidate, StepModel]] = {}
        self.model = self._model(start)
        self.costs = self.model.costs
        self.rates = host_rates(request.cluster, start.cost, self.device)
        self.order = updates_early(self.graph)
        self.known: dict[MemoryPlan, Candidate] = {MemoryPlan(): start}
        self.asked: set[MemoryPlan] = set() if modes.forced else {MemoryPlan()}
        self.base_of: dict[MemoryPlan, Candidate] = {}

    def best(self) -> Candidate:
        """The best Candidate that was found, or itself."""
        every = self._every()
        if every is not None:
            for sketch in every:
                self._simulate(sketch, once=True)
        plans = [] if every is not None else sorted(self._sketches(), key=lambda one: one.rank)
        for sketch in self._in_turn(plans):
            enough = sketch.over > 0 or self._is_late()
            if sketch.model is None or (enough and self._something_fits()):
                break
            self._simulate(sketch)
        found = min(self._allowed(), key=lambda each: ranking_key(self.request, each))
        if found is self.start:
            return found
        plan = next(plan for plan, each in self.known.items() if each is found)
        steps = (self.start, self.base_of.get(plan, found), found)
        notes = memory_notes(*steps, self.device, sum(self.costs.seconds))
        return replace(found, notes=(*found.notes, *notes))

    def _in_turn(self, plans: list[_Sketch]) -> Iterator[_Sketch]:
        """The first two, which are the best by the model. If what they lead to does not fit, the
        model was wrong: then the one that keeps least comes next, and last the others."""
        if not plans:
            return
        yield plans[0]
        done = plans[:1]
        if plans[1:] and not self._something_fits():
            done.append(min(plans[1:], key=lambda one: max(one.base.timeline.peak_bytes)))
            yield done[-1]
        for sketch in plans[1:]:
            needed = len(done) < 2 or not self._something_fits()
            if needed and not any(sketch is one for one in done):
                done.append(sketch)
                yield sketch

    def _allowed(self) -> Iterator[Candidate]:
        """What was simulated, and is as it was asked for."""
        found = [each for plan, each in self.known.items() if plan in self.asked]
        yield from found or self.known.values()

    def _model(self, candidate: Candidate) -> StepModel:
        known = self.modelled.get(id(candidate))
        if known is None or known[0] is not candidate:
            known = candidate, step_model(
                candidate.space, candidate.tasks, candidate.timeline, self.device,
                self.request.cluster, candidate.cost,
            )  # fmt: skip
            self.modelled[id(candidate)] = known
        return known[1]

    @property
    def limit(self) -> int:
        limits = self.request.memory_limit
        return NO_LIMIT if limits is None else limits[self.device]

    @property
    def host_limit(self) -> int:
        """What each device of a host may keep there."""
        for host in hosts_of(self.request.cluster):
            if self.device in host.devices:
                return host.memory_bytes // len(host.devices)
        return NO_LIMIT

    @property
    def way(self) -> HostWay:
        """The way to the host, as it is while copies go both ways."""
        line = self.rates.back_beside
        link = Link("", 1 / line.per_byte, self.rates.back.each, "")
        return HostWay(link, not self.request.cluster.communication_on_device)

    # Sketches

    def _sketches(self) -> Iterator[_Sketch]:
        """What each set of recomputed Ops leads to, by the model."""
        found = [self._sketch(ops) for ops in self._recomputed_sets()]
        yield from found
        between = self._between(found)
        if between is not None:
            yield self._sketch(between)

    def _sketch(self, ops: frozenset[int]) -> _Sketch:
        derived = derived_ops(self.graph, large_parameters(self.graph))
        plan = MemoryPlan(self.order, tuple(sorted(ops | derived)))
        base = self._scored(plan)
        sketch = self._sketched(plan, base, self.limit, ops)
        if sketch.model is None and sketch.over <= 0:
            less = MemoryPlan(self.order, tuple(sorted(ops)))
            self._scored(less)
            self.asked |= {plan, less}
        return sketch

    def _between(self, found: list[_Sketch]) -> frozenset[int] | None:
        """A set that should just fit with nothing on the host, between the one that fits so and the
        next that does not, where that promises to be quicker than all that was found."""

        def held(sketch: _Sketch) -> int:
            return sketch.base.timeline.peak_bytes[self.device]

        below = [one for one in found if one.model is None and not one.over]
        above = [one for one in found if held(one) > self.limit]
        if self.modes.recompute != AUTO or not below or not above:
            return None
        low, high = min(below, key=lambda one: one.seconds), min(above, key=held)
        share = (self.limit - held(low)) / (held(high) - held(low))
        promised = low.seconds + share * (high.base.timeline.step_seconds - low.seconds)
        if promised > (1 - WORTH) * min(one.seconds for one in found if not one.over):
            return None
        least, most = (self.model.of(one.ops).peak for one in (low, high))
        ops = quick_by_model(self.model, int(least + share * (most - least)))
        return (ops | self.modes.pins.recomputed) - self.modes.pins.kept

    def _recomputed_sets(self) -> list[frozenset[int]]:
        """Sets of Ops to recompute, from none to all, as far as that is allowed."""
        none, mode, pins = self.modes.pins.recomputed, self.modes.recompute, self.modes.pins
        if mode == KEEP:
            return [none]
        full = (full_recompute(self.graph, self.costs) | pins.recomputed) - pins.kept
        if mode == FULL:
            return [full]
        high, low = self.model.of(()).peak, self.model.of(full).peak
        between = [
            (quick_by_model(self.model, int(high - share * (high - low))) | none) - pins.kept
            for share in BUDGETS
        ]
        every = dict.fromkeys([none, *between])
        some = [ops for ops in every if self.model.of(ops).peak - self._movable() <= self.limit]
        return [*some, *([full] if full not in some else [])]

    def _movable(self) -> int:
        """Bytes that can leave the device besides what is recomputed: state, and gradients that
        need not wait for each other; of activations any."""
        if self.modes.offload != KEEP:
            return NO_LIMIT
        state = state_bytes(self.graph)
        updates = (op for op in self.graph.ops if op.kind == UPDATE_KIND and len(op.inputs) > 1)
        gradients = (self.graph.values[op.inputs[1]].nbytes for op in updates)
        return state + sum(gradients)

    def _every(self) -> list[_Sketch] | None:
        """All that can be decided, where that is little; else None."""
        if self.modes.recompute == FULL or self.modes.pins:
            return None
        units = self.model.units if self.modes.recompute != KEEP else ()
        if 2 ** len(units) > FEW_DECISIONS:
            return None
        base = self._scored(MemoryPlan(self.order))
        model = self._chunks(base, MemoryPlan(self.order), LOOKAHEADS[0])
        if 2 ** len(units) * math.prod(len(unit.options) for unit in model.units) > FEW_DECISIONS:
            return None
        if not self.modes.forced:
            self.asked.add(MemoryPlan(self.order))
        found = []
        for some in product((False, True), repeat=len(units)):
            again = [unit for unit, chosen in zip(units, some, strict=True) if chosen]
            ops = frozenset(op for unit in again for op in unit)
            for choice in product(*(range(len(unit.options)) for unit in model.units)):
                names = decided(model, choice)
                forced = self.modes.host_state in (HOST, DEVICE)
                if forced and not all(choice):
                    continue
                plan = MemoryPlan(self.order, tuple(sorted(ops)))
                found.append(_Sketch(plan, base, ops, model, names, LOOKAHEADS[0], 0.0, 0, 0))
        return found

    def _sketched(
        self, plan: MemoryPlan, base: Candidate, limit: int, ops: frozenset[int]
    ) -> _Sketch:
        """What has to lie on the host so that a Candidate with nothing there fits."""
        forced = self.modes.host_state in (HOST, DEVICE)
        there = forced or any(where != RESIDENT for _, where in self.modes.pins.state)
        if not there and max(excess(self.request, base)) <= 0:
            return _Sketch(plan, base, ops, None, {}, 0, base.timeline.step_seconds, 0, 0)
        best: _Sketch | None = None
        for lookahead in LOOKAHEADS:
            model = self._chunks(base, plan, lookahead)
            if not model.units and not forced:
                break
            if forced:
                every = tuple(min(1, len(unit.options) - 1) for unit in model.units)
                outcome = model.of(every, lookahead)
                choice = every
            else:
                found = choose_on_host(model, limit, self.host_limit, lookahead, flips=0)
                found = found or lowest_on_host(model, lookahead)
                outcome, choice = found.outcome, found.choice
            over = max(outcome.peak - limit, outcome.host - self.host_limit, 0)
            names, how = decided(model, choice), (outcome.seconds, outcome.peak, over)
            sketch = _Sketch(plan, base, ops, model, names, lookahead, *how)
            if best is None or sketch.rank < best.rank:
                best = sketch
        nothing = _Sketch(plan, base, ops, None, {}, 0, base.timeline.step_seconds, 0, NO_LIMIT)
        return best or nothing

    def _chunks(self, base: Candidate, plan: MemoryPlan, lookahead: int) -> ChunkModel:
        model, graph = self._model(base), base.space.source
        material = HostMaterial(graph, model.costs, model.levels)
        mode = self.modes.host_state
        updates = {AUTO: (HOST, DEVICE), KEEP: ()}.get(mode, (mode,))
        values: tuple[int, ...] = ()
        if self.modes.offload != KEEP and self.way.beside:
            values = tuple(sorted(offloadable(graph, model.costs, frozenset())))
        pinned = dict(self.modes.pins.state)
        return chunk_model(material, self.rates, updates, values, lookahead, pinned)

    # Simulation

    def _simulate(self, sketch: _Sketch, once: bool = False) -> None:
        """A sketch lowered and simulated; unless `once`, with a lower limit while it is over, and
        with a higher one where the model expected more than is held."""
        limit = self.limit
        for turn in range(MORE_ROUNDS):
            enough = turn >= ROUNDS or self._is_late()
            if sketch.model is None or (enough and self._something_fits()):
                return
            tried = sketch if once else self._refined(sketch, limit)
            plan = self._timed(tried)
            again, found = plan in self.asked, self._scored(plan)
            self.asked.add(plan)
            self.base_of[plan] = sketch.base
            over = max(excess(self.request, found))
            if once or again or self.modes.host_state in (HOST, DEVICE):
                return
            if over > 0:
                if tried.peak > limit:  # there is no lower one
                    return
                limit = min(limit, tried.peak) - over - over // 8  # what was tried is above it
                if turn + 1 >= ROUNDS:
                    limit -= int(STEP * limit)
            else:
                if tried.peak - over <= limit + SLACK * self.limit:
                    return
                limit = tried.peak - over
            if limit <= 0:
                return
            sketch = self._sketched(sketch.plan, sketch.base, limit, sketch.ops)

    def _is_late(self) -> bool:
        return now(self.request) > self.ends

    def _something_fits(self) -> bool:
        return any(fits(self.request, each) for each in self._allowed())

    def _refined(self, sketch: _Sketch, limit: int) -> _Sketch:
        """A sketch with single units changed too: that takes long, and only the best are worth
        it."""
        assert sketch.model is not None
        if self.modes.host_state in (HOST, DEVICE):
            return sketch
        found = choose_on_host(sketch.model, limit, self.host_limit, sketch.lookahead)
        if found is None or found.outcome.seconds > sketch.seconds:
            return sketch
        names = decided(sketch.model, found.choice)
        how = found.outcome
        return replace(sketch, decided=names, seconds=how.seconds, peak=how.peak)

    def _timed(self, sketch: _Sketch) -> MemoryPlan:
        """The decisions of a sketch, with when everything comes and leaves."""
        names = sketch.decided
        away = frozenset(value for value, name in names.items() if name == OFFLOADED)
        state = {value: name for value, name in names.items() if name != OFFLOADED}
        plan, derived = sketch.plan, derived_ops(self.graph, state)
        away = away.difference(*(self.graph.ops[op].outputs for op in derived))
        views = views_of(self.graph, self.costs, away) if away else frozenset[int]()
        ops = tuple(sorted({*sketch.ops, *views, *derived}))
        made = before_host(self.graph, MemoryPlan(plan.order, ops))
        states = time_host_state(made, self.costs, self.way, state, sketch.lookahead)
        there = made.then(host_state(made.graph, states))
        chunks = chunk_starts(there, self.costs)
        offloads = time_offloads(there, self.costs, self.way, away, chunks)
        repeats = sorted({made.origins[op] for op in made.repeats})
        return MemoryPlan(plan.order, tuple(repeats), states, offloads)

    def _scored(self, plan: MemoryPlan) -> Candidate:
        if plan not in self.known:
            made = before_host(self.graph, replace(plan, host_state=(), offloaded=()))
            repeats = tuple(sorted({made.origins[op] for op in made.repeats}))
            kept = replace(plan, recomputed=repeats)
            self.known[plan] = with_memory(self.request, self.start, kept)
        return self.known[plan]


@dataclass(frozen=True)
class _Sketch:
    """Decisions before they are timed: the Graph that was modelled, as a Candidate with nothing on
    the host, the Ops that are recomputed to save activations, the model that decided, what lies on
    the host by Value, and the seconds, the peak and the bytes over a limit, the device's or the
    host's, that the model expects."""

    plan: MemoryPlan
    base: Candidate
    ops: frozenset[int]
    model: ChunkModel | None
    decided: Mapping[int, str]
    lookahead: int
    seconds: float
    peak: int
    over: int

    @property
    def rank(self) -> tuple[int, float]:
        return self.over, self.seconds
