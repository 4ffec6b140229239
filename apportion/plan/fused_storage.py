"""What a step holds on a GPU if torch's compiler fuses its kernels and a graph replays them.

Part of the room plan. The TaskGraph of a step in generated code comes in with its Storage, the
Storage of the same step with fusion goes out.

    results   that only the kernel reads that makes them take no room (simulate/fusion.py)
    products  in half precision with an odd side are padded: the two that have that side, the
              largest of what they read and make, are there twice
    the rest  a graph keeps what it replays in blocks of its own, of which a share stays unused:
              MARGIN of the peak and a little more, as was measured on an H200
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from apportion.columns import Ints
from apportion.lower import COMPUTE, Storage, TaskGraph, with_storage
from apportion.machine import Cluster, CostModel, cost_fit
from apportion.simulate import fused_traffic, simulate, unwritten_slots

MARGIN, LEAST = 0.01, 64 << 20


def fused_storage(tasks: TaskGraph, storage: Storage, cluster: Cluster, cost: CostModel) -> Storage:
    """The Storage of a step that is compiled with fusion; `tasks` are without any."""
    known = with_storage(tasks, storage)
    slots = {slot: (base, nbytes) for slot, base, nbytes in storage.slots}
    for slot in np.flatnonzero(unwritten_slots(known)).tolist():
        slots[slot] = (int(known.slot_base[slot]), 0)
    rows = tuple((slot, *row) for slot, row in sorted(slots.items()))
    computes = known.kind == COMPUTE
    needed = known.workspace + _padded(known)
    fused = fused_traffic(known).fused & computes
    for device in range(known.devices):  # libraries' own workspace, not that of fused calls
        mine = computes & (known.device == device)
        some = known.workspace[mine & (known.workspace > 0)]
        needed[fused & mine] = some.min() if len(some) else 0
    found = replace(storage, slots=rows, workspace=_rows(needed))
    peaks = np.array(simulate(with_storage(tasks, found), cluster, cost).peak_bytes)
    more = (MARGIN * peaks).astype(np.int64) + LEAST
    needed[computes] += more[known.device[computes]]
    return replace(found, workspace=_rows(needed))


def _rows(workspace: Ints) -> tuple[tuple[int, int], ...]:
    return tuple((task, int(workspace[task])) for task in np.flatnonzero(workspace).tolist())


def _padded(tasks: TaskGraph) -> Ints:
    """Bytes of the two largest tensors of each product that is padded."""
    odd = np.array([cost_fit.fit_kind(w).endswith(cost_fit.ODD) for w in tasks.works] + [False])
    found = np.zeros(len(tasks), np.int64)
    for task in np.flatnonzero(odd[tasks.work]).tolist():
        read = tasks.in_slot[tasks.in_start[task] : tasks.in_start[task + 1]]
        made = tasks.out_slot[tasks.out_start[task] : tasks.out_start[task + 1]]
        found[task] = np.sort(tasks.slot_nbytes[np.append(read[read >= 0], made)])[-2:].sum()
    return found
