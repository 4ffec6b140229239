"""transformers' Trainer with a divided step: two names that are imported from here instead.

    from apportion.adapters.hugging_face import DividedTrainer as Trainer
    from apportion.adapters.hugging_face import DividedArguments as TrainingArguments

    trainer = Trainer(model=model, args=args, train_dataset=data, plan="data")    # or a plan's file
    trainer.train()

started by torchrun. A batch of `per_device_train_batch_size` samples is the whole batch, and is
divided over the ranks as the plan says; accumulation, clipping, schedulers, callbacks, evaluation
and checkpoints are the Trainer's own. Each rank believes to be alone; rank 0 writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

from apportion.adapters.divided_step import DividedStep, one_process
from apportion.machine import Cluster
from apportion.plan import Plan
from apportion.run import Runner


@dataclass
class DividedArguments(TrainingArguments):
    """TrainingArguments of a rank that believes to be alone; the last, smaller batch of an epoch is
    dropped, since a plan is for one shape."""

    dataloader_drop_last: bool = True

    def __post_init__(self) -> None:
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0"))  # hidden while a Trainer works
        with one_process():
            super().__post_init__()  # type: ignore[no-untyped-call]

    @property
    def process_index(self) -> int:
        """So that one rank writes and speaks."""
        return _rank()

    @property
    def local_process_index(self) -> int:
        """The same on each machine."""
        return self._local_rank

    @property
    def n_gpu(self) -> int:
        """Never DataParallel."""
        return min(1, int(super().n_gpu))


class DividedTrainer(Trainer):
    """A Trainer whose steps are divided; `plan` as `ap.distribute` takes it, for `cluster` if it is
    the name of a method, and `settings` for `ap.distribute`."""

    def __init__(
        self,
        *args: Any,
        plan: Plan | str | Path,
        cluster: Cluster | str | None = None,
        settings: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.divided = DividedStep(plan, cluster, **dict(settings or {}))
        with one_process():
            super().__init__(*args, **kwargs)
        if not isinstance(self.args, DividedArguments):
            raise ValueError(
                "DividedTrainer wants DividedArguments in the place of TrainingArguments: both are "
                "in apportion.adapters.hugging_face"
            )
        self._waiting: list[Any] = []
        self._norm: Any = None
        self._writes = False

    @property
    def runner(self) -> Runner | None:
        """What runs the steps, after the first of them."""
        return self.divided.runner

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer.train; the model has been brought up to date when it returns."""
        self.divided.forget()
        with one_process():
            done = super().train(*args, **kwargs)
        self.divided.update_model()
        return done

    def training_step(
        self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Keeps a micro-batch, and with the last one takes the step; the loss of all of them is
        that of the last."""
        self._waiting.append(self._prepare_inputs(dict(inputs)))
        if len(self._waiting) < self.current_gradient_accumulation_steps:
            return torch.zeros((), device=self.args.device)
        batch = {"micro_batches": self._waiting, "items": num_items_in_batch}
        self._waiting = []
        model.train()
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        found = self.divided.run(self._step(), model, optimizer, batch, self.state.global_step)
        self._norm = found["norm"]
        loss: torch.Tensor = found["loss"]
        return loss.detach().to(self.args.device)

    def _step(self) -> Any:
        """The body of the loop, which refers to no optimizer but the one that it is given."""
        losses = _Losses(self)
        most = float(self.args.max_grad_norm or 0.0)
        count = self.current_gradient_accumulation_steps

        def step(model: Any, optimizer: Any, batch: Any) -> dict[str, torch.Tensor]:
            parts = []
            for inputs in batch["micro_batches"]:
                loss = losses.of(model, inputs, batch["items"], count)
                loss.backward()
                parts.append(loss.detach())
            limit = most if most > 0 else float("inf")
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            optimizer.zero_grad()
            return {"loss": torch.stack(parts).sum(), "norm": norm}

        return step

    def _clip_grad_norm(self, model: Any) -> Any:
        return self._norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self._norm

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.divided.forget()  # what the ranks have is the last one

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer.evaluate, of what has been trained so far; on every rank all of the data."""
        self.divided.update_model()
        with one_process():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer.predict, of what has been trained so far."""
        self.divided.update_model()
        with one_process():
            return super().predict(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """As Trainer.save_model; rank 0 writes."""
        if self._writes:  # a checkpoint, for which all ranks wait already
            super().save_model(*args, **kwargs)
            return
        with self._written_by_first() as first:
            if first:
                super().save_model(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self._written_by_first() as first:
            if first:
                super()._save_checkpoint(model, trial)
        best = self.state.best_global_step
        if best:
            folder = os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{best}")
            self.state.best_model_checkpoint = folder if os.path.exists(folder) else None

    @contextmanager
    def _written_by_first(self) -> Iterator[bool]:
        """A context in which rank 0 writes what has been trained and the others wait for it; gives
        whether this is the one."""
        self.divided.update_model()
        self._writes = _rank() == 0
        try:
            yield self._writes
        finally:
            self._writes = False
            _wait_for_all()


class _Losses:
    """The loss of a micro-batch as the Trainer computes it."""

    def __init__(self, trainer: Any) -> None:
        self._told = (trainer,)  # not as an attribute of its own, where modules are looked for

    def of(self, model: Any, inputs: Any, items: Any, count: int) -> torch.Tensor:
        trainer = self._told[0]
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, dict(inputs), num_items_in_batch=items)
        scaled = trainer.loss_is_scaled_for_ga
        if scaled is None:
            scaled = (
                trainer.model_accepts_loss_kwargs and items is not None
            ) or trainer.compute_loss_func is not None
        found: torch.Tensor = loss if scaled else loss / count
        return found


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _wait_for_all() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
