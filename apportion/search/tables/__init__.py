"""tables: the best combination of entries of many small tables, exactly or with a bound.

In: variables with few options, and tables of what pairs and groups of them cost. Out: one option
each. Read eliminate.py, elimination_order.py and elimination_steps.py first, then shrink.py,
reweight.py and ascend.py (bounds by messages), copies_bound.py and linear.py (bounds by linear
programs).
"""
