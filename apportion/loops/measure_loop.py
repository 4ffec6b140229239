"""What an element of a loop costs, timed on this machine, and what a pass takes then.

Part of the room loops. A LoopPlanner, the arguments of a call and a cluster come in. The kernel
runs over a part of the elements, on arrays of its own: iterations are serial, and whatever devices
a cluster has, it is processes on cores that run loops. Out goes the prediction of a pass.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from apportion.loops.array import DenseArray
from apportion.loops.array_uses import uses_by_name
from apportion.loops.elements import DealRequest, Elements, facts_of
from apportion.loops.loop_body import LoopError
from apportion.loops.plan_loop import BoundArguments, LoopPlanner, chunks_of, no_scheme
from apportion.loops.predict_loop import LoopPrediction, predict_loop
from apportion.loops.rank_requests import RunPass
from apportion.loops.session import ThreadSession
from apportion.loops.tile_schedule import tile_schedule
from apportion.machine import Cluster
from apportion.quantity import format_quantity

SAMPLE, PASSES = 1_000_000, 3  # elements that are timed, and how often; the fastest counts
TIMED_SECONDS = 3.0


def predict_call(planner: LoopPlanner, bound: BoundArguments, cluster: Cluster) -> LoopPrediction:
    """Predicts a pass of a loop on a cluster."""
    over = planner.over
    if over.shards is not None:
        raise LoopError("a loop over shards cannot be predicted: only the processes read them")
    count = len(cluster.devices)
    choices = planner.choices(bound, count)
    if not choices:
        raise LoopError(no_scheme(planner.body, planner.analyse(bound)))
    scheme = choices[0].scheme
    schedule = tile_schedule(scheme, count, planner.depth)
    request = DealRequest(scheme, over.shape, count, schedule.time_parts, planner.ordered)
    numbers = np.zeros(len(over), np.int64)
    facts = facts_of(Elements(over.keys, (), numbers), request)
    uses = tuple(uses_by_name(planner.used_arrays(bound), scheme, schedule, facts).values())
    seconds, timed = time_element(planner, bound)
    provenance = f"{format_quantity(seconds, 's')}, timed on this machine over {timed} elements"
    if not cluster.name.startswith("local:"):
        provenance += f"; a process on {cluster.name} is taken to have a core like that"
    chunks = chunks_of(bound, facts)
    return predict_loop(cluster, scheme, schedule, uses, facts, seconds, provenance, chunks)


def time_element(planner: LoopPlanner, bound: BoundArguments) -> tuple[float, int]:
    """Seconds of an element on this machine, and of how many they are the mean. Nothing of the
    caller's is changed."""
    over = planner.over
    some = np.unique(np.linspace(0, len(over) - 1, min(SAMPLE, len(over))).astype(np.int64))
    starts = np.zeros(1, np.int64) if over.starts is None else over.starts
    part = Elements(over.keys, over.fields, np.arange(len(over)), over.starts, over.ragged)
    taken = part.take(some)
    sample = replace(
        over, keys=taken.keys, fields=taken.fields, holder=None, number=-over.number,
        starts=taken.starts if len(starts) > 1 else over.starts, ragged=taken.ragged,
    )  # fmt: skip
    copies = {name: _copy(array) for name, array in bound.arrays.items()}
    own = BoundArguments(copies, {}, bound.constants)
    trial = LoopPlanner(planner.body, sample, planner.ordered, planner.depth)
    session = ThreadSession(1)
    best, began = float("inf"), time.monotonic()
    for turn in range(PASSES + 1):
        plan = trial.plan(session, own, turn)
        (report,) = session.ask(RunPass(plan))
        if report.refused or report.fault is not None:
            raise LoopError(f"{planner.body.name} cannot be timed: a pass over a sample fails")
        best = min(best, report.busy_seconds) if turn else best
        if turn and time.monotonic() - began > TIMED_SECONDS:
            break
    return best / max(len(some), 1), len(some)


def _copy(array: DenseArray) -> DenseArray:
    """An array like another one, as it begins or as it is here."""
    contents = None if array.contents is None else array.contents.copy()
    return replace(array, number=-array.number, contents=contents, holder=None, lost="")
