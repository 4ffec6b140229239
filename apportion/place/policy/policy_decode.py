"""policy decode: units get their devices one after the other, each by the scores of a policy.

In: a PolicyGraph, what scores begin with for every unit (policy_network.py), the head, noise to
sample with. Out: a placement; on request the features of all devices at every moment, which is what
training needs.

Units come in the graph's order. A device's features say when the unit could start and end there, by
a schedule that is kept as list scheduling keeps one (forward nodes of a unit as one, a unit sends
one message at a time), how much the device has to do, how much of what the unit exchanges is there
already, how much memory is left. Devices that cannot run the unit or have no room are out; if none
has room, the one with the least too little is taken. Of several interchangeable devices that are
still empty only the first is looked at.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from apportion.columns import Bools, Floats, Ints, compiled, compiled_part
from apportion.place.policy.policy_features import PolicyGraph
from apportion.place.policy.policy_network import DEVICE_FEATURES, PolicyHead

CHUNK = 64  # units of one compiled call
RECENT = 0.9  # how much of the share of recent units stays with each further one


class DecodeState(NamedTuple):  # numba reads it
    """Where decoding stands."""

    place: Ints  # u: -1 for units without a device
    finish: Floats  # u: ticks at which the forward nodes end
    arrived: Floats  # u x k: ticks at which its output is at a device, -1 where it is not
    children: Floats  # u x k: neighbours after it that are on a device
    twins: Floats  # twins x k: how many of them are on a device
    twin_last: Ints  # twins: the device of the latest, or -1
    free: Floats  # k: ticks at which the device can begin with more
    port: Floats  # k: ticks at which it can send more
    load: Floats  # k: ticks of all nodes there
    used: Floats  # k: bytes
    placed: Ints  # k: units
    recent: Floats  # k: share of recent units
    last: Ints  # the device of the latest unit, and how many devices are in use
    most_devices: int
    fair_ticks: float


class Decoded(NamedTuple):
    """A placement, and if asked for what was seen on the way, in the order of placing."""

    place: Ints  # u
    features: npt.NDArray[np.float32]  # u x k x DEVICE_FEATURES, or empty
    open: Bools  # u x k, or empty


def decode(
    graph: PolicyGraph,
    base: Floats,
    head: PolicyHead,
    *,
    noise: Floats | None = None,
    follow: Ints | None = None,
    most_devices: int | None = None,
    record: bool = False,
) -> Decoded:
    """A placement. `noise` (u x k, in the order of placing) is added to the scores: of Gumbel's
    distribution times a temperature it makes a sample. With `follow` units go where that says, for
    what is seen on the way. At most `most_devices` are used, as long as memory allows it."""
    u, k = graph.allowed.shape
    most = min(most_devices or k, k)
    state = DecodeState(
        np.full(u, -1, np.int64), np.zeros(u), np.full((u, k), -1.0), np.zeros((u, k)),
        np.zeros((graph.twins, k)), np.full(graph.twins, -1, np.int64),
        np.zeros(k), np.zeros(k), np.zeros(k), np.zeros(k), np.zeros(k, np.int64), np.zeros(k),
        np.array([-1, 0], np.int64), most, graph.fair_ticks * k / most,
    )  # fmt: skip
    kept = u if record else 0
    features = np.zeros((kept, k, DEVICE_FEATURES), np.float32)
    opened = np.zeros((kept, k), np.bool_)
    noise = np.zeros((0, k)) if noise is None else noise
    follow = np.zeros(0, np.int64) if follow is None else follow
    for first in range(0, u, CHUNK):
        last = min(first + CHUNK, u)
        decode_units(graph, base, head, state, noise, follow, first, last, features, opened)
    return Decoded(state.place, features, opened)


def by_first_use(graph: PolicyGraph, place: Ints) -> Ints:
    """The same placement with interchangeable devices named as decoding would: the first of them
    to be used has the smallest number."""
    found = np.full(len(graph.limit), -1, np.int64)
    taken = np.zeros(len(graph.limit), np.bool_)
    for unit in graph.order:
        device = place[unit]
        if found[device] < 0:
            able = np.flatnonzero((graph.alike == graph.alike[device]) & ~taken)
            found[device] = able[0]
            taken[able[0]] = True
    renamed: Ints = found[place]
    return renamed


@compiled
def decode_units(
    graph: PolicyGraph,
    base: Floats,
    head: PolicyHead,
    state: DecodeState,
    noise: Floats,
    follow: Ints,
    first: int,
    last: int,
    features: npt.NDArray[np.float32],
    opened: Bools,
) -> None:
    """Place the units from `first` to `last` of the order."""
    k = len(graph.limit)
    seen, is_open = np.zeros((k, DEVICE_FEATURES)), np.zeros(k, np.bool_)
    scores, work = np.zeros(k), np.zeros((7, k))
    for at in range(first, last):
        unit = graph.order[at]
        _open_devices(graph, state, unit, is_open)
        _schedule(graph, state, unit, work)
        _exchange(graph, state, unit, work)
        _device_features(graph, state, unit, is_open, work, seen)
        score_devices(base[unit], head, seen, is_open, scores)
        best = -1
        for d in range(k):
            if is_open[d]:
                if len(noise):
                    scores[d] += noise[at, d]
                if best < 0 or scores[d] > scores[best]:
                    best = d
        if len(follow):
            best = follow[unit]
            is_open[best] = True
        if len(features):
            for d in range(k):
                opened[at, d] = is_open[d]
                for j in range(DEVICE_FEATURES):
                    features[at, d, j] = seen[d, j]
        _commit(graph, state, unit, best)


@compiled_part
def _open_devices(graph: PolicyGraph, state: DecodeState, unit: int, is_open: Bools) -> None:
    """Which devices the unit may go to."""
    k = len(graph.limit)
    found, least = 0, -1
    for capped in range(2):
        for d in range(k):
            fits = graph.allowed[unit, d]
            fits = fits and state.used[d] + graph.memory[unit] <= graph.limit[d]
            if fits and state.placed[d] == 0:
                fits = capped == 1 or state.last[1] < state.most_devices
                for other in range(d):
                    if graph.alike[other] == graph.alike[d] and state.placed[other] == 0:
                        fits = False
            is_open[d] = fits
            found += fits
        if found:
            return
    excess = 0.0
    for d in range(k):
        if graph.allowed[unit, d]:
            over = (state.used[d] + graph.memory[unit]) / max(graph.limit[d], 1.0)
            if least < 0 or over < excess:
                least, excess = d, over
    is_open[least] = True


# Rows of what is worked out for each device before its features.
START, END, HERE, COUNT, CROSSING, SIBLINGS, MAIN = 0, 1, 2, 3, 4, 5, 6


@compiled_part
def _schedule(graph: PolicyGraph, state: DecodeState, unit: int, work: Floats) -> None:
    """When the unit would start and end on each device."""
    for d in range(len(graph.limit)):
        ready = state.free[d]
        for at in range(graph.before_start[unit], graph.before_start[unit + 1]):
            other, flow = graph.before[at], graph.before_flow[at]
            if flow < 0:
                continue
            there = state.place[other]
            if there == d:
                ready = max(ready, state.finish[other])
            elif state.arrived[other, d] >= 0:
                ready = max(ready, state.arrived[other, d])
            else:
                leaves = max(state.finish[other], state.port[there])
                ready = max(ready, leaves + graph.lag[there, d] + graph.pace[there, d] * flow)
        work[START, d] = ready
        work[END, d] = ready + graph.forward[unit, d]


@compiled_part
def _exchange(graph: PolicyGraph, state: DecodeState, unit: int, work: Floats) -> None:
    """How much of what the unit exchanges with units that have a device is on each, how many of
    them, and what would cross; and how many readers of the same outputs are on each."""
    k = len(graph.limit)
    for row in range(HERE, MAIN + 1):
        for d in range(k):
            work[row, d] = 0.0
    heaviest, main = -1.0, -1
    for at in range(graph.before_start[unit], graph.before_start[unit + 1]):
        other = graph.before[at]
        there = state.place[other]
        sends, count = graph.before_sends[at], graph.before_count[at]
        work[HERE, there] += sends
        work[COUNT, there] += 1.0
        if sends > heaviest:
            heaviest, main = sends, there
        for d in range(k):
            if d != there:
                work[CROSSING, d] += graph.lag[there, d] * count + graph.pace[there, d] * sends
            work[SIBLINGS, d] += state.children[other, d]
    if main >= 0:
        work[MAIN, main] = 1.0


@compiled_part
def _squash(number: float, unit: float) -> float:
    """A number relative to a unit, between -1 and 1."""
    return number / (abs(number) + unit)


@compiled_part
def _device_features(
    graph: PolicyGraph,
    state: DecodeState,
    unit: int,
    is_open: Bools,
    work: Floats,
    seen: Floats,
) -> None:
    """The features of each device for the unit."""
    k, twin = len(graph.limit), graph.twin[unit]
    mean, fair = graph.mean_ticks, state.fair_ticks
    first = -1
    start = end = free = load = whole = 0.0
    total_load = siblings = twins = exchanged = count = 0.0
    for d in range(k):
        total_load += state.load[d]
        siblings += work[SIBLINGS, d]
        twins += state.twins[twin, d]
        exchanged += work[HERE, d]
        count += work[COUNT, d]
        if is_open[d]:
            if first < 0:
                first = d
                start, end, free = work[START, d], work[END, d], state.free[d]
                load, whole = state.load[d], graph.whole[unit, d]
            start, end = min(start, work[START, d]), min(end, work[END, d])
            free, load = min(free, state.free[d]), min(load, state.load[d])
            whole = min(whole, graph.whole[unit, d])
    for d in range(k):
        own, left = seen[d], 1.0
        if graph.limit[d] < np.inf:
            left = 1 - (state.used[d] + graph.memory[unit]) / max(graph.limit[d], 1.0)
        mean_load, takes = total_load / k, graph.whole[unit, d]
        own[0] = _squash(work[START, d] - start, mean)
        own[1] = _squash(work[END, d] - end, mean)
        own[2] = _squash(work[END, d] - end, 0.1 * fair)
        own[3] = _squash(work[START, d] - state.free[d], mean)
        own[4] = _squash(state.load[d] - mean_load, mean_load + mean)
        own[5] = min(state.load[d] / fair, 2.0)
        own[6] = work[HERE, d] / exchanged if exchanged > 0 else 0.0
        own[7] = work[COUNT, d] / count if count > 0 else 0.0
        own[8] = work[SIBLINGS, d] / siblings if siblings > 0 else 0.0
        own[9] = work[CROSSING, d] / (work[CROSSING, d] + takes + 1e-9)
        own[10] = 1.0 if state.placed[d] == 0 else 0.0
        own[11] = max(left, -1.0)
        own[12] = min(math.log((takes + 1e-9) / (whole + 1e-9)), 3.0) if takes > whole else 0.0
        own[13] = 1.0 if state.last[0] == d else 0.0
        own[14] = work[MAIN, d]
        own[15] = 1.0 if work[END, d] <= end else 0.0
        own[16] = 1.0 if state.load[d] <= load else 0.0
        own[17] = state.twins[twin, d] / twins if twins > 0 else 0.0
        own[18] = state.recent[d]
        own[19] = state.last[1] / k
        own[20] = _squash(state.free[d] - free, 0.1 * fair)
        own[21] = 1.0 if state.twin_last[twin] == d else 0.0


def _scores_by_rows(
    base: Floats, head: PolicyHead, seen: Floats, is_open: Bools, scores: Floats
) -> None:
    """What `score_devices` does, for all devices at once."""
    hidden = np.tile(base, (len(seen), 1))
    for j in range(DEVICE_FEATURES):
        hidden += seen[:, j : j + 1] * head.device[j]
    hidden = np.maximum(hidden, 0.0)
    context = np.zeros(hidden.shape[1])
    for d in np.flatnonzero(is_open):
        context += hidden[d]
    context /= np.float64(is_open.sum())
    common = head.bias.copy()
    for j in range(hidden.shape[1]):
        common += context[j] * head.context[j]
    last = np.tile(common, (len(seen), 1))
    for j in range(hidden.shape[1]):
        last += hidden[:, j : j + 1] * head.hidden[j]
    last = np.maximum(last, 0.0)
    scores[:] = 0.0
    for j in range(last.shape[1]):
        scores += last[:, j] * head.out[j]


@compiled(plain=_scores_by_rows)
def score_devices(
    base: Floats, head: PolicyHead, seen: Floats, is_open: Bools, scores: Floats
) -> None:
    """The score of every device; those that are not open count for nothing."""
    k, wide, narrow = len(seen), head.hidden.shape[0], head.hidden.shape[1]
    hidden, context, common = np.empty((k, wide)), np.zeros(wide), head.bias.copy()
    opened = 0
    for d in range(k):
        if not is_open[d]:
            continue
        opened += 1
        hidden[d] = base
        for j in range(DEVICE_FEATURES):
            feature = seen[d, j]
            if feature != 0.0:
                for i in range(wide):
                    hidden[d, i] += feature * head.device[j, i]
        for i in range(wide):
            hidden[d, i] = max(hidden[d, i], 0.0)
            context[i] += hidden[d, i]
    for j in range(wide):
        context[j] /= opened
        if context[j] != 0.0:
            for i in range(narrow):
                common[i] += context[j] * head.context[j, i]
    last = np.empty(narrow)
    for d in range(k):
        scores[d] = 0.0
        if not is_open[d]:
            continue
        last[:] = common
        for j in range(wide):
            own = hidden[d, j]
            if own != 0.0:
                for i in range(narrow):
                    last[i] += own * head.hidden[j, i]
        for i in range(narrow):
            scores[d] += max(last[i], 0.0) * head.out[i]


@compiled_part
def _commit(graph: PolicyGraph, state: DecodeState, unit: int, device: int) -> None:
    """The unit goes to the device."""
    ready = state.free[device]
    for at in range(graph.before_start[unit], graph.before_start[unit + 1]):
        other, flow = graph.before[at], graph.before_flow[at]
        there = state.place[other]
        state.children[other, device] += 1.0
        if flow < 0:
            continue
        if there == device:
            ready = max(ready, state.finish[other])
        else:
            if state.arrived[other, device] < 0:
                leaves = max(state.finish[other], state.port[there])
                state.port[there] = leaves + graph.pace[there, device] * flow
                state.arrived[other, device] = state.port[there] + graph.lag[there, device]
            ready = max(ready, state.arrived[other, device])
    if state.placed[device] == 0:
        state.last[1] += 1
    state.place[unit] = device
    state.finish[unit] = ready + graph.forward[unit, device]
    if graph.forward[unit, device] > 0:
        state.free[device] = state.finish[unit]
    state.load[device] += graph.whole[unit, device]
    state.used[device] += graph.memory[unit]
    state.placed[device] += 1
    twin = graph.twin[unit]
    state.twins[twin, device] += 1.0
    state.twin_last[twin] = device
    for d in range(len(graph.limit)):
        state.recent[d] *= RECENT
    state.recent[device] += 1 - RECENT
    state.last[0] = device
