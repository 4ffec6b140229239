"""low_order: the order of the lowest peak of those that are quickly made.

Part of the room memory. A Graph and its OrderModel come in, units in another order go out: as
captured, as captured with updates early, least peak first, or of FEW units at most by a beam;
whichever holds least. An order costs no time, but a greedy one may hold more than the user's own.
"""

from __future__ import annotations

from apportion.graph import Graph
from apportion.memory.beam_order import beam_order
from apportion.memory.least_peak_order import least_peak_order
from apportion.memory.order_model import OrderModel
from apportion.memory.reorder import updates_early

FEW = 400


def low_order(graph: Graph, orders: OrderModel) -> list[int]:
    """The order of the lowest peak; of equal ones that which is nearest to the captured one."""
    found = [orders.order_of(updates_early(graph)), orders.order_of(()), least_peak_order(orders)]
    if len(orders.units) <= FEW:
        found.append(beam_order(orders))
    return min(found, key=orders.peak)
