"""coarse: fewer and larger units.

In: a PlacementProblem. Out: one with fewer units, and which unit became which.
Read coarsen.py.
"""
