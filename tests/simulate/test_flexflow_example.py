"""The worked example of FlexFlow (Jia et al., MLSys 2019, figure 4), before and after a change.

Six operators on three devices, o1 -> o3 -> o5, o2 -> o4 -> o6, o3 -> o4; o1 to o4 in two parts. One
link joins each pair of neighbouring devices. Devices, too, take whatever is ready first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from make_tasks import schedule_as_compiled

from apportion.simulate.schedule import Network, Times, queued, schedule

GPU1, GPU2, GPU3, LINK1, LINK2 = range(5)

Item = tuple[str, int, int, list[str]]
"""Name, queue, time, predecessors."""

SENDERS: list[Item] = [
    ("1:1", GPU1, 2, []), ("1:2", GPU1, 2, []), ("2:1", GPU1, 2, []), ("2:2", GPU1, 2, []),
    ("1:1 sent", LINK1, 1, ["1:1"]), ("1:2 sent", LINK1, 1, ["1:2"]),
    ("2:1 sent", LINK1, 1, ["2:1"]), ("2:2 sent", LINK1, 1, ["2:2"]),
]  # fmt: skip

BEFORE: list[Item] = [
    *SENDERS,
    ("3:1", GPU2, 1, ["1:1 sent"]), ("3:2", GPU2, 1, ["1:2 sent"]),
    ("3:1 sent", LINK2, 1, ["3:1"]), ("3:2 sent", LINK2, 1, ["3:2"]),
    ("4:1", GPU2, 1, ["2:1 sent", "3:1"]), ("4:2", GPU2, 1, ["2:2 sent", "3:2"]),
    ("4:1 sent", LINK2, 1, ["4:1"]), ("4:2 sent", LINK2, 1, ["4:2"]),
    ("5:1", GPU3, 3, ["3:1 sent", "3:2 sent"]),
    ("6:1", GPU3, 3, ["4:1 sent", "4:2 sent"]),
]  # fmt: skip

AFTER: list[Item] = [  # o3 whole
    *SENDERS,
    ("3:1", GPU2, 2, ["1:1 sent", "1:2 sent"]), ("3:1 sent", LINK2, 2, ["3:1"]),
    ("4:1", GPU2, 1, ["2:1 sent", "3:1"]), ("4:2", GPU2, 1, ["2:2 sent", "3:1"]),
    ("4:1 sent", LINK2, 1, ["4:1"]), ("4:2 sent", LINK2, 1, ["4:2"]),
    ("5:1", GPU3, 3, ["3:1 sent"]),
    ("6:1", GPU3, 3, ["4:1 sent", "4:2 sent"]),
]  # fmt: skip

GPU1_AND_LINK1 = {
    "1:1": 0, "1:2": 2, "2:1": 4, "2:2": 6,
    "1:1 sent": 2, "1:2 sent": 4, "2:1 sent": 6, "2:2 sent": 8,
}  # fmt: skip

STARTS_BEFORE = {
    **GPU1_AND_LINK1,
    "3:1": 3, "3:2": 5, "4:1": 7, "4:2": 9,
    "3:1 sent": 4, "3:2 sent": 6, "4:1 sent": 8, "4:2 sent": 10,
    "5:1": 7, "6:1": 11,
}  # fmt: skip

STARTS_AFTER = {
    **GPU1_AND_LINK1,
    "3:1": 5, "4:1": 7, "4:2": 9,
    "3:1 sent": 7, "4:1 sent": 9, "4:2 sent": 10,  # 4:1 is ready at 8, the link is busy until 9
    "5:1": 9, "6:1": 12,  # ready at 11, the device is busy until 12
}  # fmt: skip


def network(items: list[Item]) -> Network:
    index = {name: k for k, (name, *_) in enumerate(items)}
    queue, time = (np.array([item[k] for item in items]) for k in (1, 2))
    before = [[index[name] for name in item[3]] for item in items]
    return queued(queue, time, np.zeros(len(items), np.int64), before, 5)


@pytest.mark.parametrize("run", [schedule, schedule_as_compiled])
@pytest.mark.parametrize(
    ("items", "starts", "makespan"),
    [(BEFORE, STARTS_BEFORE, 14), (AFTER, STARTS_AFTER, 15)],
    ids=["before", "after"],
)
def test_every_start(
    run: Callable[[Network], Times], items: list[Item], starts: dict[str, int], makespan: int
) -> None:
    start, end = run(network(items))
    assert dict(zip((name for name, *_ in items), start.tolist(), strict=True)) == starts
    assert (end - start).tolist() == [time for _, _, time, _ in items]
    assert end.max() == makespan
