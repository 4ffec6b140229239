"""What PyTorch itself offers for the steps of the zoo, set up as well as we know how.

    train = CONTENDERS["ddp"]("gpt2:tiny,dropout=0", seed=0)      in every rank of a process group
    loss = train()                                                one training step

    ddp, ddp-view       DistributedDataParallel; with gradients that are views of its buckets
    fsdp2, fsdp2-keep   fully_shard of every block and of the root; without resharding after forward
    tensor              parallelize_module with DTensor, as Megatron-LM cuts attention, feed-forward
                        layers, vocabulary and loss

Optimizers are fused, but for SGD on DTensors, which torch has no fused kernel for: foreach. Data
parallel ranks hold their samples before the step begins. Batch norm takes its statistics of each
rank's own samples, as it does under DDP and FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from apportion import zoo
from apportion.zoo import gpt2, mlp
from apportion.zoo.wresnet import Bottleneck

Train = Callable[[], Tensor]


class Unsuitable(ValueError):
    """This way of dividing is not for this model."""


def fused(made: torch.optim.Optimizer, names: dict[int, str], model: nn.Module) -> Any:
    """The optimizer with fused kernels, for the parameters that `model` has now; `names` are those
    of the parameters that it was made for, by identity. DTensors are in groups of their own, as
    fused kernels want them."""
    now = dict(model.named_parameters())
    groups = []
    for group in made.param_groups:
        options = {k: v for k, v in group.items() if k not in ("params", "fused", "foreach")}
        kinds: dict[type, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            new = now[names[id(parameter)]]
            kinds.setdefault(type(new.data), []).append(new)
        groups += [{**options, "params": some} for some in kinds.values()]
    lacking = isinstance(made, torch.optim.SGD) and any(
        isinstance(p, DTensor) for group in groups for p in group["params"]
    )
    return type(made)(groups, **{"foreach" if lacking else "fused": True})


def loaded(spec: str, seed: int) -> tuple[zoo.Loaded, dict[int, str]]:
    """A model of the zoo, and the names of its parameters by identity."""
    it = zoo.load(spec, seed)
    return it, {id(p): name for name, p in it.model.named_parameters()}


def own_samples(batch: Any) -> Any:
    """This rank's share of the first dimension of everything."""
    size, rank = dist.get_world_size(), dist.get_rank()
    return torch.utils._pytree.tree_map(lambda t: t.tensor_split(size)[rank].clone(), batch)


def trainer(
    step: Any, model: nn.Module, optimizer: Any, batch: Any, around: Any = nullcontext
) -> Train:
    """The usual lines; forward and backward within `around()`."""

    def train() -> Tensor:
        optimizer.zero_grad()
        with around():
            loss: Tensor = step(model, batch)
            loss.backward()
        optimizer.step()
        return loss.detach()

    return train


def replicated(spec: str, seed: int, view: bool = False) -> Train:
    """DistributedDataParallel."""
    it, names = loaded(spec, seed)
    optimizer = fused(it.optimizer, names, it.model)
    model = DistributedDataParallel(it.model, gradient_as_bucket_view=view)
    return trainer(it.step, model, optimizer, own_samples(it.batch))


def blocks(model: nn.Module) -> list[nn.Module]:
    """What FSDP2 shards one by one."""
    if isinstance(model, mlp.MLP):
        return list(model.layers)
    return [m for m in model.modules() if isinstance(m, (gpt2.Block, Bottleneck))]


def sharded(spec: str, seed: int, reshard: bool = True) -> Train:
    """FSDP2."""
    it, names = loaded(spec, seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks(it.model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(it.model, mesh=mesh, reshard_after_forward=reshard)
    return trainer(it.step, it.model, fused(it.optimizer, names, it.model), own_samples(it.batch))


def tensor_parallel(spec: str, seed: int) -> Train:
    """DTensor. Raises Unsuitable for models that Megatron-LM has no recipe for."""
    it, names = loaded(spec, seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if isinstance(it.model, mlp.MLP):
        _cut_layers(it.model, mesh)
        around: Any = nullcontext
    elif isinstance(it.model, gpt2.GPT2):
        _cut_gpt2(it.model, mesh)
        around = loss_parallel  # the loss of logits whose vocabulary is cut
    else:
        raise Unsuitable(f"{spec} has no recipe of tensor parallelism")
    optimizer = fused(it.optimizer, names, it.model)
    return trainer(it.step, it.model, optimizer, it.batch, around)


def _cut_layers(model: mlp.MLP, mesh: Any) -> None:
    """Two and two: by columns, then by rows."""
    for index, layer in enumerate(model.layers):
        columns = index % 2 == 0 and index + 1 < len(model.layers)
        rows = index % 2 == 1
        if columns or rows:
            parallelize_module(layer, mesh, ColwiseParallel() if columns else RowwiseParallel())


def _cut_gpt2(model: gpt2.GPT2, mesh: Any) -> None:
    rows, columns = RowwiseParallel, ColwiseParallel
    ranks = mesh.size()
    for block in model.blocks:
        assert isinstance(block, gpt2.Block)
        _regroup(block.attn.qkv, ranks)
        block.attn.heads //= ranks
        block.attn.forward = partial(_attention, block.attn)  # type: ignore[method-assign]
        plan = {"attn.qkv": columns(), "attn.proj": rows(), "mlp.up": columns(), "mlp.proj": rows()}
        parallelize_module(block, mesh, plan)
    parallelize_module(model.tokens, mesh, rows(input_layouts=Replicate()))
    model.head.weight = model.tokens.weight
    whole = columns(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model.head, mesh, whole)
    model.head.weight = model.tokens.weight


def _regroup(qkv: nn.Linear, ranks: int) -> None:
    """Orders the rows so that an even cut gives each rank queries, keys and values of its heads."""
    with torch.no_grad():
        for held in (qkv.weight, qkv.bias):
            held.copy_(torch.cat([p for r in range(ranks) for p in _parts(held, ranks, r)]))


def _parts(held: Tensor, ranks: int, rank: int) -> list[Tensor]:
    return [third.tensor_split(ranks)[rank] for third in held.detach().clone().chunk(3)]


def _attention(self: gpt2.Attention, x: Tensor) -> Tensor:
    """As the zoo's, where `self.heads` of the heads are here."""
    batch, seq, _ = x.shape
    q, k, v = (p.unflatten(2, (self.heads, -1)).transpose(1, 2) for p in self.qkv(x).chunk(3, 2))
    y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
    out: Tensor = self.proj(y.transpose(1, 2).reshape(batch, seq, -1))
    return F.dropout(out, self.dropout, self.training)


CONTENDERS: dict[str, Callable[[str, int], Train]] = {
    "ddp": replicated,
    "ddp-view": partial(replicated, view=True),
    "fsdp2": sharded,
    "fsdp2-keep": partial(sharded, reshard=False),
    "tensor": tensor_parallel,
}
