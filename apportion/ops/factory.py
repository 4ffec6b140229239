"""Operators that make tensors from sizes. Their parts are told their own size, and random ones
where they lie."""

from __future__ import annotations

from typing import Any

from apportion.tdl import Local, describe, f


def _first_size(args: tuple[Any, ...], local: Local) -> tuple[Any, ...]:
    return (local.outputs[0], *args[1:])


def _second_size(args: tuple[Any, ...], local: Local) -> tuple[Any, ...]:
    return (args[0], local.outputs[0], *args[2:])


@describe("aten.full", "aten.zeros", "aten.ones", "aten.empty", local=_first_size)
def full(size: Any, *rest: Any) -> Any:
    return lambda *i: f("constant")


@describe("aten.new_full", "aten.new_zeros", "aten.new_ones", "aten.new_empty", local=_second_size)
def new_full(x: Any, size: Any, *rest: Any) -> Any:
    # Only the dtype of x matters, so it is read whole by every part.
    return lambda *i: f("constant")


@describe("aten.scalar_tensor")
def scalar_tensor(value: Any) -> Any:
    return lambda: f("constant")


@describe("aten.arange")
def arange(*bounds: Any) -> Any:
    return lambda i: f("arange", i)


def _random_place(args: tuple[Any, ...], local: Local) -> tuple[Any, ...]:
    return (local.outputs[0], *args[1:3], local.positions[0])


@describe("apportion.random_uniform", local=_random_place)
def random_uniform(size: Any, *rest: Any) -> Any:
    """Numbers are a function of the global index, of which every part is told its own."""
    return lambda *i: f("constant")
