"""The tasks of Ops, from the Flows of their Values, in compiled code. A part of lower/.

In: a FlowStore (value_flow.py), OpRecords (op_records.py) and requests, each of one Op. Out:
OpTasks, in columns: always what times follow from, and what slots follow from where it is asked
for. Plans and delta simulation both use this lowering.

Tasks of an Op, in order: the exchange that fetches inputs, the assemblies of fetched regions, the
parts of the Op, the exchange that lays its results out, the assemblies of that.
"""

from __future__ import annotations

import numpy as np

from apportion.columns import Ints, compiled, compiled_part
from apportion.lower.exchange import (
    MAKES,
    OPS,
    READS,
    SHIFT,
    TASKS,
    OpTasks,
    add_exchange,
    add_task,
    new_op_tasks,
)
from apportion.lower.op_records import (
    ALIAS,
    ARGUMENTS,
    COUNT,
    DEVICES,
    FLOPS,
    INPUTS,
    ITEMSIZE,
    OPERATOR,
    PARTS,
    RESULTS,
    SPLIT,
    STAGES,
    ZEROS,
)
from apportion.lower.task_kinds import (
    COMPUTE,
)
from apportion.lower.value_flow import LAID_OUT, FlowStore

# A request has the place of the Op's record, that of its cut, whether it is computed term by term,
# and then the Flows of its Values: distinct inputs first, then results
RECORD, CUT, TERMWISE, FLOWS_OF = range(4)


@compiled
def _room_for(store, records, requests):  # type: ignore[no-untyped-def]
    """No fewer than what of anything the tasks of these requests can take."""
    total, at = 16, 0
    while at < len(requests):
        record, cut = requests[at + RECORD], requests[at + CUT]
        inputs, results = records[record + INPUTS], records[record + RESULTS]
        at += FLOWS_OF
        for k in range(inputs):
            stage = store.stage_start[requests[at + k]] + records[record + STAGES + k]
            low, high = store.piece_start[stage], store.piece_start[stage + 1]
            total += high - low + 2 * (store.source_start[high] - store.source_start[low])
            total += store.answer_start[stage + 1] - store.answer_start[stage]
        for k in range(inputs, inputs + results):
            stage = store.stage_start[requests[at + k]]
            low, high = store.piece_start[stage], store.piece_start[stage + 2]
            total += 2 * (high - low) + 2 * (store.source_start[high] - store.source_start[low])
        total += 1 + records[cut + PARTS] * (1 + records[record + ARGUMENTS])
        at += inputs + results
    return total


@compiled
def lower_ops(
    store: FlowStore, records: Ints, requests: Ints, devices: int, pairs: Ints, slots: int
) -> OpTasks:
    """The tasks of Ops; `pairs` is what `pair_columns` gives, and stays as it is. With `slots` 1
    there is also what they read, and the copies."""
    tasks: OpTasks = new_op_tasks(_room_for(store, records, requests), slots, devices, pairs)
    used, at, op = tasks.used, 0, 0
    while at < len(requests):
        record, cut = requests[at + RECORD], requests[at + CUT]
        inputs, results = records[record + INPUTS], records[record + RESULTS]
        fed = requests[at + FLOWS_OF : at + FLOWS_OF + inputs]
        made = requests[at + FLOWS_OF + inputs : at + FLOWS_OF + inputs + results]
        stages, first = records[record + STAGES : record + STAGES + inputs], used[TASKS]
        add_exchange(tasks, store, fed, stages, np.int64(0), np.int64(0), first)
        if records[cut + PARTS]:
            _add_parts(tasks, store, records, record, cut, requests[at + TERMWISE], fed, made)
            laid = np.full(results, LAID_OUT)
            add_exchange(tasks, store, made, laid, inputs, np.int64(1), first)
        for task in range(first, used[TASKS]):
            tasks.operator[task], tasks.owner[task] = records[record + OPERATOR], op
        at, op = at + FLOWS_OF + inputs + results, op + 1
        tasks.task_start[op], used[OPS] = used[TASKS], op
    return tasks


@compiled
def _add_parts(tasks, store, records, record, cut, termwise, fed, made):  # type: ignore[no-untyped-def]
    """The parts of an Op: each reads, of every argument, the next answer of its Flow."""
    inputs, arguments = records[record + INPUTS], records[record + ARGUMENTS]
    stages, places = record + STAGES, record + STAGES + inputs
    split, devices, count = records[cut + SPLIT], cut + DEVICES, records[cut + PARTS]
    parts, flops = records[split + COUNT], records[split + FLOPS :].view(np.float64)
    zeros, has_zeros = split + FLOPS + parts, records[split + ZEROS] > 0 and not termwise
    read, answer = np.empty(arguments, np.int64), np.empty(inputs, np.int64)
    for j in range(inputs):  # where the next answer of each Value is
        answer[j] = store.answer_start[store.stage_start[fed[j]] + records[stages + j]]
    for part in range(count):
        nbytes, of_split = 0, part % parts
        for k in range(arguments):
            read[k] = -1
            if has_zeros and records[zeros + of_split * arguments + k]:
                continue
            j = records[places + k]
            piece = store.answer[answer[j]]
            read[k] = j << SHIFT | piece
            answer[j] += 1
            is_new = True
            for other in range(k):  # a piece that is two arguments is read once
                is_new = is_new and read[other] != read[k]
            if is_new:
                nbytes += store.nbytes[piece]
        task = add_task(
            tasks, COMPUTE, records[devices + part], -1, 0, 0, records[record + ITEMSIZE], 0
        )
        nbytes += _add_results(tasks, store, made, inputs, part, read, records[record + ALIAS])
        tasks.nbytes[task] = 0 if records[record + ALIAS] else nbytes
        tasks.flops[task], tasks.part[task] = flops[of_split], part


@compiled_part
def _add_results(tasks, store, made, inputs, part, read, alias):  # type: ignore[no-untyped-def]
    """What the last task, a part, makes and reads; the bytes of its results."""
    used, nbytes = tasks.used, 0
    for k in range(len(made)):
        piece = store.piece_start[store.stage_start[made[k]]] + part
        nbytes += store.nbytes[piece]
        if tasks.with_slots:
            tasks.base[used[MAKES]] = read[0] if alias and len(read) else -1
        tasks.make[used[MAKES]] = (inputs + k) << SHIFT | piece
        used[MAKES] += 1
    tasks.make_start[used[TASKS]] = used[MAKES]
    if tasks.with_slots:
        for name in read:
            tasks.read[used[READS]] = name
            used[READS] += 1
        tasks.read_start[used[TASKS]] = used[READS]
    return nbytes
