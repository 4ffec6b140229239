"""families: Placeto's three families of graphs, re-created.

In: a family's name. Out: the specs of its 32 models, the number of groups they are placed in, and
which of them a policy is trained on.

Addanki et al. (NeurIPS 2019) train and test on cifar10 and ptb, 32 graphs each of 128 groups, drawn
from the search spaces of ENAS, and on nmt, 32 graphs of 160 groups with different lengths of
unrolling and sizes of the batch. Their graphs are not published with their code, and how many were
held out is not said. So these are re-created, not theirs: networks drawn from the same spaces (zoo
models enas-cifar10 and enas-ptb) and the zoo's nmt. A quarter of each family, drawn at random, is
held out.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

GRAPHS = 32
HELD_OUT = 8
FAMILY_NAMES = ("cifar10", "ptb", "nmt")

NMT_LENGTHS = (8, 10, 12, 14, 16, 18, 20, 24)
NMT_BATCHES = (32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class GraphFamily:
    """Models of one kind. `groups` is how many units each is coarsened to."""

    name: str
    groups: int
    train: tuple[str, ...]  # specs of the zoo
    test: tuple[str, ...]

    @property
    def specs(self) -> tuple[str, ...]:
        """All of them."""
        return self.train + self.test


def graph_family(name: str) -> GraphFamily:
    """The family of that name; ValueError if there is none."""
    if name == "cifar10":
        specs = [f"enas-cifar10:graph={k}" for k in range(1, GRAPHS + 1)]
    elif name == "ptb":
        specs = [f"enas-ptb:graph={k}" for k in range(1, GRAPHS + 1)]
    elif name == "nmt":
        specs = [
            f"nmt:source={length},target={length},batch={batch}"
            for length in NMT_LENGTHS
            for batch in NMT_BATCHES
        ]
    else:
        raise ValueError(f"no family {name!r} of graphs; there are {', '.join(FAMILY_NAMES)}")
    order = Random(name).sample(range(GRAPHS), GRAPHS)
    held = set(order[:HELD_OUT])
    train = tuple(spec for k, spec in enumerate(specs) if k not in held)
    test = tuple(spec for k, spec in enumerate(specs) if k in held)
    return GraphFamily(name, 160 if name == "nmt" else 128, train, test)
