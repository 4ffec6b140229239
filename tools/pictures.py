"""Draws the pictures of docs/concepts.md and docs/index.md: python tools/pictures.py

They are plain SVG, written by hand in the sense that every box is placed here; a test compares the
files with what this draws.
"""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
BLUE, ORANGE, GREEN, GREY = "#4c78a8", "#f58518", "#54a24b", "#9aa0a6"
FONT = 'font-family="sans-serif" font-size="13"'


class Picture:
    """Boxes, arrows and texts on a white ground."""

    def __init__(self, width: int, height: int) -> None:
        self.rows = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" {FONT}>',
            '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#444"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]

    def box(self, x: float, y: float, wide: float, high: float, colour: str) -> None:
        self.rows.append(
            f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="3" '
            f'fill="{colour}" fill-opacity="0.25" stroke="{colour}"/>'
        )

    def text(self, x: float, y: float, said: str, anchor: str = "middle", size: int = 13) -> None:
        self.rows.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" '
            f'fill="#222">{said}</text>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.rows.append(
            f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="#444" fill="none" '
            'marker-end="url(#end)"/>'
        )

    def named(self, x: float, y: float, wide: float, colour: str, *lines: str) -> None:
        """A box with lines of text in it."""
        high = 18 * len(lines) + 12
        self.box(x, y, wide, high, colour)
        for number, line in enumerate(lines):
            self.text(x + wide / 2, y + 20 + 18 * number, line)

    def svg(self) -> str:
        return "\n".join([*self.rows, "</svg>", ""])


def walk() -> str:
    """A step on its way: captured, divided, lowered, and then simulated or run."""
    it = Picture(820, 190)
    stations = [
        ("your step", "one device"), ("Graph", "operators, values"), ("splits", "derived, checked"),
        ("search", "a Choice for each Op"), ("TaskGraph", "compute, messages"),
    ]  # fmt: skip
    for number, lines in enumerate(stations):
        x = 10 + 162 * number
        it.named(x, 40, 140, BLUE if number else GREY, *lines)
        if number:
            it.arrow(x - 22, 64, x - 2, 64)
    for x, said in ((161, "capture"), (323, "describe"), (647, "lower")):
        it.text(x, 30, said, size=11)
    it.named(334, 120, 140, ORANGE, "Cluster, costs", "which machine")
    it.arrow(450, 118, 540, 92)
    it.named(500, 120, 140, GREEN, "simulate", "predicted step")
    it.named(660, 120, 150, GREEN, "execute", "same result, measured")
    it.arrow(700, 90, 600, 118)
    it.arrow(740, 90, 740, 118)
    return it.svg()


def splits() -> str:
    """A product of matrices cut in two along each of its axes."""
    it = Picture(820, 230)
    cases = [
        ("cut along i", "rows of A: B is on both,", "nothing is summed", "i"),
        ("cut along j", "columns of B: A is on both,", "nothing is summed", "j"),
        ("cut along k", "both are cut, parts of C", "are summed: all-reduce", "k"),
    ]
    for number, (title, first, second, axis) in enumerate(cases):
        x = 20 + 270 * number
        it.text(x + 115, 22, title, size=15)
        _matrix(it, x, 50, "A", axis == "i", axis == "k")
        it.text(x + 71, 92, "x")
        _matrix(it, x + 80, 50, "B", axis == "k", axis == "j")
        it.text(x + 152, 92, "=")
        if axis == "k":
            it.box(x + 160, 42, 60, 60, BLUE)
            it.box(x + 168, 58, 60, 60, ORANGE)
            it.text(x + 194, 140, "C, two terms")
        else:
            _matrix(it, x + 160, 50, "C", axis == "i", axis == "j")
        it.text(x + 115, 172, first)
        it.text(x + 115, 190, second)
    it.box(250, 206, 14, 14, BLUE)
    it.text(270, 218, "device 0", "start")
    it.box(350, 206, 14, 14, ORANGE)
    it.text(370, 218, "device 1", "start")
    it.box(450, 206, 14, 14, GREY)
    it.text(470, 218, "on both", "start")
    return it.svg()


def _matrix(it: Picture, x: float, y: float, name: str, rows: bool, columns: bool) -> None:
    if rows:
        it.box(x, y, 64, 36, BLUE)
        it.box(x, y + 38, 64, 36, ORANGE)
    elif columns:
        it.box(x, y, 31, 74, BLUE)
        it.box(x + 33, y, 31, 74, ORANGE)
    else:
        it.box(x, y, 64, 74, GREY)
    it.text(x + 32, y + 90, name)


def lanes() -> str:
    """What a simulated step looks like: lanes of devices, messages beside computation."""
    it = Picture(820, 200)
    it.text(10, 22, "a step of data parallelism on two devices", "start", 15)
    for device in range(2):
        y = 44 + 70 * device
        it.text(10, y + 20, f"device {device}", "start")
        it.text(10, y + 46, "messages", "start", 11)
        for x, wide, said, colour in (
            (100, 90, "forward 1", BLUE), (194, 90, "forward 2", BLUE),
            (288, 130, "backward 2", BLUE), (422, 130, "backward 1", BLUE),
            (690, 100, "updates", GREEN),
        ):  # fmt: skip
            it.box(x, y, wide, 28, colour)
            it.text(x + wide / 2, y + 19, said)
        for x, said in ((422, "reduce gradient 2"), (556, "reduce gradient 1")):
            it.box(x, y + 32, 130, 20, ORANGE)
            it.text(x + 65, y + 47, said, size=11)
    it.text(100, 190, "0", size=11)
    it.arrow(110, 186, 790, 186)
    it.text(
        450, 182, "time: the first message hides behind backward 1, the second does not", size=11
    )
    return it.svg()


PICTURES = {"walk.svg": walk, "splits.svg": splits, "lanes.svg": lanes}


def main() -> None:
    for name, draw in PICTURES.items():
        (DOCS / name).write_text(draw())


if __name__ == "__main__":
    main()
