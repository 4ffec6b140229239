"""lower: a Graph under a Strategy becomes tasks on devices.

In: a Space, a Strategy and a number of devices. Out: a TaskGraph, in columns, in one global order,
which simulate/ times and execute/ runs. No torch.
Read task_graph.py first (what a task is), then lower.py, value_flow.py (where the pieces of a
Value are, some of them on the way to others: relay_flows.py), exchange.py and op_tasks.py (the
tasks of one Op), task_columns.py (all of them), and runnable.py (the passes over them before they
run, such as coalesce.py and join_batch_norm.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apportion.faces import lazy_face

if TYPE_CHECKING:
    from apportion.lower.exchange import (
        GROUPS as GROUPS,
    )
    from apportion.lower.exchange import (
        MEMBERS as MEMBERS,
    )
    from apportion.lower.exchange import (
        OPS as OPS,
    )
    from apportion.lower.exchange import (
        PIECE as PIECE,
    )
    from apportion.lower.exchange import (
        SHIFT as SHIFT,
    )
    from apportion.lower.exchange import (
        TASKS as TASKS,
    )
    from apportion.lower.exchange import (
        OpTasks as OpTasks,
    )
    from apportion.lower.exchange import (
        pair_columns as pair_columns,
    )
    from apportion.lower.host_labels import (
        AT_HOST as AT_HOST,
    )
    from apportion.lower.host_labels import (
        host_labels as host_labels,
    )
    from apportion.lower.host_labels import (
        uses_host as uses_host,
    )
    from apportion.lower.late_tasks import (
        crosses as crosses,
    )
    from apportion.lower.lower import (
        Lowering as Lowering,
    )
    from apportion.lower.lower import (
        bytes_moved as bytes_moved,
    )
    from apportion.lower.lower import (
        lower as lower,
    )
    from apportion.lower.lower import (
        verified_lowering as verified_lowering,
    )
    from apportion.lower.message_buffers import (
        LATER as LATER,
    )
    from apportion.lower.message_buffers import (
        MessageBuffers as MessageBuffers,
    )
    from apportion.lower.message_buffers import (
        message_buffers as message_buffers,
    )
    from apportion.lower.op_tasks import (
        lower_ops as lower_ops,
    )
    from apportion.lower.pair_bytes import (
        pair_bytes as pair_bytes,
    )
    from apportion.lower.runnable import (
        runnable as runnable,
    )
    from apportion.lower.task_columns import (
        build_task_graph as build_task_graph,
    )
    from apportion.lower.task_graph import (
        CATEGORIES as CATEGORIES,
    )
    from apportion.lower.task_graph import (
        COMMUNICATION as COMMUNICATION,
    )
    from apportion.lower.task_graph import (
        NO_ENDS as NO_ENDS,
    )
    from apportion.lower.task_graph import (
        WORKSPACE as WORKSPACE,
    )
    from apportion.lower.task_graph import (
        AssembledBox as AssembledBox,
    )
    from apportion.lower.task_graph import (
        Copies as Copies,
    )
    from apportion.lower.task_graph import (
        Ends as Ends,
    )
    from apportion.lower.task_graph import (
        Storage as Storage,
    )
    from apportion.lower.task_graph import (
        TaskGraph as TaskGraph,
    )
    from apportion.lower.task_graph import (
        with_storage as with_storage,
    )
    from apportion.lower.task_kinds import (
        ASSEMBLE as ASSEMBLE,
    )
    from apportion.lower.task_kinds import (
        CALLING as CALLING,
    )
    from apportion.lower.task_kinds import (
        COLLECTIVE as COLLECTIVE,
    )
    from apportion.lower.task_kinds import (
        COMPUTE as COMPUTE,
    )
    from apportion.lower.task_kinds import (
        FROM_HOST as FROM_HOST,
    )
    from apportion.lower.task_kinds import (
        HOST_WORK as HOST_WORK,
    )
    from apportion.lower.task_kinds import (
        TO_HOST as TO_HOST,
    )
    from apportion.lower.task_kinds import (
        TRANSFER as TRANSFER,
    )
    from apportion.lower.task_kinds import (
        TaskKinds as TaskKinds,
    )
    from apportion.lower.termwise import (
        Devices as Devices,
    )
    from apportion.lower.termwise import (
        is_linear as is_linear,
    )
    from apportion.lower.termwise import (
        termwise as termwise,
    )
    from apportion.lower.value_flow import (
        FLOWS as FLOWS,
    )
    from apportion.lower.value_flow import (
        MADE as MADE,
    )
    from apportion.lower.value_flow import (
        PIECES as PIECES,
    )
    from apportion.lower.value_flow import (
        READ as READ,
    )
    from apportion.lower.value_flow import (
        STAGES as STAGES,
    )
    from apportion.lower.value_flow import (
        FlowStore as FlowStore,
    )
    from apportion.lower.value_flow import (
        end_piece as end_piece,
    )
    from apportion.lower.value_flow import (
        first_piece as first_piece,
    )

lazy_face(__name__)
