"""The tiny form of a transformers family: its default config with small numbers in the same places.

In: a config class. Out: the settings that make it tiny. Widths, heads, layers, words and pictures
are told apart by the names of their keys, which the package's families have in common; layers of
every kind that the family mixes are kept.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from typing import Any

LAYERS, HEADS, WIDTH, INNER, VOCABULARY, POSITIONS, IMAGE, PATCH = 2, 4, 64, 96, 128, 64, 32, 8
HEAD_WIDTH = WIDTH // HEADS

_RULES = tuple(
    (re.compile(f"(?:{pattern})$"), most)
    for pattern, most in (
        (
            r".*(key_value|kv|query_group)_?heads|n_head_kv|num_query_groups|multi_query_group_num",
            2,
        ),
        (r".*(_|^)heads?|n_?heads?|.*_nheads?|.*attention_heads|mamba_n_heads", HEADS),
        (r".*head_dim|.*d_head|.*head_size|d_kv|kv_channels|qk_\w+_dim", HEAD_WIDTH),
        (r"rotary_dim", 8),
        (r"index_topk|context_size", 16),
        (r"upsample_groups", WIDTH),
        (r".*lora_rank|time_step_rank|.*_rank", 8),
        (r"num_nextn\w*|num_mtp\w*|first_k\w*|.*dense_replace|moe_layer_start_index", 1),
        (
            r"num_(hidden|conv|encoder|decoder|block)?_?layers|n_layers?|.*_layers|depth|n_block",
            LAYERS,
        ),
        (r"num_blocks|num_stages_unused|num_stacks", LAYERS),
        (r".*experts_per_tok|.*top_?k(_experts)?|moe_k|num_selected_experts", 2),
        (r"num_shared_experts|n_shared_experts", 1),
        (
            r"(\w+_)?num(_\w+)?_experts|n_routed_experts|.*_num_experts|num_experts|moe_num_experts",
            4,
        ),
        (r"n_groups?|num_groups?_moe", 2),
        (r"topk_groups?", 1),
        (r".*vocab_size(_\w+)?|vocab_size_\w+", VOCABULARY),
        (r"type_vocab_size|num_labels|.*_labels", 3),
        (r".*max_\w*position\w*|n_positions|n_ctx|max_seq_len\w*|seq_len\w*", POSITIONS),
        (r"(\w+_)?image_size|image_resolution|img_size|crop_size", IMAGE),
        (r"(\w+_)?patch_size", PATCH),
        (r".*intermediate_size|.*ffn\w*|d_ff|n_inner|.*ffn_dim|mlp_dim|.*feed_?forward\w*", INNER),
        (r"num_mel_bins|input_feat_per_channel", 16),
        (r".*hidden_size|d_model|n_embd|.*(_|^)dims?|.*_channels|width|.*embedding_size", WIDTH),
        (r"hidden_size_global", WIDTH),
        (r"\w+_vocab", VOCABULARY),
        (r".*num_filters|.*fusion\w*|upsample_initial_channel|conv_channels", WIDTH),
        (r"state_size|\w*d_state|ssm_state_size", 8),
        (r"chunk_size|mamba_chunk_size|l\w+_chunk_length", 8),
        (r"num_(object_)?queries|num_query_tokens|num_latents|(latent_)?query_num", 6),
        (r"num_frames", 4),
        (r"(attention_)?window(_size)?|sliding_window|local_attention|attention_window", 8),
        (r"relative_attention_num_buckets|max_2d_position_embeddings", 64),
        (r"codebook_size|num_embeddings|entry\w*", 32),
        (r"max_source_positions|max_target_positions|max_length", POSITIONS),
    )
)
_KEPT = re.compile(
    r".*(kernel|stride|dilation|_ids?$|_index$|num_channels$|in_channels$|audio_channels)"
)
_TOKEN = re.compile(r".*_token_(id|index)s?$|.*_token$|.*_id$|.*token_index$|.*_idx$")


_FAMILIES: dict[str, dict[str, Any]] = {
    "align": {"projection_dim": 80},
    "align_text_model": {"hidden_size": 80, "num_attention_heads": 4},
    "align_vision_model": {
        "width_coefficient": 0.25,
        "depth_coefficient": 0.3,
        "hidden_dim": 320,
    },
    "autoformer": {"prediction_length": 4, "context_length": 8, "label_length": 4},
    "bamba": {"mamba_n_heads": 8},
    "bit": {"num_groups": 2},
    "blip-2": {"image_token_index": VOCABULARY - 1},
    "chameleon": {"vocabulary_map": {"<image>": 4}},
    "clap_audio_model": {"num_mel_bins": 64, "depths": [1, 1, 1, 1], "hidden_size": 8 * WIDTH},
    "clvp_decoder": {"decoder_fixing_codes": [83, 45, 45, 100]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "cvt": {"depth": [1, 2, 3]},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_group": 1},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "detr": {"encoder_attention_heads": 8, "decoder_attention_heads": 8},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [3, 3, 2],
        }
    },
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": 128},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": WIDTH // 4}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "granite4_vision": {
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [0, 1, 0, 1],
    },
    "granitemoehybrid": {"mamba_n_heads": 8},
    "informer": {"prediction_length": 4, "context_length": 8},
    "instructblip": {"image_token_index": VOCABULARY - 1},
    "instructblipvideo": {"video_token_index": VOCABULARY - 1},
    "donut-swin": {"image_size": 64, "patch_size": 4, "window_size": 2},
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16},
    "levit": {"patch_size": 16, "image_size": 64},
    "lilt": {"hidden_size": 96},
    "lw_detr_vit": {"image_size": 64, "pretrain_image_size": 64},
    "mamba2": {"num_heads": 8},
    "maskformer-swin": {"image_size": 64, "patch_size": 4, "window_size": 2},
    "mobilebert": {"embedding_size": 32, "true_hidden_size": 32, "intra_bottleneck_size": 32},
    "moonshine_streaming": {"num_key_value_heads": HEADS},
    "mobilevitv2": {"image_size": 128},
    "perceiver": {
        "max_position_embeddings": 16,
        "d_latents": WIDTH,
        "num_latents": 8,
        "num_self_attends_per_block": 2,
    },
    "pix2struct_text_model": {"initializer_range": 0.02},
    "pp_formulanet_vision": {"post_conv_in_channels": WIDTH},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_WIDTH,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_shape": [4, 4], "num_buckets": 2},
    "sapiens2": {
        "num_key_value_heads_per_layer": [HEADS, 2],
        "num_first_full_attention_layers": 1,
        "num_last_full_attention_layers": 0,
    },
    "sapiens2_head": {
        "upsample_out_channels": [32],
        "upsample_kernel_sizes": [4],
        "conv_out_channels": [32],
        "conv_kernel_sizes": [1],
    },
    "seggpt": {
        "image_size": [64, 32],
        "num_hidden_layers": 4,
        "intermediate_hidden_state_indices": [0, 1, 2, 3],
        "merge_index": 0,
    },
    "siglip2_vision_model": {"num_patches": 16},
    "step3p5": {"sliding_window": 8},
    "swin": {"image_size": 64, "patch_size": 4, "window_size": 2},
    "swinv2": {"image_size": 64, "patch_size": 4, "window_size": 2},
    "time_series_transformer": {"prediction_length": 4, "context_length": 8},
    "timesfm": {"horizon_length": 4},
    "tvp": {"max_img_size": IMAGE, "visual_prompt_size": 8},
    "vjepa2": {"frames_per_clip": 4},
    "wav2vec2-bert": {"feature_projection_input_dim": 16},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    },
}
"""What the names of keys do not tell."""

_NEEDED = {"vocab_size": VOCABULARY, "head_dim": HEAD_WIDTH, "num_key_value_heads": HEADS}
"""What some families have no default for."""

_AS_THEY_ARE = ("textnet", "hgnet_v2")
"""Families whose widths are written so often that only the defaults go together."""


def tiny_settings(config_class: Any) -> dict[str, Any]:
    """The settings of the tiny form of a family."""
    return _tiny(config_class())


def _tiny(config: Any) -> dict[str, Any]:
    if config.model_type in _AS_THEY_ARE:
        return {}
    given: dict[str, Any] = {}
    declared = {f.name: None if f.default is MISSING else f.default for f in fields(type(config))}
    usual = _usual(config)
    kept = _kept_layers(config, declared)
    for name in declared:  # some of these are other names of what the config has
        if name in ("_out_indices", "_out_features"):
            continue
        value = _value(config, name)
        if hasattr(value, "to_dict") and hasattr(value, "attribute_map"):
            value = _own_backbone(value)
            inner = _tiny(value)
            given[name] = ({"model_type": value.model_type} if value.model_type else {}) | inner
        elif kept and isinstance(value, list | tuple) and len(value) == kept[1]:
            if declared[name] is not None or len(set(map(str, value))) > 1:
                given[name] = [value[k] for k in kept[0]]
        elif isinstance(value, list | tuple) and value:
            small_list = _small_list(name, list(value))
            if small_list != list(value) or _is_set(value, usual, name):
                given[name] = small_list
        elif type(value) is type(declared[name]) and type(value) in (int, float, bool, str):
            small = _small(name, value) if type(value) is int else value
            if name.endswith("key_value_heads") and value == _value(config, "num_attention_heads"):
                small = HEADS
            if small != declared[name]:
                given[name] = small
        elif type(value) in (int, float, bool, str) and _is_set(value, usual, name):
            given[name] = _small(name, value) if type(value) is int else value
        elif value is None and name in _NEEDED:
            given[name] = _NEEDED[name]
    if kept:
        given[kept[2]] = len(kept[0])
    given |= _stages(config, usual, kept) | _sections(config) | _tokens(config)
    given |= _channels(config, given)
    for name, value in _FAMILIES.get(config.model_type, {}).items():
        given[name] = given.get(name, {}) | value if isinstance(value, dict) else value
    return given


def _value(config: Any, name: str) -> Any:
    """A setting under the config's own name for it or another; None where it has none, or one for
    every layer."""
    if name in vars(config):
        return vars(config)[name]
    try:
        return getattr(config, name, None)
    except Exception:  # the package's own kinds of error
        return None


def _usual(config: Any) -> Any:
    """The config of the same class that nothing was set for."""
    try:
        return type(config)()
    except Exception:  # some cannot do without
        return config


def _is_set(value: Any, usual: Any, name: str) -> bool:
    """Whether the config around has set this."""
    return name in vars(usual) and value != vars(usual)[name]


def _own_backbone(config: Any) -> Any:
    """In place of a backbone of another package, the one of this package that is most like it."""
    if config.model_type != "timm_backbone":
        return config
    from transformers import ResNetConfig

    settings: dict[str, Any] = {"out_indices": list(config.out_indices or [-1])}
    return ResNetConfig(**settings)


def _stages(config: Any, usual: Any, kept: tuple[list[int], int, str] | None) -> dict[str, Any]:
    """Which stages a backbone hands on: as many as before, the last ones if some are left out."""
    names, found = getattr(config, "stage_names", None), getattr(config, "out_indices", None)
    if not names or not found or min(found) < 0:
        return {}
    chosen = list(found)
    if kept and kept[1] == len(names) - 1:
        last = len(kept[0])
        chosen = list(range(last - len(chosen) + 1, last + 1))
    elif chosen == list(getattr(usual, "out_indices", None) or ()):
        return {}
    return {"out_indices": chosen}


def _channels(config: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Widths that are those of a backbone inside, or of the layers after it."""
    wide = {
        name: list(value)
        for name, value in vars(config).items()
        if name.endswith("in_channels") and isinstance(value, list | tuple)
    }
    between, narrow = getattr(config, "encoder_hidden_dim", None), given.get("encoder_hidden_dim")
    same = {n: [narrow] * len(v) for n, v in wide.items() if narrow and {*v} == {between}}
    inner: Any = getattr(config, "backbone_config", None)
    before, small = getattr(inner, "hidden_sizes", None), given.get("backbone_config", {})
    if not before or "hidden_sizes" not in small:
        return same
    found = small.get("out_indices") or list(inner.out_indices)
    old, new = ([sizes[k - 1] for k in found] for sizes in (before, small["hidden_sizes"]))
    return same | {name: new for name, value in wide.items() if value == old}


def _sections(config: Any) -> dict[str, Any]:
    """The parts of a head that are rotated by time, height and width, for narrow heads."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or "rope_type" not in rope or not _turns_in_parts(config, rope):
        return {}
    count = len(rope.get("mrope_section", "thw"))
    half = int(HEAD_WIDTH * rope.get("partial_rotary_factor", 1.0)) // 2
    first = half - (count - 1) * (half // count)
    return {"rope_parameters": {**rope, "mrope_section": [first] + [half // count] * (count - 1)}}


def _turns_in_parts(config: Any, rope: dict[str, Any]) -> bool:
    return "mrope_section" in rope or bool(
        re.search(r"^(?!ernie).*(_vl|omni|glm|ocr)", config.model_type)
    )


def _kept_layers(config: Any, declared: Any) -> tuple[list[int], int, str] | None:
    """Which layers are kept, of how many, and the name of their number: two, and one of every kind
    that a list of the config tells."""
    name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    count = getattr(config, name, None)
    if type(count) is not int or count <= LAYERS or name not in declared:
        return None
    wanted = max([LAYERS, *(len(v) for v in _layer_numbers(config).values())])
    kinds = [
        tuple(map(str, column))
        for column in zip(
            *(
                v
                for k, v in vars(config).items()
                if isinstance(v, list | tuple) and len(v) == count and not k.startswith("_")
            ),
            strict=False,
        )
    ]
    first: dict[Any, int] = {}
    for number, kind in enumerate(kinds):
        first.setdefault(kind, number)
    chosen = sorted(first.values())[:4]
    chosen += [k for k in range(count) if k not in chosen][: max(0, wanted - len(chosen))]
    return sorted(chosen), count, name


def _layer_numbers(config: Any) -> dict[str, Any]:
    """Lists that name layers by number."""
    return {
        k: v
        for k, v in vars(config).items()
        if isinstance(v, list | tuple) and k.endswith("out_indices") and len(v) > 1
    }


def _small(name: str, value: int) -> int:
    if value < 2 or _KEPT.match(name):
        return value
    for pattern, most in _RULES:
        if pattern.match(name):
            return min(value, most)
    return value


def _small_list(name: str, values: list[Any]) -> list[Any]:
    if not all(type(v) is int for v in values) or _KEPT.match(name):
        return values
    if re.search(r"heads$", name) and all(v % values[0] == 0 for v in values):
        return [v // values[0] for v in values]
    if name.endswith("out_indices") and len(values) > 1:
        return list(range(len(values)))
    if re.search(r"(proj|target|feature)_layers?$", name):
        return [v if v < 0 or name.startswith("encode_proj") else min(v, 1) for v in values]
    if re.search(r"depths?$|layers$|num_blocks$|layer_depths|blocks$", name):
        return [min(v, 1) for v in values]
    if re.search(r"image_size|img_size", name):
        return [min(v, IMAGE) for v in values]
    if re.search(r"(sizes|dims?|channels|filters|widths)$", name) and min(values) >= 16:
        factor = min(values) // 16
        return [max(8, v // factor // 8 * 8) for v in values]
    return values


def _tokens(config: Any) -> dict[str, Any]:
    """Words with a meaning that the small vocabulary has no place for, moved to its end."""
    if not hasattr(config, "vocab_size") and not hasattr(config, "text_config"):
        return {}
    moved: dict[str, Any] = {}
    last = VOCABULARY - 1
    for name, value in vars(config).items():
        if not _TOKEN.match(name) or name.startswith("_"):
            continue
        if type(value) is int and value >= VOCABULARY - 16:
            moved[name], last = last, last - 1
        elif isinstance(value, list) and _beyond(value):
            moved[name], last = [last - k for k in range(len(value))], last - len(value)
    return moved


def _beyond(values: list[Any]) -> bool:
    numbers = [v for v in values if type(v) is int]
    return len(numbers) == len(values) and max(numbers, default=0) >= VOCABULARY - 16
