"""The catalogue of the zoo: its models with their settings and sizes, without loading torch.

zoo/catalogue.json is written by tools/catalogue.py from the models themselves; a test holds the two
together. zoo/ loads the models.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

CATALOGUE = Path(__file__).parent / "zoo" / "catalogue.json"


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
