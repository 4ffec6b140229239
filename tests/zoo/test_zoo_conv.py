"""The zoo's convolutional models: that they are what their papers describe, and divide exactly."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
import torch.nn.functional as F
from compare_runs import compare
from graphs import captured, problem
from soak import kept
from torch import nn

from apportion import zoo
from apportion.capture.capture import capture
from apportion.search.baselines.random_strategy import draw
from apportion.search.levels.tofu import tofu
from apportion.split.space import Space
from apportion.zoo import amoebanet, deepspeech, inception, nasnet, resnet, wavenet, wgan

MODELS = [
    *("lenet", "alexnet", "vgg16", "resnet50", "resnet101", "resnet152", "inception-v3"),
    *("nasnet-a", "amoebanet", "wavenet", "wavenet:stacks=4,layers=36", "deepspeech", "wgan-gp"),
]


def parameters(spec: str) -> int:
    return sum(p.numel() for p in zoo.load(spec, meta=True).model.parameters())


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        ("lenet", 61_706),
        ("alexnet", 61_100_840),
        ("vgg16", 138_357_544),
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("resnet152", 60_192_808),
        ("inception-v3", 27_161_264),
        ("inception-v3:auxiliary=0", 23_834_568),
        ("nasnet-a", 88_753_150),  # 88.9M in the paper, which counts running statistics
        ("nasnet-a:cells=4,filters=1056,stem=32,image=224", 5_289_978),  # NASNet-A (4 @ 1056)
        ("deepspeech", 47_224_861),
    ],
)
def test_parameters_are_those_of_public_releases(spec: str, count: int) -> None:
    assert parameters(spec) == count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "millions"),
    [
        ("amoebanet", 82),
        ("amoebanet:filters=416", 318),
        ("amoebanet:filters=544", 542),
        ("amoebanet:layers=36,filters=544", 1050),
    ],
)
def test_amoebanets_of_gpipes_table(spec: str, millions: float) -> None:
    assert parameters(spec) / 1e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("spec", kept(MODELS, "lenet", "vgg16", "resnet50", "wgan-gp"))
def test_defaults_are_captured_without_data(spec: str) -> None:
    it = zoo.load(spec, meta=True)
    graph = capture(it.step, it.model, it.optimizer, it.batch).graph
    updated = [op for op in graph.ops if op.kind == "apportion.update"]
    assert len(updated) == len(list(it.model.parameters()))
    sizes = [math.prod(graph.values[op.parameter or 0].shape or ()) for op in updated]
    assert sum(sizes) == parameters(spec)


# The special ones: double backward, and CTC after unrolled steps.
@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", ["lenet:tiny", "deepspeech:tiny,frames=4,letters=2", "wgan-gp:tiny"]
)
def test_random_strategies_train_the_same_model(spec: str) -> None:
    program, space = captured(spec)
    found = compare(program, space, draw(space, 3, Random(7)), 3)
    assert found.equal, found


@pytest.mark.slow
def test_tofus_plan_trains_the_same_wavenet() -> None:
    program, _ = captured("wavenet:tiny")
    strategy = tofu(problem(4, "wavenet:tiny")).strategy
    found = compare(program, Space(program.graph, strategy.digits), strategy, 4)
    assert found.equal, found


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("lenet:image=15", "image=15 is below 16"),
        ("alexnet:image=62", "image=62 is below 63"),
        ("alexnet:dropout=1", "dropout=1.0 is not below 1"),
        ("vgg16:image=31", "image=31 is below 32"),
        ("inception-v3:image=106", "image=106 is below 107"),
        ("inception-v3:image=74,auxiliary=0", "image=74 is below 75"),
        ("nasnet-a:filters=4000", "filters=4000 is not a multiple of 24 from 192 up"),
        ("amoebanet:layers=17", "layers=17 is not a multiple of stages=3"),
        ("amoebanet:filters=12", "filters=12 is not a multiple of 8"),
        ("wavenet:layers=7", "layers=7 is not a multiple of stacks=2"),
        ("deepspeech:frames=39", "frames=39 is below twice letters=20"),
        ("wgan-gp:image=12", "image=12 is not a multiple of 8"),
    ],
)
def test_settings_that_do_not_fit_get_one_sentence(spec: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        zoo.load(spec, meta=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "spec",
    [
        *("lenet:tiny,image=16", "alexnet:tiny,image=63", "vgg16:tiny,image=32"),
        *("inception-v3:tiny,image=107", "inception-v3:tiny,image=75,auxiliary=0"),
        *("nasnet-a:tiny,image=9", "nasnet-a:tiny,image=24,filters=24", "amoebanet:tiny,image=16"),
    ],
)
def test_the_smallest_that_are_accepted_work(spec: str) -> None:
    it = zoo.load(spec)
    assert it.step(it.model, it.batch).isfinite()


@pytest.mark.slow
def test_inception_sees_the_papers_maps() -> None:
    with torch.device("meta"):
        model = inception.InceptionV3(inception.Settings(batch=1))
        x = model.stem(torch.empty(1, 3, 299, 299))
        assert x.shape == (1, 192, 35, 35)
        x = model.blocks17(model.shrink1(model.blocks35(x)))
        assert x.shape == (1, 768, 17, 17)
        assert model.blocks8(model.shrink2(x)).shape == (1, 2048, 8, 8)


@pytest.mark.slow
def test_found_cells_end_in_the_papers_maps() -> None:
    with torch.device("meta"):
        large = nasnet.NASNet(nasnet.Settings())
        small = amoebanet.AmoebaNet(amoebanet.Settings())
        nets = ((large, 331, (4032, 11, 11)), (small, 224, (4 * 832, 7, 7)))
        for net, image, end in nets:
            before = earlier = net.norm(net.stem(torch.empty(1, 3, image, image)))
            for cell in net.cells:
                before, earlier = cell(before, earlier), before
            assert before.shape == (1, *end)


@pytest.mark.slow
def test_blocks_of_a_resnet_are_settings() -> None:
    model = zoo.load("resnet50:tiny,stage3=5").model
    assert isinstance(model, resnet.ResNet)
    assert [len(stage) for stage in model.stages] == [1, 1, 5, 1]  # type: ignore[arg-type]
    # 3 convolutions a block, stem and head: TensorFlowMem's depth of 1001
    deep = parameters("resnet50:stage1=10,stage2=12,stage3=301,stage4=10")
    assert deep > parameters("resnet152")


def test_wavenet_hears_the_past_only() -> None:
    settings = wavenet.Settings(stacks=2, layers=6, levels=9, samples=40, batch=1)
    torch.manual_seed(0)
    model, _, (sound, _) = wavenet.build(settings)
    model = model.double()
    reach = 2 + 2 * (1 + 2 + 4)  # samples that a prediction depends on, itself among them
    changed = sound.clone()
    changed[0, 20] = (changed[0, 20] + 1) % settings.levels
    differs = (model(sound) != model(changed)).any(1)[0]
    assert differs.nonzero().flatten().tolist() == list(range(20, 20 + reach))


def test_deepspeechs_cell_is_torchs_lstm() -> None:
    torch.manual_seed(0)
    cell, theirs = deepspeech.Cell(5), nn.LSTMCell(5, 5)
    # torch's gates are input, forget, cell, output
    order = (0, 2, 1, 3)
    weight, bias = (
        torch.cat([p.detach().chunk(4)[k] for k in order])
        for p in (cell.gates.weight, cell.gates.bias)
    )
    theirs.weight_ih.data, theirs.weight_hh.data = weight.chunk(2, dim=1)
    theirs.bias_ih.data, theirs.bias_hh.data = bias, torch.zeros_like(bias)
    x, h, c = torch.randn(3, 4, 5).unbind()
    torch.testing.assert_close(cell(x, h, c), theirs(x, (h, c)))


def test_each_player_learns_from_its_own_loss() -> None:
    model, _, (real,) = wgan.build(wgan.TINY)
    assert isinstance(model, wgan.Players)
    model.double()
    real = real.double()
    draws = torch.randn(4, 5).double(), torch.rand(4, 1, 1, 1).double()

    def losses() -> tuple[torch.Tensor, torch.Tensor]:
        """The critic's and the generator's, each written out alone."""
        made = model.generator(draws[0])
        mixed = (real + draws[1] * (made.detach() - real)).requires_grad_()
        (slope,) = torch.autograd.grad(model.critic(mixed).sum(), mixed, create_graph=True)
        penalty = ((slope.square().sum((1, 2, 3)).sqrt() - 1) ** 2).mean()
        apart = model.critic(made.detach()).mean() - model.critic(real).mean()
        return apart + 10 * penalty, -model.critic(made).mean()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn", lambda *size, device, dtype: draws[0])
        patch.setattr(torch, "rand", lambda *size, device, dtype: draws[1])
        loss = wgan.step(model, (real,))
    players = [list(model.critic.parameters()), list(model.generator.parameters())]
    ours = torch.autograd.grad(loss, players[0] + players[1])
    expected = [
        g for one, own in zip(losses(), players, strict=True) for g in torch.autograd.grad(one, own)
    ]
    torch.testing.assert_close(ours, tuple(expected))
    torch.testing.assert_close(loss, sum(losses()))


@pytest.mark.slow
def test_the_penalty_pulls_slopes_to_one() -> None:
    torch.manual_seed(0)
    it = zoo.load("wgan-gp:tiny,penalty=1000")
    assert isinstance(it.model, wgan.Players)
    critic, (real,) = it.model.critic, it.batch
    optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)

    def excess() -> torch.Tensor:
        x = real.clone().requires_grad_()
        (slope,) = torch.autograd.grad(critic(x).sum(), x)
        size: torch.Tensor = slope.square().sum((1, 2, 3)).sqrt()
        return (size - 1).abs().mean()

    before = excess()
    for _ in range(40):
        optimizer.zero_grad()
        it.step(it.model, it.batch).backward()
        optimizer.step()
    assert excess() < 0.3 * before


@pytest.mark.slow
def test_ctc_loss_is_captured_with_its_real_shapes() -> None:
    it = zoo.load("deepspeech:tiny")
    graph = capture(it.step, it.model, it.optimizer, it.batch).graph
    (op,) = (op for op in graph.ops if "ctc_loss" in op.kind and "backward" not in op.kind)
    scores = F.log_softmax(torch.randn(7, 5, 11), dim=2)
    real = torch.ops.aten._ctc_loss(scores, it.batch[1], (7,) * 5, (3,) * 5, 10)
    assert [graph.values[v].shape for v in op.outputs] == [tuple(t.shape) for t in real]
