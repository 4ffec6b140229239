"""A plain whole-graph interpreter: the meaning of a captured Graph, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from apportion import graph as g
from apportion.capture.counter_random import uniform_tensor
from apportion.capture.program import (
    Program,
    batch_leaves,
    check_settings,
    setting_of,
    state_tensor,
)
from apportion.execute.kernels.base import (
    Context,
    kernel,
)

State = dict[int, torch.Tensor]

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_PLACES = ("device", "layout", "pin_memory", "generator", "memory_format")


def sdpa(q: Any, k: Any, v: Any, dropout: Any, causal: Any, mask: Any, scale: Any) -> Any:
    return _ATTENTION(q, k, v, dropout, causal, attn_mask=mask, scale=scale)


def sdpa_backward(*args: Any) -> Any:
    return _ATTENTION_BACKWARD(*args[:-2], attn_mask=args[-2], scale=args[-1])


OWN: dict[str, Callable[..., Any]] = {
    "apportion.sdpa": sdpa,
    "apportion.sdpa_backward": sdpa_backward,
    "aten.view.default": lambda x, size: x.reshape(size),
    "aten._unsafe_view.default": lambda x, size: x.reshape(size),
    "aten.clone.default": lambda x: x.contiguous().clone(),
}


def call(kind: str, args: tuple[Any, ...]) -> Any:
    """Runs one operator on real tensors."""
    if kind in OWN:
        return OWN[kind](*args)
    namespace, name, overload = kind.split(".")
    func = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    names = [a for a in func._schema.arguments if a.name not in _PLACES]
    positional = [v for a, v in zip(names, args, strict=True) if not a.kwarg_only]
    keyword = {a.name: v for a, v in zip(names, args, strict=True) if a.kwarg_only}
    skipped = any(a.name in _PLACES and not a.kwarg_only for a in func._schema.arguments)
    assert not skipped, kind
    return func(*positional, **keyword)


def run_body(program: Program, body: g.Body, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    table = list(inputs)
    for op in body.ops:
        table.append(call(op.kind, _args(program, op.args, table)))
    return [table[k] for k in body.outputs]


def run_graph(program: Program, batch: Any, state: State, seed: int, step: int) -> float:
    """One step; `state` is updated. Returns the loss."""
    check_settings(program)
    graph = program.graph
    table: dict[int, Any] = {**state, **program.constants, **batch_leaves(program, batch)}
    for op in graph.ops:
        inputs = [table[v] for v in op.inputs]
        if op.body is not None:
            results: Any = run_body(program, graph.bodies[op.body], inputs)
        elif op.kind == "apportion.random_uniform":
            size, key, dtype = op.args
            results = uniform_tensor((seed, step, key), size, getattr(torch, dtype.name))
        elif op.kind.startswith("apportion."):  # kinds of our own have no operator of torch's
            context = Context(seed, step, lambda e: setting_of(program, e), graph.bodies)
            results = kernel(op.kind)(context, _args(program, op.args, inputs))
        else:
            results = call(op.kind, _args(program, op.args, inputs))
        results = results if isinstance(results, tuple | list) else [results]
        for value, result in zip(op.outputs, results, strict=False):
            if result is not None:
                _check(graph.values[value], result)
                table[value] = result
    for before, after in graph.state:
        state[before] = table[after]
    return float(table[graph.loss])


def _args(program: Program, args: Any, tensors: list[torch.Tensor]) -> Any:
    return g.substitute(
        args,
        tensors,
        dtype=lambda name: getattr(torch, name),
        setting=lambda expression: setting_of(program, expression),
    )


def _check(value: g.Value, result: torch.Tensor) -> None:
    assert tuple(result.shape) == value.shape, value
    assert str(result.dtype) == f"torch.{value.dtype}", (value, result.dtype)


def begin(program: Program) -> State:
    """The state the step begins with."""
    return {v: state_tensor(program, v).clone() for v in program.bindings}


def run(program: Program, batches: Iterable[Any], seed: int = 0) -> tuple[list[float], State]:
    state = begin(program)
    losses = [run_graph(program, b, state, seed, n) for n, b in enumerate(batches)]
    return losses, state
