"""The methods in words, for `--help`: this file imports nothing, so that help comes at once."""

from __future__ import annotations

METHODS = {
    "auto": "the best plan by any of the others, as the simulator judges",
    "single": "everything on one device",
    "data": "data parallelism: the batch cut, parameters everywhere",
    "fsdp": "data parallelism with parameters and optimizer state cut as well",
    "owt": "one weird trick: convolutions by data, dense layers by their features",
    "megatron": "the expert's plan of transformers: layers cut within a node, data across nodes",
    "expert": "by kind of network: owt, GNMT's layers over a node's devices, or megatron",
    "op-placement": "whole layers, on the devices in turn",
    "tofu": "recursive, for the fewest bytes moved (Tofu)",
    "tofu-seconds": "the same, for the fewest seconds on the links of the cluster",
    "tofu-paper": "tofu, counted as in the paper",
    "allrow-greedy": "all tensors along their first dimension, each operator its best",
    "spartan": "the largest tensors first, each with the operators around it (Spartan)",
    "equalchop": "as tofu, with one cut of everything into all devices",
    "icml18": "as tofu, without cuts of axes that are summed over",
    "optcnn": "the fewest seconds added up over layers, exactly (OptCNN)",
    "exact": "all levels of tofu jointly, with a proven bound",
    "flexflow": "random walks over all choices, judged by the simulated step (FlexFlow)",
    "random": "a legal plan drawn at random, for tests",
}

NAMES = ", ".join(METHODS)


def explained() -> str:
    """One paragraph for each method."""
    return "\n\n".join(f"{name}: {what}." for name, what in METHODS.items())
