"""baselines: Strategies by fixed rules, which every search is compared with.

In: a Problem. Out: one device, data parallelism, FSDP, one weird trick, Megatron, layers in
turn, or a random Strategy. One rule a file.
Read data.py first; weights.py finds what the rules cut.
"""
