"""What sums and gathers over several devices are made of: direct messages, or relays.

Part of the room plan. A Strategy comes in, with its direct exchanges and what its step takes; out
go the Communications that are worth trying: the algorithms and groups (split/communication.py)
under which the busiest link has so much less to carry that the step could gain by it.

    direct         what there is without a choice
    hierarchical   groups of devices that are near each other, as the cluster has them: one level,
                   or all of its levels
    tree           halves, and halves of halves

Only the best of them is returned, by what its links carry; whether the step gains, simulation says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from apportion.columns import Floats
from apportion.lower import Lowering
from apportion.machine import Cluster, halves, is_best_direct, near_groups
from apportion.split import DIRECT, HIERARCHICAL, TREE, Communication, Strategy

LEAST_GAIN = 0.02
"""The share of a step that the busiest link has to be busy less, so that relays are tried."""


def priced_as_sent(strategy: Strategy, cluster: Cluster) -> Strategy:
    """The Strategy with direct exchanges; it says so where a simulation would believe them to be
    quicker by another algorithm than ranks send them by."""
    algorithm = "" if is_best_direct(cluster) else DIRECT
    how = replace(strategy.communication, algorithm=algorithm, levels=())
    return replace(strategy, communication=how)


def worth_relaying(
    lowering: Lowering, strategy: Strategy, cluster: Cluster, step_seconds: float
) -> Communication | None:
    """The relays by which the busiest link is busy least, if that is enough less than it is in the
    step, whose direct exchanges the Lowering has."""
    if strategy.wire:  # sums of rounded terms would be rounded again
        return None
    before = _busiest_seconds(lowering, cluster)
    if before < LEAST_GAIN * step_seconds:
        return None
    best, least = None, before - LEAST_GAIN * step_seconds
    for how in _relays(strategy.communication, cluster):
        busiest = _busiest_seconds(lowering.relayed(how.levels), cluster)
        if busiest < (1 - LEAST_GAIN) * least:
            best, least = how, busiest
    return best


def _busiest_seconds(lowering: Lowering, cluster: Cluster) -> float:
    return float(link_seconds(lowering.pair_bytes(), cluster).max(initial=0.0))


def _relays(how: Communication, cluster: Cluster) -> Iterator[Communication]:
    """The algorithms that have relays; those with few hops first."""
    groups = near_groups(cluster)
    for level in groups:
        yield replace(how, algorithm=HIERARCHICAL, levels=(level,))
    if len(groups) > 1:
        yield replace(how, algorithm=HIERARCHICAL, levels=groups)
    if not is_best_direct(cluster):
        yield replace(how, algorithm=TREE, levels=halves(cluster))


def link_seconds(carried: Floats, cluster: Cluster) -> Floats:
    """By link: for how long it is occupied by so many bytes from sender to receiver."""
    found = np.zeros(len(cluster.links))
    for sender, receiver in zip(*np.nonzero(carried), strict=True):
        for link in cluster.routes[sender][receiver]:
            found[link] += carried[sender, receiver] / cluster.links[link].bandwidth
    return found
