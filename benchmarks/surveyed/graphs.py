"""Graph networks: PyTorch Geometric's layers and models on one small graph, the same in every step;
those whose shapes depend on it say so (`capture(..., fixed=[...])`)."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surveyed.registry import PROGRAM, Registry, adamw

REGISTRY = Registry(PROGRAM, "torch_geometric")
NODES, EDGES = 12, 30


def edges() -> Tensor:
    """Every node has some; drawn without the seed of the batch."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(NODES, (2, EDGES), generator=generator)


def _node_step(model: nn.Module, batch: Any) -> Tensor:
    x, edge_index, y = batch
    return F.cross_entropy(model(x, edge_index), y)


def _node_batch() -> Any:
    return torch.randn(NODES, 8), edges(), torch.randint(4, (NODES,))


class TwoLayers(nn.Module):
    """Two layers of one kind, as in every example of PyTorch Geometric."""

    def __init__(self, kind: Any, **arguments: Any) -> None:
        super().__init__()
        self.first, self.second = kind(8, 16, **arguments), kind(16, 4, **arguments)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(F.relu(self.first(x, edge_index)), 0.5, self.training)
        return self.second(x, edge_index)


LAYERS: dict[str, dict[str, Any]] = {
    "GCNConv": {}, "SAGEConv": {}, "GATConv": {}, "GATv2Conv": {}, "GraphConv": {},
    "TransformerConv": {}, "TAGConv": {"K": 2}, "ChebConv": {"K": 2}, "SGConv": {"K": 2},
    "ARMAConv": {}, "LEConv": {}, "ResGatedGraphConv": {}, "ClusterGCNConv": {}, "FeaStConv": {},
    "MFConv": {}, "FiLMConv": {}, "GENConv": {}, "SuperGATConv": {"neg_sample_ratio": 0.5},
}  # fmt: skip


SHAPED_BY_EDGES = ("GCNConv", "GATv2Conv", "ClusterGCNConv", "SuperGATConv")  # without self-loops


def _layer(name: str, arguments: dict[str, Any]) -> Any:
    def make() -> Any:
        kind = getattr(importlib.import_module("torch_geometric.nn"), name)
        model = TwoLayers(kind, **arguments)
        fixed = ["batch.1"] if name in SHAPED_BY_EDGES else []
        return _node_step, model, adamw(model), _node_batch(), None, fixed

    return make


for _name, _arguments in LAYERS.items():
    REGISTRY.add(_name, _layer(_name, _arguments))


def _basic(name: str) -> Any:
    def make() -> Any:
        kind = getattr(importlib.import_module("torch_geometric.nn"), name)
        model = kind(8, hidden_channels=16, num_layers=2, out_channels=4, dropout=0.2)
        return _node_step, model, adamw(model), _node_batch()

    return make


for _name in ("GIN", "PNA", "EdgeCNN"):
    if _name != "PNA":
        REGISTRY.add(_name, _basic(_name))


@REGISTRY()
def gin_graph_classifier() -> Any:
    from torch_geometric.nn import GINConv, global_add_pool

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GINConv(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU()))
            self.out = nn.Linear(16, 3)

        def forward(self, x: Tensor, edge_index: Tensor, graph: Tensor) -> Tensor:
            return self.out(global_add_pool(self.conv(x, edge_index), graph, size=3))

    def step(model: nn.Module, batch: Any) -> Tensor:
        x, edge_index, graph, y = batch
        return F.cross_entropy(model(x, edge_index, graph), y)

    model = Net()
    batch = (torch.randn(NODES, 8), edges(), torch.arange(NODES) // 4, torch.randint(3, (3,)))
    return step, model, adamw(model), batch


@REGISTRY()
def gcn_on_data_object() -> Any:
    from torch_geometric.data import Data
    from torch_geometric.nn import GCN

    model = GCN(8, hidden_channels=16, num_layers=2, out_channels=4)

    def step(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch.x, batch.edge_index), batch.y)

    x, edge_index, y = _node_batch()
    batch = Data(x=x, edge_index=edge_index, y=y)
    return step, model, adamw(model), batch, None, ["batch._store.edge_index"]


@REGISTRY()
def gcn_with_mask() -> Any:
    from torch_geometric.nn import GCN

    model = GCN(8, hidden_channels=16, num_layers=2, out_channels=4)

    def step(model: nn.Module, batch: Any) -> Tensor:
        x, edge_index, y, train = batch
        made = model(x, edge_index)
        return F.cross_entropy(made[train], y[train])

    batch = (*_node_batch(), torch.arange(NODES) < 8)
    return step, model, adamw(model), batch, None, ["batch.1", "batch.3"]


@REGISTRY()
def rgcn() -> Any:
    from torch_geometric.nn import FastRGCNConv

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = FastRGCNConv(8, 4, num_relations=3)

        def forward(self, x: Tensor, edge_index: Tensor, kinds: Tensor) -> Tensor:
            return self.conv(x, edge_index, kinds)

    def step(model: nn.Module, batch: Any) -> Tensor:
        x, edge_index, kinds, y = batch
        return F.cross_entropy(model(x, edge_index, kinds), y)

    model = Net()
    batch = (torch.randn(NODES, 8), edges(), torch.arange(EDGES) % 3, torch.randint(4, (NODES,)))
    return step, model, adamw(model), batch


@REGISTRY()
def graph_autoencoder() -> Any:
    from torch_geometric.nn import VGAE, GCNConv

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = GCNConv(8, 16)
            self.mean, self.log_std = GCNConv(16, 4), GCNConv(16, 4)

        def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
            x = self.shared(x, edge_index).relu()
            return self.mean(x, edge_index), self.log_std(x, edge_index)

    def step(model: Any, batch: Any) -> Tensor:
        x, edge_index, others = batch
        z = model.encode(x, edge_index)
        return model.recon_loss(z, edge_index, others) + model.kl_loss() / NODES

    model = VGAE(Encoder())
    batch = (torch.randn(NODES, 8), edges(), edges().flip(0))
    return step, model, adamw(model), batch, None, ["batch.1"]


@REGISTRY()
def schnet_like() -> Any:
    from torch_geometric.nn.models.schnet import GaussianSmearing, InteractionBlock

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kinds = nn.Embedding(10, 16)
            self.smear = GaussianSmearing(0.0, 5.0, 8)
            self.block = InteractionBlock(16, 8, 16, 5.0)
            self.out = nn.Linear(16, 1)

        def forward(self, kinds: Tensor, places: Tensor, edge_index: Tensor) -> Tensor:
            row, col = edge_index
            distance = (places[row] - places[col] + 0.1).norm(dim=-1)
            x = self.kinds(kinds)
            x = x + self.block(x, edge_index, distance, self.smear(distance))
            return self.out(x).sum()

    def step(model: nn.Module, batch: Any) -> Tensor:
        *molecule, energy = batch
        return F.mse_loss(model(*molecule), energy)

    model = Net()
    batch = (torch.randint(10, (NODES,)), torch.randn(NODES, 3), edges(), torch.randn(()))
    return step, model, adamw(model), batch


@REGISTRY()
def lightgcn() -> Any:
    from torch_geometric.nn import LightGCN

    model = LightGCN(num_nodes=NODES, embedding_dim=8, num_layers=2)

    def step(model: Any, batch: Any) -> Tensor:
        edge_index, good, bad = batch
        ranks = model(edge_index, torch.cat([good, bad], dim=1))
        better, worse = ranks.chunk(2)
        return model.recommendation_loss(better, worse, node_id=good[0])

    generator = torch.Generator().manual_seed(3)
    good, bad = torch.randint(NODES, (2, 2, 6), generator=generator)
    return step, model, adamw(model), (edges(), good, bad)


@REGISTRY()
def gps_transformer() -> Any:
    from torch_geometric.nn import GPSConv, SAGEConv

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GPSConv(8, SAGEConv(8, 8), heads=2, dropout=0.1)
            self.out = nn.Linear(8, 4)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.out(self.conv(x, edge_index))

    model = Net()
    return _node_step, model, adamw(model), _node_batch()


@REGISTRY()
def topk_pool() -> Any:
    from torch_geometric.nn import TopKPooling

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool, self.out = TopKPooling(8, ratio=0.5), nn.Linear(8, 1)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            made, *_ = self.pool(x, edge_index)
            return self.out(made).mean()

    def step(model: nn.Module, batch: Any) -> Tensor:
        x, edge_index, _ = batch
        return model(x, edge_index).square()

    model = Net()
    return step, model, adamw(model), _node_batch()
