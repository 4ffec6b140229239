"""Which rows go first, what is in a log, and the budget that holds them back."""

from __future__ import annotations

import numpy as np
import pytest

from apportion.servers.priorities import importance_of
from apportion.servers.send_budget import SendBudget
from apportion.servers.update_log import UpdateLog


def log(priority: str) -> UpdateLog:
    """Three rows: an old small change, a large one, and one that is large beside its value."""
    made = UpdateLog(6, 2, np.dtype(np.float64), priority)
    values = np.array([[5.0, 5.0], [100.0, 100.0], [0.1, 0.1]])
    made.add(np.array([4]), np.full((1, 2), 0.01), values[:1], clock=1)
    made.add(np.array([2]), np.full((1, 2), 7.0), values[1:2], clock=3)
    made.add(np.array([0]), np.full((1, 2), 1.0), values[2:], clock=2)
    return made


@pytest.mark.parametrize(
    ("priority", "order"),
    [("fifo", [4, 0, 2]), ("relative", [0, 2, 4]), ("absolute", [2, 0, 4])],
)
def test_priorities(priority: str, order: list[int]) -> None:
    draw = np.random.default_rng(0)
    for count in (1, 2):
        assert sorted(log(priority).first(count, draw)) == sorted(order[:count])


def test_random_takes_any() -> None:
    draw = np.random.default_rng(0)
    seen = {int(log("random").first(1, draw)[0]) for _ in range(50)}
    assert seen == {0, 2, 4}


def test_ties_of_age_go_by_number() -> None:
    made = UpdateLog(5, 1, np.dtype(np.float64), "fifo")
    made.add(np.array([3, 1]), np.ones((2, 1)), np.ones((2, 1)), clock=4)
    assert made.first(1, np.random.default_rng(0)).tolist() == [1]


def test_importance_counts_changes_that_cancel() -> None:
    made = UpdateLog(2, 1, np.dtype(np.float64), "relative")
    made.add(np.array([0]), np.array([[2.0]]), np.array([[4.0]]), clock=0)
    made.add(np.array([0]), np.array([[-2.0]]), np.array([[6.0]]), clock=0)
    assert made.importance[0] == pytest.approx(2 / 4 + 2 / 6)
    assert made.deltas[0, 0] == 0 and made.unsent().tolist() == [0]


def test_importance_of_a_change_of_nothing_is_its_size() -> None:
    found = importance_of(np.array([[3.0, -1.0]]), np.array([[0.0, 2.0]]), "relative")
    assert found.tolist() == [3.5]


def test_what_is_taken_is_gone() -> None:
    made = log("fifo")
    assert made.delivered(9) == 1
    assert made.take(np.array([4])).tolist() == [[0.01, 0.01]]
    assert made.unsent().tolist() == [0, 2] and made.delivered(9) == 2
    assert made.unsent(before=3).tolist() == [0]
    made.take(np.array([0, 2]))
    assert made.delivered(9) == 9 and not made.deltas.any() and not made.importance.any()


def test_a_budget_lets_so_many_bytes_a_second_through() -> None:
    now = [100.0]
    budget = SendBudget(1000.0, clock=lambda: now[0])
    assert budget.wait() == 0
    budget.spend(500)
    assert budget.wait() == pytest.approx(0.5)
    budget.spend(500)
    assert budget.wait() == pytest.approx(1.0)
    now[0] += 3
    assert budget.wait() == 0
    budget.spend(100)
    assert budget.wait() == pytest.approx(0.1)  # what was not used is not saved up
    assert SendBudget(None).wait() == 0
