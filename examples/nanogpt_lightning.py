"""The small GPT of nanogpt.py through Lightning's Trainer, on as many ranks as torchrun starts.

    torchrun --standalone --nproc-per-node 4 examples/nanogpt_lightning.py --plan data

Against a plain program two lines differ: an import, and `strategy=`. The losses are those of
nanogpt.py.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import nanogpt
import torch
from torch.utils.data import DataLoader, Dataset

from apportion.adapters.lightning import DividedStrategy


class Batches(Dataset[dict[str, torch.Tensor]]):
    """The batches of the first steps."""

    def __init__(self, steps: int) -> None:
        self.text, self.steps = nanogpt.corpus(), steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return nanogpt.batch_of(index, self.text)


class LitGPT(lightning.LightningModule):
    """The model, its loss and its optimizer."""

    def __init__(self, steps: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.steps = steps
        self.net = nanogpt.make(dtype)[1]

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(**batch)["loss"]
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda n: nanogpt.rate(n, self.steps)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if self.trainer.is_global_zero:
            loss = float(self.trainer.callback_metrics["loss"])
            print(f"step {index} loss {loss:.15f}", flush=True)


def main() -> None:
    """Trains, in one rank of a torchrun job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--plan", default="data", help="a method, a saved plan, or a plan book")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--double", action="store_true", help="in float64")
    given = parser.parse_args()

    torch.set_num_threads(1)
    module = LitGPT(given.steps, torch.float64 if given.double else torch.float32)
    trainer = lightning.Trainer(
        max_steps=given.steps, accelerator="cpu", strategy=DividedStrategy(given.plan),
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    loader = DataLoader(Batches(given.steps), batch_size=None)
    trainer.fit(module, loader)


if __name__ == "__main__":
    main()
