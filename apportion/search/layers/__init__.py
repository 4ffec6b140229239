"""layers: seconds added up over layers, minimised exactly (OptCNN).

In: a Problem. Out: the Strategy with the fewest summed seconds of layers and exchanges.
Read optcnn.py first, then layers.py (which Ops decide together), summed_seconds.py and
exchange_seconds.py (the two kinds of cost).
"""
