"""delta: one step simulated again after a Choice changed, equal to a full simulation bit for bit.

In: a Lowering and a changed Choice. Out: the new makespan and peak memory; a change can be undone.
Read delta.py first, then new_blocks.py (tasks of the changed Ops), block_store.py,
schedule_state.py, reschedule.py (from the first moment that differs) and held_bytes.py (memory).
"""
