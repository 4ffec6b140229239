"""Capture leaves model, optimizer, batch, closures and random numbers as they were."""

from __future__ import annotations

import copy
import functools
import gc
import random
import warnings
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import apportion as ap
from apportion.capture.torch_private import FakeTensor, storage_id
from apportion.capture.untouched import (
    LiveObjects,
    Snapshot,
    _memories_of,
    untouched,
)


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def fakes_in(model: nn.Module) -> list[str]:
    """Fake tensors anywhere in the attributes of the modules."""
    found = []
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            inner = value.values() if isinstance(value, dict) else value
            inner = inner if isinstance(inner, list | tuple) else [inner]
            found += [f"{name}.{key}" for each in inner if isinstance(each, FakeTensor)]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found += [name] if isinstance(tensor, FakeTensor) else []
    return found


def described(module: nn.Module) -> list[Any]:
    """All attributes of all modules by identity, containers by their items."""
    found: list[Any] = []
    for name, each in module.named_modules(remove_duplicate=False):
        for key, value in vars(each).items():
            items = list(value.items()) if isinstance(value, dict) else value
            items = list(items) if isinstance(items, list | set) else [items]
            found.append((name, key, [_token(item) for item in items]))
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found.append((name, id(parameter), parameter._version, id(parameter.grad)))
    return found


def _token(item: Any) -> Any:
    if isinstance(item, tuple):
        return tuple(map(_token, item))
    return item if isinstance(item, int | str | float) else id(item)


class Twice(nn.Module):
    """One module object under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x))


class TiedTwice(nn.Module):
    """Tied weights, and the module of one under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 4)
        self.encoder = nn.ModuleDict({"tokens": self.embedding})
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> Any:
        ids = torch.zeros(5, dtype=torch.long)
        return self.head(self.encoder["tokens"](ids) + self.embedding(ids) + x)


class Caching(nn.Module):
    """Caches a mask in an attribute, a dict and a list, and counts its calls."""

    tables: ClassVar[dict[int, torch.Tensor]] = {}
    total = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mask: torch.Tensor | None = None
        self.cache: dict[str, Any] = {}
        self.outputs: list[torch.Tensor] = []
        self.calls = 0
        self.config = type("Config", (), {})()

    def forward(self, x: torch.Tensor) -> Any:
        if self.mask is None:
            self.mask = torch.ones(4, 4).tril()[-1]
            self.cache["mask"] = {"deep": self.mask}
            Caching.tables[4] = self.mask
        self.calls += 1
        Caching.total += 1
        self.config.seen = self.calls
        out = self.linear(x) * self.mask
        self.outputs.append(out)
        self.register_buffer("late", torch.zeros(3), persistent=False)
        self.train(False)
        return out


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.rnn(x)[0]


def spectral() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.spectral_norm(nn.Linear(4, 4))


def pruned() -> nn.Module:
    from torch.nn.utils import prune

    linear = nn.Linear(4, 4)
    prune.l1_unstructured(linear, "weight", 0.5)
    return linear


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(4, 4))


MODELS = {
    "one module under two names": Twice,
    "tied embeddings under two names": TiedTwice,
    "cached masks and counters": Caching,
    "lstm": Flat,
    "old spectral norm": spectral,
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "old weight norm": old_weight_norm,
    "pruning": pruned,
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_as_before(name: str) -> None:
    torch.manual_seed(0)
    Caching.tables.clear()
    Caching.total = 0
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    batch = torch.randn(5, 4)
    before, state = described(model), copy.deepcopy(optimizer.state_dict())
    version = batch._version
    ap.capture(step, model, optimizer, batch)
    assert described(model) == before
    assert not fakes_in(model) and not Caching.tables and Caching.total == 0
    assert optimizer.state_dict() == state and batch._version == version
    loss = step(model, batch)  # it still trains
    loss.backward()
    optimizer.step()
    assert loss.isfinite()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cached masks and counters", "one module under two names"])
def test_the_model_is_as_before_when_the_capture_fails(name: str) -> None:
    model = MODELS[name]()
    before = described(model)

    def failing(model: nn.Module, batch: Any) -> torch.Tensor:
        return step(model, batch) * int(batch.nonzero().sum())

    with pytest.raises(ap.CaptureError):
        ap.capture(failing, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(5, 4))
    assert described(model) == before


def test_random_numbers_are_as_before() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    ap.capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(5, 4))
    assert random.getstate() == states[0]
    assert str(np.random.get_state()) == str(states[1])
    assert torch.equal(torch.get_rng_state(), states[2])


@functools.lru_cache
def remembered_mask(size: int) -> dict[str, torch.Tensor]:
    return {"mask": torch.ones(size, size).tril()[-1]}


def test_no_fake_tensor_stays_in_a_remembered_result() -> None:
    remembered_mask.cache_clear()
    model = nn.Linear(4, 4)

    def masked(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch) * remembered_mask(4)["mask"]).square().mean()

    ap.capture(masked, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(5, 4))
    assert not isinstance(remembered_mask(4)["mask"], FakeTensor)


def test_closures_globals_and_their_containers_are_as_before() -> None:
    count, log, nested = 0, [1], {"a": {"b": {1, 2}}}

    def change() -> None:
        nonlocal count
        count += 1
        log.append(2)
        nested["a"]["b"].add(3)
        del nested["a"]["b"]

    with untouched({"step": change}) as live:
        change()
        changed = {change.name for change in live.changes()}
    assert (count, log, nested) == (0, [1], {"a": {"b": {1, 2}}})
    assert changed >= {"count", "log.1", "nested.a.b.3"}


def test_a_tensor_written_to_is_named() -> None:
    kept = {"inner": [torch.zeros(3)]}
    live = Snapshot({"kept": kept})
    kept["inner"][0].add_(1)
    with pytest.raises(ap.CaptureError, match=r"changes kept.inner.0, which capture cannot undo"):
        live.restore()


def yielding() -> Any:
    while True:
        yield torch.ones(5, 4)


def test_an_iterator_is_put_back_and_what_cannot_be_is_named() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches, endless = iter([torch.ones(5, 4), torch.zeros(5, 4)]), yielding()
    with pytest.raises(ap.CaptureError, match=r"changes batches.position \(0, then 1\)"):
        ap.capture(lambda m, b: step(m, next(batches)), model, optimizer, torch.ones(5, 4))
    assert len(list(batches)) == 2
    with pytest.raises(ap.CaptureError, match="changes endless, which capture cannot undo"):
        ap.capture(lambda m, b: step(m, next(endless)), model, optimizer, torch.ones(5, 4))


class Hidden(nn.Module):
    """Reads its parameter by a tuple in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.pair = (self.weight, [self.weight])

    def forward(self, x: torch.Tensor) -> Any:
        return x @ self.pair[0] + x @ self.pair[1][0]


def test_parameters_are_found_wherever_they_are_kept() -> None:
    model = Hidden()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    listed = tuple(model.parameters())

    def penalised(model: nn.Module, batch: Any, first: Any = model.weight) -> torch.Tensor:
        return step(model, batch) + sum(p.square().sum() for p in listed) + first.sum()

    pair = model.pair
    program = ap.capture(penalised, model, optimizer, torch.ones(5, 4))
    assert not program.constants and not program.notes
    assert model.pair is pair and pair[0] is model.weight and pair[1][0] is model.weight
    assert listed[0] is model.weight and penalised.__defaults__ == (model.weight,)


def test_a_module_of_torch_jit_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(ap.CaptureError, match="use the plain module it was made from"):
        ap.capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(5, 4))


@pytest.mark.slow
def test_no_fake_tensor_is_left_alive() -> None:
    model = Caching()
    ap.capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(5, 4))
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) is FakeTensor]


def test_tuples_that_count_in_a_way_of_their_own() -> None:
    class Pair(tuple[Any, ...]):
        __slots__ = ()

        def __len__(self) -> int:
            raise NotImplementedError

        def __iter__(self) -> Any:
            raise NotImplementedError

    class Items(list[Any]):
        def __iter__(self) -> Any:
            raise NotImplementedError

    model = nn.Linear(4, 4)
    model.kinds, model.items = Pair((1, "odd")), Items([2])  # type: ignore[assignment]
    ap.capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(5, 4))
    assert tuple.__getitem__(model.kinds, 1) == "odd"  # type: ignore[arg-type]


@pytest.mark.slow
def test_memory_of_what_was_garbage_belongs_to_its_next_owner() -> None:
    gc.collect()
    gc.disable()
    try:
        cycle: list[Any] = [torch.ones(3)]
        memory = storage_id(cycle[0])
        cycle.append(cycle)
        kept = torch.ones(3)
        del cycle
        objects = LiveObjects({}, {}, _memories_of(gc.get_objects()))
    finally:
        gc.enable()
    gc.collect()
    later = [torch.ones(3) for _ in range(100)]
    again = [tensor for tensor in later if storage_id(tensor) == memory]
    assert again
    assert not objects.had(again[0])
    assert objects.had(kept)


@pytest.mark.slow
@pytest.mark.parametrize("by_program", [False, True])
def test_what_was_there_before_is_told_from_what_was_made_since(by_program: bool) -> None:
    """Also where a program has set its objects aside itself."""
    if by_program:
        gc.freeze()
    try:
        before = torch.ones(3)
        with untouched({}) as objects:
            since = [torch.ones(3) for _ in range(3)]
            assert objects.had(before) and objects.had(before[1:])
            assert not any(map(objects.had, since))
            later = torch.ones(3)
            assert not objects.had(later) and objects.had(before)
        assert bool(gc.get_freeze_count()) == by_program
    finally:
        gc.unfreeze()


@pytest.mark.slow
@pytest.mark.parametrize("asked", [False, True])
def test_caches_that_were_made_within_are_emptied_too(asked: bool) -> None:
    """Whatever has been looked for meanwhile."""
    with untouched({}) as objects:
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(torch.ones(2))
            remembers = functools.cache(lambda number: [fake])
            remembers(1)
        if asked:
            objects.had(torch.ones(2))
    assert remembers.cache_info().currsize == 0
