"""Quantities as people write them: "12 GB", "100 Gbit/s", "5 us", "14 TFLOP/s".

Cluster files, the command line and tables read and show numbers by these functions. A program that
reads numbers from people takes a bare number for the base unit (bytes, seconds, bytes per second,
operations per second) and text for a number with its unit. Capital and small letters differ: a B is
a byte, and bits are spelled out.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from apportion.checked import brief

Units = dict[str, Fraction]

_DECIMAL = {p: Fraction(1000) ** n for n, p in enumerate(("", "k", "M", "G", "T", "P"))}
_BINARY = {f"{p}i": Fraction(1024) ** n for n, p in enumerate("KMGT", start=1)}
_NUMBER = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d{1,3})?)\s*([A-Za-zµμ/]+)\s*")

BYTES: Units = {f"{p}B": f for p, f in {**_DECIMAL, "K": Fraction(1000), **_BINARY}.items()}
SECONDS: Units = {
    unit: Fraction(1, 1000**n)
    for n, units in enumerate((("s",), ("ms",), ("us", "µs", "μs"), ("ns",)))
    for unit in units
}
BYTES_PER_SECOND: Units = {
    **{f"{unit}/s": factor for unit, factor in BYTES.items()},
    **{f"{prefix}bit/s": factor / 8 for prefix, factor in _DECIMAL.items()},
}
OPERATIONS_PER_SECOND: Units = {
    f"{prefix}{name}/s": factor for name in ("FLOP", "OP") for prefix, factor in _DECIMAL.items()
}

_SUCH_AS = (
    (BYTES, "12 GB or 16 GiB"),
    (SECONDS, "5 us or 1.5 ms"),
    (BYTES_PER_SECOND, "25 GB/s or 100 Gbit/s"),
    (OPERATIONS_PER_SECOND, "14 TFLOP/s"),
)


def parse_quantity(text: str, units: Units) -> float:
    """The number that `text` says in the base unit; ValueError if it does not parse."""
    match = _NUMBER.fullmatch(text) if len(text) <= 100 else None
    if match is None or not match[1].isascii() or match[2] not in units:
        example = next(example for known, example in _SUCH_AS if known is units)
        raise ValueError(f"{brief(text)!r} is not a number with a unit, such as {example}")
    try:
        return float(Fraction(match[1].replace("_", "")) * units[match[2]])
    except OverflowError:
        raise ValueError(f"{brief(text)!r} is too large a number") from None


def format_quantity(number: float, unit: str) -> str:
    """Three digits and a unit with its prefix: 25 GB/s, 5 us."""
    if unit == "s":
        steps = [(1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")]
    else:
        steps = [(float(factor), prefix + unit) for prefix, factor in reversed(_DECIMAL.items())]
    factor, name = next((step for step in steps if number >= step[0]), steps[-1])
    if number == 0:
        factor, name = 1.0, unit
    rounded = float(f"{number / factor:.3g}")
    return f"{rounded:g} {name}"


_SIZES = {"B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def parse_size_limit(text: str) -> float:
    """Bytes in `16GB` or `512MiB`, small letters too; infinitely many for `none`."""
    if text.strip().lower() == "none":
        return math.inf
    units = {unit.upper(): factor for unit, factor in _SIZES.items()}
    shape = r"(\d{1,30}(?:\.\d{1,30})?) ?([A-Z]+)"
    match = re.fullmatch(shape, text.strip().upper(), re.ASCII)
    size = int(float(match[1]) * units[match[2]]) if match and match[2] in units else 0
    if size == 0:
        raise ValueError(
            f"{brief(text)!r} is not a size; write a number and one of {', '.join(_SIZES)}, "
            "such as 16GB, or none."
        )
    return size
