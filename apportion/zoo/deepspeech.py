"""Mozilla DeepSpeech: dense layers, one LSTM unrolled over all frames, dense layers, CTC."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ABOUT = "DeepSpeech on random sound: unrolled LSTM, dropout, CTC loss, Adam"
SOURCE = "Hannun et al., arXiv 2014, as Mozilla DeepSpeech 0.6; frames and batch of TensorFlowMem"

Batch = tuple[Tensor, Tensor]

# Where the ReLUs are cut off.
CLIP = 20.0


@dataclass(frozen=True, slots=True)
class Settings:
    """`frames` of `features` numbers each, seen with `context` frames on both sides; `hidden`
    units; texts of `letters` letters from an alphabet of `alphabet`.

    Raises ValueError for texts that the frames may be too few for.
    """

    hidden: int = 2048
    frames: int = 100
    features: int = 26
    context: int = 9
    alphabet: int = 28
    letters: int = 20
    batch: int = 128
    dropout: float = 0.05

    def __post_init__(self) -> None:
        if self.frames < 2 * self.letters:
            raise ValueError(f"frames={self.frames} is below twice letters={self.letters}")
        if self.dropout >= 1:
            raise ValueError(f"dropout={self.dropout} is not below 1")

    @property
    def window(self) -> int:
        """The numbers that are seen with one frame."""
        return (2 * self.context + 1) * self.features


TINY = Settings(
    hidden=6, frames=7, features=3, context=1, alphabet=10, letters=3, batch=5, dropout=0.1
)  # fmt: skip


class Dense(nn.Module):
    """Linear, clipped ReLU, dropout."""

    def __init__(self, inward: int, outward: int, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(inward, outward), dropout

    def forward(self, x: Tensor) -> Tensor:
        y = torch.clamp(self.linear(x), min=0.0, max=CLIP)
        return F.dropout(y, self.dropout, self.training)


class Cell(nn.Module):
    """An LSTM cell; one Linear of input and state side by side makes all four gates."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * hidden, 4 * hidden)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        write, new, keep, show = self.gates(torch.cat([x, h], dim=1)).chunk(4, dim=1)
        c = torch.sigmoid(keep) * c + torch.sigmoid(write) * torch.tanh(new)
        return torch.sigmoid(show) * torch.tanh(c), c


class DeepSpeech(nn.Module):
    """Windows (frames, batch, window) to log-probabilities (frames, batch, alphabet and blank)."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        hidden, dropout = settings.hidden, settings.dropout
        self.before = nn.Sequential(
            Dense(settings.window, hidden, dropout),
            Dense(hidden, hidden, dropout),
            Dense(hidden, hidden, dropout),
        )
        self.cell = Cell(hidden)
        self.after = nn.Sequential(
            Dense(hidden, hidden, dropout), nn.Linear(hidden, settings.alphabet + 1)
        )

    def forward(self, sound: Tensor) -> Tensor:
        xs = self.before(sound).unbind(0)  # each batch, hidden
        h = c = torch.zeros_like(xs[0])
        ys = []
        for x in xs:
            h, c = self.cell(x, h, c)
            ys.append(h)
        return F.log_softmax(self.after(torch.stack(ys)), dim=2)


def step(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of one batch: how unlikely the texts are, whichever frames their letters fall on."""
    sound, texts = batch
    scores = model(sound)
    frames, samples, symbols = scores.shape
    lengths = (frames,) * samples, (texts.shape[1],) * samples
    return F.ctc_loss(scores, texts, *lengths, blank=symbols - 1, reduction="none").mean()


def build(settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """Model, optimizer and one batch, from torch's current random state."""
    model = DeepSpeech(settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sound = torch.randn(settings.frames, settings.batch, settings.window)
    texts = torch.randint(settings.alphabet, (settings.batch, settings.letters))
    return model, optimizer, (sound, texts)
