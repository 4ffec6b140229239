"""Ops that are computed term by term: linear ones whose inputs are partial sums.

Data parallelism leaves the gradient of a weight that is used twice as two partial sums which are
then added. Reducing both and adding the results moves twice the bytes of adding first and reducing
once. So an uncut linear Op, there on every device that holds a term of its inputs, is computed on
those terms where they are, and its result is partial like them. It is for lowering to see: the
Choice says the same either way.
"""

from __future__ import annotations

from apportion.graph import Graph, Op, Ref
from apportion.interval import full
from apportion.splits import Space, Split
from apportion.strategy import Strategy
from apportion.tdl import lookup

LINEAR = frozenset(
    f"aten.{name}"
    for name in (
        "neg.default",
        "clone.default",
        "mul.Scalar",
        "div.Scalar",
        "add.Tensor",
        "sub.Tensor",
    )
)

Devices = tuple[int, ...]


def termwise(space: Space, strategy: Strategy, splits: list[Split]) -> dict[int, Devices]:
    """The Ops to compute term by term, each with the device of every term."""
    graph = space.graph
    kept = {after for _, after in graph.state} | {graph.loss}
    found: dict[int, Devices] = {}
    at: dict[int, Devices] = {}
    for index, op in enumerate(graph.ops):
        devices = _shared_terms(graph, op, strategy, index, at)
        if devices is not None:
            found[index] = devices
            at |= dict.fromkeys(op.outputs, devices)
        elif not kept.intersection(op.outputs):
            at |= _left_terms(space, op, strategy, splits[index], index)
    return _all_or_none(graph, found, at)


def _left_terms(
    space: Space, op: Op, strategy: Strategy, split: Split, index: int
) -> dict[int, Devices]:
    """The Values that an Op leaves as whole terms, one on each of several devices."""
    choice = strategy.choices[index]
    found: dict[int, Devices] = {}
    for position, value in enumerate(op.outputs):
        whole = full(space.factors(value))
        terms = [part.terms[position] for part in split.parts]
        if (
            split.reducers[position] == "sum"
            and value not in strategy.layouts
            and choice.replicas == 1
            and sorted(terms) == list(range(split.terms[position]))
            and all(part.outputs[position] == whole for part in split.parts)
            and len(set(choice.devices)) == len(terms) > 1
        ):
            by_term = dict(zip(terms, choice.devices, strict=True))
            found[value] = tuple(by_term[t] for t in range(len(terms)))
    return found


def _shared_terms(
    graph: Graph, op: Op, strategy: Strategy, index: int, at: dict[int, Devices]
) -> Devices | None:
    """The devices of the terms that all inputs of a linear Op have in common."""
    choice = strategy.choices[index]
    homes = {at.get(v) for v in op.inputs}
    if not _linear(op) or choice.count != 1 or len(homes) != 1:
        return None
    (devices,) = homes
    if devices is None or set(devices) != set(choice.devices):
        return None
    if any(v in strategy.layouts for v in op.outputs):
        return None
    return devices


def _linear(op: Op) -> bool:
    description = lookup(op.kind)
    if description is None:
        return False
    if op.kind in ("aten.add.Tensor", "aten.sub.Tensor"):
        return isinstance(op.args[0], Ref) and isinstance(op.args[1], Ref)
    return op.kind in LINEAR or description.alias


def _all_or_none(
    graph: Graph, found: dict[int, Devices], at: dict[int, Devices]
) -> dict[int, Devices]:
    """A Value is reduced at once if one of its readers needs it whole: then none reads its
    terms."""
    changed = True
    while changed:
        changed = False
        for index in list(found):
            op = graph.ops[index]
            if any(
                at.get(v) != found[index] or any(r not in found for r in graph.consumers[v])
                for v in op.inputs
            ):
                del found[index]
                for value in op.outputs:
                    at.pop(value, None)
                changed = True
    return found
