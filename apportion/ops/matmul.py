"""Contractions."""

from __future__ import annotations

from typing import Any

from apportion.tdl import Sum, describe


@describe("aten.mm")
def mm(a: Any, b: Any) -> Any:
    return lambda i, j: Sum(lambda k: a[i, k] * b[k, j])


@describe("aten.bmm")
def bmm(a: Any, b: Any) -> Any:
    return lambda n, i, j: Sum(lambda k: a[n, i, k] * b[n, k, j])


@describe("aten.addmm")
def addmm(bias: Any, a: Any, b: Any, beta: Any, alpha: Any) -> Any:
    return lambda i, j: beta * bias.at((i, j)) + alpha * Sum(lambda k: a[i, k] * b[k, j])


@describe("aten.baddbmm")
def baddbmm(bias: Any, a: Any, b: Any, beta: Any, alpha: Any) -> Any:
    return lambda n, i, j: (
        beta * bias.at((n, i, j)) + alpha * Sum(lambda k: a[n, i, k] * b[n, k, j])
    )


@describe("aten.mv")
def mv(a: Any, x: Any) -> Any:
    return lambda i: Sum(lambda k: a[i, k] * x[k])


@describe("aten.dot", "aten.vdot")
def dot(a: Any, b: Any) -> Any:
    return lambda: Sum(lambda k: a[k] * b[k])
