"""placeto_acting: Placeto's network for one state after the other, in NumPy.

In: weights of a PlacetoNetwork, a graph, and the features of one state. Out: the scores of devices,
those of placeto_network.py but for rounding. An episode asks once for every group, and each
question depends on the last answer; torch takes longer to begin its many small products than to
compute them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from apportion.learn.adam import Weights
from apportion.learn.group_graph import GroupGraph

Singles = npt.NDArray[np.float32]


class ActingNetwork:
    """A PlacetoNetwork that is asked for one state at a time, all on one graph. Columns have a last
    row of ones, so that a bias is one more weight."""

    def __init__(self, weights: Weights, graph: GroupGraph, rounds: int) -> None:
        g = graph.groups
        self.rounds = rounds
        self._own = _layers(weights, ["own"])
        self._each, self._all = (_layers(weights, ["up", "down"], part) for part in ("each", "all"))
        sets = ("ancestors", "descendants", "others")
        self._pool_each, self._pool_all = (_layers(weights, sets, part) for part in ("each", "all"))
        self._head = _layers(weights, ["head"])
        before = graph.ancestors
        others = ~(before | before.T | np.eye(g, dtype=bool))
        self._sets = np.stack([before, before.T, others], axis=1).astype(np.float32)[..., None]
        edges = np.zeros((2, g, g), np.float32)  # column v: whom v listens to
        edges[0, graph.edges[:, 0], graph.edges[:, 1]] = 1
        edges[1, graph.edges[:, 1], graph.edges[:, 0]] = 1
        self._edges = edges
        self._listens = (edges.sum(axis=1, keepdims=True) > 0).astype(np.float32)
        d = self._own[0].shape[1]
        self._x, self._hidden, self._heard = (_with_ones((2, d, g)) for _ in range(3))
        self._y, self._pooled, self._said = (_with_ones((n, 2 * d, g)) for n in (1, 3, 3))
        self._sum = _with_ones((3, 2 * d, 1))
        self._z = _with_ones((1, 8 * d, 1))

    def scores(self, features: Singles, current: int) -> Singles:
        """Scores (devices) for the group `current`, of features (width x groups)."""
        d = len(features)
        x, hidden, heard = self._x, self._hidden, self._heard
        x[0, :d] = features
        _forward(self._own[:2], x[:1], hidden[:1])
        own = np.matmul(self._own[2], x[:1])
        x[:, :d] = own
        for _ in range(self.rounds):
            _forward(self._each, x, hidden)
            np.matmul(x[:, :d], self._edges, out=heard[:, :d])
            _forward(self._all, heard, hidden)
            np.multiply(heard[:, :d], self._listens, out=x[:, :d])
            x[:, :d] += own
        y = self._y
        y[0, :d], y[0, d : 2 * d] = x[0, :d], x[1, :d]
        np.matmul(self._pool_each[0], y, out=self._pooled[:, : 2 * d])
        _relu(self._pooled[:, : 2 * d])
        np.matmul(self._pool_each[1], self._pooled, out=self._said[:, : 2 * d])
        _relu(self._said[:, : 2 * d])
        total = self._sum
        np.matmul(self._said[:, : 2 * d], self._sets[current], out=total[:, : 2 * d])
        for layer in self._pool_all:
            total[:, : 2 * d] = np.maximum(np.matmul(layer, total), 0)
        z = self._z
        z[0, : 6 * d, 0] = total[:, : 2 * d].ravel()
        z[0, 6 * d : 8 * d, 0] = y[0, : 2 * d, current]
        for layer in self._head[:-1]:
            z = _and_one(np.maximum(np.matmul(layer, z), 0))
        found: Singles = np.matmul(self._head[-1], z)[0, :, 0]
        return found


def _layers(weights: Weights, parts: Sequence[str], within: str = "") -> list[Singles]:
    """The linear layers of some networks side by side: networks x narrow x (wide + 1)."""
    names = [f"{part}.{within}" if within else part for part in parts]
    count = len({name for name in weights if name.startswith(f"{names[0]}.")}) // 2
    return [
        np.stack(
            [
                np.hstack([weights[f"{name}.{2 * i}.weight"], weights[f"{name}.{2 * i}.bias"]])
                for name in names
            ]
        )
        for i in range(count)
    ]


def _forward(layers: list[Singles], x: Singles, hidden: Singles) -> None:
    """Two layers, each with ReLU; the result takes the place of x."""
    narrow = layers[0].shape[1]
    np.matmul(layers[0], x, out=hidden[:, :narrow])
    _relu(hidden[:, :narrow])
    np.matmul(layers[1], hidden, out=x[:, :narrow])
    _relu(x[:, :narrow])


def _relu(x: Singles) -> None:
    np.maximum(x, 0, out=x)


def _with_ones(shape: tuple[int, int, int]) -> Singles:
    return np.ones((shape[0], shape[1] + 1, shape[2]), np.float32)


def _and_one(x: Any) -> Singles:
    found = np.ones((x.shape[0], x.shape[1] + 1, x.shape[2]), np.float32)
    found[:, :-1] = x
    return found
