"""levels: partitioning for the fewest bytes, one factor of the device count after the other (Tofu).

In: a Problem. Out: a Strategy that uses all devices for every Op, and bounds for it.
Read tofu.py first, then sites.py (what one cut moves), levels.py (the recursion), level_grids.py,
level_places.py and level_costs.py; equalchop, icml18, greedy and exact are variations.
"""
