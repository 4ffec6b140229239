"""Which slots may be sent as they are, without being packed into a buffer first.

Part of the room execute. An Executable and a rank's RankSteps come in; out go, for each message
that the rank sends, the slots that live on after the exchange has been waited for. Nothing writes
over a slot before its last use (an update in place is the last use of what it overwrites), so the
receiver may read it where it is, and nothing is held any longer than the plan says.
"""

from __future__ import annotations

from collections.abc import Iterable

from apportion.execute.executable import Executable
from apportion.execute.rank_steps import HostStep, Post, RankStep, Segment


def lasting_slots(executable: Executable, steps: Iterable[RankStep]) -> dict[int, frozenset[int]]:
    """By message, the slots in it that are used after its exchange has ended."""
    last = executable.tasks.slot_last
    messages, found = executable.messages, dict[int, frozenset[int]]()
    latest = -1
    for step in steps:
        if isinstance(step, Segment | HostStep):
            latest = max(latest, *step.tasks)
        elif isinstance(step, Post):
            parties = (*step.exchange.sends, *step.exchange.receives)
            latest = max(latest, *(messages[number].task for number, _ in parties))
        else:
            for number, _ in step.exchange.sends:
                slots = {copy.source for copy in executable.packed[number]}
                found[number] = frozenset(s for s in slots if last[s] > latest)
    return found
