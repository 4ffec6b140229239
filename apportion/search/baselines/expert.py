"""expert: the published hand strategy for the kind of network that a Graph is.

In: a Problem. Out: the Strategy that the literature gives for such networks:

    convolutional  one weird trick (owt.py)
    recurrent      layers over the devices of a node, samples over nodes, as for GNMT (Wu 2016)
    attention      weights cut within a node, samples over nodes (megatron.py)
    dense          one weird trick's rule for dense layers

The kind is seen in the Graph, never in names. Where several apply: convolutional if convolutions do
more operations than matmuls, for then it matters most how they are cut. Else recurrent if weights
are used in an unrolled loop: a translator with LSTMs is recurrent although it looks at the words it
has read with attention, since the steps of its loops, not its heads, are what there is to divide.
A loop in which every round goes through attention repeats a layer of a transformer and does not
count. Else attention, though there may be convolutions (patches of an image); else owt.

A recurrent network is divided as Wu et al. tell, and as FlexFlow's authors compare with: every node
has the whole network and a share of the samples, its layers are on the node's devices in turn,
and all steps of a loop are one layer. The gradients of a layer are reduced over the nodes. On one
node nothing is cut. Deviations: Wu et al. have as many devices as layers and cut the softmax by
words; here it is a layer like others. Where a node has more devices than the network has layers,
the devices that are left go to the layer with the most operations for each of its devices, and the
samples are cut over them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from apportion.graph import FORWARD, INPUT, PARAMETER, Graph, Op
from apportion.machine import Cluster
from apportion.search.baselines.data import sample_classes
from apportion.search.baselines.megatron import ATTENTION, CONVOLUTION, megatron
from apportion.search.baselines.owt import owt
from apportion.search.baselines.weights import MATMULS, grouped_choice, sample_axis
from apportion.search.problem import Problem, SearchResult
from apportion.split import AxisEffects, Strategy

SIDE_BY_SIDE = "aten.cat.default"


def expert(problem: Problem, *, budget: float = 0.0, seed: int = 0) -> SearchResult:
    """What a person who knows the literature would do."""
    effects, weights = AxisEffects(problem.space), WeightUses(problem.space.graph)
    attends = any(weights.attends(op) for op in weights.forward)
    convolutions, matmuls = _operations(problem.space.graph, effects)
    if convolutions > (matmuls if weights.recurrent or attends else 0):
        return _with_note(owt(problem), "a convolutional network: one weird trick")
    if weights.recurrent:
        return _layers_over_devices(problem, weights, effects)
    if attends:
        return _with_note(megatron(problem), "a network with attention: Megatron")
    return _with_note(
        owt(problem), "no expert's kind of network: dense layers by features, as in owt"
    )


def _with_note(found: SearchResult, note: str) -> SearchResult:
    return replace(found, notes=(note, *found.notes))


def _operations(graph: Graph, effects: AxisEffects) -> tuple[float, float]:
    """Those of the convolutions, and of the matmuls, of the forward pass."""
    convolutions = matmuls = 0.0
    for index, op in enumerate(graph.ops):
        if op.phase == FORWARD and op.kind == CONVOLUTION:
            convolutions += effects.flops(index)
        elif op.phase == FORWARD and (op.kind in MATMULS or op.kind == ATTENTION):
            matmuls += effects.flops(index)
    return convolutions, matmuls


# Recurrent networks


def _layers_over_devices(
    problem: Problem, weights: WeightUses, effects: AxisEffects
) -> SearchResult:
    space = problem.space
    layer = recurrent_layers(weights)
    samples = sample_classes(space)
    operations = [0.0] * (1 + max(layer))
    for op, number in enumerate(layer):
        operations[number] += effects.flops(op)
    nodes = _nodes(problem.cluster)
    place = devices_of_layers(nodes, operations)
    choices = tuple(
        grouped_choice(
            space, op, [[d] for d in place[number]], sample_axis(space, op, samples), None
        )
        for op, number in enumerate(layer)
    )
    note = f"a recurrent network: {_counted(operations, 'layer')} over the devices of "
    note += "a node" if len(nodes) == 1 else f"each of {len(nodes)} nodes, samples over the nodes"
    strategy = Strategy(choices, digits=space.digits, opening=space.opening)
    return SearchResult(strategy, notes=(note,))


def _counted(several: Sequence[object], what: str) -> str:
    return f"{len(several)} {what}{'s' if len(several) > 1 else ''}"


def _nodes(cluster: Cluster) -> list[tuple[int, ...]]:
    return [host.devices for host in cluster.hosts] or [tuple(range(len(cluster.devices)))]


def devices_of_layers(
    nodes: Sequence[Sequence[int]], operations: Sequence[float]
) -> list[list[int]]:
    """The devices of every layer, node by node."""
    found: list[list[int]] = [[] for _ in operations]
    for node in nodes:
        counts = [1] * len(operations)
        for _ in range(len(node) - len(operations)):
            counts[max(range(len(counts)), key=lambda k: operations[k] / counts[k])] += 1
        turn = 0
        for place, count in zip(found, counts, strict=True):
            place += (node[k % len(node)] for k in range(turn, turn + count))
            turn += count
    return found


class WeightUses:
    """The weights of a forward pass, numbered, and which come before and after an Op.

    A weight is what Ops of one kind read of the same parameters in the same shapes. Sets of weights
    are integers, a bit for each.

    uses       Ops that use a weight, and which
    above      for each Op the weights that it, or what it depends on, uses
    below      for each Op the weights that it, or what depends on it, uses
    looped     weights that are used on what came of using them before: those of unrolled loops
    recurrent  whether one of them is so without attention on the way
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.forward = [i for i, op in enumerate(graph.ops) if op.phase == FORWARD]
        self.uses = _uses(graph, self.forward)
        self.above, self.below = [0] * len(graph.ops), [0] * len(graph.ops)
        self.looped, self.recurrent = 0, False
        attended = [0] * len(graph.ops)
        for op in self.forward:
            before, seen = (_union(sets, self.makers(op)) for sets in (self.above, attended))
            mine = self.mine(op)
            self.looped |= mine & before
            if mine & before & ~seen and graph.ops[op].kind in MATMULS:
                self.recurrent = True
            self.above[op] = before | mine
            attended[op] = (before if self.attends(op) else seen) & ~mine
        for op in reversed(self.forward):
            self.below[op] = _union(self.below, self.readers(op)) | self.mine(op)

    def mine(self, op: int) -> int:
        """The weight that an Op uses itself."""
        return 1 << self.uses[op] if op in self.uses else 0

    def attends(self, op: int) -> bool:
        """Whether a forward Op multiplies activations with each other."""
        at = self.graph.ops[op]
        multiplies = at.kind == ATTENTION or (at.kind in MATMULS and op not in self.uses)
        return at.phase == FORWARD and multiplies

    def makers(self, op: int) -> list[int]:
        """The Ops on whose Values an Op's results depend."""
        if _makes_constants(self.graph.ops[op].kind):
            return []
        made = (self.graph.producer[value] for value in self.graph.ops[op].inputs)
        return [maker[0] for maker in made if maker]

    def readers(self, op: int) -> list[int]:
        """The forward Ops that read an Op's Values."""
        several = (r for value in self.graph.ops[op].outputs for r in self.graph.consumers[value])
        return [reader for reader in several if self.graph.ops[reader].phase == FORWARD]


def _union(sets: Sequence[int], ops: Iterable[int]) -> int:
    """What any of the Ops has."""
    found = 0
    for op in ops:
        found |= sets[op]
    return found


def _uses(graph: Graph, forward: Iterable[int]) -> dict[int, int]:
    """Forward Ops that read parameters together with other Values, and the numbers of their
    weights. Vectors, such as biases, make no weight by themselves. What is made of parameters and
    of what nobody gives, such as a transposed weight or one with dropout, stands for them, unless
    it is larger, such as a first state that is there for every sample."""
    stands: dict[int, tuple[int, ...]] = {
        v: (v,) if value.role == PARAMETER else ()
        for v, value in enumerate(graph.values)
        if value.role != INPUT and graph.producer[v] is None
    }
    numbers: dict[object, int] = {}
    uses: dict[int, int] = {}
    for index in forward:
        op = graph.ops[index]
        given = op.inputs if not _makes_constants(op.kind) else ()
        read = [v for v in given if stands.get(v)]
        if all(v in stands for v in given) and (op.kind not in MATMULS or len(read) == len(given)):
            if not read or _elements(graph, op.outputs) <= _elements(graph, read):
                parameters = tuple(sorted({p for v in read for p in stands[v]}))
                stands.update(dict.fromkeys(op.outputs, parameters))
        elif any(len(graph.values[v].shape or ()) > 1 for v in read):
            key = (op.kind, tuple((stands[v], graph.values[v].shape) for v in read))
            uses[index] = numbers.setdefault(key, len(numbers))
    return uses


def _elements(graph: Graph, values: Iterable[int]) -> int:
    return sum(math.prod(graph.values[v].shape or ()) for v in values)


def recurrent_layers(weights: WeightUses) -> list[int]:
    """The layer of every Op, numbered as they begin.

    A loop is one layer, with weights whose products are used in it directly: those of the inputs
    of an LSTM. Weights around an attention are one layer. Any other weight is one by itself. What
    depends on no weight belongs to the layer that reads it, and so does what is larger than what it
    is made of; other forward Ops belong to the layer that they read last. Backward Ops go with
    their forward Op, updates with the first Op that reads the parameter.
    """
    graph = weights.graph
    named = _named(weights)
    for index, op in enumerate(graph.ops):
        if op.phase != FORWARD and op.forward is not None:
            named[index] = named[op.forward]
        elif op.parameter is not None and graph.consumers[op.parameter][0] < index:
            named[index] = named[graph.consumers[op.parameter][0]]
        elif named[index] < 0:
            named[index] = max(((m, named[m]) for m in weights.makers(index)), default=(0, -1))[1]
    first = next((name for name in named if name >= 0), 0)
    named = [first if name < 0 else name for name in named]
    order = {name: k for k, name in enumerate(dict.fromkeys(named))}
    return [order[name] for name in named]


def _named(weights: WeightUses) -> list[int]:
    """For every forward Op a weight of its layer; -1 for other Ops."""
    graph, joined = weights.graph, _joined(weights)
    named = [-1] * len(graph.ops)
    for op in weights.forward:
        own = _body(weights, op) | weights.mine(op)
        if own:
            named[op] = joined[own.bit_length() - 1]
    for op in reversed(weights.forward):
        if named[op] < 0 and weights.above[op] and _grows(graph, graph.ops[op]):
            named[op] = named[min(weights.readers(op), default=op)]
    for op in weights.forward:
        if named[op] < 0 and weights.above[op]:
            named[op] = named[max(maker for maker in weights.makers(op) if weights.above[maker])]
    for op in reversed(weights.forward):
        if named[op] < 0:
            named[op] = named[min(weights.readers(op), default=op)]
    return named


def _body(weights: WeightUses, op: int) -> int:
    """The weights of the loop that an Op is in."""
    return weights.above[op] & weights.below[op] & weights.looped


def _joined(weights: WeightUses) -> list[int]:
    """For every weight the number of one that stands for its layer."""
    parent = list(range(1 + max(weights.uses.values(), default=-1)))

    def root(weight: int) -> int:
        while parent[weight] != weight:
            weight = parent[weight]
        return weight

    def join(several: int) -> None:
        roots = sorted({root(k) for k in range(several.bit_length()) if several >> k & 1})
        for other in roots[1:]:
            parent[other] = roots[0]

    outside = [0 if _body(weights, op) else weights.mine(op) for op in range(len(weights.above))]
    before, after, trails = list(outside), list(outside), [False] * len(outside)
    for op in weights.forward:
        makers, body = weights.makers(op), _body(weights, op)
        if body:
            enters = weights.mine(op) or weights.graph.ops[op].kind == SIDE_BY_SIDE
            aside = [] if enters else [maker for maker in makers if not trails[maker]]
            join(body | weights.mine(op) | _union(before, aside))
        elif not outside[op]:
            before[op] = _union(before, makers)
        trails[op] = bool(body) or (not outside[op] and any(trails[maker] for maker in makers))
    loops = {root(k) for k in range(len(parent)) if weights.looped >> k & 1}
    free = sum(1 << k for k in range(len(parent)) if root(k) not in loops)
    for op in reversed(weights.forward):
        if not _body(weights, op) and not outside[op]:
            after[op] = _union(after, weights.readers(op))
            if weights.attends(op):
                join((before[op] | after[op]) & free)
    return [root(weight) for weight in range(len(parent))]


def _makes_constants(kind: str) -> bool:
    """Whether only sizes of what is read matter."""
    name = kind.split(".")[1]
    return name.startswith("new_") or name.endswith("_like")


def _grows(graph: Graph, op: Op) -> bool:
    """Whether an Op makes more bytes than it reads."""
    made, read = (sum(graph.values[v].nbytes for v in vs) for vs in (op.outputs, op.inputs))
    return made > read
