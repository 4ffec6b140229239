"""Which class of the transformers package a family is trained as: the first that has a loss.

In: a family's name. Out: its class. A class has a loss if its forward takes what a loss is computed
from and does not say that training is not implemented.
"""

from __future__ import annotations

import inspect
import re
from difflib import get_close_matches
from functools import cache
from typing import Any

from apportion.catalogue import near_open_models

_TASKS = (
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "MASKED_LM",
    "CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "CTC",
    "SEMANTIC_SEGMENTATION",
    "TEXT_TO_SPECTROGRAM",
    "TEXT_TO_WAVEFORM",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "PRETRAINING",
    "TIME_SERIES_CLASSIFICATION",
    "TIME_SERIES_PREDICTION",
    "MASKED_IMAGE_MODELING",
    "CAUSAL_IMAGE_MODELING",
    "RNNT",
    "TDT",
    "TOKEN_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION",
    "QUESTION_ANSWERING",
    "DEPTH_ESTIMATION",
    "VISUAL_QUESTION_ANSWERING",
    "UNIVERSAL_SEGMENTATION",
    "INSTANCE_SEGMENTATION",
    "OBJECT_DETECTION",
    "ZERO_SHOT_OBJECT_DETECTION",
    "AUDIO_FRAME_CLASSIFICATION",
    "IMAGE_TO_IMAGE",
    "IMAGE_MATTING",
    "NORMAL_ESTIMATION",
    "POSE_ESTIMATION",
    "KEYPOINT_DETECTION",
    "MASK_GENERATION",
    "RETRIEVAL",
)
"""The package's tables of classes by task, those first that a family is most known for."""

_TARGETS = frozenset(
    [
        "labels",
        "return_loss",
        "future_values",
        "mask_labels",
        "class_labels",
        "start_positions",
        "target_values",
        "next_sentence_label",
        "noise",
        "spectrogram_labels",
        "reward_labels",
        "sampled_negative_indices",
    ]
)
_NOT_IMPLEMENTED = re.compile(
    r"raise \w+\(\s*f?\"[^\"]*("
    r"([Tt]raining|[Ll]oss)[^\"]*(not|no)[^\"]*(implemented|supported|yet)"
    r"|not trainable|not support training)"
)


def class_named(name: str) -> Any:
    """The model class of that name, or None."""
    import transformers

    found = getattr(transformers, name, None) if name[:1].isupper() or name[:1] == "x" else None
    is_model = inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model else None


def class_with_loss(family: str, spec: str) -> Any:
    """The class that a family is trained as; raises ValueError if it has none."""
    found = _first_with_loss(family)
    if found is not None:
        return found
    raise ValueError(
        f"{spec!r}: no class of {family} in transformers computes a loss; write a FILE.py:FUNCTION "
        "with a step that does."
    )


def known_families() -> tuple[str, ...]:
    """All families that transformers knows by name."""
    from transformers.models.auto import configuration_auto

    names: Any = configuration_auto
    return tuple(names.CONFIG_MAPPING_NAMES)


def family_config(name: str, spec: str) -> Any:
    """The config class of a family; raises ValueError, with what is near, if there is none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for each in (name, name.replace("_", "-"), name.replace("-", "_")):
        if each in known_families():
            return CONFIG_MAPPING[each]
    near = [*near_open_models(name), *get_close_matches(name, [*known_families()], 5, 0.5)]
    hint = f"near are {', '.join(near)}" if near else "none is near"
    raise ValueError(
        f"{spec!r}: transformers has no family {name!r}; {hint}; a class such as LlamaForCausalLM, "
        "a file config.json and a folder with one can be named too."
    )


@cache
def families() -> tuple[str, ...]:
    """All families that have a class with a loss."""
    return tuple(name for name in known_families() if _first_with_loss(name) is not None)


@cache
def _first_with_loss(family: str) -> Any:
    for found in _classes(family):
        if has_loss(found):
            return found
    return None


def _classes(family: str) -> list[Any]:
    """The classes of a family by task, and after them all others of its module."""
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    names: list[str] = []
    for task in _TASKS:
        entry = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}).get(family, ())
        names += [entry] if isinstance(entry, str) else entry
    found = [class_named(name) for name in dict.fromkeys(names)]
    try:
        config = CONFIG_MAPPING[family]
    except Exception:  # the module needs a package that is not installed
        return []
    module = config.__module__.replace(".configuration_", ".modeling_")
    own = inspect.getmodule(found[0]) if found and found[0] is not None else _module(module)
    for name, each in vars(own).items() if own else ():
        if (
            inspect.isclass(each)
            and issubclass(each, transformers.PreTrainedModel)
            and each.__module__ == getattr(own, "__name__", "")
            and getattr(each, "config_class", None) is config
            and not name.startswith("_")
        ):
            found.append(each)
    return [each for each in dict.fromkeys(found) if each is not None]


def _module(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except Exception:  # there is none, or it needs a package that is not installed
        return None


_FROM_MORE = frozenset(["SplinterForPreTraining", "Blip2ForImageTextRetrieval"])
"""Classes whose loss needs what no config tells."""


def has_loss(model: Any) -> bool:
    """Whether a model class computes a loss."""
    if model.__name__ in _FROM_MORE:
        return False
    parameters = inspect.signature(model.forward).parameters
    try:
        source = inspect.getsource(model.forward)
    except OSError:
        return False
    if not _TARGETS.intersection(parameters):
        return "MAE" in model.__name__ and "forward_loss" in source
    return "loss" in source and not _NOT_IMPLEMENTED.search(source)
