"""When no plan fits: what would, each with the figures that it would give.

Part of the room run. A Plan that does not fit and its captured step come in, WaysOut go out. Each
was planned and simulated as any other plan, by a method that spares memory; nothing is guessed.
Those that need another step (precision, batch, micro-batches) are for models that have a name,
because a user's file decides these itself.

    --precision P          half the bytes of activations, and of what is gathered
    --recompute full       the backward computes activations again; auto does no more than it must
    --batch N              the largest batch that fits
    --accumulate K         the batch in K micro-batches
    --cluster C            more such devices, or larger ones
    --offload full         activations wait in the host's memory; auto does no more than it must
    --host-state auto      parameters and optimizer state lie there, as far as they must
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from apportion import zoo
from apportion.capture import CaptureError, Program, capture
from apportion.graph import Graph
from apportion.machine import Cluster
from apportion.machine import cluster as named_cluster
from apportion.plan import KEEP, CostSource, DefaultCosts, Plan, PlanCosts, make_plan
from apportion.search import UnsuitableMethod
from apportion.work_clock import work_seconds

SECONDS = 60.0  # for all of them together
SPARING_METHODS = ("fsdp", "tofu", "single")  # the first that is for the step and the cluster
LARGER = ("a100", "h100", "h200")  # devices with much memory, the smallest first
MOST_NODES, MOST_MICRO_BATCHES, BATCHES = 8, 64, 5
AUTO, FULL, MIXED = "auto", "full", "bf16-mixed"


@dataclass(frozen=True, slots=True)
class WayOut:
    """A plan for something else than what was asked for. `peak_bytes` is that of the fullest
    device, `limit` what that may hold; `about` what else is known."""

    options: str
    method: str
    step_seconds: float
    peak_bytes: int
    limit: int
    fits: bool
    about: str = ""


def ways_out(
    made: Plan,
    program: Program | Graph,
    seed: int = 0,
    budget: float = SECONDS,
    tell: Callable[[str], None] | None = None,
    decides: bool = False,
) -> tuple[WayOut, ...]:
    """What would fit instead of a Plan that does not, found within about `budget` seconds; ways
    that do not fit either are among them, with what they would need. Nothing, if the Plan fits.
    `program` is the step that the Plan is of, `seed` that of its model; `tell` hears what is tried.
    `decides`: the Plan was free to recompute and to move what it must; its ways out recompute too,
    and none says that it should."""
    if made.feasible:
        return ()
    ends = work_seconds() + budget
    search = _Search(made, program, seed, ends, tell or (lambda text: None), decides)
    try:
        search.run()
    except KeyboardInterrupt:
        search.tell("interrupted: these are the ways out that were tried so far")
    return tuple(search.found)


@dataclass
class _Search:
    """Ways out of one Plan, one after the other while there is time."""

    made: Plan
    program: Program | Graph
    seed: int
    ends: float
    tell: Callable[[str], None]
    decides: bool
    found: list[WayOut] = field(default_factory=list)

    def run(self) -> None:
        """All of them; those that are combined with recomputation where they alone do not do."""
        again = FULL if not self.made.recomputed and not self.decides else KEEP
        if self.is_named:
            self.precision(KEEP)
        if again != KEEP:
            self.graph_way(f"--recompute {again}", again)
        if self.is_named and again != KEEP and not self.any_fits:
            self.precision(again)
        if self.is_named:
            self.batch()
            self.micro_batches()
        for name in self.clusters():
            if self.try_cluster(name):
                break
        if self.decides:
            return
        if not self.made.offloaded and any(self.made.cluster.host_routes):
            self.graph_way(f"--offload {FULL}", KEEP, FULL)
            if not self.any_fits:
                self.graph_way(f"--recompute {FULL} --offload {FULL}", FULL, FULL)
            if not self.any_fits and not self.made.host_state:
                self.graph_way(f"--recompute {AUTO} --host-state {AUTO}", AUTO, KEEP, AUTO)

    @property
    def any_fits(self) -> bool:
        return any(way.fits for way in self.found)

    @property
    def is_named(self) -> bool:
        """Whether the model is one whose settings can be changed."""
        model = self.made.model
        return bool(model) and not (model.endswith(".py") or ".py:" in model)

    # Each way

    def graph_way(
        self, options: str, recompute: str, offload: str = KEEP, host_state: str = KEEP
    ) -> None:
        """The same step with time given for memory."""
        here, modes = self.made.cluster, (recompute, offload, host_state)
        self.try_plan(options, lambda: self.planned(self.program, here, *modes))

    def precision(self, recompute: str) -> None:
        """The model in mixed precision, if it is in float32."""
        if "precision=" in self.made.model:
            return
        also = "" if recompute == KEEP else f" --recompute {recompute}"
        spec = zoo.with_precision(self.made.model, MIXED)
        self.spec_way(f"--precision {MIXED}{also}", spec, recompute)

    def micro_batches(self) -> None:
        """The smallest number of micro-batches that does, of the powers of two."""
        samples, devices = self.samples(), len(self.made.cluster.devices)
        if "accumulate=" in self.made.model:
            return
        parts = 2
        while parts <= MOST_MICRO_BATCHES and samples % parts == 0 and samples // parts >= devices:
            spec = zoo.with_accumulation(self.made.model, parts)
            fits = self.spec_way(f"--accumulate {parts}", spec)
            if fits is None or fits:
                return
            parts *= 2

    def batch(self) -> None:
        """The largest batch that fits: by a line through what two batches need, and tried."""
        samples, devices = self.samples(), len(self.made.cluster.devices)
        unit = devices if samples % devices == 0 and samples > devices else 1
        low, high = 0, samples
        limit = min(self.made.memory_limit or (0,))
        points = {samples: max(self.made.predicted.peak_bytes)}
        best: WayOut | None = None
        for _ in range(BATCHES):
            if high - low <= unit:
                break
            guess = _batch_to_try(points, limit, low, high, unit)
            way = self.spec_plan(f"--batch {guess}", zoo.with_sizes(self.made.model, batch=guess))
            if way is None:
                break
            points[guess] = way.peak_bytes
            if way.fits:
                low, best = guess, way
            else:
                high = guess
        if best is not None:
            more = "" if high - low <= unit else "; what is between was not tried"
            self.found.append(replace(best, about=f"{high} does not fit{more}"))

    def clusters(self) -> Iterator[str]:
        """Names of clusters with more such devices, then of such with larger ones."""
        cluster = self.made.cluster
        counted = re.fullmatch(r"(?:(\d+)x)?(\d+)x(\w+)", cluster.name)
        if counted is not None:
            nodes = int(counted[1] or 1)
            for more in (2, 4, MOST_NODES):
                yield f"{nodes * more}x{counted[2]}x{counted[3]}"
        memory = max(device.memory_bytes for device in cluster.devices)
        for kind in LARGER if self.own_limit is None else ():
            name = f"{len(cluster.devices)}x{kind}"
            if named_cluster(name).devices[0].memory_bytes > memory:
                yield name

    def try_cluster(self, name: str) -> bool:
        """Whether enough clusters were tried: more nodes are tried until they do."""
        there, limit = named_cluster(name), self.own_limit
        fits = self.try_plan(
            f"--cluster {name}", lambda: self.planned(self.program, there, limit=limit)
        )
        return fits is None or fits

    @property
    def own_limit(self) -> int | None:
        """The limit that the user has set; None if it is what the devices have."""
        limits = set(self.made.memory_limit or ())
        memory = {device.memory_bytes for device in self.made.cluster.devices}
        return None if limits == memory else min(limits, default=None)

    # Planning

    def samples(self) -> int:
        """How many samples a batch has: the first dimension of its first tensor."""
        graph = self.program if isinstance(self.program, Graph) else self.program.graph
        shapes = [v.shape for v in graph.values if v.role == "input" and v.shape]
        return shapes[0][0] if shapes else 1

    def spec_way(self, options: str, spec: str, recompute: str = KEEP) -> bool | None:
        """Tries another step of the model; whether it fits, None if there was no time."""
        way = self.spec_plan(options, spec, recompute)
        return None if way is None else self.take(way)

    def spec_plan(self, options: str, spec: str, recompute: str = KEEP) -> WayOut | None:
        """What another step of the model would give; None if there is no time, or no plan."""

        def plan() -> Plan | None:
            it = zoo.load(spec, self.seed, meta=True)
            step = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm, it.fixed)
            return self.planned(step, self.made.cluster, recompute)

        return self.way(options, plan)

    def try_plan(self, options: str, plan: Callable[[], Plan | None]) -> bool | None:
        """Plans; whether that fits, None if there was no time or no plan."""
        way = self.way(options, plan)
        return None if way is None else self.take(way)

    def take(self, way: WayOut) -> bool:
        """Keeps a way, of several of a kind the last: they were tried until one did."""
        kind = way.options.split()[0]
        if kind in ("--accumulate", "--cluster"):
            self.found = [one for one in self.found if one.fits or not one.options.startswith(kind)]
        self.found.append(way)
        return way.fits

    def way(self, options: str, plan: Callable[[], Plan | None]) -> WayOut | None:
        """What a plan would give; None if there is no time left, or no such plan."""
        if work_seconds() > self.ends:
            return None
        self.tell(f"looking for what would fit: {options}")
        try:
            made = plan()
        except (ValueError, CaptureError):
            return None
        if made is None:
            return None
        peaks, limits = made.predicted.peak_bytes, made.memory_limit or made.predicted.peak_bytes
        worst = max(range(len(peaks)), key=lambda k: peaks[k] - limits[k])
        return WayOut(
            options, made.method, made.predicted.step_seconds, peaks[worst], limits[worst],
            made.feasible,
        )  # fmt: skip

    def planned(
        self,
        step: Program | Graph,
        cluster: Cluster,
        recompute: str = KEEP,
        offload: str = KEEP,
        host_state: str = KEEP,
        limit: int | None = -1,
    ) -> Plan | None:
        """A Plan by the first method that is for the step; it may not fit."""
        here = cluster is self.made.cluster
        if limit == -1:
            limit = (self.made.memory_limit or (None,))[0] if here else None
        if self.decides and recompute == KEEP:
            recompute = AUTO
        costs: CostSource = PlanCosts(self.made.cost) if here else DefaultCosts(cluster)
        for method in SPARING_METHODS:
            try:
                return make_plan(
                    step, cluster, method, 0.0, None if limit is None else float(limit), self.seed,
                    costs, recompute=recompute, offload=offload, host_state=host_state,
                )  # fmt: skip
            except UnsuitableMethod:
                continue
        return None


def _batch_to_try(points: dict[int, int], limit: int, low: int, high: int, unit: int) -> int:
    """Where the line through the two nearest points meets the limit, between low and high."""
    guess = (low + high) / 2
    if len(points) > 1:
        (a, of_a), (b, of_b) = sorted(points.items(), key=lambda p: abs(p[1] - limit))[:2]
        if of_a != of_b:
            guess = a + (limit - of_a) * (b - a) / (of_b - of_a)
    rounded = math.floor(guess / unit) * unit
    return min(max(rounded, low + unit), high - unit)
