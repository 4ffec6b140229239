"""searches: placers that change a placement of a step again and again.

In: an objective, and placements to begin with. Out: the best placement that was evaluated.
Read step_search.py, then local_search.py, annealing.py and brkga.py.
"""
