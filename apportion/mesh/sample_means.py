"""sample_means: whether ranks that each have some of the samples train as one device does.

Part of the room mesh. A Plan comes in; NotExpressible goes out where its program would not.

Under FSDP2 and DDP each rank runs the model on its own samples, and gradients are averaged over the
ranks. That is the single device's result if each sample goes through the model by itself and the
loss is a mean over samples, of which every rank has as many. A Plan may do more: operators that mix
samples (batch statistics) or sum over them are exchanged as they must be. These are refused here,
by name.
"""

from __future__ import annotations

from apportion.graph import BUFFER, FORWARD, INPUT, Graph, Op
from apportion.mesh.layout_of_plan import NotExpressible
from apportion.plan import Plan
from apportion.search import sample_classes
from apportion.split import AxisEffects, Space

MEANS = ("aten.mean.default", "aten.mean.dim")
MEAN_LOSSES = {
    "aten.mse_loss.default": 2,
    "aten.smooth_l1_loss.default": 2,
    "aten.huber_loss.default": 2,
}  # and which argument says how they reduce
MEAN = 1  # torch's number for reduction="mean"
ALIKE = (
    "aten.view.default", "aten.clone.default", "aten.detach.default", "aten._to_copy.default",
    "aten.alias.default", "aten.squeeze.default", "aten.stack.default", "aten.cat.default",
    "aten.add.Tensor", "aten.sub.Tensor", "aten.add.Scalar", "aten.neg.default",
)  # fmt: skip
SCALED = ("aten.mul.Tensor", "aten.div.Tensor", "aten.mul.Scalar", "aten.div.Scalar")
NLL = "aten.nll_loss_forward.default"
WHY = "ranks that each have their own samples would not train as one device does"


def check_sample_means(plan: Plan, ranks: int) -> None:
    """Raises NotExpressible, naming the operator, unless the mean of the ranks' losses is the loss
    of the step."""
    space = plan.space
    graph, classes = space.graph, sample_classes(space)
    _check_even(space, classes, ranks)
    mixed = _from_samples(graph, space, classes)
    averaged = _loss_ops(graph, mixed)
    effects = AxisEffects(space)
    for index, op in enumerate(graph.ops):
        if op.phase != FORWARD or mixed.isdisjoint(op.outputs) or index in averaged:
            continue
        if not _by_sample(effects, index, classes):
            raise NotExpressible(f"operator {_named(op)} mixes samples: {WHY}")
    for before, after in graph.state:
        made = graph.producer[after]
        if graph.values[before].role == BUFFER and made is not None and after in mixed:
            raise NotExpressible(
                f"operator {_named(graph.ops[made[0]])} makes the buffer "
                f"{graph.values[before].name!r} of all samples: {WHY}"
            )


def _check_even(space: Space, classes: frozenset[int], ranks: int) -> None:
    for index, op in enumerate(space.graph.ops):
        for axis in space.axes(index) if op.phase == FORWARD else ():
            if axis.group in classes and axis.extent % ranks:
                raise NotExpressible(
                    f"operator {_named(op)} has {axis.extent} samples, which {ranks} ranks cannot "
                    "share evenly: the mean of their means is not the mean"
                )


def _from_samples(graph: Graph, space: Space, classes: frozenset[int]) -> set[int]:
    """Values that depend on samples."""
    found = {
        v
        for v, value in enumerate(graph.values)
        if value.role == INPUT and not classes.isdisjoint(space.atoms.value_classes[v])
    }
    for op in graph.ops:
        if not found.isdisjoint(op.inputs):
            found.update(op.outputs)
    return found


def _by_sample(effects: AxisEffects, index: int, classes: frozenset[int]) -> bool:
    """Whether an Op does the same to each sample, so that its samples can be cut and nothing
    else follows."""
    for position, axis in enumerate(effects.space.axes(index)):
        if axis.group in classes:
            effect = effects.of(index, position)
            if effect is not None and min(effect.outputs) >= 0 and not any(effect.halos):
                return True
    return False


def _loss_ops(graph: Graph, mixed: set[int]) -> set[int]:
    """The Ops that make the loss of means over samples; raises NotExpressible for another one."""
    if graph.loss is None:
        raise NotExpressible(f"the step has no loss that could be averaged: {WHY}")
    found: set[int] = set()
    waiting = [graph.loss]
    while waiting:
        value = waiting.pop()
        made = graph.producer[value]
        if value not in mixed or made is None or made[0] in found:
            continue
        found.add(made[0])
        waiting += _terms(graph, made[0], mixed, found)
    return found


def _terms(graph: Graph, index: int, mixed: set[int], found: set[int]) -> list[int]:
    """What an Op of the loss takes the mean of, or passes on; nothing if it is a mean itself."""
    op = graph.ops[index]
    if op.kind in MEANS or op.args[MEAN_LOSSES.get(op.kind, 0)] == MEAN:
        return []
    several = [value for value in op.inputs if value in mixed]
    if op.kind == "aten.div.Tensor" and len(several) == 2:
        makers = [graph.producer[value] for value in op.inputs]
        if makers[0] and makers[1] and makers[0][0] == makers[1][0]:
            loss = graph.ops[makers[0][0]]
            if loss.kind == NLL and loss.args[2] is None:
                found.add(makers[0][0])
                return []
            op = loss
    elif op.kind in ALIKE or (op.kind in SCALED and len(several) == 1 and op.inputs[0] in mixed):
        return several
    raise NotExpressible(
        f"operator {_named(op)} makes a loss that is not known to be a mean over samples: {WHY}"
    )


def _named(op: Op) -> str:
    where = ", ".join(filter(None, (op.module, op.line)))
    return f"{op.name!r} ({op.kind}{', ' + where if where else ''})"
