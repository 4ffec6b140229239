"""read_graph: a file with a graph from elsewhere, whatever its format.

In: a path, and the name of the format if it is known. Out: an ImportedGraph, or a ValueError that
names the file and says in one sentence what is wrong with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from apportion.checked import brief
from apportion.place.imports.doppler_graph import DOPPLER, read_doppler
from apportion.place.imports.fiddle import FIDDLE, read_fiddle, read_split
from apportion.place.imports.imported_graph import ImportedGraph
from apportion.place.imports.pipedream_profile import PIPEDREAM, read_pipedream

READERS: Mapping[str, Callable[[str, str], ImportedGraph]] = {
    FIDDLE: read_fiddle,
    PIPEDREAM: read_pipedream,
    DOPPLER: read_doppler,
}
FORMATS = tuple(READERS)
MOST_CHARACTERS = 1 << 28


def read_graph(path: Path, format: str | None = None) -> ImportedGraph:
    """The graph in a file; the format is guessed from what the file has in it, unless given."""
    if format is not None and format not in READERS:
        raise ValueError(f"unknown format {format!r}; known: {', '.join(FORMATS)}")
    text = _text(path)
    try:
        return READERS[format or guess_format(text)](text, path.stem)
    except ValueError as error:
        raise ValueError(f"{path}: {brief(str(error), 300)}") from None


def read_split_file(path: Path) -> Mapping[str, str]:
    """The device of each node in a file of human-experts/, or of what `place --out` wrote."""
    text = _text(path)
    try:
        return read_split(text)
    except ValueError as error:
        raise ValueError(f"{path}: {brief(str(error), 300)}") from None


def guess_format(text: str) -> str:
    """The format that a text is in; ValueError if it is none of them."""
    if text.lstrip()[:1] in ("{", "["):
        return FIDDLE
    if "forward_compute_time=" in text:
        return PIPEDREAM
    if re.match(r"\s*\d+\s*\n", text):
        return DOPPLER
    raise ValueError(f"this is in none of the formats that are known: {', '.join(FORMATS)}")


def _text(path: Path) -> str:
    if path.stat().st_size > MOST_CHARACTERS:
        raise ValueError(f"{path}: more than {MOST_CHARACTERS >> 20} MiB are not a graph")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: this is not text") from None
