"""What DTensor's sharding rules say of one operator call, and whether it holds on slices.

The strategies are taken where the ShardingPropagator takes them, before it chooses one: from a
strategy for one mesh dimension, from a strategy function, or by tracing a decomposition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._decompositions import DecompShardingStrategy
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, TupleStrategy
from torch.distributed.tensor._ops.single_dim_strategy import _expand_single_dim_strategy_to_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from apportion.capture.record import NOT_REALLY_RANDOM
from apportion.graph import refs
from apportion.verify.blind_search import ignored_inputs, outputs_of
from apportion.verify.draws import draw
from apportion.verify.run_split import distance
from apportion.verify.sample import Sample

WHOLE, PARTIAL = "whole", "partial"
RIGHT, WRONG, NOT_RUN = "right", "wrong", "not run"
_SEEDS = 24  # ways to place the inputs of one call before DTensor is asked for its strategies
_DRAWS = (0, 1)  # later ones shuffle, and what is sorted must stay so
_TOLERANCE = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 2e-5}
_PROPAGATOR = DTensor._op_dispatcher.sharding_propagator

Signature = tuple[tuple[str, ...], tuple[str, ...]]
"""Of every input: the dimensions that are cut, `partial`, or `whole`; of every output: the
dimension that is cut, or `whole` (once the parts are combined, if they have to be)."""


def nontrivial(signature: Signature) -> bool:
    """Whether some input or output is cut and no input is partial."""
    return any(h != WHOLE for side in signature for h in side) and PARTIAL not in signature[0]


def unread(signature: Signature, unseen: Sequence[int]) -> Signature:
    """The signature without cuts of inputs whose values the operator does not look at."""
    inputs = tuple(WHOLE if k in unseen else how for k, how in enumerate(signature[0]))
    return inputs, signature[1]


class Seeded(Sample):
    """A call that draws the same random numbers every time."""

    def call(self, tensors: Sequence[torch.Tensor] | None = None) -> Any:
        torch.manual_seed(0)
        return super().call(tensors)


def registered(op: Any) -> str:
    """How DTensor knows an operator: by a rule or handler of its own, by decomposition, or not."""
    tables = (
        _PROPAGATOR.op_strategy_funcs,
        _PROPAGATOR.op_single_dim_strategy_funcs,
        _PROPAGATOR.op_to_rules,
        DTensor._op_dispatcher._custom_op_handlers,
    )
    if any(op in table for table in tables):
        return "rule"
    return "decomposition" if DecompShardingStrategy.has_decomp(op) else ""


def registered_overloads() -> dict[str, int]:
    """The overloads that DTensor has rules for, functional and others."""
    tables = (
        _PROPAGATOR.op_strategy_funcs,
        _PROPAGATOR.op_single_dim_strategy_funcs,
        _PROPAGATOR.op_to_rules,
    )
    found = {op for table in tables for op in table}
    return {"total": len(found), "mutable": sum(op._schema.is_mutable for op in found)}


def meshes() -> dict[int, DeviceMesh]:
    """A mesh of two devices, and one of a single device, where no size is uneven."""
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    return {n: DeviceMesh("cpu", list(range(n)), _init_backend=False, _rank=0) for n in (1, 2)}


@dataclass(frozen=True, eq=False)
class Asked:
    """DTensor's strategies for one call on one mesh. `flat` is the number of the tensor of every
    tensor argument, in order."""

    sample: Sample
    mesh: DeviceMesh
    flat: tuple[int, ...]

    @cached_property
    def outputs(self) -> list[torch.Tensor]:
        return outputs_of(self.sample.call())

    def rules(self) -> dict[Signature, tuple[tuple[Placement, ...], tuple[Placement | None, ...]]]:
        """One pair of placements for every distinct signature; raises where DTensor does."""
        found: dict[Signature, Any] = {}
        failure: Exception | None = None
        answered = False
        for seed in self._seeds():
            try:
                strategy = self._strategy(seed)
            except Exception as error:
                failure = failure or error
                continue
            answered = True
            for reads, leaves in self._placements(strategy):
                if not self._too_short(reads):
                    found.setdefault(self._signature(reads, leaves), (reads, leaves))
        if not answered:
            raise failure or NotImplementedError("no input can be placed")
        return found

    def _too_short(self, reads: Sequence[Placement]) -> bool:
        """Whether an input would be cut along a dimension of length 0 or 1."""
        tensors = (self.sample.tensors[k] for k in self.flat)
        return any(
            hasattr(p, "dim") and t.shape[p.dim] < 2 for p, t in zip(reads, tensors, strict=True)
        )

    def _seeds(self) -> Iterator[tuple[Placement, ...]]:
        """Placements of the inputs: what a strategy offers can depend on them."""
        tensors = [self.sample.tensors[k] for k in self.flat]
        whole: list[Placement] = [Replicate() for _ in tensors]
        seeds: list[tuple[Placement, ...]] = []
        for d in range(max((t.dim() for t in tensors), default=0)):
            seeds.append(tuple(_shard(t, d) for t in tensors))
        if registered(self.sample.target) == "decomposition":  # tries all dimensions by itself
            cut = (seed for seed in seeds if any(isinstance(p, Shard) for p in seed))
            yield next(cut, tuple(whole))
            return
        seeds += [
            (*whole[:k], _shard(t, d), *whole[k + 1 :])
            for k, t in enumerate(tensors)
            for d in range(t.dim())
        ]
        yield tuple(whole)
        yield tuple(Partial("sum") for _ in tensors)
        yield from list(dict.fromkeys(seeds))[:_SEEDS]

    def _strategy(self, seed: Sequence[Placement]) -> Any:
        """As the ShardingPropagator gets it, before it chooses."""
        op: Any = self.sample.target
        schema = self._schema(seed)
        single = _PROPAGATOR.op_single_dim_strategy_funcs.get(op)
        if single is not None:
            meta = _PROPAGATOR._propagate_tensor_meta_non_cached(schema)
            wrapped = _PROPAGATOR._wrap_with_op_strategy(schema)
            expand = _expand_single_dim_strategy_to_mesh(self.mesh, wrapped, single, meta)
            return expand(op, wrapped.args_meta, wrapped.kwargs_meta)
        if op in _PROPAGATOR.op_strategy_funcs:
            return _PROPAGATOR.op_strategy_funcs[op](_PROPAGATOR._wrap_with_op_strategy(schema))
        if not DecompShardingStrategy.has_decomp(op):
            raise NotImplementedError("no strategy is registered")
        _PROPAGATOR.decomp_strategy.ensure_schema_info(op)
        found = _PROPAGATOR.decomp_strategy.propagate_strategy(self._schema(seed))
        if found is None:
            raise NotImplementedError("the decomposition has operators without strategies")
        return found

    def _schema(self, seed: Sequence[Placement]) -> OpSchema:
        op: Any = self.sample.target
        placed = iter(seed)

        def put(item: Any) -> Any:
            if isinstance(item, list | tuple):
                return [put(x) for x in item]
            numbers = list(refs(item))
            return self._spec(numbers[0], next(placed)) if numbers else item

        args = tuple(put(a) for a in self.sample.args)
        kwargs = {k: put(v) for k, v in self.sample.kwargs.items()}
        info = _PROPAGATOR.op_to_schema_info.get(op)
        info = info or _PROPAGATOR.op_to_schema_info_for_single_dim_strategy.get(op)
        return OpSchema(op, args, kwargs, info)

    def _spec(self, number: int, placement: Placement) -> DTensorSpec:
        tensor = self.sample.tensors[number]
        meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
        return DTensorSpec(self.mesh, (placement,), tensor_meta=meta)

    def _placements(
        self, strategy: Any
    ) -> Iterator[tuple[tuple[Placement, ...], tuple[Placement | None, ...]]]:
        outputs = self.outputs
        if isinstance(strategy, OpStrategy):
            for spec in strategy.strategies:
                reads, leaves = _of(spec, len(self.flat), len(outputs))
                if len(reads) == len(self.flat) and len(leaves) == len(outputs):
                    yield reads, leaves
        elif isinstance(strategy, TupleStrategy):  # of lists: each element for itself
            for position, child in enumerate(strategy.children):
                mine = self._element(position)
                for spec in child.strategies if isinstance(child, OpStrategy) else ():
                    reads, (leaves, *_) = _of(spec, len(mine), 1)
                    if len(reads) == len(mine) and position < len(outputs):
                        every: list[Placement] = [Replicate() for _ in self.flat]
                        for k, placement in zip(mine, reads, strict=True):
                            every[k] = placement
                        left: list[Placement | None] = [Replicate() for _ in outputs]
                        left[position] = leaves
                        yield tuple(every), tuple(left)

    def _element(self, position: int) -> list[int]:
        """The places in `flat` of one element of every list, and of what is not in a list."""
        found, place = [], 0
        for arg in (*self.sample.args, *self.sample.kwargs.values()):
            count = len(_references(arg))
            if count:
                found.append(place + (position if isinstance(arg, list | tuple) else 0))
            place += count
        return [place for place in found if place < len(self.flat)]

    def _signature(
        self, reads: Sequence[Placement], leaves: Sequence[Placement | None]
    ) -> Signature:
        """An argument that occurs twice is one input, cut along all dimensions of both."""
        dims: list[set[str]] = [set() for _ in self.sample.tensors]
        for k, placement in zip(self.flat, reads, strict=True):
            how = PARTIAL if isinstance(placement, Partial) else None
            dims[k].add(how or _how(placement, self.sample.tensors[k]))
        inputs = tuple(
            PARTIAL if PARTIAL in names else "x".join(sorted(names - {WHOLE})) or WHOLE
            for names in dims
        )
        return inputs, tuple(_how(p, t) for p, t in zip(leaves, self.outputs, strict=True))


def _references(arg: Any) -> list[int]:
    """The tensors of an argument, repeated ones too."""
    if isinstance(arg, list | tuple):
        return [k for item in arg for k in _references(item)]
    return list(refs(arg))


def _shard(tensor: torch.Tensor, d: int) -> Placement:
    return Shard(d) if d < tensor.dim() and tensor.shape[d] >= 2 else Replicate()


def _of(spec: OpSpec, inputs: int, outputs: int) -> tuple[Any, Any]:
    """The placements that one strategy reads and leaves."""
    made = spec.output_specs
    leaves = [made] * outputs if isinstance(made, DTensorSpec) else [*(made or ())]
    leaves = leaves if len(leaves) == outputs else [s for s in leaves if s is not None]
    reads = [spec.output_spec] * inputs if spec.input_specs is None else [*spec.input_specs]
    return (
        tuple(s.placements[0] for s in reads),
        tuple(None if s is None else s.placements[0] for s in leaves),
    )


def _how(placement: Placement | None, tensor: torch.Tensor) -> str:
    d = getattr(placement, "dim", None)  # of a Shard, also of a strided one
    if d is None or tensor.dim() == 0 or tensor.shape[d] < 2:
        return WHOLE
    return str(d % tensor.dim())


def ask(sample: Sample, mesh: dict[int, DeviceMesh]) -> dict[str, Any]:
    """DTensor's splits of a call on two devices, and whether they hold on slices; those it would
    have if all sizes were even; as JSON."""
    flat = tuple(k for arg in (*sample.args, *sample.kwargs.values()) for k in _references(arg))
    seeded = Seeded(sample.target, sample.args, sample.kwargs, sample.tensors)
    unseen = sorted(ignored_inputs(seeded, sample.tensors))
    try:
        rules = {n: Asked(sample, mesh[n], flat).rules() for n in (2, 1)}
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return {"failure": text.splitlines()[0][:200], "unread": unseen}
    mine = {unread(s, unseen): p for s, p in rules[2].items() if nontrivial(unread(s, unseen))}
    held = {s: _holds(sample, flat, *placements) for s, placements in mine.items()}
    ruled = {unread(s, unseen) for n in rules for s in rules[n]}
    return {
        "failure": "",
        "unread": unseen,
        "splits": sorted(mine),
        "any_size": sorted(filter(nontrivial, ruled)),
        "linear": sum(PARTIAL in s[0] for s in rules[2]),
        "held": dict(Counter(held.values())),
        "wrong": sorted(s for s, how in held.items() if how == WRONG),
    }


def _holds(sample: Sample, flat: Sequence[int], reads: Any, leaves: Any) -> str:
    """Runs the operator on slices of its inputs; not where DTensor changes arguments or has a
    placement of its own, where an argument occurs twice, or where results are random."""
    op: Any = sample.target
    adapted = (
        _PROPAGATOR.op_to_shape_and_stride_idx,
        getattr(_PROPAGATOR, "op_to_scalar_shape_adjuster", {}),
        _PROPAGATOR.squeeze_op_to_dims_variant,
        DTensor._op_dispatcher._custom_op_handlers,
    )
    plain = all(type(p) in (Replicate, Shard, Partial) for p in (*reads, *leaves))
    random = torch.Tag.nondeterministic_seeded in op.tags and op not in NOT_REALLY_RANDOM
    random = random or "empty" in str(op)  # unspecified values
    if random or not plain or len(set(flat)) < len(flat) or any(op in table for table in adapted):
        return NOT_RUN
    for seed in _DRAWS:
        tensors = draw(sample, seed)
        whole = outputs_of(sample.call(tensors))
        halves = []
        for half in (0, 1):
            pieces = list(tensors)
            for k, placement in zip(flat, reads, strict=True):
                pieces[k] = _piece(tensors[k], placement, half)
            try:
                halves.append(outputs_of(sample.call(pieces)))
            except Exception:
                return WRONG
        if any(not _equal(*four) for four in zip(leaves, whole, *halves, strict=True)):
            return WRONG
    return RIGHT


def _piece(tensor: torch.Tensor, placement: Placement, half: int) -> torch.Tensor:
    if not isinstance(placement, Shard) or tensor.shape[placement.dim] < 2:
        return tensor
    return tensor.chunk(2, placement.dim)[half].clone()


_REDUCERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": lambda a, b: (a + b) / 2,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def _equal(placement: Any, whole: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    try:
        if isinstance(placement, Partial):
            made = [_REDUCERS[placement.reduce_op](a, b).to(whole.dtype)]
        elif isinstance(placement, Shard) and whole.shape[placement.dim] >= 2:
            made = [torch.cat([a, b], placement.dim)]
        else:
            made = [a, b]
    except RuntimeError:
        return False
    limit = _TOLERANCE.get(whole.dtype, 1e-2)
    return all(m.shape == whole.shape and distance(m, whole) <= limit for m in made)
