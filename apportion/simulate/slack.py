"""slack: how much later each item of a schedule could end without making the whole longer.

With messages served in the order that they have, a schedule is one of longest paths, between three
kinds of moments: an item is ready, a link turns to a message, an item ends. Each is held up by the
latest of those before it, so that a delay is handed on less the gap to what comes next:

    slack(moment) = min over the next moments of (gap + slack),  0 at the end of the schedule

        end of i      -> ready of whatever waits for i
        ready of m    -> every link's turn to m         (of work: its end)
        turn of j to m -> end of m, and the turn of j to the message after m

A delay that would change the order of messages may cost more or less than that. An item without
slack is on a critical path.
"""

from __future__ import annotations

import numpy as np

from apportion.columns import Ints, compiled
from apportion.simulate.schedule import Network, Times, link_spans, readiness


def slack(net: Network, times: Times) -> Ints:
    """Nanoseconds per item that its end has, given what the schedulers said."""
    start, end = times
    ready = readiness(net, times)
    begun = np.where(net.lead >= 0, start, ready) if len(net.lead) else ready
    order = np.lexsort((np.arange(len(ready)), begun))  # whatever waits comes later
    spans = link_spans(net, times)
    found: Ints = _slack(net, order, ready, begun, end, spans.start)
    return found


@compiled
def _slack(net: Network, order: Ints, ready: Ints, begun: Ints, end: Ints, turn: Ints) -> Ints:
    found = (end.max() if len(end) else 0) - end
    at_ready = np.zeros(len(end), np.int64)
    after, at_turn = np.full(net.links, -1), np.zeros(len(turn), np.int64)
    for item in order[::-1]:
        both = len(net.lead) > 0 and net.lead[item] >= 0
        held = found[item]  # of its lanes, where they go on before it ends
        for at in range(net.next_start[item], net.next_start[item + 1]):
            later = net.next[at]
            if both and net.next_lane[at]:
                gap = begun[later] - begun[item] - net.duration[item]
                held = min(held, gap + at_ready[later])
            else:
                found[item] = min(found[item], begun[later] - end[item] + at_ready[later])
        first, last = net.hop_start[item], net.hop_start[item + 1]
        at_ready[item] = found[item]
        for hop in range(first, last):
            passed = turn[hop] + net.hop_occupancy[hop]
            left = end[item] - net.latency[item] - passed + found[item]
            behind = after[net.hop_link[hop]]
            if behind >= 0:
                left = min(left, turn[behind] - passed - net.hold[item] + at_turn[behind])
            after[net.hop_link[hop]], at_turn[hop] = hop, left
            waited = turn[hop] - ready[item] + left
            at_ready[item] = waited if hop == first else min(at_ready[item], waited)
        if both:
            late = end[item] - begun[item] - net.duration[item] + found[item]
            at_ready[item] = min(at_ready[item], held, late)
    return found
