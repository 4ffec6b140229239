"""timm: image classifiers of many families, made small by their own arguments."""

from __future__ import annotations

import importlib
from typing import Any

from surveyed.registry import PROGRAM, Registry, classifier, images

REGISTRY = Registry(PROGRAM, "timm torchvision")

SMALL = {"img_size": 32, "num_classes": 10}
VIT = SMALL | {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
STAGES = {"num_classes": 10, "depths": (1, 1, 1, 1)}

# module, class, arguments, image size
CLASSES: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "VisionTransformer": ("vision_transformer", "VisionTransformer", VIT, 32),
    "Eva": ("eva", "Eva", VIT, 32),
    "Beit": ("beit", "Beit", VIT | {"use_rel_pos_bias": True}, 32),
    "Cait": ("cait", "Cait", VIT, 32),
    "ConVit": ("convit", "ConVit", VIT | {"local_up_to_layer": 1}, 32),
    "ConvMixer": (
        "convmixer", "ConvMixer",
        {"dim": 16, "depth": 2, "kernel_size": 5, "patch_size": 4, "num_classes": 10}, 32,
    ),
    "ConvNeXt": ("convnext", "ConvNeXt", STAGES | {"dims": (8, 16, 24, 32)}, 64),
    "DaVit": (
        "davit", "DaVit",
        STAGES | {"embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 3, 4), "window_size": 4}, 128,
    ),
    "EdgeNeXt": (
        "edgenext", "EdgeNeXt",
        STAGES | {"dims": (8, 16, 24, 32), "heads": (1, 2, 2, 4)}, 64,
    ),
    "FocalNet": ("focalnet", "FocalNet", STAGES | {"embed_dim": 8}, 64),
    "MetaFormer": ("metaformer", "MetaFormer", STAGES | {"dims": (8, 16, 24, 32)}, 64),
    "MlpMixer": (
        "mlp_mixer", "MlpMixer", SMALL | {"patch_size": 8, "num_blocks": 2, "embed_dim": 32}, 32,
    ),
    "Nest": (
        "nest", "Nest",
        SMALL | {"patch_size": 4, "num_levels": 2, "embed_dims": (16, 32), "num_heads": (2, 2),
                 "depths": (1, 1)}, 32,
    ),
    "PoolingVisionTransformer": (
        "pit", "PoolingVisionTransformer",
        SMALL | {"patch_size": 8, "stride": 4, "base_dims": (8, 8), "depth": (1, 1),
                 "heads": (1, 2)}, 32,
    ),
    "PyramidVisionTransformerV2": (
        "pvt_v2", "PyramidVisionTransformerV2",
        STAGES | {"embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 2, 4)}, 64,
    ),
    "SwinTransformer": (
        "swin_transformer", "SwinTransformer",
        SMALL | {"patch_size": 2, "embed_dim": 8, "depths": (2, 2), "num_heads": (1, 2),
                 "window_size": 4}, 32,
    ),
    "SwinTransformerV2": (
        "swin_transformer_v2", "SwinTransformerV2",
        SMALL | {"patch_size": 2, "embed_dim": 8, "depths": (2, 2), "num_heads": (1, 2),
                 "window_size": 4}, 32,
    ),
    "TNT": (
        "tnt", "TNT",
        SMALL | {"patch_size": 16, "embed_dim": 16, "inner_dim": 4, "depth": 2,
                 "num_heads_inner": 2, "num_heads_outer": 2}, 32,
    ),
    "TinyVit": (
        "tiny_vit", "TinyVit",
        STAGES | {"embed_dims": (8, 16, 16, 32), "num_heads": (1, 2, 2, 2),
                  "window_sizes": (4, 4, 4, 2)}, 64,
    ),
    "Twins": (
        "twins", "Twins",
        SMALL | {"img_size": 64, "patch_size": 4, "embed_dims": (8, 16, 24, 32),
                 "num_heads": (1, 2, 2, 4), "mlp_ratios": (2, 2, 2, 2), "depths": (1, 1, 1, 1)}, 64,
    ),
    "Xcit": ("xcit", "Xcit", VIT | {"eta": 1.0}, 32),
    "Sequencer2d": (
        "sequencer", "Sequencer2d",
        SMALL | {"img_size": 32, "layers": (1, 1, 1, 1), "embed_dims": (8, 8, 16, 16),
                 "hidden_sizes": (4, 4, 4, 4), "patch_sizes": (4, 1, 1, 1)}, 32,
    ),
    "StarNet": ("starnet", "StarNet", STAGES | {"base_dim": 8}, 64),
    "MambaOut": ("mambaout", "MambaOut", STAGES | {"dims": (8, 16, 24, 32)}, 64),
    "MetaNeXt": ("inception_next", "MetaNeXt", STAGES | {"dims": (16, 24, 32, 48)}, 64),
    "CrossVit": (
        "crossvit", "CrossVit",
        {"img_size": 48, "num_classes": 10, "img_scale": (1.0, 1.0), "patch_size": (8, 16),
         "embed_dim": (16, 32), "depth": ((1, 1, 0),), "num_heads": (2, 2),
         "mlp_ratio": (2.0, 2.0, 1.0)}, 48,
    ),
    "Visformer": (
        "visformer", "Visformer",
        SMALL | {"img_size": 64, "init_channels": 8, "embed_dim": 32, "depth": (1, 1, 1),
                 "num_heads": 2}, 64,
    ),
    "Hiera": (
        "hiera", "Hiera",
        {"img_size": (64, 64), "num_classes": 10, "embed_dim": 8, "num_heads": 1,
         "stages": (1, 1, 1)}, 64,
    ),
}  # fmt: skip

# names of timm's own, with arguments and image size
NAMED: dict[str, tuple[dict[str, Any], int]] = {
    "resnet18": ({}, 32),
    "resnetv2_50": ({"layers": (1, 1, 1, 1)}, 32),
    "test_resnet": ({}, 64),
    "test_vit": ({"img_size": 64}, 64),
    "test_vit3": ({"img_size": 64}, 64),
    "test_efficientnet": ({}, 64),
    "test_efficientnet_gn": ({}, 64),
    "test_efficientnet_evos": ({}, 64),
    "test_byobnet": ({}, 64),
    "test_nfnet": ({}, 64),
    "mobilenetv3_small_050": ({}, 32),
    "densenet121": ({"block_config": (2, 2), "growth_rate": 8}, 32),
    "regnetx_002": ({}, 32),
    "ghostnet_050": ({}, 32),
    "mobilevit_xxs": ({}, 64),
    "vgg11": ({}, 32),
    "dla34": ({}, 32),
    "repvit_m0_9": ({}, 64),
    "levit_128s": ({"img_size": 64}, 64),
    "efficientformerv2_s0": ({"img_size": 64}, 64),
    "vit_relpos_small_patch16_224": (
        {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2}, 32,
    ),
}  # fmt: skip


def _from_class(module: str, name: str, arguments: dict[str, Any], size: int) -> Any:
    def make() -> Any:
        model = getattr(importlib.import_module(f"timm.models.{module}"), name)(**arguments)
        return classifier(model, images(4, size))

    return make


def _named(name: str, arguments: dict[str, Any], size: int) -> Any:
    def make() -> Any:
        import timm

        model = timm.create_model(name, num_classes=10, **arguments)
        return classifier(model, images(4, size))

    return make


for _name, _row in CLASSES.items():
    REGISTRY.add(_name, _from_class(*_row))
for _name, (_arguments, _size) in NAMED.items():
    REGISTRY.add(_name, _named(_name, _arguments, _size))
