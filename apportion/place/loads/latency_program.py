"""latency program: the time of one sample as a mixed-integer linear program.

In: a LatencyObjective with one piece for each accelerator. Out: a PlacementProgram (Tarnawski et
al. 2020), with times as shares of `scale` ticks:

    x[u, d]           unit u is on accelerator d, or on the host; binary
    in, out[t, d]     as in milp.py
    start, end[d]     of an accelerator; end = start + what it receives, runs and sends
    late[v]           when node v has ended
    start[d] >= late[v] if d receives from v;  late[v] >= end[d] if v is on d
    late[v]  >= late[w] + its time on the host, if it is there, for each w that v reads from

What holds only under a condition is slack by the longest time of interest otherwise. That pieces do
not wait for each other follows: they would have to end before they start, unless they take no time.
"""

from __future__ import annotations

import numpy as np

from apportion.columns import Floats, Ints
from apportion.place.loads.ideals import first_devices
from apportion.place.loads.integer_program import IntegerProgram, PlacementProgram, crossing
from apportion.place.objectives.latency import LatencyObjective
from apportion.place.objectives.max_load import load_columns


def latency_program(objective: LatencyObjective, scale: float, feasible: bool) -> PlacementProgram:
    """The program. No latency above `scale` is of interest if a placement with that is known."""
    c, problem, program = objective.columns, objective.problem, IntegerProgram()
    longest = 1.0 if feasible else objective.worst / scale
    hosts = np.flatnonzero(c.host).tolist()
    devices = [*np.flatnonzero(c.host == 0).tolist(), *hosts[:1]]
    allowed = problem.columns.allowed & first_devices(load_columns(problem))
    allowed[:, hosts] = problem.columns.allowed[:, hosts]
    x = [
        {d: program.add(float(allowed[u, d]), True) for d in devices} for u in range(problem.units)
    ]
    for row in x:
        program.equal([(v, 1.0) for v in row.values()], 1.0)
    late = [program.add(longest) for _ in c.unit]
    target = program.add(longest)
    program.at_least([(target, 1.0)], objective.lower_bound() * problem.tick / scale)
    for node, unit in enumerate(c.unit.tolist()):
        program.at_least([(target, 1.0), (late[node], -1.0)], 0.0)
        own = [(x[unit][d], -c.duration[node, d] / scale) for d in hosts[:1] if allowed[unit, d]]
        program.at_least([(late[node], 1.0), *own], 0.0)
        for source in c.read[c.read_start[node] : c.read_start[node + 1]].tolist():
            program.at_least([(late[node], 1.0), (late[source], -1.0), *own], 0.0)
    for device in devices:
        if not c.host[device]:
            _accelerator(objective, program, x, late, device, scale, longest)
    table = np.array([[row[d] for d in devices] for row in x])

    def where(values: Floats) -> Ints:
        found: Ints = np.array(devices, np.int64)[values[table].argmax(axis=1)]
        return found

    return PlacementProgram(program, target, scale, where)


def _accelerator(
    objective: LatencyObjective,
    program: IntegerProgram,
    x: list[dict[int, int]],
    late: list[int],
    device: int,
    scale: float,
    longest: float,
) -> None:
    """The rows of one accelerator."""
    c, problem = objective.columns, objective.problem
    start, end = program.add(longest), program.add(longest)
    load = [(end, 1.0), (start, -1.0)]
    for node, unit in enumerate(c.unit.tolist()):
        on = x[unit][device]
        if problem.columns.allowed[unit, device]:
            load.append((on, -c.duration[node, device] / scale))
        program.at_least([(late[node], 1.0), (end, -1.0), (on, -longest)], -longest)
    for row, source in enumerate(c.source.tolist()):
        home = c.unit[source]
        readers = c.unit[c.reader[c.reader_start[row] : c.reader_start[row + 1]]]
        others = np.setdiff1d(readers, [home]).tolist()
        if others:
            comes, goes = crossing(program, x[home][device], [x[r][device] for r in others])
            price = float(c.price[row, device]) / scale
            load += [(comes, -price), (goes, -price)]
            program.at_least([(start, 1.0), (late[source], -1.0), (comes, -longest)], -longest)
    program.equal(load, 0.0)
    limit, total = problem.limit[device], float(objective.resident.sum())
    if total > limit:
        held = [(x[u][device], -size / total) for u, size in enumerate(objective.resident.tolist())]
        program.at_least(held, -limit / total)
