"""A Trainer as people use it, plain or divided: accumulation, clipping, a schedule with a warm-up,
evaluation, checkpoints, the best one at the end, and going on from a checkpoint.

    python trainer_loop.py plain FOLDER
    torchrun --standalone --nproc-per-node 2 trainer_loop.py data FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))

import nanogpt
from nanogpt_trainer import Rows

from apportion.adapters.hugging_face import DividedArguments, DividedTrainer

FACTS = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")


def trainer(how: str, folder: Path, steps: int) -> Any:
    plain = how == "plain"
    kind = transformers.TrainingArguments if plain else DividedArguments
    arguments = kind(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=6,
        per_device_eval_batch_size=6, gradient_accumulation_steps=2, max_grad_norm=0.5,
        learning_rate=3e-2, warmup_steps=2, lr_scheduler_type="cosine", logging_steps=1,
        eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True,
        report_to=[], disable_tqdm=True, use_cpu=True, train_sampling_strategy="sequential",
    )  # fmt: skip
    model = nanogpt.make(torch.float64)[1]
    data: dict[str, Any] = {"train_dataset": Rows(6), "eval_dataset": Rows(1)}
    if plain:
        return transformers.Trainer(model=model, args=arguments, **data)
    return DividedTrainer(model=model, args=arguments, plan=how, **data)


def facts(one: Any) -> dict[str, Any]:
    """What it has logged, and sums of the parameters that the model has in the end."""
    return {
        "log": [{k: entry[k] for k in FACTS if k in entry} for entry in one.state.log_history],
        "parameters": {name: float(p.detach().sum()) for name, p in one.model.named_parameters()},
        "best": one.state.best_global_step,
    }


def main(how: str, folder: Path) -> None:
    torch.set_num_threads(1)
    first = trainer(how, folder, 4)
    first.train()
    later = trainer(how, folder, 5)
    later.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    if first.is_world_process_zero():
        print(json.dumps({"first": facts(first), "later": facts(later)}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
