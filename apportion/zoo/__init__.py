"""zoo: models to try apportion on, and how to name them.

In: a name with settings, or a file with a function. Out: a step, a model, an optimizer and a batch,
which capture/ takes. Read mlp.py first; one model a file.

    SPEC ::= NAME | NAME:SETTING,... | FILE.py:FUNCTION
           | OWNER/NAME | OWNER/NAME,SETTING,... | hf:NAME,SETTING,...
    SETTING ::= tiny | KEY=VALUE

`gpt2`, `mlp:tiny`, `gpt2:layers=4,batch=8`, `gpt2:tiny,layers=3`, `train.py:make`,
`meta-llama/Llama-3.1-8B`; hf.py has the models of the transformers package and the hub. A user's
function takes no arguments and returns `(step, model, optimizer, batch)`; modules beside its file
can be imported while it runs.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from apportion.catalogue import Known, known_models, near_open_models
from apportion.free_memory import free_memory
from apportion.quantity import format_quantity
from apportion.without_dynamo import leave_unloaded
from apportion.zoo import (
    alexnet,
    amoebanet,
    bert,
    deepspeech,
    enas_cifar10,
    enas_ptb,
    gnmt,
    gpt2,
    inception,
    lenet,
    llama,
    mlp,
    moe,
    nasnet,
    nmt,
    resnet,
    rnn,
    rnnlm,
    rnntc,
    transformer_xl,
    vgg,
    wavenet,
    wgan,
    wresnet,
)
from apportion.zoo.accumulate import batch_tensors, in_micro_batches, without_accumulation
from apportion.zoo.accumulate import with_accumulation as with_accumulation
from apportion.zoo.hf import load_hf
from apportion.zoo.precision import PRECISIONS as PRECISIONS
from apportion.zoo.precision import TrainedParts, in_precision, without_precision
from apportion.zoo.precision import with_precision as with_precision
from apportion.zoo.whole_names import whole

leave_unloaded()


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `capture` needs. `name` is the spec it was loaded from."""

    name: str
    step: Callable[..., Any]
    model: Any
    optimizer: Any
    batch: Any
    clip_norm: float | None = None
    notes: tuple[str, ...] = ()
    """Sentences about what was set for the user."""
    fixed: tuple[str, ...] = ()
    """The names of tensors in the batch that are the same in every step."""


_MODELS: dict[str, Any] = {
    "mlp": mlp,
    "gpt2": gpt2,
    "bert": bert,
    "llama": llama,
    "transformer-xl": transformer_xl,
    "transformer-moe": moe,
    "rnn": rnn,
    "rnnlm": rnnlm,
    "rnntc": rnntc,
    "nmt": nmt,
    "gnmt": gnmt,
    "wresnet": wresnet,
    "lenet": lenet,
    "alexnet": alexnet,
    "vgg16": vgg,
    "resnet50": resnet.RESNET50,
    "resnet101": resnet.RESNET101,
    "resnet152": resnet.RESNET152,
    "inception-v3": inception,
    "nasnet-a": nasnet,
    "amoebanet": amoebanet,
    "wavenet": wavenet,
    "deepspeech": deepspeech,
    "wgan-gp": wgan,
    "enas-cifar10": enas_cifar10,
    "enas-ptb": enas_ptb,
}


def known() -> tuple[Known, ...]:
    """All models of the zoo."""
    return known_models()


def counted() -> tuple[Known, ...]:
    """All models of the zoo, each made without data to count its parameters: what catalogue.json
    has."""
    found = []
    for name, module in _MODELS.items():
        settings = dataclasses.asdict(module.Settings()), dataclasses.asdict(module.TINY)
        count = sum(p.numel() for p in load(name, meta=True).model.parameters())
        found.append(Known(name, module.ABOUT, module.SOURCE, *settings, count))
    return tuple(found)


def load(spec: str, seed: int = 0, *, meta: bool | None = None) -> Loaded:
    """The step, model, optimizer and batch that `spec` names, bit-equal for equal seeds.

    With `meta` a zoo model and its batch have shapes and no data: enough to capture and plan it,
    whatever its size. Unless it is said, they have data if this machine has the memory for it, and
    a warning says so if it has not. A user's file is loaded with data all the same.
    `precision=` among the settings of a model is one of precision.py, whatever the model, and
    `accumulate=` the number of micro-batches (accumulate.py).
    The caller's random state is left as it was. Raises ValueError, in one sentence, if the spec
    is wrong, the user's file fails, or `meta` is False and this machine has not the memory.
    """
    if spec.endswith(".py") or ".py:" in spec:
        with _seeded(seed):
            return _load_file(spec)
    spec = whole(spec)
    plain, precision = without_precision(spec)
    plain, micro_batches = without_accumulation(plain)
    why = "" if meta else _too_large(spec, _load_named(plain, seed, meta=True))
    if why and meta is False:
        raise ValueError(
            f"{why}. zoo.load(..., meta=True) makes it without data, which is enough to capture "
            "and plan it."
        )
    if why:
        warnings.warn(
            f"{why}: it is made without data (meta device), which is enough to capture and plan it",
            stacklevel=2,
        )
    it = _load_named(plain, seed, meta=bool(meta or why))
    parts = TrainedParts(it.step, it.model, it.optimizer, it.batch, it.clip_norm, it.notes)
    made = in_micro_batches(in_precision(parts, precision), micro_batches, spec)
    return Loaded(
        spec, made.step, made.model, made.optimizer, made.batch, made.clip_norm, made.notes
    )


def _load_named(spec: str, seed: int, meta: bool) -> Loaded:
    """A model of the zoo or of transformers, in float32."""
    name, _, rest = spec.partition(":")
    if name == "hf":
        with _seeded(seed), torch.device("meta") if meta else nullcontext():
            it = load_hf(spec)
        return Loaded(spec, it.step, it.model, it.optimizer, it.batch, notes=it.notes)
    if name not in _MODELS:
        near = ", ".join(near_open_models(name))
        raise ValueError(
            f"Unknown model {name!r}{near and '; near are '}{near}; known are "
            f"{', '.join(_MODELS)}, OWNER/NAME for those of the hub, hf:FAMILY for those of "
            "transformers, and FILE.py:FUNCTION for your own."
        )
    settings = _settings(spec, name, rest.split(",") if ":" in spec else [])
    with _seeded(seed), torch.device("meta") if meta else nullcontext():
        model, optimizer, batch = _MODELS[name].build(settings)
    return Loaded(spec, _MODELS[name].step, model, optimizer, batch)


def _too_large(spec: str, shapes: Loaded) -> str:
    """What to say of a model that, with its batch, has more data than this machine has memory; ""
    if it has not. Such data is not made, because a system that runs out of memory ends some
    program."""
    tensors = [*shapes.model.parameters(), *shapes.model.buffers(), *batch_tensors(shapes.batch)]
    wanted, there = sum(t.numel() * t.element_size() for t in tensors), free_memory()
    if wanted <= there:
        return ""
    count = sum(p.numel() for p in shapes.model.parameters())
    return (
        f"{spec!r} has {count:,} parameters; they and its batch are "
        f"{format_quantity(wanted, 'B')}, and this machine has {format_quantity(there, 'B')} "
        "of memory free"
    )


def with_sizes(spec: str, batch: int | None = None, seq: int | None = None) -> str:
    """The spec with other sizes of the batch, which are settings of its model: a user's file sets
    its own."""
    given = {"batch": batch, "seq": seq}
    wanted = {key: value for key, value in given.items() if value is not None}
    if not wanted:
        return spec
    if spec.endswith(".py") or ".py:" in spec:
        raise ValueError(
            f"{spec!r} makes its own batch; --{next(iter(wanted))} is for models of the zoo and "
            "of transformers (hf:)."
        )
    name, colon, rest = whole(spec).partition(":")
    own = [item for item in rest.split(",") if item.partition("=")[0] not in wanted]
    settings = [*(own if colon else ()), *(f"{key}={value}" for key, value in wanted.items())]
    return f"{name}:{','.join(settings)}"


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds torch, numpy and random for the block, and puts their states back after it."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


# Settings of the zoo's own models


def _settings(spec: str, name: str, items: list[str]) -> Any:
    module = _MODELS[name]
    base = module.TINY if "tiny" in items else module.Settings()
    changes: dict[str, int | float] = {}
    for item in items:
        if item == "tiny":
            continue
        key, equals, text = item.partition("=")
        if not equals or not hasattr(base, key) or key.startswith("_"):
            raise ValueError(
                f"{spec!r}: {item!r} is not a setting of {name}; its settings are tiny, "
                f"{', '.join(f'{k}={v}' for k, v in dataclasses.asdict(base).items())}."
            )
        if key in changes:
            raise ValueError(f"{spec!r}: {key} is set twice.")
        changes[key] = _number(spec, key, text, type(getattr(base, key)))
    try:
        return dataclasses.replace(base, **changes)
    except ValueError as error:
        raise ValueError(f"{spec!r}: {error}.") from None


def _number(spec: str, key: str, text: str, kind: type[int] | type[float]) -> int | float:
    """A positive int, or a float from 0 up."""
    try:
        number = kind(text)
    except ValueError:
        number = kind(-1)
    if number > 0 if kind is int else 0 <= number < float("inf"):
        return number
    expected = "a positive whole number" if kind is int else "a number from 0 up"
    raise ValueError(f"{spec!r}: {key} must be {expected}, not {text!r}.")


# A user's own file


def made_by_file(spec: str, finished: Callable[[Any], bool] = lambda found: False) -> Any:
    """What the function FILE.py:FUNCTION returns, or the object of that name itself if it is
    `finished`. Raises ValueError, with the user's line, if there is no such thing or it fails."""
    file, _, name = spec.rpartition(":")
    if not file.endswith(".py") or not name:
        raise ValueError(f"{spec!r} names no function; write FILE.py:FUNCTION.")
    path = Path(file).resolve()
    if not path.is_file():
        raise ValueError(f"There is no file {file!r}.")
    with _beside(path):
        function = getattr(_import(path, file), name, None)
        if finished(function):
            return function
        if not callable(function):
            raise ValueError(f"{file} has no function {name!r}.")
        try:
            return function()
        except (Exception, SystemExit) as error:
            raise _failure(error, path, file, name) from error


def _load_file(spec: str) -> Loaded:
    made = made_by_file(spec)
    if not _is_training(made):
        raise ValueError(
            f"{spec} must return (step, model, optimizer, batch), a function, a torch.nn.Module, "
            "a torch.optim.Optimizer and a batch (several modules or optimizers in a tuple, list "
            "or dict), and after them, if gradients are to be clipped, their largest norm (else "
            "None) and, if tensors of the batch are the same in every step, a list of their "
            f"names; but it returned {_kinds(made)}."
        )
    fixed = tuple(made[5]) if len(made) == 6 else ()
    return dataclasses.replace(Loaded(spec, *made[:5]), fixed=fixed)


def _import(path: Path, file: str) -> Any:
    name = f"_apportion_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _failure(error, path, file, "") from error
    return module


@contextmanager
def _beside(path: Path) -> Iterator[None]:
    """Lets the file import its neighbours, as a script could."""
    sys.path.insert(0, str(path.parent))
    try:
        yield
    finally:
        sys.path.remove(str(path.parent))


def _failure(error: BaseException, path: Path, file: str, function: str) -> ValueError:
    """One sentence with the last line of the user's file that was running."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    where = file
    if isinstance(error, SyntaxError) and error.filename == str(path):
        where = f"{file}:{error.lineno}"
    elif lines:
        where = f"{file}:{lines[-1]}"
    elif function:
        where = f"{file}:{function}"
    text = (str(error).strip().splitlines() or [""])[0]
    return ValueError(f"{where} failed with {type(error).__name__}{text and ': '}{text}")


def _is_training(made: Any) -> bool:
    if not isinstance(made, tuple) or len(made) not in (4, 5, 6) or not callable(made[0]):
        return False
    clipped = len(made) == 4 or made[4] is None or isinstance(made[4], int | float)
    if len(made) == 6 and not (isinstance(made[5], list | tuple) and _all_are(made[5], str)):
        return False
    return clipped and _all_are(made[1], nn.Module) and _all_are(made[2], torch.optim.Optimizer)


def _all_are(given: Any, wanted: type) -> bool:
    """Whether something is of a class, or a sequence or mapping of such."""
    if isinstance(given, wanted):
        return True
    if not isinstance(given, Sequence | Mapping) or isinstance(given, str) or not given:
        return False
    each = given.values() if isinstance(given, Mapping) else given
    return all(isinstance(one, wanted) for one in each)


def _kinds(made: Any) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(item).__name__ for item in made)})"
    return type(made).__name__
