"""cuts: placers that cut the graph into balanced parts, by METIS and Scotch.

In: an objective. Out: a placement.
Read cut_graph.py.
"""
