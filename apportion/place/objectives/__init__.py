"""objectives: what placements are judged by.

In: a PlacementProblem and a placement. Out: the time of a step, the largest load, or the latency.
Read step_time.py, then max_load.py and latency.py.
"""
