"""Tabular data, time series and recommenders."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surveyed.registry import PROGRAM, Registry, adamw, classifier, classify, labels, regress

REGISTRY = Registry(PROGRAM)


@REGISTRY("rtdl_revisiting_models")
def tabular_mlp() -> Any:
    from rtdl_revisiting_models import MLP

    return classifier(MLP(d_in=8, d_out=10, n_blocks=2, d_block=16, dropout=0.1), torch.randn(8, 8))


@REGISTRY("rtdl_revisiting_models")
def tabular_resnet() -> Any:
    from rtdl_revisiting_models import ResNet

    model = ResNet(
        d_in=8, d_out=10, n_blocks=2, d_block=16, d_hidden=None, d_hidden_multiplier=2.0,
        dropout1=0.1, dropout2=0.0,
    )  # fmt: skip
    return classifier(model, torch.randn(8, 8))


@REGISTRY("rtdl_revisiting_models")
def ft_transformer_rtdl() -> Any:
    from rtdl_revisiting_models import FTTransformer

    model = FTTransformer(
        n_cont_features=4, cat_cardinalities=[3, 4], d_out=1, n_blocks=2, d_block=16,
        attention_n_heads=2, attention_dropout=0.1, ffn_d_hidden_multiplier=2.0, ffn_dropout=0.1,
        residual_dropout=0.0,
    )  # fmt: skip

    def step(model: nn.Module, batch: Any) -> Tensor:
        numbers, kinds, y = batch
        return F.mse_loss(model(numbers, kinds), y)

    batch = (torch.randn(8, 4), torch.randint(3, (8, 2)), torch.randn(8, 1))
    return step, model, torch.optim.AdamW(model.make_parameter_groups(), lr=1e-3), batch


@REGISTRY("rtdl_num_embeddings")
def periodic_embeddings() -> Any:
    from rtdl_num_embeddings import PeriodicEmbeddings

    model = nn.Sequential(
        PeriodicEmbeddings(4, 8, n_frequencies=6, lite=False), nn.Flatten(), nn.Linear(32, 10)
    )
    return classifier(model, torch.randn(8, 4))


@REGISTRY("rtdl_num_embeddings")
def piecewise_embeddings() -> Any:
    from rtdl_num_embeddings import PiecewiseLinearEmbeddings

    bins = [torch.linspace(-2, 2, 5) for _ in range(4)]
    model = nn.Sequential(
        PiecewiseLinearEmbeddings(bins, 8, activation=True, version="B"), nn.Flatten(),
        nn.Linear(32, 10),
    )  # fmt: skip
    return classifier(model, torch.randn(8, 4))


@REGISTRY("tabm rtdl_num_embeddings")
def tabm_ensemble() -> Any:
    from tabm import TabM

    model = TabM(
        n_num_features=4, cat_cardinalities=[3], d_out=10, k=4, n_blocks=2, d_block=16,
        dropout=0.1, arch_type="tabm", start_scaling_init="random-signs",
    )  # fmt: skip

    def step(model: nn.Module, batch: Any) -> Tensor:
        numbers, kinds, y = batch
        made = model(numbers, kinds)
        return F.cross_entropy(made.flatten(0, 1), y.repeat_interleave(4))

    batch = (torch.randn(8, 4), torch.randint(3, (8, 1)), labels(8))
    return step, model, adamw(model), batch


@REGISTRY("pytorch_tabnet")
def tabnet() -> Any:
    from pytorch_tabnet.tab_network import TabNet

    model = TabNet(
        input_dim=6, output_dim=10, n_d=4, n_a=4, n_steps=2, virtual_batch_size=4,
        group_attention_matrix=torch.eye(6),
    )  # fmt: skip

    def step(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        made, sparsity = model(inputs)
        return F.cross_entropy(made, targets) - 1e-3 * sparsity

    return (
        step,
        model,
        torch.optim.Adam(model.parameters(), lr=2e-2),
        (torch.randn(8, 6), labels(8)),
    )


def _deepctr(name: str) -> Any:
    def make() -> Any:
        from deepctr_torch.inputs import DenseFeat, SparseFeat

        kind = getattr(importlib.import_module("deepctr_torch.models"), name)
        columns = [SparseFeat("user", 10, 4), SparseFeat("item", 10, 4), DenseFeat("age", 1)]
        model = kind(columns, columns, dnn_hidden_units=(16, 8), device="cpu")

        def step(model: nn.Module, batch: Any) -> Tensor:
            inputs, y = batch
            return F.binary_cross_entropy(model(inputs).squeeze(1), y)

        inputs = torch.cat([torch.randint(10, (8, 2)).float(), torch.rand(8, 1)], dim=1)
        return step, model, torch.optim.Adam(model.parameters()), (inputs, torch.rand(8).round())

    return make


for _name in ("DeepFM", "DCN", "xDeepFM", "AutoInt"):
    REGISTRY.add(_name, _deepctr(_name), "deepctr_torch tensorflow")


@REGISTRY("torchfm")
def factorization_machine() -> Any:
    from torchfm.model.dfm import DeepFactorizationMachineModel

    model = DeepFactorizationMachineModel([5, 6, 7], embed_dim=4, mlp_dims=(8,), dropout=0.1)

    def step(model: nn.Module, batch: Any) -> Tensor:
        fields, y = batch
        return F.binary_cross_entropy(model(fields), y)

    batch = (torch.randint(5, (8, 3)), torch.rand(8).round())
    return step, model, torch.optim.Adam(model.parameters(), weight_decay=1e-6), batch


@REGISTRY("torchfm")
def attentional_fm() -> Any:
    from torchfm.model.afm import AttentionalFactorizationMachineModel

    model = AttentionalFactorizationMachineModel(
        [5, 6, 7], embed_dim=4, attn_size=4, dropouts=(0.1, 0.1)
    )

    def step(model: nn.Module, batch: Any) -> Tensor:
        fields, y = batch
        return F.binary_cross_entropy(model(fields), y)

    batch = (torch.randint(5, (8, 3)), torch.rand(8).round())
    return step, model, torch.optim.Adam(model.parameters()), batch


@REGISTRY("torch_rechub")
def rechub_din_block() -> Any:
    from torch_rechub.basic.layers import MLP, CrossNetwork

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cross, self.deep = CrossNetwork(8, 2), MLP(8, dims=[16, 8], output_layer=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.deep(self.cross(x))

    model = Net()
    return regress, model, adamw(model), (torch.randn(8, 8), torch.randn(8, 1))


@REGISTRY("pytorch_widedeep")
def widedeep() -> Any:
    from pytorch_widedeep.models import TabMlp, Wide, WideDeep

    columns = {"a": 0, "b": 1, "x": 2}
    deep = TabMlp(
        column_idx=columns, cat_embed_input=[("a", 5, 4), ("b", 5, 4)], continuous_cols=["x"],
        mlp_hidden_dims=[8],
    )  # fmt: skip
    model = WideDeep(wide=Wide(10, 1), deeptabular=deep)

    def step(model: nn.Module, batch: Any) -> Tensor:
        wide, table, y = batch
        return F.mse_loss(model({"wide": wide, "deeptabular": table}), y)

    table = torch.cat([torch.randint(1, 5, (8, 2)).float(), torch.randn(8, 1)], 1)
    return (
        step,
        model,
        adamw(model),
        (torch.randint(1, 10, (8, 2)).float(), table, torch.randn(8, 1)),
    )


@REGISTRY("nbeats_pytorch")
def nbeats() -> Any:
    from nbeats_pytorch.model import NBeatsNet

    model = NBeatsNet(
        forecast_length=4, backcast_length=8, nb_blocks_per_stack=1, hidden_layer_units=16,
        thetas_dim=(4, 4),
    )  # fmt: skip

    def step(model: nn.Module, batch: Any) -> Tensor:
        past, future = batch
        _, made = model(past)
        return F.mse_loss(made, future)

    trained = torch.optim.Adam(model.parameters())
    return step, model, trained, (torch.randn(8, 8), torch.randn(8, 4))


@REGISTRY("pytorch_forecasting sklearn pandas lightning")
def nhits_block() -> Any:
    from pytorch_forecasting.models.nhits.sub_modules import MLP

    model = MLP(in_features=8, out_features=4, hidden_size=[16], activation="ReLU", dropout=0.1)
    return regress, model, adamw(model), (torch.randn(8, 8), torch.randn(8, 4))


@REGISTRY("pytorch_forecasting sklearn pandas lightning")
def tft_blocks() -> Any:
    module = "pytorch_forecasting.models.temporal_fusion_transformer.sub_modules"
    blocks = importlib.import_module(module)
    model = nn.Sequential(
        blocks.GatedResidualNetwork(8, 16, 8, dropout=0.1), blocks.GatedLinearUnit(8, 4)
    )
    return regress, model, adamw(model), (torch.randn(8, 8), torch.randn(8, 4))


def _gluon(name: str, **arguments: Any) -> Any:
    def make() -> Any:
        module = importlib.import_module("gluonts.torch.model." + name)
        kinds = {"d_linear": "DLinearModel", "simple_feedforward": "SimpleFeedForwardModel"}
        model = getattr(module, kinds[name])(prediction_length=4, context_length=8, **arguments)

        def step(model: nn.Module, batch: Any) -> Tensor:
            past, future = batch
            made, loc, scale = model(past)
            target = model.distr_output.distribution(made, loc=loc, scale=scale)
            return -target.log_prob(future).mean()

        return step, model, adamw(model), (torch.randn(8, 8), torch.randn(8, 4))

    return make


REGISTRY.add(
    "simple_feedforward", _gluon("simple_feedforward"), "gluonts pandas lightning lazy_loader"
)


@REGISTRY("neuralforecast pandas sklearn utilsforecast")
def neuralforecast_tsmixer_block() -> Any:
    from neuralforecast.models.tsmixer import MixingLayer

    model = MixingLayer(n_series=3, input_size=8, dropout=0.1, ff_dim=8)
    return regress, model, adamw(model), (torch.randn(4, 8, 3), torch.randn(4, 8, 3))


@REGISTRY("tsai fastai pandas sklearn")
def inception_time() -> Any:
    from tsai.models.InceptionTime import InceptionTime

    return classifier(InceptionTime(3, 10, nf=4), torch.randn(4, 3, 16))


@REGISTRY("stable_baselines3 gymnasium pandas")
def ppo_update() -> Any:
    import numpy as np
    from gymnasium import spaces
    from stable_baselines3.common.policies import ActorCriticPolicy

    model = ActorCriticPolicy(
        spaces.Box(-1, 1, (4,), dtype=np.float32), spaces.Discrete(3), lambda _: 3e-4,
        net_arch=[16],
    )  # fmt: skip

    def step(model: Any, batch: Any) -> Tensor:
        seen, actions, old, advantages, returns = batch
        values, log_prob, entropy = model.evaluate_actions(seen, actions)
        ratio = torch.exp(log_prob - old)
        clipped = torch.clamp(ratio, 0.8, 1.2)
        gain = torch.min(advantages * ratio, advantages * clipped).mean()
        return -gain + 0.5 * F.mse_loss(returns, values.flatten()) - 0.01 * entropy.mean()

    batch = (
        torch.randn(8, 4), torch.randint(3, (8,)), torch.randn(8), torch.randn(8), torch.randn(8),
    )  # fmt: skip
    return step, model, torch.optim.Adam(model.parameters(), lr=3e-4), batch, 0.5


@REGISTRY("skorch")
def skorch_module() -> Any:
    from skorch.toy import MLPModule

    model = MLPModule(input_units=8, output_units=10, hidden_units=16, output_nonlin=nn.Identity())
    return (
        classify,
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        (torch.randn(8, 8), labels(8)),
    )
