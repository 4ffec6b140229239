"""Any batch that people have is taken apart and put together again, or refused by its name."""

from __future__ import annotations

import types
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import apportion as ap
from apportion import graph as g
from apportion.capture.batch_tree import flatten, map_tensors
from apportion.capture.program import batch_leaves
from apportion.capture.trace import CaptureError

X, Y = torch.randn(4, 3), torch.randn(4, 2)


@dataclass(frozen=True)
class FrozenSample:
    x: torch.Tensor
    y: torch.Tensor
    scale: float = 2.0


@dataclass(slots=True)
class SlotSample:
    x: torch.Tensor
    extra: dict[str, Any] = field(default_factory=dict)


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Plain:
    """An object that keeps its tensors as attributes, and a child that knows it."""

    def __init__(self) -> None:
        self.x, self.parts = X, [X, (Y,)]
        self.child = types.SimpleNamespace(parent=self, y=Y)


class Encoding(UserDict):  # type: ignore[type-arg]
    """As transformers' BatchEncoding: keys are attributes too, and it keeps something of its own
    that cannot be copied."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self._encodings = [(k for k in range(3))]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getstate__(self) -> Any:
        return {"data": self.data, "encodings": self._encodings}

    def __setstate__(self, state: Any) -> None:
        self.data, self._encodings = state["data"], state["encodings"]


class Lazy(Mapping[str, torch.Tensor]):
    """A Mapping that makes its tensors when it is asked for them."""

    def __getitem__(self, key: str) -> torch.Tensor:
        return X + 1

    def __iter__(self) -> Iterator[str]:
        return iter(["x"])

    def __len__(self) -> int:
        return 1


Old = namedtuple("Old", "x y")


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        (X, ["batch"]),
        ((X, Y), ["batch.0", "batch.1"]),
        ({"x": [X, {"y": (Y,)}], "n": 3}, ["batch.x.0", "batch.x.1.y.0"]),
        (OrderedDict(x=X, y=Y), ["batch.x", "batch.y"]),
        (defaultdict(list, x=[X]), ["batch.x.0"]),
        (deque([X, Y]), ["batch.0", "batch.1"]),
        (Pair(X, Y), ["batch.x", "batch.y"]),
        (Old(X, Y), ["batch.x", "batch.y"]),
        (FrozenSample(X, Y), ["batch.x", "batch.y"]),
        (SlotSample(X, {"y": Y}), ["batch.x", "batch.extra.y"]),
        (UserDict(x=X, y=Y), ["batch.x", "batch.y"]),
        (Encoding({"input_ids": X, "labels": X}), ["batch.input_ids", "batch.labels"]),
        (types.SimpleNamespace(x=X, y=None), ["batch.x"]),
        (Plain(), ["batch.x", "batch.parts.0", "batch.parts.1.0", "batch.child.y"]),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_batch_is_rebuilt_with_other_tensors(batch: Any, names: list[str]) -> None:
    flat = flatten(batch)
    assert [name for _, name, _ in flat.tensors] == names
    before = [id(leaf) for leaf in flat.leaves]
    new = [x.clone() if isinstance(x, torch.Tensor) else x for x in flat.leaves]
    made = flat.rebuild(new)
    assert type(made) is type(batch)
    assert [id(a) for a in flatten(made).leaves] == [id(b) for b in new]
    assert [id(leaf) for leaf in flatten(batch).leaves] == before
    flatten(made).in_order_of(flat)


def test_a_child_knows_the_rebuilt_parent() -> None:
    made = map_tensors(lambda x: x + 1, Plain())
    assert made.child.parent is made


def test_a_registered_type_is_opened_as_it_says() -> None:
    output = pytest.importorskip("transformers.modeling_outputs").BaseModelOutput
    made = map_tensors(lambda x: x + 1, {"out": output(last_hidden_state=X)})
    assert torch.equal(made["out"].last_hidden_state, X + 1)
    assert made["out"]["last_hidden_state"] is made["out"].last_hidden_state


def test_a_tokenizers_encoding() -> None:
    encoding = pytest.importorskip("transformers").BatchEncoding
    given = encoding({"input_ids": X, "labels": X})
    made = map_tensors(torch.clone, given)
    assert type(made) is encoding and made.input_ids is not made["labels"]
    assert given["input_ids"] is X


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ({"x": [np.zeros(3)]}, "batch.x.0 is a NumPy array"),
        (types.SimpleNamespace(a=np.zeros(3)), "batch.a is a NumPy array"),
        ((X for _ in range(2)), "batch is a generator, which can be read only once"),
        ({"x": {X, Y}}, "batch.x is a set of tensors"),
    ],
)
def test_what_cannot_be_seen_into_is_refused_by_name(batch: Any, text: str) -> None:
    with pytest.raises(CaptureError, match=text):
        flatten(batch)


@pytest.mark.parametrize("batch", [Lazy(), types.MappingProxyType({"x": X})])
def test_what_cannot_be_rebuilt_is_refused(batch: Any) -> None:
    with pytest.raises(CaptureError, match="give the step"):
        flatten(batch).rebuild([X.clone()])


def test_a_batch_of_another_structure_is_refused_by_what_differs() -> None:
    captured = flatten({"x": X, "pair": (X, Y)})
    assert flatten({"pair": [Y, X], "x": X}).in_order_of(captured) == (X, Y, X)
    with pytest.raises(ValueError, match=r"structure .* it lacks batch.x; it also has batch.z"):
        flatten({"z": X, "pair": (X, Y)}).in_order_of(captured)
    with pytest.raises(ValueError, match=r"it lacks batch.pair.0, batch.pair.1; batch.pair is a"):
        flatten({"x": X, "pair": X}).in_order_of(captured)


# in a captured step


def regression(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def attributes(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch.x) - batch.y).square().mean()


@pytest.mark.parametrize(
    ("step", "batch"),
    [
        (regression, Encoding({"x": X, "y": Y})),
        (attributes, Encoding({"x": X, "y": Y})),
        (attributes, FrozenSample(X, Y)),
        (attributes, types.SimpleNamespace(x=X, y=Y)),
    ],
)
def test_no_batch_is_baked_in(step: Any, batch: Any) -> None:
    model = nn.Linear(3, 2)
    program = ap.capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), batch)
    inputs = [v.name for v in program.graph.values if v.role == g.INPUT]
    assert inputs == ["batch.x", "batch.y"]
    assert not program.constants
    other = map_tensors(lambda x: x + 1, batch)
    fed = list(batch_leaves(program, other).values())
    assert all(map(torch.equal, fed, (X + 1, Y + 1)))
