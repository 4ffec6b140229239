"""WGAN-GP: a generator and a critic, whose gradient with respect to images is held near one.

The penalty differentiates the critic inside the step, so that its training needs second
derivatives. Both players learn in every step, each from its own loss; the paper gives the critic
five turns for one of the generator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

ABOUT = "WGAN-GP on random images: gradient penalty by double backward, Adam"
SOURCE = "Gulrajani et al., NeurIPS 2017, residual networks for CIFAR-10"

Batch = tuple[Tensor]

# The generator doubles its first map this often.
DOUBLINGS = 3


@dataclass(frozen=True, slots=True)
class Settings:
    """`latent` is the noise that an image is made from, `channels` those of all blocks; `penalty`
    the weight of the gradient's distance from one.

    Raises ValueError for images that are no doublings.
    """

    latent: int = 128
    channels: int = 128
    image: int = 32
    batch: int = 64
    penalty: float = 10.0

    def __post_init__(self) -> None:
        if self.image % 2**DOUBLINGS:
            raise ValueError(f"image={self.image} is not a multiple of {2**DOUBLINGS}")


TINY = Settings(latent=5, channels=6, image=16, batch=4)


def _convolution(inward: int, outward: int, kernel: int = 3, *, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(inward, outward, kernel, padding=kernel // 2, bias=bias)


def _doubled(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="nearest")


class Growing(nn.Module):
    """A residual block of the generator: doubles the map. Its convolutions have no bias, because
    a batch norm follows all of them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.conv1, self.conv2 = (_convolution(channels, channels, bias=False) for _ in range(2))
        self.shortcut = _convolution(channels, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(_doubled(F.relu(self.norm1(x))))
        y = self.conv2(F.relu(self.norm2(y)))
        z: Tensor = y + self.shortcut(_doubled(x))
        return z


class Judging(nn.Module):
    """A residual block of the critic, without batch norm, which would tie samples together. It
    may halve the map; the `first` sees the images."""

    def __init__(self, inward: int, channels: int, *, halves: bool, first: bool = False) -> None:
        super().__init__()
        self.conv1, self.conv2 = _convolution(inward, channels), _convolution(channels, channels)
        self.shortcut = _convolution(inward, channels, 1) if halves else None
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv2(F.relu(self.conv1(x if self.first else F.relu(x))))
        if self.shortcut is None:
            return x + y
        z: Tensor = F.avg_pool2d(y, 2) + self.shortcut(F.avg_pool2d(x, 2))
        return z


class Generator(nn.Module):
    """Noise (batch, latent) to images (batch, 3, image, image)."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        channels, start = settings.channels, settings.image >> DOUBLINGS
        self.start = (channels, start, start)
        self.linear = nn.Linear(settings.latent, channels * start * start)
        self.blocks = nn.Sequential(*(Growing(channels) for _ in range(DOUBLINGS)))
        self.norm, self.last = nn.BatchNorm2d(channels), _convolution(channels, 3)

    def forward(self, noise: Tensor) -> Tensor:
        x = self.blocks(self.linear(noise).view(-1, *self.start))
        return torch.tanh(self.last(F.relu(self.norm(x))))


class Critic(nn.Module):
    """Images (batch, 3, image, image) to scores (batch,)."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        channels = settings.channels
        self.blocks = nn.Sequential(
            Judging(3, channels, halves=True, first=True),
            Judging(channels, channels, halves=True),
            Judging(channels, channels, halves=False),
            Judging(channels, channels, halves=False),
        )
        self.head = nn.Linear(channels, 1)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(F.relu(self.blocks(images)).mean((2, 3)))
        return scores.squeeze(1)


class Players(nn.Module):
    """Generator and critic."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.latent, self.penalty = settings.latent, settings.penalty
        self.generator, self.critic = Generator(settings), Critic(settings)


def _penalty(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """How far the critic's slope is from one, between real and made images."""
    share = torch.rand(real.shape[0], 1, 1, 1, device=real.device, dtype=real.dtype)
    mixed = torch.lerp(real, fake.to(real.dtype), share).requires_grad_()
    (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    excess: Tensor = slope.flatten(1).norm(2, dim=1) - 1
    return excess.square().mean()


def step(model: nn.Module, batch: Batch) -> Tensor:
    """The losses of both players, added; neither's gradient reaches the other's parameters."""
    assert isinstance(model, Players)
    (real,) = batch
    critic = model.critic
    noise = torch.randn(real.shape[0], model.latent, device=real.device, dtype=real.dtype)
    made = model.generator(noise)
    fake = made.detach()
    critical: Tensor = critic(fake).mean() - critic(real).mean()
    critical = critical + model.penalty * _penalty(critic, real, fake)
    fixed = {name: parameter.detach() for name, parameter in critic.named_parameters()}
    judged: Tensor = functional_call(critic, fixed, (made,))
    return critical - judged.mean()


def build(settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """Model, optimizer and one batch, from torch's current random state."""
    model = Players(settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.0, 0.9))
    return (
        model,
        optimizer,
        (torch.rand(settings.batch, 3, settings.image, settings.image) * 2 - 1,),
    )
