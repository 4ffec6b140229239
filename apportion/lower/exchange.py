"""The tasks of one exchange: the messages that bring boxes to where they are read, and the
assemblies of what they bring. A part of lower/, in compiled code.

In: Flows (value_flow.py), and the stages of them that are to be made. Out: rows of OpTasks, the
columns which op_tasks.py fills.

A message goes from one device to another with all boxes that one exchange moves between the two.
Where a group of three or more devices all send to all, and about equally much, they have one
COLLECTIVE instead of all their messages.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.columns import Floats, Ints, compiled, compiled_part, hash_table, is_new_pair, sort
from apportion.lower.task_kinds import ASSEMBLE, COLLECTIVE, TRANSFER
from apportion.machine import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER

EVEN = 2.0  # members of a collective send about equally much: the most over the least
FEWEST_PAIRS = 6  # as many pairs of devices have a message where three send to each other

SHIFT = 32  # a piece is named j << SHIFT | piece: which of the Op's Values it is of, and its number
PIECE = (1 << SHIFT) - 1

OPS, TASKS, NEEDS, WAITS, MAKES, GROUPS, MEMBERS, READS, COPIES = range(9)


class OpTasks(NamedTuple):  # numba takes no dataclass
    """The tasks of several Ops. Lengths: Ops o, tasks t, made pieces m, copies c, groups g. Tasks
    are numbered through all Ops. Columns are longer than what is used of them."""

    used: Ints  # how many there are: OPS, TASKS, ...
    task_start: Ints  # o + 1
    kind: Ints  # t
    operator: Ints  # t: which operator the Op is
    owner: Ints  # t: which of the Ops
    part: Ints  # t: which part of the Op, -1 unless COMPUTE
    device: Ints  # t
    peer: Ints  # t: the receiver of a TRANSFER, else -1
    late: Ints  # t: 1 for tasks that lay results out
    hop: Ints  # t: of an exchange that is made one after another, which of these it belongs to
    nbytes: Ints  # t
    flops: Floats  # t
    itemsize: Ints  # t
    taken: Ints  # t: boxes that a message carries, or that an assembly puts together
    group: Ints  # t: the group of a COLLECTIVE, else -1
    pattern: Ints  # t: what the blocks of a COLLECTIVE are, else -1
    need_start: Ints  # t + 1
    need: Ints  # names of the pieces that a message reads, each once
    wait_start: Ints  # t + 1
    wait: Ints  # messages that an assembly waits for, counted from the Op's first task
    make_start: Ints  # t + 1
    make: Ints  # m: names of the pieces that a task makes
    group_start: Ints  # g + 1
    member: Ints  # devices, rising
    # The rest is there only where slots are asked for
    with_slots: int  # whether they are: 0 or 1
    read_start: Ints  # t + 1
    read: Ints  # names of the pieces that a task reads, in order; -1 for a block of zeros
    base: Ints  # m: the name of the piece whose storage a made piece shares, or -1
    copy_target: Ints  # c: the name of the piece that a box goes into
    copy_source: Ints  # c: the number of the source in the FlowStore
    copy_message: Ints  # c: the message that carries it, or -1
    copy_task: Ints  # c: the ASSEMBLE that it is for
    # For one exchange; between two of them as they were
    pair_bytes: Ints  # by pair of devices: 0
    carrier: Ints  # by pair of devices: -1
    parent: Ints  # by device
    seen: Ints  # t: the last of those that wait for a message


PENDING = -2  # the carrier of a pair that has something to send, but no message yet


def pair_columns(devices: int) -> Ints:
    """What OpTasks have by pair of devices, before the first exchange."""
    return np.array([[0], [-1]]).repeat(devices * devices, 1)


@compiled
def new_op_tasks(room, slots, devices, pairs):  # type: ignore[no-untyped-def]
    """Empty columns with so much room for everything, and for slots if `slots` is 1."""
    c, d = np.empty((24, room + 1), np.int64), np.empty((7, slots * room + 1), np.int64)
    c[:, 0], d[:, 0] = 0, 0
    return OpTasks(
        np.zeros(9, np.int64), c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7], c[8], c[9],
        c[10].view(np.float64), c[11], c[12], c[13], c[14], c[15], c[16], c[17], c[18], c[19],
        c[20], c[21], c[22], slots, d[0], d[1], d[2], d[3], d[4], d[5], d[6],
        pairs[0], pairs[1], np.empty(devices, np.int64), c[23],
    )  # fmt: skip


@compiled_part
def add_task(tasks, kind, device, peer, late, nbytes, itemsize, taken):  # type: ignore[no-untyped-def]
    """Adds a task; what it needs, waits for, makes and reads is added after it. Its number."""
    used = tasks.used
    task = used[TASKS]
    tasks.kind[task], tasks.device[task], tasks.peer[task] = kind, device, peer
    tasks.late[task], tasks.nbytes[task], tasks.itemsize[task] = late, nbytes, itemsize
    tasks.hop[task] = 0
    tasks.taken[task], tasks.flops[task], tasks.part[task] = taken, 0.0, -1
    tasks.group[task] = tasks.pattern[task] = tasks.seen[task] = -1
    tasks.need_start[task + 1] = used[NEEDS]
    tasks.wait_start[task + 1] = used[WAITS]
    tasks.make_start[task + 1] = used[MAKES]
    used[TASKS] = task + 1
    return task


@compiled
def add_exchange(tasks, store, flows, stages, first_value, late, begun):  # type: ignore[no-untyped-def]
    """The messages and assemblies that make the pieces of Flows at stages, hop by hop. The Flows
    are those of the Op's Values from `first_value` on; the Op's tasks are those from `begun` on."""
    devices, device, source_start = len(tasks.parent), store.device, store.source_start
    hop, more = 0, True
    while more:
        first, remote, more = tasks.used[TASKS], 0, False
        for k in range(len(flows)):
            at = store.stage_start[flows[k]] + stages[k]
            for piece in range(store.piece_start[at], store.piece_start[at + 1]):
                more = more or store.hop[piece] > hop
                if store.hop[piece] == hop:
                    for q in range(source_start[piece], source_start[piece + 1]):
                        remote += device[store.source[q]] != device[piece]
        pairs = np.empty((2, min(remote, devices * devices)), np.int64)
        count = 0
        if remote:
            count = _add_messages(
                tasks, store, flows, stages, first_value, late, remote, pairs, hop
            )
        for k in range(len(flows)):
            at = store.stage_start[flows[k]] + stages[k]
            low, high = store.piece_start[at], store.piece_start[at + 1]
            if low < high:
                value, itemsize = (k + first_value) << SHIFT, store.itemsize[flows[k]]
                _add_assemblies(tasks, store, low, high, value, itemsize, late, begun, hop)
        for k in range(count):
            pair = pairs[0, k] * devices + pairs[1, k]
            tasks.carrier[pair], tasks.pair_bytes[pair] = -1, 0
        if hop:
            tasks.hop[first : tasks.used[TASKS]] = hop
        hop += 1


@compiled_part
def _add_assemblies(tasks, store, low, high, value, itemsize, late, begun, hop):  # type: ignore[no-untyped-def]
    """The tasks that put those of the pieces low to high together that are of this hop; names of
    pieces of their Value begin with `value`."""
    device, source, source_start = store.device, store.source, store.source_start
    nbytes, base, used, devices = store.source_nbytes, store.base, tasks.used, len(tasks.parent)
    carrier, seen, wait, wait_start = tasks.carrier, tasks.seen, tasks.wait, tasks.wait_start
    make, make_start = tasks.make, tasks.make_start
    for piece in range(low, high):
        if store.hop[piece] != hop:
            continue
        begin, end, here, moved = source_start[piece], source_start[piece + 1], device[piece], 0
        if base[piece] < 0:
            for q in range(begin, end):
                moved += 2 * nbytes[q]
        task = add_task(tasks, ASSEMBLE, here, -1, late, moved, itemsize, end - begin)
        for q in range(begin, end):
            there = device[source[q]]
            if there != here:
                message = carrier[there * devices + here]
                if seen[message] != task:
                    seen[message] = task
                    wait[used[WAITS]] = message - begun
                    used[WAITS] += 1
        if tasks.with_slots:
            _add_copies(tasks, store, piece, value, task)
        make[used[MAKES]] = value | piece
        used[MAKES] += 1
        wait_start[task + 1], make_start[task + 1] = used[WAITS], used[MAKES]


@compiled_part
def _add_copies(tasks, store, piece, value, task):  # type: ignore[no-untyped-def]
    """The boxes that an assembly puts together, and the pieces on its device that it reads."""
    used, reads, devices = tasks.used, tasks.used[READS], len(tasks.parent)
    here, base = store.device[piece], store.base[piece]
    for q in range(store.source_start[piece], store.source_start[piece + 1]):
        there, row = store.device[store.source[q]], used[COPIES]
        tasks.copy_target[row], tasks.copy_source[row] = value | piece, q
        tasks.copy_task[row], tasks.copy_message[row] = task, -1
        if there != here:
            tasks.copy_message[row] = tasks.carrier[there * devices + here]
        else:
            used[READS] = _insert(tasks.read, reads, used[READS], value | store.source[q])
        used[COPIES] = row + 1
    tasks.base[used[MAKES]] = value | base if base >= 0 else -1
    tasks.read_start[task + 1] = used[READS]


@compiled_part
def _insert(numbers, begin, end, number):  # type: ignore[no-untyped-def]
    """Puts a number among the rising ones numbers[begin:end], once; their new end."""
    place = end
    while place > begin and numbers[place - 1] > number:
        place -= 1
    if place > begin and numbers[place - 1] == number:
        return end
    for k in range(end, place, -1):
        numbers[k] = numbers[k - 1]
    numbers[place] = number
    return end + 1


# Messages


class _SentBoxes(NamedTuple):
    """Boxes that leave their device in one exchange, in columns."""

    source: Ints  # which source in the FlowStore; -1 if its message reads the same piece already
    name: Ints  # of the piece that is read
    sender: Ints  # device; then the message, counted from the first of the exchange
    receiver: Ints  # device


@compiled
def _add_messages(  # type: ignore[no-untyped-def]
    tasks, store, flows, stages, first_value, late, remote, pairs, hop
):  # fmt: skip
    """The messages of one exchange, and what each reads. Writes the pairs of devices that have a
    message to `pairs`; how many these are."""
    carrier, devices, first = tasks.carrier, len(tasks.parent), tasks.used[TASKS]
    c = np.empty((4, remote), np.int64)
    sent = _SentBoxes(c[0], c[1], c[2], c[3])
    _find_sent(tasks, store, flows, stages, first_value, sent, hop)
    count = _find_pairs(carrier, sent.sender, devices, pairs)
    if count >= FEWEST_PAIRS:
        _add_collectives(tasks, store, pairs[:, :count], sent, late)
    for k in range(count):
        pair = pairs[0, k] * devices + pairs[1, k]
        if carrier[pair] == PENDING:
            nbytes = tasks.pair_bytes[pair]
            carrier[pair] = add_task(tasks, TRANSFER, pairs[0, k], pairs[1, k], late, nbytes, 1, 0)
    _add_needs(tasks, sent, first)
    return count


@compiled_part
def _find_sent(tasks, store, flows, stages, first_value, sent, hop):  # type: ignore[no-untyped-def]
    """Writes all boxes that leave their device, and adds up what every pair of devices sends."""
    device, source, devices, n = store.device, store.source, len(tasks.parent), 0
    for k in range(len(flows)):
        at = store.stage_start[flows[k]] + stages[k]
        for piece in range(store.piece_start[at], store.piece_start[at + 1]):
            if store.hop[piece] != hop:
                continue
            here = device[piece]
            for q in range(store.source_start[piece], store.source_start[piece + 1]):
                there = device[source[q]]
                if there != here:
                    sent.source[n], sent.name[n] = q, (k + first_value) << SHIFT | source[q]
                    sent.sender[n], sent.receiver[n] = there, here
                    tasks.carrier[there * devices + here] = PENDING
                    tasks.pair_bytes[there * devices + here] += store.source_nbytes[q]
                    n += 1


@compiled
def _find_pairs(carrier, sender, devices, pairs):  # type: ignore[no-untyped-def]
    """Writes the pairs (sender, receiver) that have something to send, rising; how many."""
    sends, count = np.zeros(devices, np.uint8), 0
    for device in sender:
        sends[device] = 1
    for a in range(devices):
        if sends[a]:
            for b in range(devices):
                if carrier[a * devices + b] == PENDING:
                    pairs[0, count], pairs[1, count] = a, b
                    count += 1
    return count


@compiled
def _add_needs(tasks, sent, first):  # type: ignore[no-untyped-def]
    """The pieces that every message from `first` on reads, each once."""
    used, devices, count = tasks.used, len(tasks.parent), tasks.used[TASKS] - first
    start, table = np.zeros(count + 1, np.int64), hash_table(len(sent.source))
    for k in range(len(sent.source)):
        task = tasks.carrier[sent.sender[k] * devices + sent.receiver[k]]
        tasks.taken[task] += 1
        sent.sender[k] = task - first
        if is_new_pair(table, sent.name, sent.sender, k):
            start[task - first + 1] += 1
        else:
            sent.source[k] = -1
    for k in range(count):
        start[k + 1] += start[k]
        tasks.need_start[first + k + 1] = used[NEEDS] + start[k + 1]
    base = used[NEEDS]
    used[NEEDS] += start[count]
    for k in range(len(sent.source)):
        if sent.source[k] >= 0:
            tasks.need[base + start[sent.sender[k]]] = sent.name[k]
            start[sent.sender[k]] += 1
    if tasks.with_slots:
        _read_needs(tasks, first)


@compiled_part
def _read_needs(tasks, first):  # type: ignore[no-untyped-def]
    """A message reads what it needs, in rising order."""
    used = tasks.used
    for task in range(first, used[TASKS]):
        needs = tasks.need[tasks.need_start[task] : tasks.need_start[task + 1]]
        sort(needs)
        for name in needs:
            tasks.read[used[READS]] = name
            used[READS] += 1
        tasks.read_start[task + 1] = used[READS]


# Collectives


@compiled
def _add_collectives(tasks, store, pairs, sent, late):  # type: ignore[no-untyped-def]
    """Groups of three or more that all send to all, about equally much, have one message."""
    devices, parent, count = len(tasks.parent), tasks.parent, pairs.shape[1]
    _join(parent, pairs)
    inside, most, total, joined = np.zeros((4, devices), np.int64)
    least = np.full(devices, np.iinfo(np.int64).max)
    for k in range(count):
        a, b = pairs[0, k], pairs[1, k]
        root, nbytes = parent[a], tasks.pair_bytes[a * devices + b]
        inside[root] += 1
        most[root] = max(most[root], nbytes)
        least[root] = min(least[root], nbytes)
        total[root] += nbytes
        joined[a] = joined[b] = 1
    for root in range(devices):
        members = 0
        if inside[root]:
            for device in range(devices):
                members += joined[device] and parent[device] == root
        if members < 3 or inside[root] != members * (members - 1):
            continue
        if most[root] > EVEN * least[root]:
            continue
        task = add_task(tasks, COLLECTIVE, root, -1, late, total[root], 1, 0)
        tasks.group[task] = _add_group(tasks, joined, root)
        tasks.pattern[task] = _pattern(store, parent, root, sent, members)
        for k in range(count):
            if parent[pairs[0, k]] == root:
                tasks.carrier[pairs[0, k] * devices + pairs[1, k]] = task


@compiled_part
def _join(parent, pairs):  # type: ignore[no-untyped-def]
    """Writes for every device the smallest one that it exchanges with, maybe through others."""
    for device in range(len(parent)):
        parent[device] = device
    moved = True
    while moved:
        moved = False
        for k in range(pairs.shape[1]):
            a, b = pairs[0, k], pairs[1, k]
            least = min(parent[a], parent[b])
            if parent[a] != least or parent[b] != least:
                parent[a] = parent[b] = least
                moved = True


@compiled_part
def _add_group(tasks, joined, root):  # type: ignore[no-untyped-def]
    """The devices that joined and whose smallest one is `root`, as a group; its number."""
    used, number = tasks.used, tasks.used[GROUPS]
    tasks.group_start[number] = used[MEMBERS]
    for device in range(len(joined)):
        if joined[device] and tasks.parent[device] == root:
            tasks.member[used[MEMBERS]] = device
            used[MEMBERS] += 1
    used[GROUPS] = number + 1
    tasks.group_start[number + 1] = used[MEMBERS]
    return number


@compiled
def _pattern(store, parent, root, sent, members):  # type: ignore[no-untyped-def]
    """What the blocks of a collective are."""
    count, different, terms = 0, 0, False
    table, box = hash_table(len(sent.source)), np.empty(len(sent.source), np.int64)
    for k in range(len(sent.source)):
        if parent[sent.sender[k]] == root:
            count += 1
            box[k] = store.source_hash[sent.source[k]]
            different += is_new_pair(table, sent.name, box, k)
            terms = terms or store.source_term[sent.source[k]] != 0
    if different * (members - 1) == count:
        return ALL_GATHER
    return REDUCE_SCATTER if terms else ALL_TO_ALL
