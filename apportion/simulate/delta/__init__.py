"""delta: one step simulated again after a Choice changed, equal to a full simulation bit for bit.

In: a Lowering and a changed Choice. Out: the new makespan and peak memory; a change can be undone.
Read delta.py first, then stage_names.py (which Ops change), new_blocks.py (their tasks),
task_prices.py, block_store.py, schedule_state.py, reschedule.py (from the first time that can have
changed) and held_bytes.py (memory).
"""
