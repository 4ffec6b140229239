"""Why a loop is divided as it is: its references, dependences, schemes, and where its arrays are.

Part of the room loops. A LoopPlanner and arguments come in; a LoopExplanation goes out, which
prints as a page. Arguments that are not known leave out what depends on their sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from apportion.loops.array import DenseArray
from apportion.loops.buffer import Buffer
from apportion.loops.choose_scheme import SchemeChoice
from apportion.loops.dependence import Dependence
from apportion.loops.loop_plan import BOXED, KEYED, READ, RESIDENT, ROTATING, ArrayUse
from apportion.loops.plan_loop import BoundArguments, LoopAnalysis, LoopPlanner, analyse_body
from apportion.loops.references import ArrayReference, subscripted_parameters
from apportion.loops.schemes import ONE_D, TWO_D, Scheme
from apportion.quantity import format_quantity


@dataclass(frozen=True)
class LoopExplanation:
    """What is known of a loop on so many processes. `choices` are the permitted schemes with the
    bytes that they move, the best one first; without them sizes are not known."""

    title: str
    analysis: LoopAnalysis
    processes: int
    dims: int
    choices: tuple[SchemeChoice, ...]
    buffered: tuple[str, ...]

    @property
    def scheme(self) -> Scheme | None:
        """The scheme that the loop runs under; None if there is none."""
        if self.choices:
            return self.choices[0].scheme
        return self.analysis.schemes[0] if self.analysis.schemes else None

    @property
    def kind(self) -> str:
        """1D, 2D, ordered 2D wavefront or unimodular; buffered if that took a permission; or
        none."""
        if self.scheme is None:
            return "none"
        return f"{self.scheme.family}{', buffered' if self.buffered else ''}"

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    __repr__ = __str__


def explain_loop(planner: LoopPlanner, known: Mapping[str, Any], processes: int) -> LoopExplanation:
    """Explains a loop with the arguments that are known, by their names."""
    body, over = planner.body, planner.over
    buffered = tuple(name for name, value in known.items() if isinstance(value, Buffer))
    arrays = _arrays(known)
    dims: dict[str, int | None] = {
        name: arrays[name].ndim if name in arrays else None
        for name in {**dict.fromkeys(subscripted_parameters(body)), **arrays}
    }
    plain = [name for name, value in known.items() if isinstance(value, np.ndarray)]
    dims = {name: count for name, count in dims.items() if name not in plain}
    analysis = analyse_body(body, dims, over.ndim, planner.ordered, buffered)
    choices: list[SchemeChoice] = []
    if all(name in arrays for name in dims):
        constants = {k: v for k, v in known.items() if k not in arrays}
        buffers = {name: known[name] for name in buffered}
        bound = BoundArguments(arrays, buffers, constants)
        choices = planner.choices(bound, processes)
    order = "in the order of keys" if planner.ordered else "in any order"
    shape = " x ".join(map(str, over.shape))
    title = f"{body.name} ({body.place(body.first_line)}), a loop over {shape} keys, {order}"
    return LoopExplanation(title, analysis, processes, over.ndim, tuple(choices), buffered)


def _arrays(known: Mapping[str, Any]) -> dict[str, DenseArray]:
    found = {}
    for name, value in known.items():
        array = value.array if isinstance(value, Buffer) else value
        if isinstance(array, DenseArray):
            found[name] = array
    return found


def _lines(it: LoopExplanation) -> Iterator[str]:
    yield it.title
    yield ""
    yield "References (k0, k1, ... are the loop's indices)"
    for each in dict.fromkeys(it.analysis.references.found):
        yield f"  {_reference(each)}{'; buffered' if each.array in it.buffered else ''}"
    yield ""
    yield from _dependences(it)
    yield ""
    yield from _scheme(it)
    for use in it.choices[0].uses.values() if it.choices else ():
        yield f"  {_placement(use, it.choices[0].scheme)}"
    others = it.choices[1:]
    if others:
        yield ""
        yield "Other schemes that keep the meaning"
        for choice in others:
            yield f"  {choice.scheme}: {_bytes(choice)}"
    refused = list(_refused(it))
    if refused:
        yield ""
        yield "Schemes that do not"
        yield from refused


def _reference(each: ArrayReference) -> str:
    return str(each)


def _dependences(it: LoopExplanation) -> Iterator[str]:
    vectors = it.analysis.dependences.vectors
    if not vectors:
        yield "No iteration depends on another one."
    else:
        yield "Dependence vectors (how far apart iterations are that touch one element)"
    for each in vectors:
        yield f"  {each.array}: {each}, {_places(each)}"
    for array in it.analysis.dependences.racing:
        yield (
            f"  {array}: several iterations may write one element and nobody reads it; the last "
            "one by the order of tiles stays"
        )


def _places(each: Dependence) -> str:
    first, second = sorted(each.lines)
    return f"line {first}" if first == second else f"lines {first} and {second}"


def _scheme(it: LoopExplanation) -> Iterator[str]:
    if it.scheme is None:
        yield (
            "No scheme keeps that; pass loops.buffer(array) for an array whose changes others may "
            "see a little later"
        )
        return
    cost = f", {_bytes(it.choices[0])}" if it.choices else ""
    yield f"Scheme on {it.processes} processes: {it.scheme}{cost}"
    yield f"  {_why(it.scheme, bool(it.analysis.dependences.vectors))}"


def _why(scheme: Scheme, depends: bool) -> str:
    space, time = f"k{scheme.space}", f"k{scheme.time}"
    if scheme.kind == ONE_D:
        if not depends:
            return f"the iterations are cut along {space}"
        return f"every vector is 0 in {space}: parts of it have nothing to do with each other"
    if scheme.kind == TWO_D:
        return (
            f"every vector is 0 in {space} or in {time}: tiles that differ in both have nothing to "
            "do with each other, and each process works on another part of time"
        )
    if scheme.skew:
        return (
            f"with time {time}+{scheme.skew}*{space} no vector is negative (the transformation has "
            f"rows (1, 0) and ({scheme.skew}, 1)): tiles run along a wavefront, in the program's "
            "order"
        )
    return "no vector is negative: tiles run along a wavefront, in the program's order"


def _placement(use: ArrayUse, scheme: Scheme) -> str:
    name, dim = use.kernel.name, use.layout.dim
    if use.placement == RESIDENT:
        return f"{name} is resident: cut along dim {dim} like k{scheme.space}"
    if use.placement == ROTATING:
        parts = len(use.layout.owners)
        return f"{name} rotates: cut along dim {dim} like k{scheme.time}, in {parts} parts"
    what = {READ: "read", BOXED: ""}.get(use.change, use.change)
    if use.placement == KEYED:
        return f"{name} is fetched by rows that a slice of the body finds out beforehand ({what})"
    return f"{name} is fetched tile by tile, as far as a tile may touch it ({what})"


def _bytes(choice: SchemeChoice) -> str:
    return f"{format_quantity(choice.nbytes, 'B')} sent a pass"


def _refused(it: LoopExplanation) -> Iterator[str]:
    permitted = {(each.kind, each.space) for each in it.analysis.schemes}
    for dim in range(it.dims):
        bad = next(
            (v for v in it.analysis.dependences.vectors if not v.distance[dim].is_zero), None
        )
        if (ONE_D, dim) not in permitted and bad is not None:
            yield f"  1D on k{dim}: {bad.array} has {bad} ({_places(bad)})"
