"""A GPU with a small part of its memory: how deep a GPT trains on it, and how fast.

    python benchmarks/memory_gpu.py rates --out rates.json           the host of this GPU
    python benchmarks/memory_gpu.py plan --layers 170 --limit 11GiB --costs rates.json --out p.json
    python benchmarks/memory_gpu.py run --layers 170 --plan p.json --cap 12GiB --out runs.jsonl
    python benchmarks/memory_gpu.py peer --kind fsdp2 --layers 170 --cap 12GiB --out runs.jsonl

The model is a GPT of width 1024 with 8 x 1024 tokens, float32 parameters, bfloat16 autocast and
AdamW, its loss in 8 parts. `plan` needs no GPU and can be done elsewhere; `run` trains a plan and
says what was predicted beside it; `peer` trains the same model by means that PyTorch has: eager,
checkpoint (each block and each part of the loss), stream (saved tensors go to pinned memory in a
stream of their own, as torchtune does), fsdp2 (CPU offloading of state, and checkpoints), budget
(each block compiled with torch's activation memory budget, parts of the loss in checkpoints). All
are held to the same share of the GPU's memory. Weights are made quickly: blocks of random numbers.

With --spec it is another model of the zoo, a `{}` in it for --layers. With --turn FOLDER a process
says there when it has warmed up and waits for its turn, as memory_depth.py gives it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from apportion import zoo
from apportion.capture.capture import capture
from apportion.execute.executable import Executable
from apportion.execute.transport import worker
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import CostModel, default_cost
from apportion.machine.cost_table import CostLine
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan
from apportion.quantity import parse_size_limit
from apportion.run.planned_program import planned_program
from apportion.run.runner import Runner
from apportion.simulate.host_bytes import host_peaks

SPEC = (
    "gpt2:layers={},width=1024,heads=16,vocab=50304,batch=8,seq=1024,dropout=0,loss_parts=8,"
    "precision=bf16-mixed"
)
GIB = 2**30
WARM, RUNS = 3, 3
BUDGET = 0.1  # of what a compiled block would keep


class MeasuredHost:
    """Costs of an H200 with what was measured of its host."""

    seconds = 0.0

    def __init__(self, mode: str, path: Path | None) -> None:
        cost = default_cost(cluster("1xh200"), mode)
        if path is not None:
            lines = {k: CostLine(*v) for k, v in json.loads(path.read_text()).items()}
            table = cost.tables["h200"]
            table = replace(table, lines={**table.lines, **lines})
            cost = replace(cost, tables={**cost.tables, "h200": table})
        self.model = cost

    def known(self) -> CostModel:
        return self.model

    def cost(self, strategy: Any, tasks: Any) -> CostModel:
        return self.model


def quick_weights() -> None:
    """Lets modules fill their weights with blocks of random numbers, which takes seconds less."""
    block = torch.randn(1 << 20) * 0.02

    def fill(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            flat = tensor.view(-1)
            for start in range(0, flat.numel(), len(block)):
                part = flat[start : start + len(block)]
                part.copy_(block[: len(part)])
        return tensor

    nn.init.normal_ = fill
    for kind in (nn.Linear, nn.Embedding):
        kind.reset_parameters = lambda self: None  # type: ignore[method-assign]


def tell(out: Path | None, **facts: Any) -> None:
    print(json.dumps(facts), flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(facts) + "\n")


def wait_for_turn(folder: Path | None) -> None:
    """Says that this process is ready to be measured, and waits until it is to be."""
    if folder is not None:
        (folder / "ready").touch()
        while not (folder / "go").exists():
            time.sleep(0.05)


def rates(out: Path) -> None:
    from apportion.run.calibrate_host import host_lines

    lines = host_lines()
    out.write_text(json.dumps({name: list(line) for name, line in lines.items()}))
    tell(None, gigabytes_a_second={k: 1e-9 / v.per_byte for k, v in lines.items()})


def plan(
    spec: str, layers: int, limit: str, mode: str, costs: Path | None,
    ways: tuple[str, str, str], out: Path,
) -> None:  # fmt: skip
    it = zoo.load(spec, 0, meta=True)
    program = capture(it.step, it.model, it.optimizer, it.batch)
    began = time.perf_counter()
    made = make_plan(
        program, cluster("1xh200"), "single", 30.0, parse_size_limit(limit), recompute=ways[0],
        offload=ways[1], host_state=ways[2], costs=MeasuredHost(mode, costs),
    )  # fmt: skip
    made.save(out)
    tell(
        None, layers=layers, feasible=made.feasible, planning_s=time.perf_counter() - began,
        ms_layer=made.predicted.step_seconds * 1e3 / layers,
        peak_gib=made.predicted.peak_bytes[0] / GIB, host_gib=host_peaks(made.tasks)[0] / GIB,
        notes=made.notes,
    )  # fmt: skip


def capped(cap: str) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, parse_size_limit(cap) / total))


def timed(
    step: Callable[[], Any], steps: int, finish: Callable[[], Any], turn: Path | None
) -> dict[str, Any]:
    """The seconds of steps in a row after some that warm up, and the allocator's peaks."""
    first, peaks = [], []
    for _ in range(WARM):
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        first.append(time.perf_counter() - began)
        peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
    finish()
    wait_for_turn(turn)
    took = []
    for _ in range(RUNS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        took.append((time.perf_counter() - began) / steps)
        finish()
    return {
        "ms_step": statistics.mean(took) * 1e3,
        "runs_ms": [each * 1e3 for each in took],
        "first_s": first,
        "allocated_gib": [a / GIB for a, _ in peaks],
        "reserved_gib": [r / GIB for _, r in peaks],
    }


def run(
    spec: str, layers: int, path: Path, mode: str, steps: int, cap: str, out: Path | None,
    turn: Path | None, lanes: bool,
) -> None:  # fmt: skip
    it = zoo.load(spec, 0)
    began = time.perf_counter()
    program = capture(it.step, it.model, it.optimizer, it.batch)
    captured = time.perf_counter() - began
    made = Plan.load(path)
    capped(cap)
    mine = worker(Executable(made.space, made.strategy, made.tasks), 0, "cuda:0", mode)
    runner = Runner(planned_program(program, made), mine)
    losses: list[Any] = []
    found = timed(lambda: losses.append(runner.step(it.batch)), steps, runner.finish, turn)
    tell(
        out, what="apportion", plan=path.stem, spec=spec, layers=layers, mode=mode,
        ms_layer=found["ms_step"] / layers,
        predicted_ms_layer=made.predicted.step_seconds * 1e3 / layers,
        predicted_gib=made.predicted.peak_bytes[0] / GIB, capture_s=captured,
        host_gib=host_peaks(made.tasks)[0] / GIB, decided=made.notes,
        losses=[float(x) for x in losses[:3]], notes=[n[:200] for n in mine.notes], **found,
    )  # fmt: skip
    if lanes:
        tell(
            out,
            what="lanes",
            plan=path.stem,
            layers=layers,
            mode=mode,
            **_lanes(runner, made, it.batch),
        )


def _lanes(runner: Runner, made: Plan, batch: Any) -> dict[str, Any]:
    """Milliseconds that each lane is busy in a step, measured and predicted."""
    from apportion.execute.cuda_clock import CudaClock

    rank = runner.worker.rank
    clock = CudaClock("cuda:0")
    clock.start()
    rank.clock, rank.records = clock, True
    rank.spans.clear()
    runner.step(batch)
    torch.cuda.synchronize()
    runner.finish()
    spans, rank.records = clock.times(rank.spans), False
    kinds, line = made.tasks.task_kinds, made.timeline
    measured: dict[str, float] = {}
    for task, start, end in spans:
        name = kinds[int(made.tasks.kind[task])].name
        measured[name] = measured.get(name, 0.0) + (end - start) / 1e6
    length = line.end_ns - line.start_ns
    predicted = {
        row.name: float(length[made.tasks.kind == k].sum() / 1e6) for k, row in enumerate(kinds)
    }
    return {"measured": measured, "predicted": {k: v for k, v in predicted.items() if v}}


# Peers


class LossOf(nn.Module):
    """The zoo's loss of a model, each part of it recomputed in the backward if `again`."""

    def __init__(self, model: Any, again: bool) -> None:
        super().__init__()
        self.model, self.again = model, again

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        model = self.model
        with torch.autocast(tokens.device.type, torch.bfloat16):
            hidden = model.hidden(tokens).flatten(0, 1).chunk(model.loss_parts)
            wanted = targets.flatten().chunk(model.loss_parts)
            losses = [
                checkpoint(self._part, x, y, use_reentrant=False)
                if self.again
                else self._part(x, y)
                for x, y in zip(hidden, wanted, strict=True)
            ]
            return torch.stack(losses).mean()

    def _part(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model.head(x), y)


def eager(spec: str, steps: int, cap: str, out: Path | None, turn: Path | None) -> None:
    """Any model of the zoo as it is written, on the GPU."""
    it = zoo.load(spec, 0)
    capped(cap)
    it.model.cuda()
    batch = tree_map_only(Tensor, lambda x: x.cuda(), it.batch)

    def step() -> None:
        it.step(it.model, batch).backward()
        it.optimizer.step()
        it.optimizer.zero_grad(set_to_none=True)

    try:
        found = timed(step, steps, lambda: None, turn)
    except torch.OutOfMemoryError:
        tell(out, what="eager", spec=spec, out_of_memory=True)
        return
    tell(out, what="eager", spec=spec, **found)


def peer(
    kind: str, spec: str, layers: int, steps: int, cap: str, out: Path | None, turn: Path | None
) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    it = zoo.load(spec, 0)
    model, again = it.model, kind in ("checkpoint", "fsdp2")
    assert isinstance(model, nn.Module)
    capped(cap)
    if again:
        for number, block in enumerate(model.blocks):  # type: ignore[arg-type,union-attr]
            model.blocks[number] = checkpoint_wrapper(block)  # type: ignore[index,operator]
    if kind == "budget":
        _keep_little(model)
    whole = LossOf(model, again or kind == "budget")
    if kind == "fsdp2":
        _shard(model, whole)
    else:
        model.cuda()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
    batch = [each.cuda() for each in it.batch]
    away = SavedOnHost() if kind == "stream" else nullcontext()

    losses: list[Tensor] = []

    def step() -> None:
        with away:
            loss = whole(*batch)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    try:
        found = timed(step, steps, lambda: None, turn)
    except torch.OutOfMemoryError:
        tell(out, what=kind, layers=layers, out_of_memory=True)
        return
    tell(
        out, what=kind, layers=layers, ms_layer=found["ms_step"] / layers,
        losses=[float(x) for x in losses[:3]], **found,
    )  # fmt: skip


def _keep_little(model: Any) -> None:
    """Compiles each block by itself, equal ones once, with a budget for what its backward reads."""
    import torch._functorch.config as compiler

    compiler.activation_memory_budget = BUDGET
    for block in model.blocks:
        block.compile()


def _shard(model: Any, whole: nn.Module) -> None:
    """FSDP2 with state on the host, on one GPU, each block by itself."""
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1, store=dist.HashStore())
    torch.cuda.set_device(0)
    how: dict[str, Any] = {
        "offload_policy": CPUOffloadPolicy(pin_memory=True),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for block in model.blocks:
        fully_shard(block, **how)
    fully_shard(whole, **how)


class SavedOnHost(torch.autograd.graph.saved_tensors_hooks):
    """Saved tensors of 1024 bytes and more go to pinned memory in a stream of their own, of which a
    few are under way, and come back when they are read, the next one ahead."""

    STASH = 5

    def __init__(self) -> None:
        self.out, self.back = torch.cuda.Stream(), torch.cuda.Stream()
        self.under_way: deque[tuple[Any, Tensor]] = deque()
        super().__init__(self._pack, self._unpack)  # type: ignore[no-untyped-call]

    def _pack(self, tensor: Tensor) -> Any:
        small = tensor.numel() * tensor.element_size() < 1024
        if small or not tensor.is_cuda or isinstance(tensor, nn.Parameter) or tensor._is_view():
            return tensor
        self.out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.out):
            room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            room.copy_(tensor, non_blocking=True)
            done = self.out.record_event()
        self.under_way.append((done, tensor))
        while len(self.under_way) > self.STASH:
            before, _ = self.under_way.popleft()
            torch.cuda.current_stream().wait_event(before)
        return room

    def _unpack(self, packed: Any) -> Tensor:
        if packed.is_cuda:
            found: Tensor = packed
            return found
        self.under_way.clear()
        with torch.cuda.stream(self.back):
            here = packed.to("cuda", non_blocking=True)
        torch.cuda.current_stream().wait_stream(self.back)
        here.record_stream(torch.cuda.current_stream())
        moved: Tensor = here
        return moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("rates", "plan", "run", "peer"))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--spec", default=SPEC, help="a model of the zoo, {} for the layers")
    parser.add_argument("--limit", default="11GiB")
    parser.add_argument("--cap", default="12GiB")
    parser.add_argument("--mode", default="inductor")
    parser.add_argument("--recompute", default="auto")
    parser.add_argument("--offload", default="none")
    parser.add_argument("--host-state", default="auto")
    parser.add_argument("--costs", type=Path)
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--kind", default="checkpoint")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--lanes", action="store_true")
    parser.add_argument("--turn", type=Path, help="a folder: measure when there is a file `go`")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    spec = given.spec.format(given.layers)
    if given.what == "rates":
        rates(given.out or Path("rates.json"))
    elif given.what == "plan":
        ways = (given.recompute, given.offload, given.host_state)
        how = (given.mode, given.costs, ways, given.out or Path("plan.json"))
        plan(spec, given.layers, given.limit, *how)
    elif given.what == "run":
        if given.spec == SPEC:
            quick_weights()
        how_run = (given.mode, given.steps, given.cap, given.out, given.turn, given.lanes)
        run(spec, given.layers, given.plan, *how_run)
    elif given.kind == "eager":
        eager(spec, given.steps, given.cap, given.out, given.turn)
    else:
        quick_weights()
        how_peer = (given.steps, given.cap, given.out, given.turn)
        peer(given.kind, spec, given.layers, *how_peer)


if __name__ == "__main__":
    main()
