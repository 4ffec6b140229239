"""loads: placers for throughput and latency.

In: an objective. Out: a placement, and where it is proven a lower bound.
Read ideals.py, then load_search.py and milp.py.
"""
