"""What convolutions of few channels need are multiples of their operands' bytes."""

from __future__ import annotations

import pytest

from apportion.execute.copied_operands import copied_operands, thin_convolutions
from apportion.machine.cost_table import KernelMeasurement

KIND = "apportion.conv_backward_weight"


def call(grad: int, image: int) -> str:
    return f"{KIND}(float32[{grad},64,1,1] float32[{image},3,1,1]) #0"


def work(grad: int, image: int, density: float, workspace: int) -> KernelMeasurement:
    nbytes = 256 * grad + 12 * image
    return KernelMeasurement(1.0, density * nbytes, nbytes, 4, workspace)


KNOWN = {
    call(g, i): work(g, i, 60.0, 2 * 256 * g + 12 * i)
    for g, i in ((1000, 3000), (2000, 1000), (5000, 9000))
} | {call(g, 7): work(g, 7, 5.0, 256 * g) for g in (400, 700)}


def test_found_again() -> None:
    grad, image = 3000, 20000
    nbytes = 256 * grad + 12 * image
    found = copied_operands(KNOWN, call(grad, image), 100.0 * nbytes, nbytes)
    assert found == pytest.approx(2 * 256 * grad + 12 * image, rel=1e-6)
    light = copied_operands(KNOWN, call(grad, 7), 4.0 * nbytes, nbytes)
    assert light == pytest.approx(256 * grad, rel=0.01), "another algorithm"


def test_others_are_not_guessed() -> None:
    assert copied_operands(KNOWN, "aten.mm.default(float32[8,8] float32[8,8]) #0", 1.0, 1) is None
    assert copied_operands({}, call(10, 10), 1e6, 2000) is None
    wide = f"{KIND}(float32[8,64,9,9] float32[8,64,9,9]) #0"
    assert copied_operands(KNOWN, wide, 1e9, 1000) is None
    assert thin_convolutions(KNOWN | {wide: work(1, 1, 1.0, 0)}) == KNOWN
