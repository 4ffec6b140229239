"""Language: adapters, sentence embeddings, state-space models, taggers, PyTorch's own layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surveyed.registry import (
    PROGRAM,
    Registry,
    adamw,
    classifier,
    classify,
    labels,
    language_model,
    mean_square,
    sgd,
    tokens,
)

REGISTRY = Registry(PROGRAM)


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, use_cache=False
    )
    return GPT2LMHeadModel(config)


def _causal(model: nn.Module, batch: Tensor) -> Tensor:
    return model(input_ids=batch, labels=batch).loss


def _peft(name: str, **arguments: Any) -> Any:
    def make() -> Any:
        import peft

        model = peft.get_peft_model(
            _gpt2(), getattr(peft, name)(task_type="CAUSAL_LM", **arguments)
        )
        trained = [p for p in model.parameters() if p.requires_grad]
        return _causal, model, torch.optim.AdamW(trained, lr=1e-3), tokens(4, 12)

    return make


PEFT = "peft accelerate psutil"
REGISTRY.add("lora", _peft("LoraConfig", r=4, target_modules=["c_attn"], fan_in_fan_out=True), PEFT)
REGISTRY.add(
    "dora",
    _peft("LoraConfig", r=4, target_modules=["c_attn"], use_dora=True, fan_in_fan_out=True), PEFT,
)  # fmt: skip
REGISTRY.add(
    "lora_dropout",
    _peft("LoraConfig", r=4, target_modules=["c_attn", "c_proj"], lora_dropout=0.1,
          fan_in_fan_out=True), PEFT,
)  # fmt: skip
REGISTRY.add(
    "ia3",
    _peft("IA3Config", target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"],
          fan_in_fan_out=True), PEFT,
)  # fmt: skip
REGISTRY.add("prompt_tuning", _peft("PromptTuningConfig", num_virtual_tokens=4), PEFT)
REGISTRY.add("prefix_tuning", _peft("PrefixTuningConfig", num_virtual_tokens=4), PEFT)


@REGISTRY("peft accelerate psutil")
def lora_on_mlp() -> Any:
    import peft

    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10))
    model = peft.get_peft_model(
        net, peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"])
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    return classify, model, torch.optim.Adam(trained), (torch.randn(4, 8), labels())


@REGISTRY("loralib")
def loralib_linear() -> Any:
    import loralib

    model = nn.Sequential(loralib.Linear(8, 16, r=2), nn.ReLU(), loralib.Linear(16, 10, r=2))
    loralib.mark_only_lora_as_trainable(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    return classify, model, torch.optim.Adam(trained), (torch.randn(4, 8), labels())


@REGISTRY("sentence_transformers")
def sentence_embeddings() -> Any:
    from sentence_transformers.models import Dense, Pooling
    from transformers import BertConfig, BertModel

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = BertModel(
                BertConfig(
                    vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                    intermediate_size=48,
                ), add_pooling_layer=False,
            )  # fmt: skip
            self.pool, self.dense = Pooling(32, "mean"), Dense(32, 16)

        def forward(self, ids: Tensor) -> Tensor:
            mask = torch.ones_like(ids)
            made = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
            features = {"token_embeddings": made, "attention_mask": mask}
            return self.dense(self.pool(features))["sentence_embedding"]

    def step(model: nn.Module, batch: Any) -> Tensor:
        one, other = (F.normalize(model(ids), dim=-1) for ids in batch)
        return F.cross_entropy(20 * one @ other.T, torch.arange(len(one)))

    model = Net()
    return step, model, adamw(model), (tokens(4, 12), tokens(4, 12))


@REGISTRY("mambapy")
def mamba() -> Any:
    from mambapy.mamba import Mamba, MambaConfig

    body = Mamba(MambaConfig(d_model=16, n_layers=1, d_state=4, pscan=False))
    model = nn.Sequential(nn.Embedding(64, 16), body, nn.Linear(16, 64))
    return language_model, model, adamw(model), tokens(4, 9)


@REGISTRY("mambapy")
def mamba_pscan() -> Any:
    from mambapy.mamba import Mamba, MambaConfig

    body = Mamba(MambaConfig(d_model=16, n_layers=1, d_state=4, pscan=True))
    model = nn.Sequential(nn.Embedding(64, 16), body, nn.Linear(16, 64))
    return language_model, model, adamw(model), tokens(4, 9)


@REGISTRY("torchcrf")
def crf_tagger() -> Any:
    from torchcrf import CRF

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(64, 16), nn.Linear(32, 5)
            self.lstm = nn.LSTM(16, 16, batch_first=True, bidirectional=True)
            self.crf = CRF(5, batch_first=True)

        def forward(self, words: Tensor, tags: Tensor) -> Tensor:
            return -self.crf(self.out(self.lstm(self.embed(words))[0]), tags, reduction="mean")

    model = Tagger()
    return (lambda m, b: m(*b)), model, sgd(model), (tokens(4, 6), torch.randint(5, (4, 6)))


@REGISTRY("entmax")
def entmax_attention() -> Any:
    from entmax import Entmax15Loss, entmax15

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            weights = entmax15(self.q(x) @ self.k(x).transpose(-1, -2), dim=-1)
            return self.out((weights @ x).mean(1))

    loss = Entmax15Loss(reduction="elementwise_mean")

    def step(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        return loss(model(inputs), targets)

    model = Net()
    return step, model, adamw(model), (torch.randn(4, 6, 8), labels())


@REGISTRY("transformer_lens fancy_einsum jaxtyping")
def hooked_transformer() -> Any:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(
        n_layers=2, d_model=32, n_ctx=16, d_head=16, n_heads=2, d_vocab=64, act_fn="gelu",
    )  # fmt: skip
    model = HookedTransformer(config)
    return (lambda m, b: m(b, return_type="loss")), model, adamw(model), tokens(4, 12)


@REGISTRY("adapters")
def bottleneck_adapter() -> Any:
    import adapters

    model = _gpt2()
    adapters.init(model)
    model.add_adapter("task", config="seq_bn")
    model.train_adapter("task")
    trained = [p for p in model.parameters() if p.requires_grad]
    return _causal, model, torch.optim.AdamW(trained, lr=1e-3), tokens(4, 12)


@REGISTRY("memory_efficient_attention_pytorch einops")
def memory_efficient_attention() -> Any:
    from memory_efficient_attention_pytorch import Attention

    model = Attention(
        dim=16, dim_head=8, heads=2, memory_efficient=True, q_bucket_size=4, k_bucket_size=4
    )
    return mean_square, model, adamw(model), torch.randn(2, 8, 16)


@REGISTRY("titans_pytorch assoc_scan axial_positional_embedding tensordict")
def titans_memory() -> Any:
    from titans_pytorch import NeuralMemory

    model = NeuralMemory(dim=16, chunk_size=4)

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        made, _ = model(batch)
        return made.square().mean()

    return step, model, adamw(model), torch.randn(2, 8, 16)


@REGISTRY("taylor_series_linear_attention einops rotary_embedding_torch")
def taylor_attention() -> Any:
    from taylor_series_linear_attention import TaylorSeriesLinearAttn

    model = TaylorSeriesLinearAttn(dim=16, dim_head=4, heads=2)
    return mean_square, model, adamw(model), torch.randn(2, 8, 16)


@REGISTRY("agent_attention_pytorch einops")
def agent_attention() -> Any:
    from agent_attention_pytorch import AgentSelfAttention

    model = AgentSelfAttention(dim=16, num_agent_tokens=4, dim_head=8, heads=2)
    return mean_square, model, adamw(model), torch.randn(2, 8, 16)


@REGISTRY("recurrent_memory_transformer_pytorch einops")
def recurrent_memory() -> Any:
    from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer

    model = RecurrentMemoryTransformer(
        num_tokens=64, num_memory_tokens=4, dim=16, depth=1, causal=True, dim_head=8, heads=2,
        seq_len=8, use_flash_attn=False,
    )  # fmt: skip

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        first, memory, _ = model(batch[:, :8])
        second, _, _ = model(batch[:, 8:16], memory)
        logits = torch.cat([first, second], 1)
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    return step, model, adamw(model), tokens(4, 17)


@REGISTRY("simple_hierarchical_transformer local_attention vector_quantize_pytorch")
def hierarchical_transformer() -> Any:
    from simple_hierarchical_transformer import HierarchicalTransformer

    model = HierarchicalTransformer(
        num_tokens=64, dim=16, depth=1, seq_len=16, dim_head=8, heads=2, hierarchies=(1, 2),
        window_sizes=(4, None),
    )  # fmt: skip

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        loss, _ = model(batch, return_loss=True)
        return loss

    return step, model, adamw(model), tokens(4, 17)


@REGISTRY("torch_ema")
def ema_of_weights(**more: Any) -> Any:
    from torch_ema import ExponentialMovingAverage

    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10))
    average = ExponentialMovingAverage(model.parameters(), decay=0.99, **more)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = classify(model, batch)
        loss.backward()
        optimizer.step()
        average.update()
        return loss

    return step, model, adamw(model), (torch.randn(4, 8), labels())


@REGISTRY("pytorch_lightning torchmetrics lightning_utilities")
def lightning_module() -> Any:
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10))

        def training_step(self, batch: Any, number: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    model = Module()
    batch = (torch.randn(4, 8), labels())
    return (lambda m, b: m.training_step(b, 0)), model, model.configure_optimizers(), batch


@REGISTRY("torchmetrics lightning_utilities")
def torchmetrics_logging() -> Any:
    from torchmetrics.functional.classification import multiclass_accuracy

    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10))

    def step(model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        logits = model(inputs)
        accuracy = multiclass_accuracy(logits, targets, num_classes=10)
        return {"loss": F.cross_entropy(logits, targets), "accuracy": accuracy}

    return step, model, adamw(model), (torch.randn(4, 8), labels())


@REGISTRY("fastai fastcore")
def fastai_tabular() -> Any:
    from fastai.tabular.model import TabularModel

    model = TabularModel([(5, 3), (6, 3)], n_cont=4, out_sz=10, layers=[16], ps=0.1)

    def step(model: nn.Module, batch: Any) -> Tensor:
        kinds, numbers, y = batch
        return F.cross_entropy(model(kinds, numbers), y)

    batch = (torch.randint(5, (8, 2)), torch.randn(8, 4), labels(8))
    return step, model, adamw(model), batch


@REGISTRY("fastai fastcore")
def fastai_xresnet() -> Any:
    from fastai.layers import ResBlock
    from fastai.vision.models.xresnet import XResNet

    model = XResNet(ResBlock, 1, [1, 1], stem_szs=(8, 8, 8), widen=0.25, n_out=10)
    return classifier(model, torch.randn(4, 3, 32, 32))
