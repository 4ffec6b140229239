"""lucidrains' packages: vision transformers, attention variants, language models, quantizers."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from surveyed.registry import (
    PROGRAM,
    Registry,
    adamw,
    classifier,
    classify,
    images,
    labels,
    language_model,
    mean_square,
    own_loss,
    sgd,
    tokens,
)

REGISTRY = Registry(PROGRAM)

BASE = {
    "image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32, "depth": 2, "heads": 2,
    "mlp_dim": 48,
}  # fmt: skip

VITS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "vit": ("vit", "ViT", BASE | {"dropout": 0.1, "emb_dropout": 0.1}, 32),
    "simple_vit": ("simple_vit", "SimpleViT", BASE, 32),
    "simple_vit_qk_norm": ("simple_vit_with_qk_norm", "SimpleViT", BASE, 32),
    "simple_vit_registers": ("simple_vit_with_register_tokens", "SimpleViT", BASE, 32),
    "simple_vit_fft": (
        "simple_vit_with_fft", "SimpleViT", BASE | {"freq_patch_size": 8}, 32,
    ),
    "simple_vit_value_residual": ("simple_vit_with_value_residual", "SimpleViT", BASE, 32),
    "simple_vit_patch_dropout": (
        "simple_vit_with_patch_dropout", "SimpleViT", BASE | {"patch_dropout": 0.25}, 32,
    ),
    "deepvit": ("deepvit", "DeepViT", BASE, 32),
    "cait": ("cait", "CaiT", BASE | {"cls_depth": 1}, 32),
    "cait_layer_dropout": ("cait", "CaiT", BASE | {"cls_depth": 1, "layer_dropout": 0.2}, 32),
    "xcit": ("xcit", "XCiT", BASE | {"cls_depth": 1}, 32),
    "pit": ("pit", "PiT", BASE | {"depth": (1, 1)}, 32),
    "rvt": ("rvt", "RvT", BASE, 32),
    "local_vit": ("local_vit", "LocalViT", BASE, 32),
    "vit_small_dataset": ("vit_for_small_dataset", "ViT", BASE, 32),
    "parallel_vit": ("parallel_vit", "ViT", BASE, 32),
    "normalized_vit": ("normalized_vit", "nViT", dict(BASE), 32),
    "ats_vit": ("ats_vit", "ViT", BASE | {"max_tokens_per_depth": (8, 4)}, 32),
    "jumbo_vit": ("jumbo_vit", "JumboViT", BASE, 32),
    "cct": (
        "cct", "CCT",
        {"img_size": 32, "embedding_dim": 32, "n_conv_layers": 1, "num_layers": 2, "num_heads": 2,
         "mlp_ratio": 2.0, "num_classes": 10, "positional_embedding": "learnable"}, 32,
    ),
    "t2t": (
        "t2t", "T2TViT",
        {"image_size": 32, "num_classes": 10, "dim": 32, "depth": 1, "heads": 2, "mlp_dim": 48,
         "t2t_layers": ((3, 2), (3, 2))}, 32,
    ),
    "cvt": (
        "cvt", "CvT",
        {"num_classes": 10, "s1_emb_dim": 8, "s2_emb_dim": 16, "s2_heads": 2, "s2_depth": 1,
         "s3_emb_dim": 16, "s3_heads": 2, "s3_depth": 1}, 32,
    ),
    "levit": (
        "levit", "LeViT",
        {"image_size": 64, "num_classes": 10, "stages": 2, "dim": (16, 32), "depth": 1,
         "heads": (2, 2), "mlp_mult": 2}, 64,
    ),
    "twins_svt": (
        "twins_svt", "TwinsSVT",
        {"num_classes": 10, "s1_emb_dim": 8, "s1_local_patch_size": 4, "s2_emb_dim": 16,
         "s2_local_patch_size": 4, "s3_emb_dim": 16, "s3_local_patch_size": 2, "s3_depth": 1,
         "s4_emb_dim": 16, "s4_local_patch_size": 1}, 64,
    ),
    "nest": (
        "nest", "NesT",
        {"image_size": 32, "patch_size": 4, "num_classes": 10, "dim": 16, "heads": 2,
         "num_hierarchies": 2, "block_repeats": (1, 1)}, 32,
    ),
    "mobile_vit": (
        "mobile_vit", "MobileViT",
        {"image_size": (64, 64), "dims": (16, 16, 16),
         "channels": (4, 4, 8, 8, 8, 8, 8, 8, 8, 8, 16), "num_classes": 10, "depths": (1, 1, 1)},
        64,
    ),
    "max_vit": (
        "max_vit", "MaxViT",
        {"num_classes": 10, "dim_conv_stem": 8, "dim": 8, "dim_head": 8, "depth": (1, 1),
         "window_size": 4, "dropout": 0.1}, 32,
    ),
    "sep_vit": (
        "sep_vit", "SepViT",
        {"num_classes": 10, "dim": 8, "dim_head": 8, "heads": (1, 2), "depth": (1, 1)}, 56,
    ),
    "look_vit": (
        "look_vit", "LookViT",
        {"dim": 16, "image_size": 32, "num_classes": 10, "depth": 1, "patch_size": 8, "heads": 2,
         "dim_head": 8, "highres_patch_size": 4, "cross_attn_heads": 2, "cross_attn_dim_head": 8},
        32,
    ),
    "cross_vit": (
        "cross_vit", "CrossViT",
        {"image_size": 32, "num_classes": 10, "sm_dim": 16, "lg_dim": 24, "sm_patch_size": 8,
         "sm_enc_heads": 2, "sm_enc_mlp_dim": 16, "lg_patch_size": 16, "lg_enc_depth": 1,
         "lg_enc_heads": 2, "lg_enc_mlp_dim": 16, "cross_attn_heads": 2, "depth": 1}, 32,
    ),
}  # fmt: skip


def _vit(module: str, name: str, arguments: dict[str, Any], size: int) -> Any:
    def make() -> Any:
        kind = getattr(importlib.import_module(f"vit_pytorch.{module}"), name)
        return classifier(kind(**arguments), images(4, size))

    return make


for _name, _row in VITS.items():
    REGISTRY.add(_name, _vit(*_row), "vit_pytorch einops")


@REGISTRY("vit_pytorch einops")
def vivit() -> Any:
    from vit_pytorch.vivit import ViViT

    model = ViViT(
        image_size=16, image_patch_size=8, frames=4, frame_patch_size=2, num_classes=10, dim=16,
        spatial_depth=1, temporal_depth=1, heads=2, mlp_dim=32,
    )  # fmt: skip
    return classifier(model, torch.randn(4, 3, 4, 16, 16))


@REGISTRY("vit_pytorch einops")
def vit_1d() -> Any:
    from vit_pytorch.vit_1d import ViT

    model = ViT(
        seq_len=32, patch_size=4, num_classes=10, dim=16, depth=2, heads=2, mlp_dim=32, channels=2
    )
    return classifier(model, torch.randn(4, 2, 32))


@REGISTRY("vit_pytorch einops")
def distill() -> Any:
    from vit_pytorch.distill import DistillableViT, DistillWrapper

    teacher = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))
    model = DistillWrapper(teacher=teacher, student=DistillableViT(**BASE), hard=False)
    optimizer = torch.optim.AdamW(model.student.parameters(), lr=1e-3)
    return (lambda m, b: m(*b)), model, optimizer, (images(), labels())


def trained_lm(module: str, name: str, **arguments: Any) -> Any:
    """The program that trains a language model of a package."""
    model = getattr(importlib.import_module(module), name)(**arguments)
    return language_model, model, adamw(model), tokens(4, 17)


def _lm(module: str, name: str, **arguments: Any) -> Any:
    return lambda: trained_lm(module, name, **arguments)


LM = {"num_tokens": 64, "dim": 32, "depth": 2}
HEADS = {"heads": 2, "dim_head": 16}
REGISTRY.add(
    "PerformerLM", _lm("performer_pytorch", "PerformerLM", max_seq_len=16, **LM, **HEADS),
    "performer_pytorch einops local_attention axial_positional_embedding",
)  # fmt: skip
REGISTRY.add(
    "PerformerLM_causal",
    _lm("performer_pytorch", "PerformerLM", max_seq_len=16, causal=True, generalized_attention=True,
        **LM, **HEADS), "performer_pytorch einops local_attention axial_positional_embedding",
)  # fmt: skip
REGISTRY.add(
    "LinformerLM", _lm("linformer", "LinformerLM", seq_len=16, k=8, heads=2, **LM), "linformer"
)
REGISTRY.add(
    "LinformerLM_reversible",
    _lm("linformer", "LinformerLM", seq_len=16, k=8, heads=2, reversible=True, **LM), "linformer",
)  # fmt: skip
REGISTRY.add(
    "ReformerLM",
    _lm("reformer_pytorch", "ReformerLM", max_seq_len=16, bucket_size=4, n_hashes=2, ff_chunks=1,
        causal=True, **LM, **HEADS),
    "reformer_pytorch product_key_memory axial_positional_embedding",
)  # fmt: skip
REGISTRY.add(
    "SinkhornTransformerLM",
    _lm("sinkhorn_transformer", "SinkhornTransformerLM", max_seq_len=16, bucket_size=4, heads=2,
        **LM), "sinkhorn_transformer local_attention axial_positional_embedding product_key_memory",
)  # fmt: skip
REGISTRY.add(
    "FastTransformer",
    _lm("fast_transformer_pytorch", "FastTransformer", max_seq_len=16, absolute_pos_emb=True, **LM,
        **HEADS), "fast_transformer_pytorch rotary_embedding_torch",
)  # fmt: skip
REGISTRY.add(
    "HTransformer1D",
    _lm("h_transformer_1d", "HTransformer1D", max_seq_len=16, block_size=4, causal=True, **LM,
        **HEADS), "h_transformer_1d rotary_embedding_torch",
)  # fmt: skip
REGISTRY.add(
    "TokenShiftGPT", _lm("token_shift_gpt", "TokenShiftGPT", max_seq_len=16, **LM),
    "token_shift_gpt einops",
)  # fmt: skip
REGISTRY.add(
    "Mega", _lm("mega_pytorch", "Mega", ema_heads=2, attn_dim_qk=8, attn_dim_value=16, **LM),
    "mega_pytorch einops scipy",
)  # fmt: skip
REGISTRY.add(
    "LocalTransformer",
    _lm("local_attention", "LocalTransformer", max_seq_len=16, local_attn_window_size=4, **LM,
        **HEADS), "local_attention einops hyper_connections",
)  # fmt: skip
REGISTRY.add(
    "LinearAttentionTransformerLM",
    _lm("linear_attention_transformer", "LinearAttentionTransformerLM", max_seq_len=16, heads=2,
        causal=True, blindspot_size=1, **LM),
    "linear_attention_transformer linformer local_attention product_key_memory "
    "axial_positional_embedding",
)  # fmt: skip
REGISTRY.add("PaLM", _lm("palm_pytorch.palm_pytorch", "PaLM", **LM, **HEADS), "palm_pytorch einops")
REGISTRY.add(
    "gMLP", _lm("g_mlp_pytorch", "gMLP", seq_len=16, causal=True, **LM), "g_mlp_pytorch einops"
)


@REGISTRY("x_transformers einops")
def decoder() -> Any:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    net = TransformerWrapper(
        num_tokens=64, max_seq_len=16, attn_layers=Decoder(dim=32, depth=2, heads=2)
    )
    model = AutoregressiveWrapper(net)
    return own_loss, model, adamw(model), tokens(4, 17)


@REGISTRY("x_transformers einops")
def decoder_modern() -> Any:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=32, depth=2, heads=2, rotary_pos_emb=True, ff_glu=True, ff_swish=True,
        use_rmsnorm=True, attn_qk_norm=True, attn_flash=True, attn_kv_heads=1,
    )  # fmt: skip
    model = TransformerWrapper(num_tokens=64, max_seq_len=16, attn_layers=layers)
    return language_model, model, adamw(model), tokens(4, 17)


@REGISTRY("x_transformers einops")
def alibi_decoder() -> Any:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=32, depth=2, heads=2, alibi_pos_bias=True, attn_dropout=0.1, ff_dropout=0.1
    )
    model = TransformerWrapper(num_tokens=64, max_seq_len=16, attn_layers=layers)
    return language_model, model, adamw(model), tokens(4, 17)


@REGISTRY("x_transformers einops")
def t5_bias_encoder() -> Any:
    from x_transformers import Encoder, TransformerWrapper

    layers = Encoder(dim=32, depth=2, heads=2, rel_pos_bias=True, sandwich_norm=True)
    model = TransformerWrapper(num_tokens=64, max_seq_len=16, attn_layers=layers)
    return language_model, model, adamw(model), tokens(4, 17)


@REGISTRY("x_transformers einops")
def encoder_decoder() -> Any:
    from x_transformers import XTransformer

    model = XTransformer(
        dim=32, enc_num_tokens=64, enc_depth=1, enc_heads=2, enc_max_seq_len=16,
        dec_num_tokens=64, dec_depth=1, dec_heads=2, dec_max_seq_len=16, tie_token_emb=True,
    )  # fmt: skip
    return (lambda m, b: m(*b)), model, adamw(model), (tokens(), tokens(4, 16))


@REGISTRY("x_transformers einops")
def vit_wrapper() -> Any:
    from x_transformers import Encoder, ViTransformerWrapper

    layers = Encoder(dim=32, depth=2, heads=2)
    model = ViTransformerWrapper(image_size=32, patch_size=8, num_classes=10, attn_layers=layers)
    return classifier(model, images())


@REGISTRY("x_transformers einops")
def continuous() -> Any:
    from x_transformers import ContinuousTransformerWrapper, Decoder

    model = ContinuousTransformerWrapper(
        dim_in=8, dim_out=8, max_seq_len=16, attn_layers=Decoder(dim=32, depth=2, heads=2)
    )
    return mean_square, model, adamw(model), torch.randn(4, 16, 8)


@REGISTRY("perceiver_pytorch einops")
def perceiver() -> Any:
    from perceiver_pytorch import Perceiver

    model = Perceiver(
        input_channels=3, input_axis=2, num_freq_bands=2, max_freq=8.0, depth=2, num_latents=8,
        latent_dim=16, latent_heads=2, cross_dim_head=8, latent_dim_head=8, num_classes=10,
        weight_tie_layers=True,
    )  # fmt: skip
    return classifier(model, torch.randn(4, 8, 8, 3))


@REGISTRY("perceiver_pytorch einops")
def perceiver_io() -> Any:
    from perceiver_pytorch import PerceiverIO

    model = PerceiverIO(
        dim=16, queries_dim=16, logits_dim=10, depth=1, num_latents=8, latent_dim=16,
        latent_heads=2, cross_dim_head=8, latent_dim_head=8,
    )  # fmt: skip

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        data, queries = batch
        return model(data, queries=queries).square().mean()

    return step, model, adamw(model), (torch.randn(4, 12, 16), torch.randn(4, 6, 16))


@REGISTRY("g_mlp_pytorch einops")
def gmlp_vision() -> Any:
    from g_mlp_pytorch import gMLPVision

    model = gMLPVision(image_size=32, patch_size=8, num_classes=10, dim=32, depth=2)
    return classifier(model, images())


@REGISTRY("mlp_mixer_pytorch einops")
def mlp_mixer() -> Any:
    from mlp_mixer_pytorch import MLPMixer

    model = MLPMixer(image_size=32, channels=3, patch_size=8, dim=32, depth=2, num_classes=10)
    return classifier(model, images())


@REGISTRY("mlp_mixer_pytorch einops")
def permutator() -> Any:
    from mlp_mixer_pytorch import Permutator

    model = Permutator(image_size=32, patch_size=8, dim=32, depth=2, num_classes=10, segments=4)
    return classifier(model, images())


@REGISTRY("nystrom_attention einops")
def nystromformer() -> Any:
    from nystrom_attention import Nystromformer

    model = Nystromformer(dim=32, depth=2, heads=2, dim_head=16, num_landmarks=4)
    return mean_square, model, adamw(model), torch.randn(4, 16, 32)


@REGISTRY("axial_attention")
def axial_image_transformer() -> Any:
    from axial_attention import AxialAttention

    model = nn.Sequential(AxialAttention(dim=8, dim_index=1, heads=2, num_dimensions=2))
    return mean_square, model, adamw(model), images(4, 8, 8)


@REGISTRY("vector_quantize_pytorch einops einx")
def vq_autoencoder() -> Any:
    from vector_quantize_pytorch import VectorQuantize

    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(12, 8), nn.Linear(8, 12)
            self.quantize = VectorQuantize(dim=8, codebook_size=16, decay=0.8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            quantized, _, loss = self.quantize(self.down(x))
            return self.up(quantized), loss

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        made, commitment = model(batch)
        return F.mse_loss(made, batch) + commitment.sum()

    model = Autoencoder()
    return step, model, adamw(model), torch.randn(4, 6, 12)


@REGISTRY("vector_quantize_pytorch einops einx")
def residual_vq_learned() -> Any:
    from vector_quantize_pytorch import ResidualVQ

    model = ResidualVQ(
        dim=8, num_quantizers=2, codebook_size=16, learnable_codebook=True, ema_update=False,
    )  # fmt: skip

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        made, _, losses = model(batch)
        return made.square().mean() + losses.sum()

    return step, model, adamw(model), torch.randn(4, 6, 8)


@REGISTRY("vector_quantize_pytorch einops einx")
def fsq() -> Any:
    from vector_quantize_pytorch import FSQ

    model = nn.Sequential(nn.Linear(6, 8), FSQ([8, 5, 5], dim=8))

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        made, _ = model(batch)
        return made.square().mean()

    return step, model, adamw(model), torch.randn(4, 6, 6)


@REGISTRY("vector_quantize_pytorch einops einx")
def lfq() -> Any:
    from vector_quantize_pytorch import LFQ

    model = nn.Sequential(nn.Linear(6, 8), LFQ(codebook_size=16, dim=8))

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        made, _, entropy = model(batch)
        return made.square().mean() + entropy

    return step, model, adamw(model), torch.randn(4, 6, 6)


@REGISTRY("egnn_pytorch einops")
def egnn() -> Any:
    from egnn_pytorch import EGNN_Network

    model = EGNN_Network(num_tokens=10, num_positions=8, dim=16, depth=2, m_dim=8)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        features, places = model(*batch)
        return features.square().mean() + places.square().mean()

    return step, model, adamw(model), (torch.randint(10, (4, 8)), torch.randn(4, 8, 3))


@REGISTRY("tab_transformer_pytorch hyper_connections x_mlps_pytorch")
def tab_transformer() -> Any:
    from tab_transformer_pytorch import TabTransformer

    model = TabTransformer(
        categories=(5, 6, 7),
        num_continuous=4,
        dim=16,
        depth=2,
        heads=2,
        dim_head=8,
        attn_dropout=0.1,
    )

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        kinds, numbers, targets = batch
        return F.binary_cross_entropy_with_logits(model(kinds, numbers), targets)

    batch = (torch.randint(0, 5, (4, 3)), torch.randn(4, 4), torch.rand(4, 1).round())
    return step, model, adamw(model), batch


@REGISTRY("tab_transformer_pytorch hyper_connections x_mlps_pytorch")
def ft_transformer() -> Any:
    from tab_transformer_pytorch import FTTransformer

    model = FTTransformer(categories=(5, 6, 7), num_continuous=4, dim=16, depth=2, heads=2)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        kinds, numbers, targets = batch
        return F.mse_loss(model(kinds, numbers), targets)

    batch = (torch.randint(0, 5, (4, 3)), torch.randn(4, 4), torch.randn(4, 1))
    return step, model, adamw(model), batch


@REGISTRY("conformer einops")
def conformer() -> Any:
    from conformer import Conformer

    model = Conformer(dim=16, depth=2, dim_head=8, heads=2, conv_kernel_size=5, ff_dropout=0.1)
    return mean_square, model, adamw(model), torch.randn(4, 16, 16)


@REGISTRY("byol_pytorch torchvision")
def byol() -> Any:
    from byol_pytorch import BYOL

    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 10),
    )  # fmt: skip
    plain = nn.Identity()
    model = BYOL(
        net, image_size=32, hidden_layer=3, projection_size=16, projection_hidden_size=32,
        augment_fn=plain, augment_fn2=plain, use_simplicial_embeddings=False,
    )  # fmt: skip
    trained = [p for p in model.parameters() if p.requires_grad]
    return own_loss, model, torch.optim.Adam(trained, lr=1e-3), images()


@REGISTRY("lambda_networks einops")
def lambda_layer() -> Any:
    from lambda_networks import LambdaLayer

    layer = LambdaLayer(dim=8, dim_out=8, r=5, dim_k=4, heads=2, dim_u=2)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), layer)
    return mean_square, model, sgd(model), images(4, 8)


@REGISTRY("bottleneck_transformer_pytorch einops")
def bottle_stack() -> Any:
    from bottleneck_transformer_pytorch import BottleStack

    model = BottleStack(
        dim=8, fmap_size=8, dim_out=16, num_layers=2, heads=2, dim_head=8, rel_pos_emb=True
    )
    return mean_square, model, sgd(model), images(4, 8, 8)


@REGISTRY("halonet_pytorch einops")
def halo_attention() -> Any:
    from halonet_pytorch import HaloAttention

    model = HaloAttention(dim=8, block_size=4, halo_size=2, dim_head=4, heads=2)
    return mean_square, model, sgd(model), images(4, 8, 8)


@REGISTRY("electra_pytorch reformer_pytorch product_key_memory axial_positional_embedding")
def electra() -> Any:
    from electra_pytorch import Electra

    class Encoder(nn.Module):
        def __init__(self, out: int) -> None:
            super().__init__()
            self.token_emb = nn.Embedding(64, 16)
            self.body = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.out = nn.Linear(16, out)

        def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
            return self.out(self.body(self.token_emb(x)))

    model = Electra(Encoder(64), Encoder(1), mask_token_id=2, pad_token_id=0)

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).loss

    return step, model, adamw(model), tokens()


@REGISTRY("compressive_transformer_pytorch mogrifier")
def compressive_transformer() -> Any:
    from compressive_transformer_pytorch import CompressiveTransformer

    model = CompressiveTransformer(
        num_tokens=64, dim=16, depth=2, seq_len=8, mem_len=8, cmem_len=2, heads=2
    )

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        first, memories, _ = model(batch[:, :8])
        second, _, extra = model(batch[:, 8:16], memories=memories)
        loss = F.cross_entropy(first.flatten(0, 1), batch[:, 1:9].flatten())
        return loss + F.cross_entropy(second.flatten(0, 1), batch[:, 9:17].flatten()) + extra

    return step, model, adamw(model), tokens(4, 17)


@REGISTRY("slot_attention")
def slot_attention() -> Any:
    from slot_attention import SlotAttention

    model = SlotAttention(num_slots=3, dim=16, iters=2, hidden_dim=32)
    return mean_square, model, adamw(model), torch.randn(4, 10, 16)


@REGISTRY("point_transformer_pytorch einops")
def point_transformer() -> Any:
    from point_transformer_pytorch import PointTransformerLayer

    model = PointTransformerLayer(dim=16, pos_mlp_hidden_dim=8, attn_mlp_hidden_mult=2)
    batch = (torch.randn(4, 8, 16), torch.randn(4, 8, 3))
    return mean_square, model, adamw(model), batch


@REGISTRY("point_transformer_pytorch einops")
def point_transformer_neighbours() -> Any:
    from point_transformer_pytorch import PointTransformerLayer

    model = PointTransformerLayer(
        dim=16, pos_mlp_hidden_dim=8, attn_mlp_hidden_mult=2, num_neighbors=3
    )
    batch = (torch.randn(4, 8, 16), torch.randn(4, 8, 3))
    return mean_square, model, adamw(model), batch


@REGISTRY("glom_pytorch einops")
def glom() -> Any:
    from glom_pytorch import Glom

    model = Glom(dim=16, levels=3, image_size=16, patch_size=4)
    return (lambda m, b: m(b, iters=2).square().mean()), model, adamw(model), images(4, 16)


@REGISTRY("siren_pytorch einops")
def siren() -> Any:
    from siren_pytorch import SirenNet, SirenWrapper

    net = SirenNet(dim_in=2, dim_hidden=16, dim_out=3, num_layers=3, w0_initial=30.0)
    model = SirenWrapper(net, image_width=8, image_height=8)
    return own_loss, model, adamw(model), torch.randn(1, 3, 8, 8)


@REGISTRY("invariant_point_attention einops")
def ipa_transformer() -> Any:
    from invariant_point_attention import IPABlock

    model = IPABlock(dim=16, require_pairwise_repr=False, heads=2)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        single, rotations, translations = batch
        made = model(single, rotations=rotations, translations=translations)
        return made.square().mean()

    rotations = torch.linalg.qr(torch.randn(2, 8, 3, 3))[0]
    return step, model, adamw(model), (torch.randn(2, 8, 16), rotations, torch.randn(2, 8, 3))


@REGISTRY("soft_moe_pytorch einops")
def soft_moe() -> Any:
    from soft_moe_pytorch import SoftMoE

    model = SoftMoE(dim=16, seq_len=8, num_experts=2)
    return mean_square, model, adamw(model), torch.randn(4, 8, 16)


@REGISTRY("st_moe_pytorch colt5_attention beartype")
def st_moe() -> Any:
    from st_moe_pytorch import MoE

    model = MoE(dim=16, num_experts=4, gating_top_n=2)

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        made, auxiliary, *_ = model(batch)
        return made.square().mean() + auxiliary

    return step, model, adamw(model), torch.randn(4, 8, 16)


@REGISTRY("mixture_of_experts")
def mixture_of_experts() -> Any:
    from mixture_of_experts import MoE

    model = MoE(dim=16, num_experts=4, hidden_dim=32)

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        made, auxiliary = model(batch)
        return made.square().mean() + auxiliary

    return step, model, adamw(model), torch.randn(4, 8, 16)


@REGISTRY("product_key_memory einops colt5_attention")
def product_key_memory() -> Any:
    from product_key_memory import PKM

    model = PKM(dim=16, heads=2, num_keys=8, topk=4, dim_head=8)
    return mean_square, model, adamw(model), torch.randn(4, 8, 16)


@REGISTRY("hamburger_pytorch einops")
def hamburger() -> Any:
    from hamburger_pytorch import Hamburger

    model = Hamburger(dim=16, n=16, ratio=2, K=2)
    return mean_square, model, adamw(model), torch.randn(4, 16, 4, 4)


@REGISTRY("uformer_pytorch einops")
def uformer() -> Any:
    from uformer_pytorch import Uformer

    model = Uformer(dim=8, stages=2, num_blocks=1, window_size=4, dim_head=8, heads=2, ff_mult=2)
    return mean_square, model, adamw(model), images(2, 16)


@REGISTRY("iTransformer hyper_connections")
def itransformer() -> Any:
    from iTransformer import iTransformer

    model = iTransformer(
        num_variates=5, lookback_len=12, dim=16, depth=2, heads=2, dim_head=8, pred_length=4
    )

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        past, future = batch
        return model(past, targets=future)

    return step, model, adamw(model), (torch.randn(4, 12, 5), torch.randn(4, 4, 5))


@REGISTRY("timesformer_pytorch einops")
def timesformer() -> Any:
    from timesformer_pytorch import TimeSformer

    model = TimeSformer(
        dim=16, image_size=16, patch_size=8, num_frames=2, num_classes=10, depth=1, heads=2,
        dim_head=8,
    )  # fmt: skip
    return classifier(model, torch.randn(2, 2, 3, 16, 16))


@REGISTRY("transformer_in_transformer einops")
def tnt() -> Any:
    from transformer_in_transformer import TNT

    model = TNT(
        image_size=16, patch_dim=16, pixel_dim=8, patch_size=8, pixel_size=4, depth=1,
        num_classes=10, heads=2, dim_head=8,
    )  # fmt: skip
    return classifier(model, images(4, 16))


@REGISTRY("isab_pytorch einops")
def isab() -> Any:
    from isab_pytorch import ISAB

    model = ISAB(dim=16, heads=2, num_latents=4)

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        features, latents = model(batch)
        return features.square().mean() + latents.square().mean()

    return step, model, adamw(model), torch.randn(4, 8, 16)


@REGISTRY("x_clip vit_pytorch")
def x_clip() -> Any:
    from x_clip import CLIP

    model = CLIP(
        dim_text=16, dim_image=16, dim_latent=16, num_text_tokens=64, text_enc_depth=1,
        text_seq_len=16, text_heads=2, visual_enc_depth=1, visual_image_size=16,
        visual_patch_size=8, visual_heads=2, visual_patch_dropout=0.0,
    )  # fmt: skip

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(*batch, return_loss=True)

    return step, model, adamw(model), (tokens(), images(4, 16))


@REGISTRY("coca_pytorch vit_pytorch")
def coca() -> Any:
    from coca_pytorch import CoCa

    model = CoCa(
        dim=16, num_tokens=64, unimodal_depth=1, multimodal_depth=1, dim_head=8, heads=2,
        num_img_queries=4, image_dim=16,
    )  # fmt: skip

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        text, pictures = batch
        return model(text=text, image_tokens=pictures, return_loss=True)

    return step, model, adamw(model), (tokens(4, 17), torch.randn(4, 9, 16))


@REGISTRY("gated_state_spaces_pytorch einops")
def gated_state_spaces() -> Any:
    from gated_state_spaces_pytorch import GatedStateSpacesLM

    model = GatedStateSpacesLM(num_tokens=64, dim=16, depth=1, dss_kernel_N=8, dss_kernel_H=8)
    return language_model, model, adamw(model), tokens(4, 17)


@REGISTRY("gateloop_transformer rotary_embedding_torch")
def gateloop() -> Any:
    from gateloop_transformer import SimpleGateLoopLayer

    model = nn.Sequential(nn.Linear(8, 16), SimpleGateLoopLayer(16), nn.Linear(16, 4))
    return mean_square, model, adamw(model), torch.randn(4, 8, 8)


@REGISTRY("block_recurrent_transformer_pytorch einops")
def block_recurrent() -> Any:
    from block_recurrent_transformer_pytorch import BlockRecurrentTransformer

    model = BlockRecurrentTransformer(
        num_tokens=64, dim=16, depth=2, dim_head=8, heads=2, max_seq_len=16, block_width=8,
        num_state_vectors=8, recurrent_layers=(2,),
    )  # fmt: skip

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss, *_ = model(batch, return_loss=True)
        return loss

    return step, model, adamw(model), tokens(4, 17)


@REGISTRY("MEGABYTE_pytorch beartype")
def megabyte() -> Any:
    from MEGABYTE_pytorch import MEGABYTE

    model = MEGABYTE(
        num_tokens=64, dim=(16, 8), depth=(1, 1), max_seq_len=(4, 4), dim_head=8, heads=2
    )

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch, return_loss=True)

    return step, model, adamw(model), tokens(4, 16)


@REGISTRY("flamingo_pytorch einops")
def perceiver_resampler() -> Any:
    from flamingo_pytorch import PerceiverResampler

    model = PerceiverResampler(
        dim=16, depth=2, dim_head=8, heads=2, num_latents=4, num_media_embeds=2
    )
    return mean_square, model, adamw(model), torch.randn(2, 2, 6, 16)


@REGISTRY("rotary_embedding_torch")
def rotary_attention() -> Any:
    from rotary_embedding_torch import RotaryEmbedding

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotary = RotaryEmbedding(dim=8)
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            q, k = self.rotary.rotate_queries_or_keys(q), self.rotary.rotate_queries_or_keys(k)
            made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(made.transpose(1, 2).flatten(2)).mean(1)

    return classifier(Attention(), torch.randn(4, 8, 16))


@REGISTRY("ema_pytorch", "ema_update_after_step")
def ema_model() -> Any:
    from ema_pytorch import EMA

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10))
            self.ema = EMA(self.net, beta=0.9, update_after_step=0, include_online_model=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    model = Both()
    optimizer = torch.optim.Adam(model.net.parameters(), lr=1e-3)
    return classify, model, optimizer, (torch.randn(4, 8), labels())
