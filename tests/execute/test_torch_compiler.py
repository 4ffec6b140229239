"""Graphs on their way to inductor: images in the order that convolutions like."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from apportion.execute.torch_compiler import channels_last, compiled, fake_mode, traced

aten = torch.ops.aten
SHAPES = ((2, 3, 16, 16), (64, 3, 3, 3), (128, 64, 3, 3), (128,))


def two_layers(*given: torch.Tensor) -> Sequence[torch.Tensor]:
    """Two convolutions and their gradients, with a mean and a view between."""
    image, first, second, row = given
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    one = aten.convolution(image, first, None, *how)
    middle = aten.relu(one)
    two = aten.convolution(middle, second, None, *how)
    loss = (aten.view(aten.mean(two, [2, 3], True), [2, 128]) * row).sum()
    grad = aten.view(row, [1, 128, 1, 1]).expand(2, 128, 16, 16) / 256
    masks = [True, True, False]
    back, for_second, _ = aten.convolution_backward(grad, middle, second, None, *how, masks)
    masked = back * (one > 0)
    _, for_first, _ = aten.convolution_backward(
        masked, image, first, None, *how, [False, True, False]
    )
    return loss, for_first, for_second, middle


def test_convolutions_read_channels_last_in_both_directions() -> None:
    generator = torch.Generator().manual_seed(0)
    real = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    with fake_mode():
        fakes = [torch.empty(shape, dtype=torch.float64) for shape in SHAPES]
        graph = traced(two_layers, fakes)
    before = [tuple(out.stride()) for out in two_layers(*real)]
    made = channels_last(graph, fakes)
    nodes = {
        node.target: [n for n in made.graph.nodes if n.target is node.target]
        for node in made.graph.nodes
    }
    order = {"memory_format": torch.channels_last}
    assert (
        len(nodes[aten.convolution.default]) == len(nodes[aten.convolution_backward.default]) == 2
    )
    for node in nodes[aten.convolution.default]:
        assert node.args[0].meta["val"].is_contiguous(**order)
    inner = nodes[aten.convolution_backward.default][0]
    assert inner.args[1].meta["val"].is_contiguous(**order)
    found = made(*real)
    for ours, true, stride in zip(found, two_layers(*real), before, strict=True):
        torch.testing.assert_close(ours, true)
        assert tuple(ours.stride()) == stride


def test_a_graph_without_convolutions_stays() -> None:
    with fake_mode():
        fakes = [torch.empty(4, 4)]
        graph = traced(lambda x: [aten.relu(x)], fakes)
    code = graph.code
    assert channels_last(graph, fakes).code == code


@pytest.mark.slow
def test_a_graph_without_inputs_is_compiled() -> None:
    with fake_mode():
        graph = traced(lambda: [torch.arange(5) * 2], [])
    (made,) = compiled(graph, [])([])
    assert torch.equal(made, torch.arange(5) * 2)
