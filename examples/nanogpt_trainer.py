"""The small GPT of nanogpt.py through transformers' Trainer, on as many ranks as torchrun starts.

    torchrun --standalone --nproc-per-node 4 examples/nanogpt_trainer.py --plan data

Against a plain program two lines differ: the import of the two names, and `plan=`. The losses are
those of nanogpt.py.
"""

from __future__ import annotations

import argparse

import nanogpt
import torch
from torch.utils.data import Dataset

from apportion.adapters.hugging_face import DividedArguments as TrainingArguments
from apportion.adapters.hugging_face import DividedTrainer as Trainer


class Rows(Dataset[dict[str, torch.Tensor]]):
    """The samples of the first steps, in their order."""

    def __init__(self, steps: int) -> None:
        self.text, self.steps = nanogpt.corpus(), steps

    def __len__(self) -> int:
        return self.steps * nanogpt.BATCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        batch = nanogpt.batch_of(index // nanogpt.BATCH, self.text)
        return {name: rows[index % nanogpt.BATCH] for name, rows in batch.items()}


def main() -> None:
    """Trains, in one rank of a torchrun job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--plan", default="data", help="a method, a saved plan, or a plan book")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", default="trainer")
    parser.add_argument("--double", action="store_true", help="in float64")
    given = parser.parse_args()

    torch.set_num_threads(1)
    _, model, optimizer, _ = nanogpt.make(torch.float64 if given.double else torch.float32)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: nanogpt.rate(n, given.steps))
    arguments = TrainingArguments(
        output_dir=given.out, max_steps=given.steps, per_device_train_batch_size=nanogpt.BATCH,
        max_grad_norm=0.0, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        use_cpu=True, train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Rows(given.steps),
        optimizers=(optimizer, schedule), plan=given.plan,
    )  # fmt: skip
    trainer.train()
    if trainer.is_world_process_zero():
        for number, entry in enumerate(e for e in trainer.state.log_history if "loss" in e):
            print(f"step {number} loss {entry['loss']:.15f}", flush=True)


if __name__ == "__main__":
    main()
