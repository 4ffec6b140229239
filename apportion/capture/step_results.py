"""StepResults: what a step returns, as the scalars in it and the form to return them in.

Part of capture/. The object that the user's step returned comes in; out go its scalar tensors by
name and a form without tensors, from which runner.step makes an object of the same kind with the
scalars of a divided step. A tensor of one element is a scalar too. Larger tensors (logits) are left
out: None stands in their place.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch


@dataclass(frozen=True)
class ScalarPlace:
    """Where the scalar of that number goes."""

    number: int


@dataclass(frozen=True, eq=False)
class StepResults:
    """What a step returns.

    names  of the scalars, by where they are: `loss`, `0`, `aux.kl`
    form   the object with a ScalarPlace for each scalar
    loss   the number of the scalar that is the loss; None: backward was called on what is not
           returned
    """

    names: tuple[str, ...]
    form: Any
    loss: int | None

    def filled(self, scalars: Callable[[int], Any]) -> Any:
        """The object with these scalars, asked for by number."""
        return _mapped(self.form, lambda x: scalars(x.number) if isinstance(x, ScalarPlace) else x)

    def agreed(self, other: StepResults) -> tuple[StepResults, tuple[str, ...]]:
        """These results without the numbers that the other ones, of the same step with other values
        read, have otherwise; and the names of those."""
        numbers: dict[str, Any] = {}
        left_out: list[str] = []

        def note(name: str, leaf: Any) -> Any:
            numbers[name] = leaf
            return leaf

        def keep(name: str, leaf: Any) -> Any:
            known = numbers.get(name, leaf)
            if not isinstance(leaf, int | float) or leaf is None:
                return leaf
            if type(leaf) in (int, float, bool) and leaf == known:
                return leaf
            left_out.append(name)
            return None

        _named_map(other.form, "", note)
        return dataclasses.replace(self, form=_named_map(self.form, "", keep)), tuple(left_out)


@dataclass(frozen=True)
class ReturnedScalars:
    """The scalars that were returned, the form they were in, and the names of what is left out."""

    scalars: dict[str, torch.Tensor]
    form: Any
    left_out: tuple[str, ...]


def returned_numbers(result: Any) -> dict[str, float]:
    """The plain numbers that a step returned, by the names that scalars have."""
    found: dict[str, float] = {}

    def note(name: str, leaf: Any) -> Any:
        if isinstance(leaf, int | float) and not isinstance(leaf, bool):
            found[name or "loss"] = float(leaf)
        return leaf

    _named_map(result, "", note)
    return found


def returned_scalars(
    result: Any, tensor_of: Callable[[Any], torch.Tensor | None] = lambda _: None
) -> ReturnedScalars:
    """Takes apart what a step returned; `tensor_of` knows the tensor that a number was read
    from."""
    scalars: dict[str, torch.Tensor] = {}
    left_out: list[str] = []

    def place(name: str, leaf: Any) -> Any:
        tensor = leaf if isinstance(leaf, torch.Tensor) else tensor_of(leaf)
        if tensor is None:
            return leaf
        if tensor.dim() and tensor.numel() == 1:
            tensor = tensor.reshape(())
        if tensor.dim():
            left_out.append(name)
            return None
        name = name or "loss"
        scalars[name] = tensor
        return ScalarPlace(list(scalars).index(name))

    return ReturnedScalars(scalars, _named_map(result, "", place), tuple(left_out))


def _mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    return _named_map(tree, "", lambda _, leaf: function(leaf))


def _named_map(tree: Any, name: str, function: Callable[[str, Any], Any]) -> Any:
    """The same structure with each leaf replaced; names say where a leaf is."""

    def inside(key: Any, each: Any) -> Any:
        return _named_map(each, f"{name}.{key}" if name else str(key), function)

    if isinstance(tree, torch.Tensor | ScalarPlace | type):
        return function(name, tree)
    if dataclasses.is_dataclass(tree):
        fields = [f.name for f in dataclasses.fields(tree) if f.init]
        made = {each: inside(each, getattr(tree, each)) for each in fields}
        kind: Any = type(tree)
        return kind(**made)
    if isinstance(tree, Mapping):
        items = {key: inside(key, each) for key, each in tree.items()}
        return type(tree)(items) if type(tree) is not dict else items  # type: ignore[call-arg]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(inside(k, x) for k, x in zip(tree._fields, tree, strict=True)))
    if isinstance(tree, list | tuple):
        return type(tree)(inside(k, x) for k, x in enumerate(tree))
    if _keeps_tensors(tree):
        made = copy.copy(tree)
        for key, each in vars(tree).items():
            setattr(made, key, inside(key, each))
        return made
    if isinstance(getattr(tree, "loss", None), torch.Tensor):
        return SimpleNamespace(loss=inside("loss", tree.loss))
    return function(name, tree)


def _keeps_tensors(thing: Any) -> bool:
    """Whether an object is one with tensors, or places of such, as its attributes."""
    if isinstance(thing, torch.nn.Module) or callable(thing):
        return False
    kept = getattr(thing, "__dict__", {}).values()
    return any(isinstance(each, torch.Tensor | ScalarPlace) for each in kept)
