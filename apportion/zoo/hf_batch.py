"""A batch for a model of the transformers package, made from its config: words, pictures, sounds.

In: a model, its config and the sizes of the batch. Out: what its forward takes, by name, and notes.
What a forward takes is read from its signature; how long, wide and many comes from the config.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_MASKED_SOUND = ("parakeet_ctc", "lasr_ctc", "granite_speech5_ctc")
_NEED_PICTURES = ("git", "vilt", "bridgetower", "tvp", "kosmos-2", "idefics")
_VIDEOS = ("vivit", "timesformer", "videomae", "xclip", "tvp")
_SIDES = ("image_size", "img_size", "crop_size", "max_img_size")
_WORDS, _IMAGE, _SAMPLES, _FRAMES = 512, 224, 16000, 128


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Samples, words of each, and the side of pictures, 0: as the config suggests. `small` is for
    what no config says."""

    batch: int = 8
    seq: int = 0
    image: int = 0
    small: bool = False


def make_batch(
    model: Any, config: Any, sizes: BatchSizes, spec: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The keyword arguments of a model's forward, from torch's random state, and notes.

    Raises ValueError where the forward wants something that a config does not tell.
    """
    made = _BatchMaker(model, config, sizes)
    batch = made.inputs() | made.targets()
    parameters = inspect.signature(model.forward).parameters.values()
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        and p.name not in batch
    ]
    if missing or not batch:
        raise ValueError(
            f"{spec!r}: {type(model).__name__} wants {', '.join(missing) or 'inputs'}, which "
            "cannot be made from its config; write a FILE.py:FUNCTION that makes its batch."
        )
    return batch, tuple(made.notes)


class _BatchMaker:
    """The parts of a batch, each from what the config says."""

    def __init__(self, model: Any, config: Any, sizes: BatchSizes) -> None:
        self.model, self.config, self.sizes = model, config, sizes
        self.takes = inspect.signature(model.forward).parameters
        self.name = type(model).__name__
        self.kind = str(config.model_type)
        self.main = str(getattr(model, "main_input_name", "input_ids"))
        self.notes: list[str] = []
        self.made: dict[str, Any] = {}
        self.text = config.get_text_config()
        limit = _first(self.text, "max_position_embeddings", "n_positions", "max_target_positions")
        self.seq = sizes.seq or min(_WORDS, limit if limit and limit > 0 else _WORDS)

    def find(self, *names: str) -> Any:
        """The first of these settings that the config or a config inside it has."""
        for each in _configs(self.config):
            value = _first(each, *names)
            if value is not None:
                return value
        return None

    # what a model sees

    def inputs(self) -> dict[str, Any]:
        self.made = made = {}
        if "past_values" in self.takes:
            return self._series()
        if "input_ids" in self.takes:
            made["input_ids"] = self.words()
        if "bbox" in self.takes and "input_ids" in made:
            half = int(self.find("max_2d_position_embeddings") or 1000) // 2
            corner = torch.randint(half, (*made["input_ids"].shape, 2))
            made["bbox"] = torch.cat([corner, corner + half - 1], -1)
            if self.kind == "udop":  # where things are as shares of the page
                made["bbox"] = made["bbox"] / (2 * half)
        if self.kind == "molmo2":  # asks where words are and where pictures
            made["mm_token_type_ids"] = torch.zeros_like(made["input_ids"])
        if "flattened_patches" in self.takes:
            places = torch.randint(1, 5, (self.sizes.batch, 16, 2)).float()
            wide = int(self.find("patch_embed_hidden_size"))
            patches = torch.randn(self.sizes.batch, 16, wide)
            made["flattened_patches"] = torch.cat([places, patches], -1)
        if "visual_feats" in self.takes:
            things = (self.sizes.batch, 6)
            made["visual_feats"] = torch.randn(*things, self.config.visual_feat_dim)
            made["visual_pos"] = torch.rand(*things, self.config.visual_pos_dim)
        if "visual_embeds" in self.takes and self.find("visual_embedding_dim"):
            wide = int(self.find("visual_embedding_dim"))
            made["visual_embeds"] = torch.randn(self.sizes.batch, 6, wide)
            made["attention_mask"] = torch.ones_like(made["input_ids"])
            made["visual_attention_mask"] = torch.ones(self.sizes.batch, 6, dtype=torch.long)
        if self._sees():
            made |= self._patches() if "spatial_shapes" in self.takes else self._pictures()
        if "pixel_values_videos" in self.takes and self.main == "pixel_values_videos":
            made["pixel_values_videos"] = self.video()
        for name in ("input_values", "input_features"):
            if name in self.takes and (self.main == name or not made or self._compares(name)):
                made[name] = self.sound(name)
                if self.kind in _MASKED_SOUND or "decoder_cache" in self.takes:
                    made["attention_mask"] = torch.ones(made[name].shape[:2], dtype=torch.long)
        if self.kind == "moshi_depth":
            shape = (*made["input_ids"].shape, int(self.config.input_size))
            made["last_hidden_state"] = torch.randn(shape)
        if self.kind == "dia":
            channels = int(self.config.decoder_config.num_channels)
            said = (self.sizes.batch, self.seq, channels)
            made["decoder_input_ids"] = torch.randint(*self.ordinary_words(), said)
        if "decoder_cache" in self.takes:  # a transducer reads what it has said, one ahead
            made["decoder_input_ids"] = torch.randint(*self.ordinary_words(), (self.sizes.batch, 4))
        return made

    def _compares(self, name: str) -> bool:
        """Whether a model learns which of these belongs to which text."""
        needed = self.takes[name].default is inspect.Parameter.empty
        return "return_loss" in self.takes or needed

    def _pictures(self) -> dict[str, Any]:
        """Pictures, and in the text as many words in their place as the model makes of each."""
        made: dict[str, Any] = {"pixel_values": self.picture()}
        words = self.made.get("input_ids")
        if "prompt_pixel_values" in self.takes:
            made |= {f"prompt_{n}": self.picture() for n in ("pixel_values", "masks")}
        if words is None:
            return made
        token = _first(self.config, "image_token_index", "video_token_index", "image_token_id")
        places = self.find("num_query_tokens", "latent_query_num")
        if "qformer_input_ids" in self.takes:
            made["qformer_input_ids"] = words.clone()
        if token is not None and places:
            frames = made["pixel_values"].shape[1] if made["pixel_values"].dim() == 5 else 1
            front = torch.full((len(words), int(places) * frames), int(token))
            self.made["input_ids"] = torch.cat([front, words], 1)
        if "image_embeds_position_mask" in self.takes and places:
            mask = torch.zeros(words.shape, dtype=torch.long)
            mask[:, : int(places)] = 1
            made["image_embeds_position_mask"] = mask
        if "image_attention_mask" in self.takes:
            made["pixel_values"] = made["pixel_values"].unsqueeze(1)
            made["image_attention_mask"] = torch.ones(*words.shape, 1, dtype=torch.long)
        return made

    def _patches(self) -> dict[str, Any]:
        """Pictures cut into patches, with how many there are along each side."""
        side = int(self.find("num_patches") ** 0.5)
        wide = int(self.find("num_channels") * self.find("patch_size") ** 2)
        shape = (self.sizes.batch, side * side)
        return {
            "pixel_values": torch.randn(*shape, wide),
            "pixel_attention_mask": torch.ones(shape, dtype=torch.long),
            "spatial_shapes": torch.full((self.sizes.batch, 2), side),
        }

    def words(self) -> Tensor:
        """Words that mean nothing special, (batch, seq)."""
        low, high = self.ordinary_words()
        rows = self.sizes.batch
        if self.name.startswith("Musicgen") and self.name.endswith("ForCausalLM"):
            rows *= int(self.find("num_codebooks"))  # a row for each
        codebooks = int(self.find("num_codebooks") or 0)
        if self.kind == "kyutai_speech_to_text":  # a word of the text and one of each codebook
            return torch.randint(low, high, (rows, self.seq, codebooks + 1))
        if self.kind == "csm":
            return torch.randint(low, high, (rows, self.seq, codebooks))
        if self.kind == "moshi_depth":
            return torch.randint(low, high, (rows, codebooks))
        return torch.randint(low, high, (rows, self.seq))

    def ordinary_words(self) -> tuple[int, int]:
        """The longest range of the vocabulary without words that the config names."""
        size = _first(self.text, "vocab_size") or self.find("vocab_size", "audio_vocab_size") or 2
        named = {-1, int(size)}
        for each in _configs(self.config):
            for name, value in vars(each).items():
                if name.endswith(("_id", "_index", "_ids", "_token", "_idx")):
                    values = value if isinstance(value, list | tuple) else [value]
                    named.update(v for v in values if type(v) is int and 0 <= v < size)
        ends = sorted(named)
        low, high = max(pairwise(ends), key=lambda pair: pair[1] - pair[0])
        return (low + 1, high) if low + 1 < high else (0, int(size))  # all of them have names

    def _sees(self) -> bool:
        if "pixel_values" not in self.takes:
            return False
        needed = self.takes["pixel_values"].default is inspect.Parameter.empty
        needed = needed or self.kind in _NEED_PICTURES
        return self.main == "pixel_values" or "return_loss" in self.takes or needed

    def side(self) -> tuple[int, int]:
        """Height and width of pictures."""
        usual = 64 if self.sizes.small else _IMAGE
        found = self.sizes.image or self.find(*_SIDES) or usual
        if isinstance(found, list | tuple):
            return int(found[-2]), int(found[-1])
        if isinstance(found, dict):
            return int(found.get("height", _IMAGE)), int(found.get("width", _IMAGE))
        return int(found), int(found)

    def picture(self) -> Tensor:
        channels = self.find("num_channels", "in_channels", "in_chans") or 3
        shape: tuple[int, ...] = (int(channels), *self.side())
        if "prompt_pixel_values" in self.takes:  # half of what the model sees
            shape = (int(channels), self.side()[0] // 2, self.side()[1])
        if self.kind in _VIDEOS or "Video" in self.name:
            shape = (int(self.find("num_frames", "frames_per_clip") or 8), *shape)
        return torch.randn(self.sizes.batch, *shape)

    def video(self) -> Tensor:
        frames = int(self.find("frames_per_clip", "num_frames") or 8)
        channels = int(self.find("num_channels", "in_chans", "in_channels") or 3)
        return torch.randn(self.sizes.batch, frames, channels, *self.side())

    def sound(self, name: str) -> Tensor:
        bins = self.find("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim")
        if self.kind == "clap":
            return torch.randn(self.sizes.batch, 1, _FRAMES // 2, int(bins))
        if self.kind == "clvp":
            return torch.randn(self.sizes.batch, int(self.find("feature_size")), _FRAMES // 2)
        if self.kind == "pe_audio":
            return torch.randn(self.sizes.batch, 1, 8 * int(self.find("hop_length")))
        if name == "input_values":
            if self.kind == "audio-spectrogram-transformer":
                return torch.randn(self.sizes.batch, int(self.config.max_length), int(bins))
            return torch.randn(self.sizes.batch, self.sizes.seq * 400 or _SAMPLES)
        frames = self.find("max_source_positions")
        if frames and self.kind not in ("speech_to_text", "wav2vec2-bert", "speecht5"):
            return torch.randn(self.sizes.batch, int(bins or 80), 2 * int(frames))
        return torch.randn(self.sizes.batch, self.sizes.seq * 2 or _FRAMES, int(bins or 80))

    def _series(self) -> dict[str, Any]:
        batch, config = self.sizes.batch, self.config
        channels = int(_first(config, "num_input_channels", "input_size") or 1)
        if "forecast_context_len" in self.takes:
            past = int(config.patch_length) * 2
            return {"past_values": [torch.randn(past) for _ in range(batch)]}
        past = int(config.context_length)
        if "past_time_features" not in self.takes:
            return {"past_values": torch.randn(batch, past, channels)}
        past += max(config.lags_sequence)
        ahead, features = int(config.prediction_length), int(config.num_time_features)
        shape = () if channels == 1 else (channels,)
        return {
            "past_values": torch.randn(batch, past, *shape),
            "past_time_features": torch.randn(batch, past, features),
            "past_observed_mask": torch.ones(batch, past, *shape),
            "future_time_features": torch.randn(batch, ahead, features),
        }

    # what it is to answer

    def targets(self) -> dict[str, Any]:
        batch, takes = self.sizes.batch, self.takes
        if "labels" not in takes:
            return self._other_targets()
        classes = int(getattr(self.config, "num_labels", None) or 2)
        kinds = "SequenceClassification ImageClassification VideoClassification AudioClassification"
        if any(kind in self.name for kind in kinds.split()) or "XVector" in self.name:
            return {"labels": torch.randint(classes, (batch,))}
        if "TokenClassification" in self.name:
            return {"labels": torch.randint(classes, (batch, self.seq))}
        if "SemanticSegmentation" in self.name:
            return {"labels": torch.randint(classes, (batch, *self.side()))}
        if "DepthEstimation" in self.name:
            return {"labels": torch.rand(batch, *self.side())}
        if "ObjectDetection" in self.name or self.name.endswith("ForSegmentation"):
            mask = self.side() if "Segmentation" in self.name else None
            return {"labels": [_boxes(classes, mask) for _ in range(batch)]}
        if "prompt_pixel_values" in takes:
            return {"labels": self.picture()}
        if self.kind in ("vilt", "tvp", "visual_bert"):
            return {"labels": self._seen_answers(classes)}
        if "CTC" in self.name or "decoder_cache" in takes:
            return {"labels": torch.randint(*self.ordinary_words(), (batch, 3))}
        shape: tuple[int, ...] = (batch, self.seq)
        if self.kind == "dia":
            shape = (batch * int(self.config.decoder_config.num_channels), self.seq)
        if self.name.startswith("Musicgen"):
            shape += (int(self.find("num_codebooks")),)
        elif "input_ids" in takes and not self.config.is_encoder_decoder:
            words = self.made["input_ids"]
            several = words.dim() == 3 and self.kind != "csm"
            return {"labels": words[..., 0].clone() if several else words.clone()}
        return {"labels": torch.randint(*self.ordinary_words(), shape)}

    def _seen_answers(self, classes: int) -> Any:
        """Answers about a text and a picture: how well each fits, from when to when, or words."""
        if self.kind == "vilt":
            return torch.rand(self.sizes.batch, classes)
        if self.kind == "tvp":
            return [torch.rand(self.sizes.batch) for _ in range(3)]
        return torch.randint(*self.ordinary_words(), (self.sizes.batch, self.seq + 6))

    def _other_targets(self) -> dict[str, Any]:
        batch, takes = self.sizes.batch, self.takes
        if "future_values" in takes:
            if "forecast_context_len" in takes:
                return {"future_values": torch.randn(batch, int(self.config.horizon_length))}
            channels = int(_first(self.config, "num_input_channels", "input_size") or 1)
            shape = () if channels == 1 and "past_time_features" in takes else (channels,)
            return {"future_values": torch.randn(batch, self.config.prediction_length, *shape)}
        if "target_values" in takes:
            return {"target_values": torch.randint(self.config.num_targets, (batch,))}
        if "return_loss" in takes:
            return {"return_loss": True}
        if "start_positions" in takes:
            where = torch.randint(self.seq, (2, batch))
            return {"start_positions": where[0], "end_positions": where[1]}
        if "mask_labels" in takes:
            classes = int(getattr(self.config, "num_labels", None) or 2)
            return {
                "mask_labels": [(torch.rand(2, *self.side()) > 0.5).float() for _ in range(batch)],
                "class_labels": [torch.randint(classes, (2,)) for _ in range(batch)],
            }
        return {}


def _boxes(classes: int, side: tuple[int, int] | None) -> dict[str, Tensor]:
    """Two things in a picture, with a box around each and, if asked for, where each is."""
    made = {
        "class_labels": torch.randint(classes, (2,)),
        "boxes": torch.rand(2, 4) * 0.4 + 0.3,
    }
    return made | ({"masks": (torch.rand(2, *side) > 0.5).float()} if side else {})


def _first(config: Any, *names: str) -> Any:
    """The first of these settings that a config has; some refuse to be asked."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except NotImplementedError:
            continue
        if value is not None:
            return value
    return None


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "attribute_map"):
            yield from _configs(value)
