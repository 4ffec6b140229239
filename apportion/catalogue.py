"""The catalogue of the zoo: its models with their settings and sizes, without loading torch.

zoo/catalogue.json is written by tools/catalogue.py from the models themselves; a test holds the two
together. zoo/open_models.toml has the shapes of published models, with their sources. zoo/ loads
the models.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

CATALOGUE = Path(__file__).parent / "zoo" / "catalogue.json"
OPEN_MODELS = Path(__file__).parent / "zoo" / "open_models.toml"


@dataclass(frozen=True, slots=True)
class Known:
    """A model of the zoo: where it comes from, its settings with their defaults, those of its tiny
    form, and how many parameters it has by default."""

    name: str
    about: str
    source: str
    defaults: dict[str, int | float]
    tiny: dict[str, int | float]
    parameters: int


def known_models() -> tuple[Known, ...]:
    """All models of the zoo."""
    return tuple(Known(**row) for row in json.loads(CATALOGUE.read_text()))


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A published model: its name on the hub and other names of the same shape, the class of
    transformers that it is trained as and what its config is made from. `stated` says whether the
    source gives the number of parameters to the last one, or only the shape that has them."""

    family: str
    name: str
    also: tuple[str, ...]
    model: str
    part: str
    config: dict[str, Any]
    parameters: int
    stated: bool
    source: str


@cache
def open_models() -> tuple[OpenModel, ...]:
    """All published models whose shapes are built in, family by family."""
    facts = tomllib.loads(OPEN_MODELS.read_text(encoding="utf-8"))
    return tuple(_open_model(family, row) for family in facts["family"] for row in family["models"])


def _open_model(family: dict[str, Any], row: list[Any]) -> OpenModel:
    name, how, parameters, *sizes = row
    config = family.get("config", {}) | dict(zip(family["columns"], sizes, strict=True))
    config |= family.get("only", {}).get(name, {})
    config = {key: None if value == "none" else value for key, value in config.items()}
    also = tuple(family.get("also", {}).get(name, ()))
    told = family["class"], family.get("part", ""), config, parameters, how == "stated"
    return OpenModel(family["name"], name, also, *told, family["source"])


def open_model(name: str) -> OpenModel | None:
    """The published model of a name, in any case and with or without its owner before it."""
    return _by_name().get(name.lower())


@cache
def _by_name() -> dict[str, OpenModel]:
    names = {name.lower(): model for model in open_models() for name in (model.name, *model.also)}
    return {name.partition("/")[2]: model for name, model in names.items()} | names


def near_open_models(name: str, count: int = 3) -> tuple[str, ...]:
    """The names of published models that are most like a name."""
    wanted = name.lower() if "/" in name else f"/{name.lower()}"
    known = {(each if "/" in name else each[each.index("/") :]): each for each in _whole_names()}
    found = get_close_matches(wanted, [key.lower() for key in known], count, 0.75)
    lower = {key.lower(): each for key, each in known.items()}
    return tuple(lower[key] for key in found)


def _whole_names() -> list[str]:
    return [name for model in open_models() for name in (model.name, *model.also)]
