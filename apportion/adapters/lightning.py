"""Lightning's Trainer with a divided step: a strategy.

    from apportion.adapters.lightning import DividedStrategy

    trainer = L.Trainer(strategy=DividedStrategy("data"), max_epochs=3)     # or a plan's file
    trainer.fit(module, loader)

started by torchrun. The batches of the loader are whole batches, divided over the ranks as the plan
says. `training_step`, `configure_optimizers`, accumulation, clipping, schedulers, callbacks,
validation and checkpoints are as ever; a module has one optimizer and optimizes automatically. What
`training_step` logs is logged after the step, the mean over accumulated batches. Each rank believes
to be alone; rank 0 writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import callbacks
from lightning.pytorch.strategies import SingleDeviceStrategy

from apportion.adapters.divided_step import DividedStep
from apportion.checkpoint import told_by_first
from apportion.machine import Cluster
from apportion.plan import Plan
from apportion.run import Runner

BETWEEN_STEPS = tuple(
    getattr(callbacks, name)
    for name in (
        "BaseFinetuning", "ModelPruning", "StochasticWeightAveraging", "WeightAveraging",
    )
    if hasattr(callbacks, name)
)  # fmt: skip
"""Callbacks that cannot be had with a divided step."""


class DividedStrategy(SingleDeviceStrategy):
    """Runs the steps of a LightningModule by a plan, as `ap.distribute` takes it, for `cluster` if
    it is the name of a method, and `settings` for `ap.distribute`."""

    def __init__(
        self,
        plan: Plan | str | Path,
        cluster: Cluster | str | None = None,
        device: str = "cpu",
        **settings: Any,
    ) -> None:
        super().__init__(device=device)
        self.divided = DividedStep(plan, cluster, device=device, **settings)
        self.global_rank = self.divided.rank
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._waiting: list[tuple[Any, int]] = []

    @property
    def runner(self) -> Runner | None:
        """What runs the steps, after the first of them."""
        return self.divided.runner

    @property
    def is_global_zero(self) -> bool:
        """Whether this rank writes and speaks."""
        return self.global_rank == 0

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all ranks."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What rank 0 says, where it is a text; everything else is the same on all ranks."""
        return told_by_first(obj) if isinstance(obj, str) else obj

    def setup(self, trainer: Any) -> None:
        """As ever, unless a callback looks at parameters, or changes them, between steps: the live
        module has not what the ranks have trained until it is evaluated or saved."""
        for callback in trainer.callbacks:
            if isinstance(callback, BETWEEN_STEPS):
                raise ValueError(
                    f"{type(callback).__name__} reads or changes parameters between steps, where a "
                    "divided run does not bring them back; leave it out, or write a loop of your "
                    "own (docs/training.md has averages of parameters)"
                )
        super().setup(trainer)

    # steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Keeps a batch, and with the last one that is accumulated takes the step."""
        module, trainer = self._module()
        self._waiting.append((args[0], int(args[1]) if len(args) > 1 else 0))
        if trainer.fit_loop._should_accumulate():
            return torch.zeros((), device=self.root_device)
        waiting, self._waiting = self._waiting, []
        batch = {"batches": [one for one, _ in waiting]}
        step = _step(len(args), trainer.accumulate_grad_batches, _clipping(trainer))
        number = trainer.global_step
        found = self.divided.run(step, module, self._optimizer(), batch, number)
        for name, value in found["logged"].items():
            module.log(name, value.detach(), **found["settings"][name])
        return found["loss"].detach() * trainer.accumulate_grad_batches

    def _module(self) -> tuple[Any, Any]:
        module = self.lightning_module
        assert module is not None
        if not module.automatic_optimization:
            raise ValueError(
                "DividedStrategy needs automatic optimization: a module that steps its optimizers "
                "by itself is captured as a loop of one's own, see ap.capture"
            )
        return module, module.trainer

    def _optimizer(self) -> Any:
        if len(self.optimizers) != 1:
            raise ValueError(
                f"DividedStrategy is for one optimizer, and the module has {len(self.optimizers)}"
            )
        return self.optimizers[0]

    def backward(self, closure_loss: Any, *args: Any, **kwargs: Any) -> Any:
        """The step has done it."""
        return closure_loss

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Calls the closure, in which `training_step` takes the whole step."""
        return closure()

    # what has been trained

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights as they are trained so far; all ranks call it."""
        self.divided.update_model()
        found: dict[str, Any] = super().lightning_module_state_dict()
        return found

    def on_validation_start(self) -> None:
        """Brings the module up to date."""
        self.divided.update_model()

    def on_train_end(self) -> None:
        """Brings the module up to date, for whoever goes on with it."""
        self.divided.update_model()
        self.divided.forget()


def _step(arguments: int, count: int, clip: Callable[[Any], None]) -> Any:
    """The body of the loop: what Lightning does between two optimizer steps."""

    def step(module: Any, optimizer: Any, batch: Any) -> dict[str, Any]:
        losses: list[torch.Tensor] = []
        logs: list[dict[str, Any]] = []
        settings: dict[str, dict[str, Any]] = {}
        for number, one in enumerate(batch["batches"]):
            with _collected_logs(module, settings) as logged:
                told = module.training_step(*(one, number)[:arguments])
            loss = (told["loss"] if isinstance(told, Mapping) else told) / count
            loss.backward()
            losses.append(loss.detach())
            logs.append(logged)
        clip(module)
        optimizer.step()
        optimizer.zero_grad()
        total = torch.stack(losses).sum()
        return {"loss": total, "logged": _means(logs), "settings": settings}

    return step


def _means(logs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """What was logged in all batches, each the mean over those that did."""
    names = dict.fromkeys(name for logged in logs for name in logged)
    found = {}
    for name in names:
        values = [torch.as_tensor(each[name]).detach() for each in logs if name in each]
        real = [x if x.is_floating_point() else x.to(torch.get_default_dtype()) for x in values]
        found[name] = torch.stack(real).mean()
    return found


@contextmanager
def _collected_logs(module: Any, settings: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A context in which a module notes what it logs; gives name and value of each. How it wants it
    logged goes into `settings`."""
    found: dict[str, Any] = {}

    def log(name: str, value: Any, *given: Any, **how: Any) -> None:
        found[name] = value
        settings[name] = {**dict(zip(("prog_bar", "logger"), given, strict=False)), **how}

    def log_dict(values: Mapping[str, Any], *given: Any, **how: Any) -> None:
        for name, value in values.items():
            log(name, value, *given, **how)

    with _replaced(module, {"log": log, "log_dict": log_dict, "print": lambda *a, **k: None}):
        yield found


@contextmanager
def _replaced(module: Any, functions: Mapping[str, Any]) -> Iterator[None]:
    """A context in which methods of an object are others."""
    module.__dict__.update(functions)
    try:
        yield
    finally:
        for name in functions:
            module.__dict__.pop(name, None)


def _clipping(trainer: Any) -> Callable[[Any], None]:
    """What clips gradients as the Trainer was told."""
    limit, kind = trainer.gradient_clip_val, str(trainer.gradient_clip_algorithm or "norm")
    by_value = kind.endswith("value")

    def clip(module: Any) -> None:
        if limit and by_value:
            torch.nn.utils.clip_grad_value_(module.parameters(), float(limit))
        elif limit:
            torch.nn.utils.clip_grad_norm_(module.parameters(), float(limit))

    return clip
