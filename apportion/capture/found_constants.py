"""Tensors that a step finds somewhere else than in its model, its optimizers and its batch.

Part of capture/. Such a tensor becomes a constant of the Graph: it stays as it is now. That is
right for a table of class weights; it is wrong for a tensor of the batch that the step takes from
somewhere else than its argument, or for a parameter that it reaches by a view or a list made
before. A Trace and the live tensors come in; notes go out, or a CaptureError with the user's line.
"""

from __future__ import annotations

from collections.abc import Iterator

from apportion import graph as g
from apportion.capture.build_graph import StepTensors
from apportion.capture.torch_private import storage_id
from apportion.capture.trace import CaptureError, Trace
from apportion.capture.untouched import LiveObjects
from apportion.capture.user_line import at_line

_LITERALS = ("aten.lift_fresh.default", "aten.lift_fresh_copy.default")


def constant_notes(trace: Trace, tensors: StepTensors, objects: LiveObjects) -> tuple[str, ...]:
    """A note on the tensors that stay as they are; raises CaptureError for one that shares its
    memory with a tensor of the batch or with a trained parameter."""
    given = {storage_id(tensor): name for name, (_, tensor) in tensors.batch.items()}
    owned = {storage_id(tensors.parameters[name]): name for name in tensors.trained}
    shown = []
    for slot, line in _first_readers(trace):
        tensor = trace.constants[slot]
        memory = storage_id(tensor)
        if memory in given and tensor.numel():
            raise CaptureError(
                f"the step reads {given[memory]}{at_line(line)} from somewhere else than the batch "
                "that it is given, so that it would stay as it is now; take it from the step's "
                "argument"
            )
        if memory in owned and tensor.numel():
            raise CaptureError(
                f"the step reads the parameter {owned[memory]}{at_line(line)} by a tensor made "
                "before (a view, .data or a detached copy of it), which would stay as it is now; "
                "take it from the module in the step"
            )
        if objects.had(tensor):
            shown.append(f"{tuple(tensor.shape)}{at_line(line)}")
    if not shown:
        return ()
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return (
        "tensors that are no parameters, no buffers and not in the batch stay as they are now: "
        f"those of shape {', '.join(shown[:3])}{more}",
    )


def _first_readers(trace: Trace) -> Iterator[tuple[int, str]]:
    """The constants that are read, each with the line that reads it first; not those that the step
    writes down as numbers."""
    seen: set[int] = set()
    for call in trace.calls:
        for slot in (*g.refs(call.args), *g.refs(tuple(call.kwargs.values()))):
            if slot in trace.constants and slot not in seen:
                seen.add(slot)
                if str(call.target) not in _LITERALS:
                    yield slot, call.site.line
