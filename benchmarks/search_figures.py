"""Figures with both axes by decades or parts of them, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, MARGIN = 640, 400, 60
FEW, BESIDE = 4, 230  # of more series the names stand beside the frame, which takes so much
COLOURS = ("#1f5fa8", "#b5471f", "#2f7d3b", "#7a4aa0", "#b08900", "#008c95", "#a3376b", "#5c5c5c",
           "#73a5d9", "#d98a6b")  # fmt: skip


@dataclass(frozen=True)
class Series:
    """Points of one kind, from left to right."""

    name: str
    points: tuple[tuple[float, float], ...]
    joined: bool = True


@dataclass(frozen=True)
class _Frame:
    """The least and the largest of both axes."""

    low: tuple[float, float]
    high: tuple[float, float]

    def place(self, x: float, y: float) -> tuple[float, float]:
        across, up = (
            (math.log(v) - math.log(a)) / (math.log(b) - math.log(a))
            for v, a, b in zip((x, y), self.low, self.high, strict=True)
        )
        return MARGIN + across * (WIDTH - 2 * MARGIN), HEIGHT - MARGIN - up * (HEIGHT - 2 * MARGIN)


def figure(across: str, up: str, several: Sequence[Series], level: float | None = None) -> str:
    """All series in one frame; a dashed line at `level`."""
    points = [point for series in several for point in series.points]
    ys = [y for _, y in points] + ([level] if level else [])
    xs = [x for x, _ in points]
    frame = _Frame((_below(min(xs)), _below(min(ys))), (_above(max(xs)), _above(max(ys))))
    drawn = [*_grid(frame)]
    if level:
        (x1, y1), (x2, y2) = frame.place(frame.low[0], level), frame.place(frame.high[0], level)
        drawn.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#555" '
            'stroke-dasharray="5 4"/>'
        )
    for number, series in enumerate(several):
        colour = COLOURS[number % len(COLOURS)]
        at = (MARGIN, 34) if len(several) <= FEW else (WIDTH - MARGIN + 10, MARGIN + 12)
        drawn += [
            *_series(frame, series, colour),
            *_name(series, colour, at[0], at[1] + 16 * number),
        ]
    wide = WIDTH if len(several) <= FEW else WIDTH + BESIDE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {HEIGHT}" '
        'font-family="sans-serif" font-size="13">'
        f'<rect width="{wide}" height="{HEIGHT}" fill="white"/>{"".join(drawn)}'
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">{across}</text>'
        f'<text x="{MARGIN}" y="20">{up}</text></svg>\n'
    )


def _series(frame: _Frame, series: Series, colour: str) -> Iterator[str]:
    places = [frame.place(x, y) for x, y in series.points]
    if series.joined:
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for x, y in places:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>'


def _name(series: Series, colour: str, x: int, y: int) -> Iterator[str]:
    yield f'<circle cx="{x + 6}" cy="{y - 4}" r="4" fill="{colour}"/>'
    yield f'<text x="{x + 16}" y="{y}">{series.name}</text>'


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of every decade, or the 1 alone if there are many decades."""
    digits = (1, 2, 5) if high / low < 1e3 else (1,)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = [d * 10.0**n for n in range(first, last + 1) for d in digits]
    return [tick for tick in every if low * 0.999 <= tick <= high * 1.001]


def _below(value: float) -> float:
    return max(d * 10.0**n for n in range(-6, 12) for d in (1, 2, 5) if d * 10.0**n <= value)


def _above(value: float) -> float:
    return min(d * 10.0**n for n in range(-6, 12) for d in (1, 2, 5) if d * 10.0**n > value)


def _grid(frame: _Frame) -> Iterator[str]:
    for tick in _ticks(frame.low[0], frame.high[0]):
        x, y = frame.place(tick, frame.low[1])
        yield f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x:.1f}" y2="{MARGIN}" stroke="#ddd"/>'
        yield f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{tick:,g}</text>'
    for tick in _ticks(frame.low[1], frame.high[1]):
        x, y = frame.place(frame.low[0], tick)
        yield f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{WIDTH - MARGIN}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
