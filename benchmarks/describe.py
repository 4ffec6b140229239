"""How long it takes to describe a big step: atoms, and every axis of every operator cut in two.

    python benchmarks/describe.py [--layers 72]

A Llama of 7B width; 72 layers make about 12,000 operators. Equal operators are analysed once; the
last line analyses each alone, for the ratio.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import llama7b

from apportion.capture.capture import capture
from apportion.describe.descriptions import find_description
from apportion.describe.errors import IllegalCut
from apportion.split.derive import CallSplits
from apportion.split.space import Space

SOME = 50  # every so many-th operator is analysed alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=72)
    graph = capture(*llama7b.build(layers=parser.parse_args().layers)).graph
    began = time.perf_counter()
    space = Space(graph)
    atoms = time.perf_counter()
    cuts = sum(sum(space.cuttable(op)) for op in range(len(graph.ops)))
    end = time.perf_counter()
    distinct = len(set(space.calls))
    print(f"{len(graph.ops)} operators, {distinct} distinct, {cuts} axes can be cut")
    print(f"formulas and atoms {atoms - began:.2f} s, splits {end - atoms:.2f} s")
    alone = _alone(space) * SOME
    print(f"splits without sharing: {alone:.1f} s, {alone / (end - atoms):.0f} times as long")


def _alone(space: Space) -> float:
    began = time.perf_counter()
    for op in range(0, len(space.graph.ops), SOME):
        axes = space.axes(op)
        for position, axis in enumerate(axes):
            if axis.extent > 1:
                try:
                    parts = tuple(2 if k == position else 1 for k in range(len(axes)))
                    CallSplits(space.calls[op], find_description(space.calls[op].kind)).split(parts)
                except IllegalCut:
                    continue
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
