"""Models of the transformers package by name and size: `hf:llama,hidden_size=4096 ...`.

In: a spec. Out: a step, a model with random weights, an optimizer and a batch made from the config.

    SPEC ::= hf:NAME[,SETTING...]      NAME ::= a family (llama), a class (LlamaForCausalLM), a hub
                                               name, a folder with a config.json, or that file
    SETTING ::= tiny | batch=N | seq=N | image=N | class=NAME | KEY=VALUE of the config

A key of a config inside the config has its path: `text_config.hidden_size=64`. A value is a number,
true, false, none, a word, or a list in brackets. hf_names.py finds the configuration, hf_classes.py
chooses the class, hf_batch.py makes the batch and hf_tiny.py the sizes of the tiny form. The
package is needed only here, and only when a spec names it.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from apportion.zoo.hf_batch import BatchSizes, make_batch
from apportion.zoo.hf_classes import (
    class_named,
    class_with_loss,
    families,
    has_loss,
)
from apportion.zoo.hf_names import found_config
from apportion.zoo.hf_tiny import tiny_settings

OWN = ("batch", "seq", "image")
"""Settings of the batch; all others but `tiny` and `class` are keys of the config."""

_LAYERS, _MASKS = "a captured step runs every layer", "NumPy draws the masks, once for all steps"
_PER_STEP = dict.fromkeys(("layerdrop", "encoder_layerdrop", "decoder_layerdrop"), _LAYERS) | {
    "apply_spec_augment": _MASKS
}
"""What changes from step to step in a way that no captured step has, and why it is switched off."""

_TINY_SIZES = {"batch": 4, "seq": 16}


@dataclass(frozen=True, slots=True)
class HfModel:
    """What a spec names, with what was set for the user, in sentences."""

    step: Callable[[nn.Module, Any], Any]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: dict[str, Any]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Request:
    """A spec taken apart: the settings of the config keep the order they were written in."""

    spec: str
    name: str
    tiny: bool
    chosen: str | None
    sizes: dict[str, int]
    keys: dict[str, Any]


def step(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The loss that the model computes itself."""
    loss: Tensor = model(**batch).loss
    return loss


def load_hf(spec: str) -> HfModel:
    """The model of a spec, on torch's current device and from its random state.

    Raises ValueError, in one sentence, for an unknown name or setting, for a family without a loss,
    for sizes that the package refuses, and where the package is not installed.
    """
    _require_package()
    request = _request(spec)
    with _quiet():
        config, chosen, found = _config(request)
        notes = [*found, *_prepare(config, request)]
        try:
            model = chosen(config)
        except Exception as error:
            raise _refused(spec, f"{chosen.__name__} cannot be built", error) from error
        model.train()
        own = _TINY_SIZES | request.sizes if request.tiny else request.sizes
        sizes = BatchSizes(**own, small=request.tiny)
        batch, more = make_batch(model, config, sizes, spec)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.01)
    return HfModel(step, model, optimizer, batch, (*notes, *more))


def hf_names() -> tuple[str, ...]:
    """The families that have a class with a loss."""
    _require_package()
    with _quiet():
        return families()


def _require_package() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise ValueError(
            "Models of the hub, of folders and of hf: need the transformers package; install it "
            "with pip install 'apportion[hf]'."
        ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the package's advice about checkpoints and generation, which does not matter here,
    and without what its modules warn of while they are loaded."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


# The spec


def _request(spec: str) -> _Request:
    name, *items = _split(spec.removeprefix("hf:"))
    if not name:
        raise ValueError(
            f"{spec!r} names no model; write hf:llama, hf:OWNER/NAME or hf:path/to/config.json."
        )
    sizes: dict[str, int] = {}
    keys: dict[str, Any] = {}
    chosen: str | None = None
    for item in items:
        key, equals, text = item.partition("=")
        if item == "tiny":
            continue
        if not equals or not key or not text:
            raise ValueError(f"{spec!r}: {item!r} is no setting; write tiny, or KEY=VALUE.")
        if key in sizes or key in keys or (key == "class" and chosen):
            raise ValueError(f"{spec!r}: {key} is set twice.")
        if key == "class":
            chosen = text
        elif key in OWN:
            sizes[key] = _positive(spec, key, text)
        else:
            keys[key] = _value(text)
    return _Request(spec, name, "tiny" in items, chosen, sizes, keys)


def _split(text: str) -> list[str]:
    """The pieces between commas that are not inside brackets."""
    pieces, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            pieces.append("")
        else:
            pieces[-1] += letter
    return pieces


def _positive(spec: str, key: str, text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{spec!r}: {key} must be a positive whole number, not {text!r}.")
    return int(text)


def _value(text: str) -> Any:
    """A number, a truth value, None, a list of those, or the word itself."""
    words = {"none": None, "null": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    if text.startswith("[") and text.endswith("]"):
        inner = text[1:-1]
        return [_value(piece.strip()) for piece in _split(inner)] if inner.strip() else []
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# The config


def _config(request: _Request) -> tuple[Any, Any, tuple[str, ...]]:
    """The config that a spec names, the class to build of it, and notes."""
    wanted = class_named(request.chosen or request.name)
    if request.chosen and wanted is None:
        raise _unknown_class(request)
    found = found_config(request.name, request.spec)
    if request.tiny and (found.settings or found.models):
        raise ValueError(f"{request.spec!r}: tiny is for families; set sizes by their keys.")
    named = map(class_named, found.models)
    wanted = wanted or next((each for each in named if each and has_loss(each)), None)
    wanted = wanted or class_with_loss(found.config.model_type, request.spec)
    made = found.config if issubclass(found.config, wanted.config_class) else wanted.config_class
    return _made(made, found.settings, request), wanted, found.notes


def _made(made: Any, given: dict[str, Any], request: _Request) -> Any:
    """A config of a class and what it is made from, with the settings that were asked for."""
    what = "its config cannot be made"
    try:
        given = tiny_settings(made) if request.tiny else given
        config = made(**given)
        if request.keys:
            what = "these settings do not go together"
            config = made(**_with_keys(config, given, request))
    except ValueError as error:
        if str(error).startswith(repr(request.spec)):
            raise
        raise _refused(request.spec, what, error) from error
    except Exception as error:
        raise _refused(request.spec, what, error) from error
    return config


def _unknown_class(request: _Request) -> ValueError:
    import transformers

    name = request.chosen or request.name
    near = get_close_matches(name, [n for n in dir(transformers) if "For" in n or "LM" in n], 3)
    hint = f"; near are {', '.join(near)}" if near else ""
    return ValueError(f"{request.spec!r}: transformers has no model class {name!r}{hint}.")


def _with_keys(config: Any, given: dict[str, Any], request: _Request) -> dict[str, Any]:
    """What a config was made from, with other settings, so that what follows from them follows."""
    given = copy.deepcopy(given)
    for path, value in request.keys.items():
        _check_key(config, path, request.spec)
        *outer, last = path.split(".")
        place, there = given, config
        for name in outer:
            usual = there.sub_configs_defaults.get(name)
            there = getattr(there, name)
            place = place.setdefault(name, _made_from(usual, there))
        key = there.attribute_map.get(last, last)
        if key == there.attribute_map.get("num_hidden_layers", "num_hidden_layers"):
            _repeat_layers(place, getattr(there, key, None), value)
        place[key] = value
    return given


def _made_from(usual: Any, config: Any) -> dict[str, Any]:
    """What a config inside another was made from, where nothing was given for it."""
    made = dict(getattr(usual, "init_kwargs", None) or {})
    return ({"model_type": config.model_type} if config.model_type else {}) | made


def _repeat_layers(place: dict[str, Any], before: Any, count: Any) -> None:
    """Lists with something for every layer, for another number of layers."""
    for name, value in place.items():
        if isinstance(value, list) and value and len(value) == before and type(count) is int:
            place[name] = [value[k % len(value)] for k in range(count)]


def _check_key(config: Any, path: str, spec: str) -> None:
    there = config
    *outer, last = path.split(".")
    for name in outer:
        there = getattr(there, name, None)
        if there is None or not hasattr(there, "to_dict"):
            inner = [k for k, v in vars(config).items() if hasattr(v, "to_dict")]
            raise ValueError(
                f"{spec!r}: the config has no config {name!r} inside; it has "
                f"{', '.join(inner) or 'none'}."
            )
    known = {k for k in there.to_dict() if not k.startswith("_")} | set(there.attribute_map)
    if last in known or last in ("num_labels", "attn_implementation", "experts_implementation"):
        return
    inside = [
        f"{k}.{last}"
        for k, v in vars(there).items()
        if hasattr(v, "to_dict") and last in v.to_dict()
    ]
    near = inside or get_close_matches(last, sorted(known), 5, 0.6)
    hint = f"near are {', '.join(near)}" if near else f"it has {', '.join(sorted(known))}"
    raise ValueError(f"{spec!r}: {last!r} is no setting of {type(there).__name__}; {hint}.")


def _prepare(config: Any, request: _Request) -> list[str]:
    """Sets what a training step wants; returns sentences about what that changes."""
    notes = []
    for each in _configs(config):
        if getattr(each, "use_cache", None):
            each.use_cache = False
        for name, why in _PER_STEP.items():
            if getattr(each, name, 0) and name not in {k.split(".")[-1] for k in request.keys}:
                setattr(each, name, type(getattr(each, name))(0))
                notes.append(f"{request.spec}: {name} is {getattr(each, name)}, because {why}")
    notes += _longer(config, request)
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id
    return notes


def _longer(config: Any, request: _Request) -> list[str]:
    """Lets the model see as many tokens as are asked for."""
    text, seq = config.get_text_config(), request.sizes.get("seq", 0)
    try:
        limit = getattr(text, "max_position_embeddings", None)
    except NotImplementedError:  # some configs refuse to be asked
        return []
    if (
        not isinstance(limit, int)
        or not 0 < limit < seq
        or "max_position_embeddings" in request.keys
    ):
        return []
    text.max_position_embeddings = seq
    return [f"{request.spec}: max_position_embeddings is {seq} instead of {limit}, as seq is"]


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "attribute_map"):
            yield from _configs(value)


def _refused(spec: str, what: str, error: Exception) -> ValueError:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    text = " ".join(lines[-2:])[:300] if lines else ""
    return ValueError(f"{spec!r}: {what}: {type(error).__name__}{text and ': '}{text}")
