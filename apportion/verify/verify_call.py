"""Verify: every derived split of a call against its kernel, and a blind search for others.

A call is lifted to the operators that a captured step would contain, and each axis (with several
operators: each class of axes) is cut through all of them, into 2 and into 3 parts. The cut is

    right     the recombined parts equal the whole
    wrong     they differ: a wrong training run
    raised    a part's kernel raised, or gave another shape
    refused   the analysis does not allow it

What the blind search finds and no right cut covers is *missing*; if the analysis refused just that
cut, it was *falsely refused*. A Find is covered by a cut that leaves the same outputs and cuts the
same inputs, inputs that the kernel ignores aside.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from apportion.capture import HARMLESS, CaptureError, Lifted, lift, torch_private
from apportion.describe import Affine, Refused
from apportion.execute import Context
from apportion.graph import substitute
from apportion.split import Space, Split, opened
from apportion.verify.blind_search import SAME, Find, candidates, ignored, outputs_of, try_cut
from apportion.verify.crash_proof import attempt
from apportion.verify.run_split import Raised, distance, recombined, run_op
from apportion.verify.torch_samples import Sample

RIGHT, WRONG, RAISED, REFUSED = "right", "wrong", "raised", "refused"
OPENED = " (opened)"  # of an axis that is cut inside a composite
_TOLERANCE = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 2e-5}
_PAIRS = 6
_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


@dataclass(frozen=True, slots=True)
class Cut:
    """One axis of a call, cut into `parts`: the dimensions along which each input is cut, and what
    the parts leave of each output (a dimension to concatenate, a reducer, `same`)."""

    axis: str
    parts: int
    status: str
    inputs: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[str, ...] = ()
    why: str = ""

    def __str__(self) -> str:
        reads = ", ".join(
            f"input {k} dim {'x'.join(map(str, dims))}"
            for k, dims in enumerate(self.inputs)
            if dims
        )
        leaves = ", ".join(
            f"output {k} {'dim ' + how if how.isdigit() else how}"
            for k, how in enumerate(self.outputs)
        )
        told = f" ({self.why})" if self.why else ""
        return f"{self.axis}: {reads or 'no input'} cut; {leaves or 'nothing left'}{told}"


@dataclass(frozen=True)
class Verdict:
    """All that was found about one call."""

    target: str
    key: str
    kinds: tuple[str, ...] = ()
    undescribed: dict[str, str] = field(default_factory=dict)
    cuts: tuple[Cut, ...] = ()
    pairs: dict[str, int] = field(default_factory=dict)
    finds: int = 0
    missing: tuple[Find, ...] = ()
    falsely: tuple[str, ...] = ()
    crashed: int = 0
    searched: bool = False
    failure: str = ""

    @property
    def splits(self) -> bool:
        """Whether some cut is right and none is wrong."""
        return any(c.status == RIGHT for c in self.cuts) and not self.bad

    @property
    def bad(self) -> tuple[Cut, ...]:
        return tuple(c for c in self.cuts if c.status in (WRONG, RAISED))


def share_of(key: str) -> int:
    """0 or 1: descriptions are tuned on calls of share 0, figures are reported on share 1."""
    return zlib.crc32(key.encode()) & 1


def draw(sample: Sample, seed: int) -> tuple[torch.Tensor, ...]:
    """The sample's inputs with other values, near enough to be in its domain, and wider where the
    kernel takes that; the sample's own if it takes neither. From seed 2 on elements are shuffled
    too, those of whole numbers and truth values included."""
    generator = torch.Generator().manual_seed(seed)
    for wide, change, shuffle in (
        *([(True, True, True)] if seed >= 2 else []),
        *((True, True, False), (True, False, False), (False, True, False)),
    ):
        tensors = sample.tensors
        if wide:
            tensors = tuple(_widened(t) for t in tensors)
        if shuffle:
            tensors = tuple(_shuffled(t, generator) for t in tensors)
        if change:
            tensors = tuple(_perturbed(t, generator) for t in tensors)
        if _accepts(sample, tensors):
            return tensors
    return sample.tensors


def _shuffled(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if tensor.dtype == torch.bool and tensor.numel() > 1 and tensor.unique().numel() == 1:
        return torch.rand(tensor.shape, generator=generator) < 0.5  # a mask of nothing hides much
    order = torch.randperm(tensor.numel(), generator=generator)
    return tensor.reshape(-1)[order].reshape(tensor.shape)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_WIDER.get(tensor.dtype, tensor.dtype))


def _perturbed(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return tensor
    kind = tensor.dtype if tensor.is_floating_point() else _real(tensor.dtype)
    noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64).to(kind)
    if tensor.is_complex():
        return tensor * (0.99 + 0.02 * noise)
    finite = tensor[tensor.isfinite()]
    if finite.numel() == 0:
        return tensor
    low, high = finite.min(), finite.max()
    if low == high:  # a gradient of ones or zeros makes false splits hold
        return tensor * (0.8 + 0.4 * noise) if low != 0 else tensor + 0.01 + 0.1 * noise
    changed = tensor * (0.99 + 0.02 * noise)
    return changed.clamp(low, high).where(tensor.isfinite(), tensor)


def _real(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.complex128 else torch.float32


def _accepts(sample: Sample, tensors: Sequence[torch.Tensor]) -> bool:
    if all(a is b for a, b in zip(tensors, sample.tensors, strict=True)):
        return True
    try:
        shapes = [t.shape for t in outputs_of(sample.call(sample.tensors))]
        return [t.shape for t in outputs_of(sample.call(tensors))] == shapes
    except Exception:
        return False


def judge(
    space: Space,
    index: int,
    parts: tuple[int, ...],
    values: Mapping[int, torch.Tensor],
    context: Context,
) -> tuple[str, Split | None, str]:
    """Whether a cut of an Op is right, given the whole Values that it reads and makes."""
    op = space.graph.ops[index]
    try:
        split = space.split(index, parts)
    except Refused as why:
        return REFUSED, None, str(why)
    try:
        made = recombined(space, index, split, [values[v] for v in op.inputs], context)
    except Raised as why:
        return RAISED, split, f"{op.kind}: {why}"
    for v, (tensor, largest) in zip(op.outputs, made, strict=True):
        whole = values[v]
        away = distance(tensor, whole, largest)
        if away > _tolerance(whole):
            return WRONG, split, f"{op.kind}: differs by {away:.1e}"
    return RIGHT, split, ""


class Case:
    """A sample, lifted (and opened, if it is to be), every Value computed whole on one draw."""

    def __init__(
        self, sample: Sample, seed: int = 0, *, opening: bool = False, as_given: bool = False
    ) -> None:
        self.sample = sample
        self.tensors = sample.tensors if as_given else draw(sample, seed)
        self.lifted: Lifted = lift(
            sample.target,
            substitute(sample.args, self.tensors),
            {k: substitute(v, self.tensors) for k, v in sample.kwargs.items()},
        )
        if opening:
            self.lifted = replace(self.lifted, graph=opened(self.lifted.graph))
        self.space = Space(self.lifted.graph)
        self.context = Context(0, 0, lambda e: 0.0, self.lifted.graph.bodies)
        self.values = self._whole()

    def _whole(self) -> dict[int, torch.Tensor]:
        values = dict(self.lifted.constants)
        values.update(zip(self.lifted.inputs, self.tensors, strict=True))
        for op in self.lifted.graph.ops:
            results = run_op(op, op.args, [values[v] for v in op.inputs], self.context)
            values.update(zip(op.outputs, results, strict=False))
        return values

    def lifting_error(self) -> str:
        """How the lifted operators differ from the call itself; "" if they do not."""
        if _is_random(self.sample):
            return ""
        if any(name in str(self.sample.target) for name in ("empty", "_ctc_loss.")):
            return ""  # unspecified values
        direct = outputs_of(self.sample.call(self.tensors))
        ours = [self.values[v] for v in self.lifted.outputs if v is not None]
        for a, b in zip(ours, direct, strict=True):
            if distance(a, b) > _tolerance(b):
                return f"the lifted operators differ from the call by {distance(a, b):.1e}"
        return ""

    # cuts

    def cuts(self) -> Iterator[Cut]:
        """Every axis cut alone, into 2 and 3 parts."""
        graph = self.lifted.graph
        if not graph.ops:
            yield from self._renamed()
        if len(graph.ops) == 1:
            for position, axis in enumerate(self.space.axes(0)):
                for count in (2, 3):
                    if axis.extent >= count:
                        yield self.cut(axis.name, count, {0: (position,)})
            return
        groups: dict[int, dict[int, tuple[int, ...]]] = {}
        names: dict[int, str] = {}
        for index in range(len(graph.ops)):
            for position, axis in enumerate(self.space.axes(index)):
                if axis.extent >= 2:
                    places = groups.setdefault(axis.group, {})
                    places[index] = (*places.get(index, ()), position)
                    names.setdefault(axis.group, axis.name)
        for group, places in groups.items():
            longest = max(self.space.axes(i)[p].extent for i, ps in places.items() for p in ps)
            for count in range(2, min(longest, 3) + 1):
                yield self.cut(names[group], count, places)

    def _renamed(self) -> Iterator[Cut]:
        """Cuts of a call that only gives its input another name: a Graph has no Op for it."""
        if len(self.lifted.inputs) == 1 and set(self.lifted.outputs) == set(self.lifted.inputs):
            for d, extent in enumerate(self.tensors[0].shape):
                for count in range(2, min(extent, 3) + 1):
                    yield Cut(f"i{d}", count, RIGHT, ((d,),), (str(d),))

    def pairs(self) -> dict[str, int]:
        """Two axes of one operator cut at once, by status."""
        found: dict[str, int] = {}
        if len(self.lifted.graph.ops) != 1:
            return found
        axes = self.space.axes(0)
        several = itertools.combinations(range(len(axes)), 2)
        for a, b in itertools.islice(several, _PAIRS):
            if min(axes[a].extent, axes[b].extent) >= 2:
                parts = tuple(2 if k in (a, b) else 1 for k in range(len(axes)))
                status, _, _ = self._try(0, parts)
                found[status] = found.get(status, 0) + 1
        return found

    def cut(self, name: str, count: int, places: dict[int, tuple[int, ...]]) -> Cut:
        """One class of axes, at its positions in every Op, cut into parts."""
        chosen: dict[int, Split] = {}
        why, worst = "", REFUSED
        for index, positions in places.items():
            for position in positions:
                axes = self.space.axes(index)
                if axes[position].extent < count:
                    continue
                parts = tuple(count if k == position else 1 for k in range(len(axes)))
                status, split, told = self._try(index, parts)
                if status == REFUSED:
                    why = why or told
                    continue
                assert split is not None
                chosen[index] = split
                if worst == REFUSED or status != RIGHT:
                    worst, why = status, told
                break
        if not chosen:
            return Cut(name, count, REFUSED, why=why)
        inputs = tuple(self._cut_dims(v, chosen) for v in self.lifted.inputs)
        outputs = tuple(self._left(v, chosen) for v in self.lifted.outputs if v is not None)
        return Cut(name, count, worst, inputs, outputs, why if worst != RIGHT else "")

    def _try(self, index: int, parts: tuple[int, ...]) -> tuple[str, Split | None, str]:
        return judge(self.space, index, parts, self.values, self.context)

    def _cut_dims(self, value: int, chosen: dict[int, Split]) -> tuple[int, ...]:
        dims: set[int] = set()
        for index, split in chosen.items():
            for k, v in enumerate(self.lifted.graph.ops[index].inputs):
                if v == value:
                    dims |= self._partial_dims(value, [part.inputs[k] for part in split.parts])
        return tuple(sorted(dims))

    def _left(self, value: int, chosen: dict[int, Split]) -> str:
        made = self.lifted.graph.producer[value]
        if made is None or made[0] not in chosen:
            return SAME
        split, position = chosen[made[0]], made[1]
        reducer = split.reducers[position]
        if reducer is not None:
            return reducer
        dims = self._partial_dims(value, [part.outputs[position] for part in split.parts])
        return "x".join(map(str, sorted(dims))) or SAME

    def _partial_dims(self, value: int, regions: Sequence[Any]) -> set[int]:
        """The dimensions along which parts have different ranges."""
        dims, place = set(), 0
        for d, factors in enumerate(self.space.atoms.dims[value]):
            for _ in factors:
                if len({region[place] for region in regions}) > 1:
                    dims.add(d)
                place += 1
        return dims

    def outline(self, name: str) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]] | None:
        """What a refused cut of an axis would read and leave, by the formula alone."""
        formula = self.space.formulas[0] if len(self.lifted.graph.ops) == 1 else None
        if formula is None:
            return None
        name = name.partition(".")[0]
        op = self.lifted.graph.ops[0]
        inputs = []
        for v in self.lifted.inputs:
            dims = {
                d
                for access in formula.accesses
                if op.inputs[access.tensor] == v
                for d, index in enumerate(access.index)
                for item in index
                if isinstance(item, Affine) and any(n == name for n, _ in item.terms)
            }
            inputs.append(tuple(sorted(dims)))
        outputs = []
        for position, output in enumerate(formula.outputs):
            if op.outputs[position] in self.lifted.outputs:
                along = [
                    d for d, names in enumerate(output.dims if output else ()) if name in names
                ]
                outputs.append(str(along[0]) if along else "?")
        return tuple(inputs), tuple(outputs)


def _tolerance(whole: torch.Tensor) -> float:
    return _TOLERANCE.get(whole.dtype, 1e-2)


def verify(samples: Sequence[Sample], *, blind: bool = True) -> list[Verdict]:
    """The verdicts on calls. Kernels run in disposable processes."""
    # Autograd's threads, which machines with a GPU have, do not survive a fork.
    plain = all(isinstance(sample.target, torch_private.OpOverload) for sample in samples)
    here = torch.cuda.is_available() and not plain
    checked = list(attempt([partial(_checked, sample) for sample in samples], here=here))
    verdicts = [_verdict(sample, found) for sample, found in zip(samples, checked, strict=True)]
    if not blind:
        return verdicts
    searches = [
        None if found is None or found["failure"] or _is_random(sample) else _Search(sample)
        for sample, found in zip(samples, checked, strict=True)
    ]
    work = [piece for search in searches if search for piece in search.work()]
    results = iter(attempt(work, here=here))
    for k, (search, found) in enumerate(zip(searches, checked, strict=True)):
        if search is not None:
            own = list(itertools.islice(results, 1 + len(search.ways)))
            verdicts[k] = search.conclude(verdicts[k], found["outlines"], own)
    return verdicts


def _verdict(sample: Sample, found: Any) -> Verdict:
    target, key = str(sample.target), sample.key
    if found is None:
        died = Cut("some cut", 2, RAISED, why=f"{target}: a kernel killed its process")
        return Verdict(target, key, cuts=(died,))
    if found["failure"]:
        return Verdict(target, key, failure=found["failure"])
    cuts = tuple(
        Cut(c["axis"], c["parts"], c["status"], tuple(map(tuple, c["inputs"])),
            tuple(c["outputs"]), c["why"])
        for c in found["cuts"]
    )  # fmt: skip
    return Verdict(target, key, tuple(found["kinds"]), found["undescribed"], cuts, found["pairs"])


def _is_random(sample: Sample) -> bool:
    tagged = torch.Tag.nondeterministic_seeded in getattr(sample.target, "tags", ())
    return tagged and sample.target not in HARMLESS


def _checked(sample: Sample) -> dict[str, Any]:
    try:
        case = Case(sample)
        cuts = [*_lifted_wrongly(case), *case.cuts()]
        cuts += _other_dtypes(sample, cuts)
    except (CaptureError, NotImplementedError, RuntimeError, ValueError, TypeError) as why:
        text = str(why) or type(why).__name__
        return {"failure": text.splitlines()[0][:200], "kinds": []}
    refused = {c.axis for c in cuts if c.status == REFUSED}
    if opened(case.lifted.graph) is not case.lifted.graph:
        inner = Case(sample, opening=True)
        cuts += [replace(c, axis=f"{c.axis}{OPENED}") for c in _lifted_wrongly(inner)]
        known = {(c.parts, c.inputs, c.outputs) for c in cuts if c.status == RIGHT}
        cuts += [
            replace(c, axis=f"{c.axis}{OPENED}")
            for c in inner.cuts()
            if c.status != REFUSED and (c.parts, c.inputs, c.outputs) not in known
        ]
    return {
        "failure": "",
        "kinds": [op.kind for op in case.lifted.graph.ops],
        "undescribed": case.space.undescribed,
        "cuts": [asdict(c) for c in cuts],
        "pairs": case.pairs(),
        "outlines": {name: case.outline(name) for name in refused},
    }


def _lifted_wrongly(case: Case) -> list[Cut]:
    """The whole, where the operators that stand for a call compute something else than it does."""
    why = case.lifting_error()
    return [Cut("the whole", 1, WRONG, why=f"{case.sample.target}: {why}")] if why else []


def _other_dtypes(sample: Sample, cuts: Sequence[Cut]) -> list[Cut]:
    """The first right cut again in the precision that was given, if its parts have other dtypes or
    shapes there."""
    first = next((c for c in cuts if c.status == RIGHT), None)
    case = Case(sample, as_given=True)
    if first is None or not case.lifted.graph.ops:
        return []
    for cut in case.cuts():
        if (cut.axis, cut.parts) == (first.axis, first.parts):
            odd = cut.status == RAISED or "differs by inf" in cut.why
            finite = all(bool(t.isfinite().all()) for t in sample.tensors if t.is_floating_point())
            return [replace(cut, axis=f"{cut.axis} (as given)")] if odd and finite else []
    return []


class _Search:
    """The blind search of one call: pieces of work, and what follows from their results."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.ways = list(candidates(sample))
        self.draws: list[Sequence[torch.Tensor]] = []

    def work(self) -> list[Callable[[], Any]]:
        return [self._ignored, *(partial(self._try, way) for way in self.ways)]

    def _drawn(self) -> list[Sequence[torch.Tensor]]:
        if not self.draws:
            self.draws = [draw(self.sample, seed) for seed in range(1, 7)]
        return self.draws

    def _ignored(self) -> list[int]:
        return sorted(ignored(self.sample, self._drawn()[0]))

    def _try(self, way: Any) -> list[list[str]]:
        return try_cut(self.sample, self._drawn(), way)

    def conclude(self, verdict: Verdict, outlines: dict[str, Any], results: list[Any]) -> Verdict:
        unseen = set(results[0] or ())
        finds = [
            Find(way, tuple(map(tuple, held)))
            for way, held in zip(self.ways, results[1:], strict=True)
            if held and any(d is not None and k not in unseen for k, d in enumerate(way))
        ]
        right = [(c.inputs, c.outputs) for c in verdict.cuts if (c.status, c.parts) == (RIGHT, 2)]
        if len(verdict.kinds) > 1:
            right += _joined(right)
        missing = tuple(find for find in finds if not _covered(find, right, unseen))
        falsely = tuple(
            name
            for name, outline in outlines.items()
            if outline and any(_covered(find, [outline], unseen) for find in missing)
        )
        crashed = sum(r is None for r in results)
        return replace(
            verdict, finds=len(finds), missing=missing, falsely=falsely, crashed=crashed,
            searched=True,
        )  # fmt: skip


def _joined(cuts: Sequence[Any]) -> list[Any]:
    """Two cuts at once, where each leaves outputs alone that the other one cuts."""
    found = []
    for (inputs, outputs), (others, leaves) in itertools.combinations(cuts, 2):
        if all(SAME in pair for pair in zip(outputs, leaves, strict=True)):
            reads = tuple(tuple(sorted({*a, *b})) for a, b in zip(inputs, others, strict=True))
            left = zip(outputs, leaves, strict=True)
            found.append((reads, tuple(b if a == SAME else a for a, b in left)))
    return found


def _covered(find: Find, cuts: Sequence[Any], unseen: set[int]) -> bool:
    return any(
        all(
            k in unseen or tuple(dims) == (() if d is None else (d,))
            for k, (dims, d) in enumerate(zip(inputs, find.inputs, strict=True))
        )
        and all(
            how == "?" or how in names for how, names in zip(outputs, find.outputs, strict=True)
        )
        for inputs, outputs in cuts
    )
