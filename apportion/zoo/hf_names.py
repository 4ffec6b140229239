"""Whose configuration a name is: a file, a folder, one in transformers' cache, a built-in shape.

In: what was typed after `hf:`. Out: the class of a config, what it is made from, and a note.

A hub name (`meta-llama/Llama-3.1-8B`) is looked up in this order: a folder of that name, the cache
of transformers, the shapes of open_models.toml, and last the hub itself, which only the package
speaks to, without weights and without code from there. transformers repeats what fails: without a
name server it gives up after 23 s, where messages are lost after more than a minute. _HUB_SECONDS
bounds that.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from apportion.catalogue import OpenModel, near_open_models, open_model
from apportion.zoo.hf_classes import class_named, family_config, known_families

_HUB_SECONDS = 10.0
"""Longer than a hub takes that answers: a configuration is a few kilobytes."""

_HUB_NAME = re.compile(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class FoundConfig:
    """The class of a config, what it is made from, and the classes of models it was written for."""

    config: Any
    settings: dict[str, Any]
    models: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def found_config(name: str, spec: str) -> FoundConfig:
    """The config of a family, a class, a file, a folder or a hub name; raises ValueError, in one
    sentence, if there is none."""
    if name.endswith(".json"):
        return _of_file(Path(name), spec)
    named_class = class_named(name)
    if named_class is not None:
        return FoundConfig(named_class.config_class, {})
    if "/" in name or name in (".", ".."):
        return _of_path(name, spec)
    found = None if name in known_families() else _of_short_name(name, spec)
    return found or FoundConfig(family_config(name, spec), {})


def _of_short_name(name: str, spec: str) -> FoundConfig | None:
    """A folder here, a built-in shape without its owner, or what the cache has by such a name."""
    if (Path(name) / "config.json").is_file():
        return _of_path(name, spec)
    known = open_model(name)
    return _of_hub(known.name, spec) if known is not None else _cached(name, spec)


def _of_path(name: str, spec: str) -> FoundConfig:
    folder = Path(name)
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return _of_file(folder / "config.json", spec)
        raise ValueError(
            f"{spec!r}: the folder {name!r} has no config.json; save one there with "
            "config.save_pretrained, or name another folder."
        )
    if _HUB_NAME.fullmatch(name) is None or name.startswith("."):
        raise ValueError(
            f"{spec!r}: there is no folder {name!r}, and a model of the hub is named as OWNER/NAME."
        )
    return _of_hub(name, spec)


def _of_file(file: Path, spec: str) -> FoundConfig:
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(f"There is no file {str(file)!r}.") from None
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}.") from None
    if not isinstance(facts, dict) or "model_type" not in facts:
        raise ValueError(f"{file} has no model_type; it must be a config.json of transformers.")
    family = family_config(str(facts.pop("model_type")), spec)
    return FoundConfig(family, facts, tuple(facts.get("architectures") or ()))


def _of_hub(name: str, spec: str) -> FoundConfig:
    known = open_model(name)
    found = _cached(name, spec) or (_cached(known.name, spec) if known is not None else None)
    if found is not None:
        return found
    if known is not None:
        return _built_in(known, name)
    return _asked_for(name, spec)


def _cached(name: str, spec: str) -> FoundConfig | None:
    """What transformers' cache has by a name; raises ValueError for what it can do nothing with."""
    try:
        return _read(name, local=True)
    except OSError:  # it is not in the cache
        return None
    except Exception as error:
        raise ValueError(f"{spec!r}: {_refusal(error)}") from None


def _read(name: str, local: bool) -> FoundConfig:
    """By transformers itself: OSError where it has no such configuration, and what else it raises
    where it can do nothing with one."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(name, local_files_only=local, trust_remote_code=False)
    facts, _ = type(config).get_config_dict(name, local_files_only=True)
    facts.pop("model_type", None)
    return FoundConfig(type(config), facts, tuple(facts.get("architectures") or ()))


def _built_in(known: OpenModel, name: str) -> FoundConfig:
    model = class_named(known.model)
    if model is None:
        raise ValueError(f"This version of transformers has no class {known.model} for {name}.")
    note = (
        f"{name}: its built-in shape is taken{known.part and f', {known.part}'}, as transformers' "
        f"cache has no configuration of it (`hf download {name} config.json` puts it there)"
    )
    return FoundConfig(model.config_class, deepcopy(known.config), (known.model,), (note,))


def _asked_for(name: str, spec: str) -> FoundConfig:
    """From the hub, if it answers in time and may be asked."""
    from huggingface_hub import is_offline_mode

    why = "HF_HUB_OFFLINE forbids to ask the hub"
    if not is_offline_mode():
        answer = _within(_HUB_SECONDS, lambda: _read(name, local=False))
        if isinstance(answer, FoundConfig):
            return answer
        if answer is not None and not isinstance(answer, OSError):
            raise ValueError(f"{spec!r}: {_refusal(answer)}")
        why = _hub_reason(answer)
    near = near_open_models(name)
    hint = f"near are {', '.join(near)}" if near else "`apportion models` lists those"
    raise ValueError(
        f"{spec!r}: {name} is neither in transformers' cache nor a built-in shape ({hint}), and "
        f"{why}; where there is a network run `hf download {name} config.json`, or name a folder "
        "with its config.json."
    )


def _within(seconds: float, work: Callable[[], Any]) -> Any:
    """What work returns or raises, None if it takes longer: then nobody waits for it any more."""
    done: list[Any] = []

    def attempt() -> None:
        logger = logging.getLogger("huggingface_hub")
        before = logger.level
        logger.setLevel(logging.CRITICAL)  # it tells of every try
        try:
            done.append(work())
        except Exception as error:
            done.append(error)
        finally:
            logger.setLevel(before)

    thread = Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    return done[0] if done else None


def _hub_reason(error: Any) -> str:
    """Why the hub gave nothing, by the kinds of errors that led to transformers' own."""
    kinds = set()
    while error is not None:
        kinds |= {each.__name__ for each in type(error).__mro__}
        error = error.__cause__ or error.__context__
    if "GatedRepoError" in kinds:
        return "the hub gives it only to those who have accepted its terms (`hf auth login`)"
    if "RepositoryNotFoundError" in kinds:
        return "the hub has none of that name, or it is private (`hf auth login`)"
    if "RemoteEntryNotFoundError" in kinds:
        return "the hub has no config.json of it"
    return f"the hub was not reached within {_HUB_SECONDS:.0f} s"


def _refusal(error: Exception) -> str:
    """The first sentence of what transformers says, on one line."""
    text = " ".join(str(error).split())
    return text.partition(". ")[0].rstrip(".") + "."
