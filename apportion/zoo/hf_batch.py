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
        if self._sees():
            made["pixel_values"] = self.picture()
        if "pixel_values_videos" in self.takes and self.main == "pixel_values_videos":
            made["pixel_values_videos"] = self.video()
        for name in ("input_values", "input_features"):
            if name in self.takes and (self.main == name or not made):
                made[name] = self.sound(name)
                if self.kind in ("parakeet_ctc", "lasr_ctc", "granite_speech5_ctc"):
                    made["attention_mask"] = torch.ones(made[name].shape[:2], dtype=torch.long)
        return made

    def words(self) -> Tensor:
        """Words that mean nothing special, (batch, seq)."""
        low, high = self.ordinary_words()
        rows = self.sizes.batch
        if self.name.startswith("Musicgen") and self.name.endswith("ForCausalLM"):
            rows *= int(self.find("num_codebooks"))  # a row for each
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
        return low + 1, high

    def _sees(self) -> bool:
        if "pixel_values" not in self.takes:
            return False
        needed = self.takes["pixel_values"].default is inspect.Parameter.empty
        needed = needed or self.kind in ("git", "vilt", "bridgetower")
        return self.main == "pixel_values" or "return_loss" in self.takes or needed

    def side(self) -> tuple[int, int]:
        """Height and width of pictures."""
        usual = 64 if self.sizes.small else _IMAGE
        found = self.sizes.image or self.find("image_size", "img_size", "crop_size") or usual
        if isinstance(found, list | tuple):
            return int(found[-2]), int(found[-1])
        if isinstance(found, dict):
            return int(found.get("height", _IMAGE)), int(found.get("width", _IMAGE))
        return int(found), int(found)

    def picture(self) -> Tensor:
        channels = self.find("num_channels", "in_channels", "in_chans") or 3
        shape: tuple[int, ...] = (int(channels), *self.side())
        if self.kind in ("vivit", "timesformer", "videomae", "xclip") or "Video" in self.name:
            shape = (int(self.find("num_frames", "frames_per_clip") or 8), *shape)
        return torch.randn(self.sizes.batch, *shape)

    def video(self) -> Tensor:
        frames = int(self.find("frames_per_clip", "num_frames") or 8)
        channels = int(self.find("num_channels", "in_chans", "in_channels") or 3)
        return torch.randn(self.sizes.batch, frames, channels, *self.side())

    def sound(self, name: str) -> Tensor:
        bins = self.find("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim")
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
            return {"labels": [_boxes(classes) for _ in range(batch)]}
        if "CTC" in self.name:
            return {"labels": torch.randint(*self.ordinary_words(), (batch, 3))}
        shape: tuple[int, ...] = (batch, self.seq)
        if self.name.startswith("Musicgen"):
            shape += (int(self.find("num_codebooks")),)
        elif "input_ids" in takes and not self.config.is_encoder_decoder:
            return {"labels": self.made["input_ids"].clone()}
        return {"labels": torch.randint(*self.ordinary_words(), shape)}

    def _other_targets(self) -> dict[str, Any]:
        batch, takes = self.sizes.batch, self.takes
        if "future_values" in takes:
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


def _boxes(classes: int) -> dict[str, Tensor]:
    """Two things in a picture."""
    return {
        "class_labels": torch.randint(classes, (2,)),
        "boxes": torch.rand(2, 4) * 0.4 + 0.3,
    }


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
