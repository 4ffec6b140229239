"""walks: random walks over Choices, each judged by a simulated step (FlexFlow).

In: a Problem and Strategies to start from. Out: the best Strategy met.
Read metropolis.py first (the chain), then flexflow.py, moves.py and units.py (what a proposal
changes), simulated_walk.py (its cost by delta simulation), device_loads.py and process_crew.py.
"""
