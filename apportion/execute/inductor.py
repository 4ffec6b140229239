"""Segments compiled by inductor.

Part of the room execute. An Executable and a Segment come in, a SegmentFunction goes out. The
segment is cut into pieces (segment_cut.py), a piece becomes a graph of ATen operators
(segment_graph.py) and the graph an artefact of inductor (torch_compiler.py), without dynamo and
without autograd. Pieces with equal graphs share one artefact; torch keeps artefacts on disk.

Nothing is compiled before the first step, because an artefact is made for the strides of the
tensors that it reads. If the first piece cannot be compiled (no compiler, no Triton, no place on
the disk), the whole segment cannot, and CannotCompile is raised before anything has run. A later
piece that fails runs as `otherwise` says, and `notes` says why.

Updates are not traced: one fused kernel does many of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from apportion.execute.executable import BoxCopy, Executable
from apportion.execute.kernels.base import Context
from apportion.execute.rank import Rank
from apportion.execute.rank_steps import Segment
from apportion.execute.segment_cut import (
    CALLED,
    TRACED,
    UPDATES,
    around,
    cut,
    labels_of,
)
from apportion.execute.segment_function import (
    CannotCompile,
    SegmentCompiler,
    SegmentFunction,
)
from apportion.execute.segment_graph import (
    CannotTrace,
    boxes_read,
    first_line,
    form_of,
    random_operators,
    segment_key,
    trace_segment,
)
from apportion.execute.step_words import StepWords, words_tensor
from apportion.execute.torch_compiler import CompiledCode, compiled, stop_workers
from apportion.execute.update_calls import update_calls

MOST_FAILURES = 3  # distinct pieces; then no more are tried


@dataclass(frozen=True)
class CompiledPiece:
    """A piece with its artefact.

    ins    (slot, whether it is dropped) of each input
    rows   which rows of the segment's words are its own
    gone   messages that nobody reads afterwards
    unread slots that are dropped and not read
    """

    code: CompiledCode
    ins: tuple[tuple[int, bool], ...]
    outs: tuple[int, ...]
    boxes: tuple[BoxCopy, ...]
    rows: slice
    gone: tuple[int, ...]
    unread: tuple[int, ...] = ()

    def __call__(self, rank: Rank, words: torch.Tensor | None) -> None:
        self.run(self.code, rank, words)

    def run(self, code: CompiledCode, rank: Rank, words: torch.Tensor | None) -> None:
        """Runs the piece with its code, or with other code that takes the same."""
        tensors = rank.tensors
        args: list[Any] = [tensors.pop(s) if last else tensors[s] for s, last in self.ins]
        for copy in self.boxes:
            raw = rank.received[copy.message][copy.offset : copy.offset + copy.nbytes]
            args.append(raw.view(copy.dtype).reshape(copy.shape).to(rank.place))
        for message in self.gone:
            del rank.received[message]
        if words is not None and self.rows.stop > self.rows.start:
            args.append(words[self.rows])
        for slot in self.unread:
            tensors.pop(slot, None)
        for slot, tensor in zip(self.outs, code(args), strict=True):
            tensors[slot] = tensor


class InductorSegment:
    """The function of a segment; its pieces are compiled when they first run."""

    def __init__(
        self, executable: Executable, segment: Segment, place: str, otherwise: SegmentCompiler
    ) -> None:
        self.executable = executable
        self.place = place
        self.otherwise = otherwise
        self.notes: list[str] = []
        self.failures = 0
        self.pieces = cut(executable, segment, place, executable.artefacts["labels"])
        self.ready: list[CompiledPiece | SegmentFunction] = []
        self.operators = tuple(
            operator
            for piece in self.pieces
            if piece.kind == TRACED
            for operator in random_operators(executable, piece.segment)
        )
        self.drawn = 0  # by the pieces that are ready
        self.calls = 0

    def __call__(self, rank: Rank, context: Context) -> None:
        self.calls += 1
        if self.calls == 2 and self.executable.artefacts.pop("compiling", False):
            stop_workers()  # all segments have been compiled in the first step
        words = self._words(context)
        for number in count():
            while number == len(self.ready) < len(self.pieces):
                self.prepare(rank)
            if number == len(self.pieces):
                return
            piece = self.ready[number]
            if isinstance(piece, CompiledPiece):
                piece(rank, words)
            else:
                piece(rank, context)

    def _words(self, context: Context) -> torch.Tensor | None:
        if not self.operators:
            return None
        if isinstance(context.words, StepWords):
            return context.words.table(self.operators)
        return words_tensor(context.seed, context.step, self.operators, self.place)

    def prepare(self, rank: Rank) -> None:
        """Makes the next piece ready, or cuts it into several."""
        number = len(self.ready)
        piece = self.pieces[number]
        own = piece.segment
        if piece.kind == UPDATES:
            self.ready.append(update_calls(self.executable, own))
            return
        if piece.kind == CALLED:
            self.ready.append(made_one_by_one(own))
            return
        rows = slice(self.drawn, self.drawn + len(random_operators(self.executable, own)))
        try:
            code = self._artefact(rank, own)
        except CannotTrace as error:
            self.pieces[number : number + 1] = around(self.executable, own, error.task)
            call = self.executable.computes.get(error.task)
            name = "an assembly" if call is None else repr(call.op.name)
            self.notes.append(f"{name} runs by itself: it cannot be traced ({error})")
            return
        except CannotCompile as error:
            if not any(isinstance(piece, CompiledPiece) for piece in self.ready):
                raise
            self.notes.append(f"{len(own.tasks)} tasks of a segment are not compiled: {error}")
            self.ready.append(self._not_compiled(own))
        else:
            self.ready.append(compiled_piece(self.executable, own, code, rows))
        self.drawn = rows.stop

    def _not_compiled(self, own: Segment) -> SegmentFunction:
        try:
            return self.otherwise(self.executable, own, self.place)
        except CannotCompile:
            return made_one_by_one(own)

    def _artefact(self, rank: Rank, own: Segment) -> CompiledCode:
        """The compiled code of a piece, which may be another's."""
        known = self.executable.artefacts
        forms = {slot: form_of(rank.tensors[slot]) for slot in own.ins}
        key = segment_key(self.executable, own, forms, self.place)
        if key not in known:
            if self.failures >= MOST_FAILURES:
                raise CannotCompile("too many others could not be compiled")
            known["compiling"] = True
            meant = trace_segment(self.executable, own, forms, self.place)
            try:
                known[key] = compiled(meant.graph, meant.inputs, self.executable.tasks.devices > 1)
            except Exception as error:  # whatever a compiler, a disk or a driver may raise
                known[key] = CannotCompile(first_line(error))
                self.failures += 1
        found: CompiledCode | CannotCompile = known[key]
        if isinstance(found, CannotCompile):
            raise found
        return found


def compiled_piece(
    executable: Executable, own: Segment, code: CompiledCode, rows: slice
) -> CompiledPiece:
    """A piece with the code that does it."""
    tasks = set(own.tasks)
    gone = tuple(m for m in own.messages if executable.readers[m] in tasks)
    dropped = set(own.frees)
    ins = tuple((slot, slot in dropped) for slot in own.ins)
    boxes = tuple(boxes_read(executable, own))
    unread = tuple(dropped.difference(own.ins))
    return CompiledPiece(code, ins, own.outs, boxes, rows, gone, unread)


def made_one_by_one(own: Segment) -> SegmentFunction:
    """The function that lets the interpreter make each task."""

    def run(rank: Rank, context: Context) -> None:
        for task in own.tasks:
            rank.make(task, context)
            rank.free(task)

    return run


def kernel_by_kernel(executable: Executable, segment: Segment, place: str) -> SegmentFunction:
    """The function that calls the interpreter's kernels and fused updates: what a CUDA graph
    records where nothing is compiled."""
    ready: list[SegmentFunction] = [
        update_calls(executable, piece.segment)
        if piece.kind == UPDATES
        else made_one_by_one(piece.segment)
        for piece in cut(executable, segment, place)
    ]

    def run(rank: Rank, context: Context) -> None:
        for piece in ready:
            piece(rank, context)

    return run


def inductor(executable: Executable, segment: Segment, place: str) -> SegmentFunction:
    """The function of a segment by inductor; raises CannotCompile, at the latest when it is first
    called."""
    known = executable.artefacts
    if "labels" not in known:
        try:
            known["labels"] = labels_of(executable, place)
        except CannotCompile as error:
            known["labels"] = error
    if isinstance(known["labels"], CannotCompile):
        raise known["labels"]
    return InductorSegment(executable, segment, place, lambda _, own, __: made_one_by_one(own))
