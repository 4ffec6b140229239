"""Problems for tests of `policy`: recurrent nets with a backward pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from apportion.columns import Ints, offsets
from apportion.place.imports.captured import placeto_links
from apportion.place.placement_problem import (
    PlacementColumns,
    PlacementDevice,
    PlacementProblem,
)


def unrolled(
    layers: int = 3, steps: int = 4, devices: int = 3, limit: int | None = None, in_order: int = 0
) -> PlacementProblem:
    """Cells of a recurrent net: each is a unit of a forward and a backward node."""
    cells = layers * steps
    nodes = 2 * cells
    reads: list[list[int]] = []
    for cell in range(cells):
        layer, step = divmod(cell, steps)
        later = [cell + steps] if layer + 1 < layers else []
        later += [cell + 1] if step + 1 < steps else []
        reads.append(sorted([*later, nodes - 1 - cell]))
    for node in range(cells, nodes):
        layer, step = divmod(nodes - 1 - node, steps)
        before = [nodes - 1 - node - steps] if layer else []
        before += [nodes - 2 - node] if step else []
        reads.append(sorted(nodes - 1 - cell for cell in before))
    source = np.array([n for n in range(nodes) if reads[n]], np.int64)
    columns = PlacementColumns(
        unit=np.array([*range(cells), *range(cells - 1, -1, -1)], np.int64),
        duration=np.repeat([[100_000], [200_000]], cells, axis=0) * np.ones(devices, np.int64),
        backward=np.repeat([0, 1], cells),
        resident=np.full(nodes, 10),
        source=source,
        nbytes=np.full(len(source), 5),
        send=np.full(len(source), 50_000.0),
        output_start=offsets(np.array([int(bool(r)) for r in reads])),
        reader_start=offsets(np.array([len(r) for r in reads if r])),
        reader=np.array([r for each in reads for r in each], np.int64),
        allowed=np.ones((cells, devices), bool),
    )
    names = tuple(f"n{k}" for k in range(nodes))
    kinds = ("cell",) * cells + ("cell backward",) * cells
    of = tuple(PlacementDevice(f"d{k}", "gpu", limit) for k in range(devices))
    links = placeto_links(devices)._replace(in_order=in_order)
    return PlacementProblem("unrolled", names, kinds, columns, links, of)


def renumbered(problem: PlacementProblem, units: Ints, seed: int) -> PlacementProblem:
    """The same problem with unit i called units[i], and its nodes in another order in which they
    can run."""
    rng, c = np.random.default_rng(seed), problem.columns
    n = len(c.unit)
    outputs = np.repeat(np.arange(len(c.source)), np.diff(c.reader_start))
    waits = np.bincount(c.reader, minlength=n)
    ready, order = [k for k in range(n) if waits[k] == 0], []
    while ready:
        node = ready.pop(int(rng.integers(len(ready))))
        order.append(node)
        for reader in c.reader[np.isin(outputs, np.flatnonzero(c.source == node))]:
            waits[reader] -= 1
            if waits[reader] == 0:
                ready.append(int(reader))
    new = np.empty(n, np.int64)
    new[order] = np.arange(n)
    rows = np.argsort(new[c.source], kind="stable")
    reads = [sorted(new[c.reader[outputs == m]]) for m in rows]
    columns = c._replace(
        unit=units[c.unit[order]],
        duration=c.duration[order],
        backward=c.backward[order],
        resident=c.resident[order],
        source=new[c.source][rows],
        nbytes=c.nbytes[rows],
        send=c.send[rows],
        output_start=offsets(np.diff(c.output_start)[order]),
        reader_start=offsets(np.array([len(r) for r in reads], np.int64)),
        reader=np.array([r for each in reads for r in each], np.int64),
        allowed=c.allowed[np.argsort(units)],
    )
    return replace(
        problem,
        columns=columns,
        node_names=tuple(problem.node_names[k] for k in order),
        node_kinds=tuple(problem.node_kinds[k] for k in order),
    )
