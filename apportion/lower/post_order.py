"""post_order: where in a step its exchanges are posted, and which of them are posted as one.

A part of lower/, in compiled code. In: the tasks of a TaskGraph as TaskDependencies, and the units
in which messages move: a **unit** is what a set of devices exchanges at one position. Out: a
Placing, which coalesce.py makes a TaskGraph of.

Work that computes keeps its order, Op by Op. A unit may be posted once all that it sends is made,
and has to be there before the first Op that reads what it brings. An assembly comes just before the
first task that reads it, or with the others of its bucket. In between:

    soon     a unit that is read within LEAD Ops is posted at once
    pushed   else it waits in the open bucket of its set of devices, which is posted when it is full
             or one of its units is read soon. When a bucket is posted, the one `depth` buckets
             earlier is taken apart: its regions are assembled, which a second stage may be sent
             from, with the bucket that is posted now
    pulled   a unit whose sources stay where they are anyway, such as parameters, is posted as late
             as it can be: one bucket ahead of the one that is read

Every unit of a bucket has all that it sends when the bucket is posted, so no unit waits for another
one of its bucket.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.columns import Bools, Ints, compiled, compiled_part, mixed

LEAD = 4  # Ops
DEPTH = 2  # buckets of one set of devices that are under way
CHEAP = 1 << 18  # bytes that are sent along with something urgent
SMALL = 16  # of a bucket's size that share is always sent along

WAITING, SOON, PATIENT, POSTED = range(4)
SEQUENCE, BUCKETS, NOW, READY, SORTED, SEEN = range(6)


class TaskDependencies(NamedTuple):  # numba takes no dataclass
    """Tasks in columns. Lengths: tasks n, units u."""

    op: Ints  # n
    message: Bools  # n
    assembles: Bools  # n
    dep_start: Ints  # n + 1
    dep: Ints
    unit: Ints  # n: of a message, else -1
    ops: int  # the end of the step counted


class Units(NamedTuple):
    """What sets of devices exchange, in columns."""

    key: Ints  # u: the number of its set of devices
    nbytes: Ints  # u: what a device sends of it, on average
    need: Ints  # u: the first Op that reads what it brings
    pulled: Bools  # u
    first: Ints  # u: its first message


class BucketLimits(NamedTuple):
    """Bytes of a bucket, by set of devices."""

    pushed: Ints
    pulled: Ints
    most: int  # that are fetched ahead of need


class Placing(NamedTuple):
    """Where tasks go. Tasks and buckets have their numbers in one sequence."""

    sequence: Ints  # n: of work; not read for a message
    at_op: Ints  # n: the Op that work is placed beside
    bucket: Ints  # u
    bucket_sequence: Ints  # u, of which as many are used as there are buckets
    bucket_op: Ints  # u


@compiled
def find_units(
    message: Bools, position: Ints, end_start: Ints, end_device: Ints, devices: int
) -> tuple[Ints, Ints, Ints, Ints]:
    """The unit of every message, else -1; of every unit a hash of its set of devices, how many
    these are, and its first message."""
    n = len(message)
    unit, count = np.full(n, -1), 0
    codes, sizes, firsts = np.empty((3, n), np.int64)
    parent, number = np.empty(devices, np.int64), np.empty(devices, np.int64)
    code, size = np.empty(devices, np.int64), np.empty(devices, np.int64)
    low = 0
    while low < n:
        if not message[low]:
            low += 1
            continue
        high = low
        while high < n and message[high] and position[high] == position[low]:
            high += 1
        _join_ends(parent, end_start, end_device, low, high)
        for device in range(devices):
            root = parent[device]
            if root == device:
                code[root], size[root], number[root] = 0, 0, -1
            if root >= 0:
                code[root] = mixed(code[root], np.int64(device + 1))
                size[root] += 1
        for task in range(low, high):
            root = parent[end_device[end_start[task]]]
            if number[root] < 0:
                number[root] = count
                codes[count], sizes[count], firsts[count] = code[root], size[root], task
                count += 1
            unit[task] = number[root]
        low = high
    return unit, codes[:count].copy(), sizes[:count].copy(), firsts[:count].copy()


@compiled_part
def _join_ends(parent, end_start, end_device, low, high):  # type: ignore[no-untyped-def]
    """Writes for every device the smallest one that it exchanges with in the messages low to high,
    maybe through others; -1 for a device that does not."""
    parent[:] = -1
    for row in range(end_start[low], end_start[high]):
        parent[end_device[row]] = end_device[row]
    moved = True
    while moved:
        moved = False
        for task in range(low, high):
            least = parent[end_device[end_start[task]]]
            for row in range(end_start[task], end_start[task + 1]):
                least = min(least, parent[end_device[row]])
            for row in range(end_start[task], end_start[task + 1]):
                if parent[end_device[row]] != least:
                    parent[end_device[row]] = least
                    moved = True


@compiled
def find_needs(tasks: TaskDependencies, units: int) -> tuple[Ints, Ints, Bools]:
    """For every task the first Op that needs it; the same for every unit; and for every task
    whether it is an assembly of local slots that a message waits for."""
    op, message, assembles, dep_start, dep, unit, ops = tasks
    n = len(op)
    need, unit_need = np.full(n, ops - 1), np.full(units, ops - 1)
    feeds = np.zeros(n, np.bool_)
    for t in range(n - 1, -1, -1):
        local = assembles[t]
        for at in range(dep_start[t], dep_start[t + 1]):
            local = local and not message[dep[at]]
        if message[t]:
            need[t] = unit_need[unit[t]]
        elif not assembles[t]:
            need[t] = op[t]
        feeding = message[t] or (local and feeds[t])
        for at in range(dep_start[t], dep_start[t + 1]):
            before = dep[at]
            if message[before]:
                unit_need[unit[before]] = min(unit_need[unit[before]], need[t])
            elif assembles[before]:
                need[before] = min(need[before], need[t])
                feeds[before] = feeds[before] or feeding
        feeds[t] = feeds[t] and local
    return need, unit_need, feeds


class Rows(NamedTuple):
    """What belongs to tasks, units, Ops and sets of devices: offsets and numbers."""

    next_start: Ints  # by task: the messages and eager assemblies that wait for it
    next: Ints
    made_start: Ints  # by unit: its assemblies
    made: Ints
    due_start: Ints  # by Op: assemblies and first messages of units that it needs
    due: Ints
    soon_start: Ints  # by Op: units that are read LEAD Ops later
    soon: Ints
    pull_start: Ints  # by set of devices: pulled units, by need
    pull: Ints
    op_start: Ints  # by Op: what it computes
    computes: Ints


class State(NamedTuple):
    """What has been placed, and what is open."""

    counters: Ints
    done: Bools  # n
    pending: Ints  # n: of an eager assembly
    unit_pending: Ints  # u
    stage: Ints  # u: WAITING, SOON, PATIENT or POSTED
    ready: Ints  # u: in the order in which they became so; READY of them, SORTED into lists
    stack: Ints  # n: a list of work that is to be placed
    after: Ints  # u: the next unit of its list
    soon: Ints  # by set of devices: the first unit of a list, or -1
    patient: Ints
    open_bytes: Ints  # by set of devices: of the patient ones
    flying: Ints  # sets of devices x DEPTH: buckets under way, the oldest first, -1 for none
    next_pull: Ints  # by set of devices
    members: Ints  # u: the first unit of a bucket that is not pulled
    taken: Bools  # u: whether a bucket has been taken apart, or led to the next one


@compiled
def place(
    tasks: TaskDependencies, units: Units, limits: BucketLimits, rows: Rows, state: State
) -> Placing:
    """Places all tasks."""
    n, u = len(tasks.op), len(units.key)
    placing = Placing(
        np.full(n, -1), np.zeros(n, np.int64), np.full(u, -1), np.full(u, -1),
        np.zeros(u, np.int64),
    )  # fmt: skip
    for now in range(tasks.ops):
        state.counters[NOW] = now
        low, high = rows.due_start[now], rows.due_start[now + 1]
        for at in range(low, high):  # all that can go at once, before anybody waits
            unit = tasks.unit[rows.due[at]]
            if unit >= 0:
                _post_due(tasks, units, limits, rows, state, placing, unit)
        for at in range(low, high):
            task = rows.due[at]
            unit = tasks.unit[task]
            if unit >= 0:
                _post_due(tasks, units, limits, rows, state, placing, unit)
            elif not state.done[task]:
                _take_apart(tasks, rows, state, placing, _bucket_of(tasks, placing, units, task))
                _place_work(tasks, rows, state, placing, task)
                _sort_ready(units, state)
        for at in range(rows.op_start[now], rows.op_start[now + 1]):
            _place_work(tasks, rows, state, placing, rows.computes[at])
        _sort_ready(units, state)
        _post_open(tasks, units, limits, rows, state, placing)
    return placing


@compiled_part
def _place_work(tasks, rows, state, placing, task):  # type: ignore[no-untyped-def]
    """Places a task of work, and the eager assemblies that waited for it alone; units that may be
    posted now become ready."""
    stack, counters = state.stack, state.counters
    stack[0], size = task, 1
    while size:
        size -= 1
        task = stack[size]
        if state.done[task]:
            continue
        state.done[task] = True
        placing.sequence[task], placing.at_op[task] = counters[SEQUENCE], counters[NOW]
        counters[SEQUENCE] += 1
        for at in range(rows.next_start[task], rows.next_start[task + 1]):
            later = rows.next[at]
            if tasks.message[later]:
                unit = tasks.unit[later]
                state.unit_pending[unit] -= 1
                if state.unit_pending[unit] == 0:
                    state.ready[counters[READY]] = unit
                    counters[READY] += 1
            else:
                state.pending[later] -= 1
                if state.pending[later] == 0:
                    stack[size] = later
                    size += 1


@compiled_part
def _sort_ready(units, state):  # type: ignore[no-untyped-def]
    """Puts units that have become ready among those that are read soon, or the patient ones."""
    counters = state.counters
    while counters[SORTED] < counters[READY]:
        unit = state.ready[counters[SORTED]]
        counters[SORTED] += 1
        if units.pulled[unit]:
            continue
        key = units.key[unit]
        if units.need[unit] - counters[NOW] <= LEAD:
            state.stage[unit] = SOON
            state.after[unit], state.soon[key] = state.soon[key], unit
        else:
            state.stage[unit] = PATIENT
            state.after[unit], state.patient[key] = state.patient[key], unit
            state.open_bytes[key] += units.nbytes[unit]


@compiled_part
def _post_open(tasks, units, limits, rows, state, placing):  # type: ignore[no-untyped-def]
    """Posts what is read soon, and buckets that are full or have something that is."""
    counters, now = state.counters, state.counters[NOW]
    for at in range(rows.soon_start[now], rows.soon_start[now + 1]):
        if state.stage[rows.soon[at]] == PATIENT:
            _post_patient(tasks, units, rows, state, placing, units.key[rows.soon[at]])
    while counters[SEEN] < counters[READY]:  # to post a bucket may make more of them ready
        key = units.key[state.ready[counters[SEEN]]]
        counters[SEEN] += 1
        if state.soon[key] >= 0:
            _post_soon(state, placing, key)
        if state.patient[key] >= 0 and state.open_bytes[key] >= limits.pushed[key]:
            _post_patient(tasks, units, rows, state, placing, key)


@compiled_part
def _post_due(tasks, units, limits, rows, state, placing, unit):  # type: ignore[no-untyped-def]
    """Posts a unit that is needed now, if that can be and has not been done. The first one that is
    needed of a bucket of pulled units has the next bucket posted."""
    key = units.key[unit]
    if units.pulled[unit]:
        if state.unit_pending[unit] > 0:
            return
        if state.stage[unit] != POSTED:
            _post_pulled(units, limits, rows, state, placing, key, False)
        bucket = placing.bucket[unit]
        if not state.taken[bucket]:
            state.taken[bucket] = True
            _post_pulled(units, limits, rows, state, placing, key, True)
    elif state.stage[unit] == SOON:
        _post_soon(state, placing, key)
    elif state.stage[unit] == PATIENT:
        _post_patient(tasks, units, rows, state, placing, key)


@compiled_part
def _new_bucket(state, placing):  # type: ignore[no-untyped-def]
    counters = state.counters
    bucket = counters[BUCKETS]
    placing.bucket_sequence[bucket] = counters[SEQUENCE]
    placing.bucket_op[bucket] = counters[NOW]
    counters[BUCKETS] += 1
    counters[SEQUENCE] += 1
    state.members[bucket] = -1
    return bucket


@compiled_part
def _post_list(state, placing, bucket, unit):  # type: ignore[no-untyped-def]
    """Puts a list of units into a bucket."""
    while unit >= 0:
        later = state.after[unit]
        placing.bucket[unit], state.stage[unit] = bucket, POSTED
        state.after[unit], state.members[bucket] = state.members[bucket], unit
        unit = later


@compiled_part
def _post_soon(state, placing, key):  # type: ignore[no-untyped-def]
    """Posts what a set of devices reads soon, and with it the open bucket if that costs little."""
    bucket = _new_bucket(state, placing)
    _post_list(state, placing, bucket, state.soon[key])
    state.soon[key] = -1
    if state.open_bytes[key] <= CHEAP:
        _post_list(state, placing, bucket, state.patient[key])
        state.patient[key], state.open_bytes[key] = -1, 0


@compiled_part
def _post_patient(tasks, units, rows, state, placing, key):  # type: ignore[no-untyped-def]
    """Posts the open bucket of a set of devices, after the one that is too many is taken apart."""
    _take_apart(tasks, rows, state, placing, state.flying[key, 0])
    _sort_ready(units, state)
    bucket = _new_bucket(state, placing)
    _post_list(state, placing, bucket, state.patient[key])
    state.patient[key], state.open_bytes[key] = -1, 0
    for k in range(DEPTH - 1):
        state.flying[key, k] = state.flying[key, k + 1]
    state.flying[key, DEPTH - 1] = bucket


@compiled_part
def _post_pulled(units, limits, rows, state, placing, key, ahead):  # type: ignore[no-untyped-def]
    """Posts the next pulled units of a set of devices, those that are needed now among them; or, if
    they are fetched ahead of need, as many as that is allowed for."""
    now, bucket, nbytes, whole = state.counters[NOW], -1, 0, True
    for at in range(state.next_pull[key], rows.pull_start[key + 1]):
        unit = rows.pull[at]
        if state.stage[unit] != POSTED:
            due = units.need[unit] <= now
            if state.unit_pending[unit] > 0:
                if due:
                    whole = False
                    continue
                break
            more = nbytes + units.nbytes[unit]
            full = more > limits.pulled[key] and SMALL * units.nbytes[unit] > limits.pulled[key]
            if not due and bucket >= 0 and full:
                break
            if not due and ahead and units.nbytes[unit] > limits.most:
                break
            if bucket < 0:
                bucket = _new_bucket(state, placing)
            nbytes += units.nbytes[unit]
            placing.bucket[unit], state.stage[unit] = bucket, POSTED
        if whole:
            state.next_pull[key] = at + 1


@compiled_part
def _take_apart(tasks, rows, state, placing, bucket):  # type: ignore[no-untyped-def]
    """Places the assemblies of a bucket, as far as what they read besides is there."""
    if bucket < 0 or state.taken[bucket]:
        return
    state.taken[bucket] = True
    unit = state.members[bucket]
    while unit >= 0:
        for at in range(rows.made_start[unit], rows.made_start[unit + 1]):
            task = rows.made[at]
            there = True
            for k in range(tasks.dep_start[task], tasks.dep_start[task + 1]):
                before = tasks.dep[k]
                there = there and (tasks.message[before] or state.done[before])
            if there:
                _place_work(tasks, rows, state, placing, task)
        unit = state.after[unit]


@compiled_part
def _bucket_of(tasks, placing, units, task):  # type: ignore[no-untyped-def]
    """The bucket that an assembly is of, or -1 if it has none or a pulled one."""
    for at in range(tasks.dep_start[task], tasks.dep_start[task + 1]):
        unit = tasks.unit[tasks.dep[at]]
        if unit >= 0 and not units.pulled[unit]:
            return placing.bucket[unit]
    return -1
