"""Lightning's Trainer as people use it, plain or divided: accumulation, clipping, a schedule,
validation, checkpoints, and going on from one.

    python lightning_loop.py plain FOLDER
    torchrun --standalone --nproc-per-node 2 lightning_loop.py data FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))

from nanogpt_lightning import Batches, LitGPT

from apportion.adapters.lightning import DividedStrategy


class Watched(LitGPT):
    """The example's module with validation; prints nothing."""

    def __init__(self) -> None:
        super().__init__(8, torch.float64)
        self.seen: list[float] = []

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        loss = self.net(**batch)["loss"]
        self.seen.append(float(loss))
        self.log("validation", loss)

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        pass


def trainer(how: str, folder: Path, steps: int, *more: Any) -> Any:
    given: dict[str, Any] = {"devices": 1} if how == "plain" else {"strategy": DividedStrategy(how)}
    keep = ModelCheckpoint(folder, monitor="validation", save_top_k=2, save_last=True)
    return lightning.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, accumulate_grad_batches=2, gradient_clip_val=0.5,
        val_check_interval=4, limit_val_batches=2, num_sanity_val_steps=0,
        callbacks=[keep, *more], **given,
    )  # fmt: skip


def loader() -> Any:
    return DataLoader(Batches(16), batch_size=None)


def fitted(how: str, folder: Path, steps: int, begin: str | None) -> tuple[Any, dict[str, Any]]:
    module, one = Watched(), trainer(how, folder, steps)
    one.fit(module, loader(), loader(), ckpt_path=begin)
    sums = {name: float(p.detach().sum()) for name, p in module.named_parameters()}
    return one, {"validation": module.seen, "parameters": sums}


def main(how: str, folder: Path) -> None:
    torch.set_num_threads(1)
    one, first = fitted(how, folder, 4, None)
    later = fitted(how, folder, 6, one.checkpoint_callback.last_model_path)[1]
    refused = ""
    if how != "plain":
        try:
            trainer(how, folder, 4, StochasticWeightAveraging(1e-3)).fit(Watched(), loader())
        except ValueError as error:
            refused = str(error)
    if one.is_global_zero:
        print(json.dumps({"first": first, "later": later, "refused": refused}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
