"""From a call of a loop to a LoopPlan: analysis, choice of a scheme, placement, kernel.

Part of the room loops. The body and the arguments come in; what is found out is kept for the next
call with arguments alike.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from apportion.loops.array import DenseArray, SparseArray
from apportion.loops.array_uses import (
    UsedArray,
    block_length,
    bytes_by_index,
    row_dims,
    uses_by_name,
)
from apportion.loops.buffer import Buffer
from apportion.loops.check_accesses import check_accesses
from apportion.loops.choose_scheme import SchemeChoice, weigh_schemes
from apportion.loops.dependence import LoopDependences, dependences
from apportion.loops.elements import DealFacts, DealRequest, joined
from apportion.loops.index_slice import index_slice
from apportion.loops.kernel_arrays import KernelArray, KernelLayout
from apportion.loops.kernel_text import kernel_text
from apportion.loops.loop_body import LoopBody, LoopError
from apportion.loops.loop_plan import LoopPlan
from apportion.loops.rank_requests import SampleElements
from apportion.loops.references import BodyReferences, collect_references
from apportion.loops.schemes import ONE_D, Scheme, permitted_schemes
from apportion.loops.session import LoopSession
from apportion.loops.subscripts import Index
from apportion.loops.tile_schedule import tile_schedule

SAMPLE, SAMPLE_BYTES = 48, 1 << 26  # elements that a body is watched on, and of arrays at most


@dataclass(frozen=True)
class LoopAnalysis:
    """What is known of a body whose arrays have so many dims, some of them buffered."""

    references: BodyReferences
    dependences: LoopDependences
    schemes: tuple[Scheme, ...]


@dataclass(frozen=True)
class BoundArguments:
    """The arguments of a call, sorted: arrays (whether buffered or not), buffers, and numbers or
    plain arrays that all processes get."""

    arrays: Mapping[str, DenseArray]
    buffers: Mapping[str, Buffer]
    constants: Mapping[str, Any]


@dataclass
class LoopPlanner:
    """What a loop is, and what has been found out about it. `forced` is the scheme to run under,
    if it is permitted; `interpreted` runs the body as plain Python. Both are for tests. `turned`:
    statements on vectors are turned into loops, unless the compiler refuses them so."""

    body: LoopBody
    over: SparseArray
    ordered: bool
    depth: int
    repeated: bool = False
    forced: Scheme | None = None
    interpreted: bool = False
    checked: set[Any] = field(default_factory=set)
    turned: bool = True
    analyses: dict[Any, LoopAnalysis] = field(default_factory=dict)

    def bind(self, arguments: tuple[Any, ...]) -> BoundArguments:
        """The arguments by the names of parameters. Raises LoopError for what cannot be one."""
        wanted = self.body.parameters
        if len(arguments) != len(wanted):
            raise LoopError(
                f"{self.body.name} takes {len(wanted)} arguments ({', '.join(wanted)}), and "
                f"{len(arguments)} were given"
            )
        arrays, buffers, constants = {}, {}, {}
        for name, value in zip(wanted, arguments, strict=True):
            if isinstance(value, DenseArray):
                arrays[name] = value
            elif isinstance(value, Buffer):
                arrays[name], buffers[name] = value.array, value
            elif isinstance(value, bool | int | float | np.number | np.ndarray):
                constants[name] = value
            else:
                raise LoopError(
                    f"the argument {name} is a {type(value).__name__}; a loop takes its arrays, "
                    "numbers and NumPy's arrays"
                )
        _check_distinct({k: v for k, v in arrays.items() if not _is_update(buffers.get(k))})
        return BoundArguments(arrays, buffers, constants)

    def analyse(self, bound: BoundArguments) -> LoopAnalysis:
        """The analysis for arguments like these."""
        dims = {name: array.ndim for name, array in bound.arrays.items()}
        key = analysis_key(bound)
        if key not in self.analyses:
            self.analyses[key] = analyse_body(
                self.body, dims, self.over.ndim, self.ordered, tuple(bound.buffers)
            )
        return self.analyses[key]

    def used_arrays(self, bound: BoundArguments) -> dict[str, UsedArray]:
        """The arrays of a call that the body touches, with their references."""
        analysis = self.analyse(bound)
        found = {}
        for name, array in bound.arrays.items():
            mine = tuple(analysis.references.of(name))
            if mine:
                used = UsedArray(name, array, mine, bound.buffers.get(name))
                found[name] = replace(used, keyed=self._row_dims(used, bound, analysis))
        return found

    def _row_dims(
        self, used: UsedArray, bound: BoundArguments, analysis: LoopAnalysis
    ) -> tuple[int, ...]:
        """The dims that number the rows of an array, if a slice of the body can find them out."""
        dims = row_dims(used)
        if not dims:
            return ()
        kernels = {name: _absent(name, array) for name, array in bound.arrays.items()}
        kernels[used.name] = replace(kernels[used.name], keyed=dims)
        found = index_slice(self.body, analysis.references, self._layout(bound, kernels))
        return dims if found is not None else ()

    def _layout(self, bound: BoundArguments, kernels: Mapping[str, KernelArray]) -> KernelLayout:
        numbers = (k for k, v in bound.constants.items() if not isinstance(v, np.ndarray))
        return KernelLayout(
            self.over.ndim, self.over.single_values, len(self.over.ragged), kernels,
            frozenset(numbers), is_single(bound), self.turned,
        )  # fmt: skip

    def choices(self, bound: BoundArguments, processes: int) -> list[SchemeChoice]:
        """The permitted schemes, the best one first."""
        analysis = self.analyse(bound)
        return weigh_schemes(
            analysis.schemes, self.used_arrays(bound), self.over.shape, processes, self.depth,
            self.ordered,
        )  # fmt: skip

    def plan(self, session: LoopSession, bound: BoundArguments, seed: int) -> LoopPlan:
        """How the ranks of a session run a call; they get their elements and arrays."""
        if session.count == 1:  # a single process need not send anything later
            kept = {k: v for k, v in bound.buffers.items() if v.apply is not None}
            bound = BoundArguments(bound.arrays, kept, bound.constants)
        scheme = self._scheme(bound, session.count)
        schedule = tile_schedule(scheme, session.count, self.depth)
        used = self.used_arrays(bound)
        block = 0 if self.ordered else block_length(used, scheme, session.count)
        request = DealRequest(
            scheme, self.over.shape, session.count, schedule.time_parts, self.ordered, block
        )
        facts = session.deal(self.over, request)
        _check_ranges(self.body, used, facts)
        self._check_updates(bound)
        uses = uses_by_name(used, scheme, schedule, facts)
        kernels = {
            name: uses[name].kernel if name in uses else _absent(name, array)
            for name, array in bound.arrays.items()
        }
        layout = self._layout(bound, kernels)
        references = self.analyse(bound).references
        text = kernel_text(self.body, references, layout)
        rows = None
        if any(kernel.keyed for kernel in kernels.values()):
            rows = index_slice(self.body, references, layout)
        uses = {name: session.with_tables(use) for name, use in uses.items()}
        for name, use in uses.items():
            session.place(bound.arrays[name], use.layout)
            for state in bound.buffers[name].state if name in bound.buffers else ():
                session.place(state, use.layout)
        single = layout.single
        constants = [(name, _constant(value, single)) for name, value in bound.constants.items()]
        constants += [
            (name, _constant(value, single))
            for name, value in self.body.free.constants.items()
            if isinstance(value, np.ndarray)
        ]
        chunks = chunks_of(bound, facts)
        return LoopPlan(
            self.over.number, text, schedule, tuple(uses.values()), tuple(constants), seed,
            self.interpreted, chunks, rows, self.repeated,
        )  # fmt: skip

    def check_sample(
        self, session: LoopSession, bound: BoundArguments, function: Callable[..., Any]
    ) -> None:
        """Watches the body on a few elements, once for arguments alike."""
        key = analysis_key(bound)
        if key in self.checked:
            return
        analysis = self.analyse(bound)
        parts = session.ask(SampleElements(self.over.number, max(4, SAMPLE // session.count)))
        check_accesses(
            self.body, function, joined(parts),
            {name: _sample_values(array) for name, array in bound.arrays.items()},
            bound.constants, analysis.references.found, analysis.dependences, self.ordered,
            tuple(bound.buffers),
        )  # fmt: skip
        self.checked.add(key)

    def _check_updates(self, bound: BoundArguments) -> None:
        """Raises LoopError if a body does anything but add to an array whose new elements a
        function makes."""
        names = {name for name, buffer in bound.buffers.items() if _is_update(buffer)}
        added = {
            id(node.target)
            for node in ast.walk(self.body.tree)
            if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub)
        }
        for node in ast.walk(self.body.tree):
            if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
                continue
            if node.value.id in names and id(node) not in added:
                raise self.body.error(
                    node,
                    f"{node.value.id} is a buffer with a function; the body can only add to it",
                )

    def _scheme(self, bound: BoundArguments, processes: int) -> Scheme:
        if processes == 1:  # which index counts as space matters to the cache only
            used, each = self.used_arrays(bound), range(self.over.ndim)
            sizes = [bytes_by_index(used, Scheme(ONE_D, k)) * self.over.shape[k] for k in each]
            return Scheme(ONE_D, sizes.index(max(sizes)))
        choices = self.choices(bound, processes)
        if not choices:
            raise LoopError(no_scheme(self.body, self.analyse(bound)))
        permitted = [each.scheme for each in choices]
        return self.forced if self.forced in permitted else permitted[0]


def analysis_key(bound: BoundArguments) -> Any:
    """What the analysis of a body depends on."""
    dims = tuple((name, array.ndim) for name, array in bound.arrays.items())
    return dims, tuple(bound.buffers)


def analyse_body(
    body: LoopBody,
    arrays: Mapping[str, int | None],
    dims: int,
    ordered: bool,
    buffered: tuple[str, ...] = (),
) -> LoopAnalysis:
    """References, dependences and permitted schemes of a body over `dims` indices. Writes to
    buffered arrays may be seen late, so that nothing depends on them."""
    references = collect_references(body, arrays, dims)
    strict = [each for each in references.found if each.array not in buffered]
    found = dependences(strict, dims, ordered)
    schemes = permitted_schemes(found.vectors, dims, ordered)
    return LoopAnalysis(references, found, tuple(schemes))


def no_scheme(body: LoopBody, analysis: LoopAnalysis) -> str:
    """Why a loop cannot be divided, and what to do."""
    worst = max(
        analysis.dependences.vectors,
        key=lambda each: sum(not part.is_zero for part in each.distance),
    )
    lines = sorted(set(worst.lines))
    where = f"line {lines[0]}" if len(lines) == 1 else f"lines {lines[0]} and {lines[1]}"
    return (
        f"{body.place(lines[0])}: the iterations of {body.name} cannot be divided with their order "
        f"of reads and writes kept: {where} may touch one element of {worst.array} in iterations "
        f"that are {worst} apart; pass loops.buffer({worst.array}) if what others add to it may be "
        "seen a little later"
    )


def is_single(bound: BoundArguments) -> bool:
    """Whether a loop computes in single precision: all its arrays of fractions are float32."""
    kinds = {array.dtype for array in bound.arrays.values() if array.dtype.kind == "f"}
    return kinds == {np.dtype(np.float32)}


def _absent(name: str, array: DenseArray) -> KernelArray:
    order = tuple(range(array.ndim))
    return KernelArray(name, array.shape, array.dtype.name, order, is_absent=True)


def _sample_values(array: DenseArray) -> Any:
    """Elements for watching a body: the array's own, or zeros if there are too many."""
    return array.numpy() if array.nbytes <= SAMPLE_BYTES else np.zeros(array.shape, array.dtype)


def _is_update(buffer: Buffer | None) -> bool:
    return buffer is not None and buffer.apply is not None


def _check_distinct(arrays: Mapping[str, DenseArray]) -> None:
    names: dict[int, str] = {}
    for name, array in arrays.items():
        if array.number in names:
            raise LoopError(
                f"{names[array.number]} and {name} are the same array; a loop has to know it by "
                "one name"
            )
        names[array.number] = name


def _check_ranges(body: LoopBody, arrays: Mapping[str, UsedArray], facts: DealFacts) -> None:
    """Raises LoopError if an element's index leads outside of an array."""
    for used in arrays.values():
        for each in used.references:
            for dim in range(used.array.ndim):
                subscript = each.subscript(dim)
                if not isinstance(subscript, Index):
                    continue
                low, high = facts.key_ranges[subscript.dim]
                low, high = low + subscript.offset, high + subscript.offset
                extent = used.array.shape[dim]
                if high >= low and (low < 0 or high >= extent):
                    raise body.error(
                        each.line,
                        f"the elements' indices lead from {low} to {high} in dim {dim} of "
                        f"{used.name}, which has 0 to {extent - 1}; subscripts do not wrap",
                    )


def _constant(value: Any, single: bool) -> Any:
    """An argument as the kernel takes it: fractions in the precision of the arrays."""
    if isinstance(value, np.ndarray):
        fixed = value.copy()
        fixed.flags.writeable = False
        return fixed
    return np.float32(value) if isinstance(value, float) and single else value


def chunks_of(bound: BoundArguments, facts: DealFacts) -> int:
    """Into how many chunks tiles are cut, so that no buffer is kept back for longer than its
    delay."""
    delays = [each.delay for each in bound.buffers.values() if each.delay]
    most = max((count for row in facts.counts for count in row), default=0)
    return max([1, *(-(-most // delay) for delay in delays)])
