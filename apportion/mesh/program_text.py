"""program_text: the program of plain PyTorch that trains as a Plan does.

Part of the room mesh. A Program, its Plan and their MeshLayout come in; out goes the text of a
Python program for torchrun: `fully_shard` on a device mesh, or DistributedDataParallel where
nothing is cut, with the layout's placements and checkpointed modules. `check_program` refuses what
such a program would not train as the Plan does. Models of the zoo are loaded by apportion.zoo;
those of a user's own file from that file, without apportion.
"""

from __future__ import annotations

import pprint
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from apportion.capture import Program
from apportion.graph import FORWARD
from apportion.machine import INDUCTOR
from apportion.memory import numbered_modules
from apportion.mesh.layout_of_plan import NotExpressible
from apportion.mesh.mesh_layout import MeshLayout
from apportion.mesh.sample_means import NLL, check_sample_means
from apportion.plan import Plan
from apportion.search import sample_classes
from apportion.split import Space

FROM_ZOO = '''\
def build(seed):
    """The step, model, optimizer, batch and largest norm of gradients (or None)."""
    from apportion import zoo

    it = zoo.load(MODEL, seed, meta=False)
    return it.step, it.model, it.optimizer, it.batch, it.clip_norm'''

FROM_FILE = '''\
def build(seed):
    """The step, model, optimizer, batch and largest norm of gradients (or None)."""
    import importlib.util
    import sys

    file, _, function = MODEL.rpartition(":")
    spec = importlib.util.spec_from_file_location("model_to_train", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["model_to_train"] = module
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
    spec.loader.exec_module(module)
    torch.manual_seed(seed)
    made = getattr(module, function)()
    return (*made[:4], made[4] if len(made) > 4 else None)'''


def check_program(program: Program, plan: Plan, layout: MeshLayout) -> None:
    """Raises NotExpressible, naming an operator, unless a program of FSDP2 trains so."""
    graph = program.graph
    if layout.tensor > 1:
        name = next(
            (f"operator {op.name!r} ({op.module})" for k, op in enumerate(plan.space.graph.ops)
             if (op.phase == FORWARD and plan.strategy.choices[k].count > layout.tensor)
             or (plan.strategy.choices[k].count == layout.tensor and op.module)),
            "an operator",
        )  # fmt: skip
        raise NotExpressible(
            f"{name} is cut by tensor parallelism: the model's own code would have to know of its "
            "part of the heads; write the layout (--layout) and cut the modules by hand"
        )
    if layout.devices == 1:
        raise NotExpressible("the plan is for one device: there is nothing to divide")
    if program.by_itself:
        last = next(op for op in reversed(graph.ops) if op.phase == FORWARD)
        raise NotExpressible(
            f"the step calls backward and its optimizer by itself, after operator {last.name!r}: "
            "its loss cannot be averaged over ranks from outside"
        )
    if not isinstance(program.model, torch.nn.Module) or len(program.optimizers) != 1:
        raise NotExpressible("the step has several models or optimizers; FSDP2 divides one")
    for path in layout.checkpoint:
        if type(program.model.get_submodule(path)).forward is torch.nn.Module.forward:
            raise NotExpressible(f"module {path!r} is never called, and cannot be checkpointed")
    check_sample_means(plan, layout.replicate * layout.shard)
    whole = [name for name, placed in (layout.placements or {}).items() if placed.shard is None]
    if layout.shard > 1 and whole:
        values = {value.name: number for number, value in enumerate(graph.values)}
        update = graph.producer[graph.after[values[whole[0]]]]
        at = f" (operator {graph.ops[update[0]].name!r})" if update else ""
        raise NotExpressible(
            f"parameter {whole[0]!r}{at} is whole on every device while others are cut: FSDP2 "
            "cuts all parameters of a module"
        )


def program_notes(program: Program, plan: Plan, layout: MeshLayout) -> tuple[str, ...]:
    """What the user of the program should know, a sentence each."""
    found, kinds = [], {op.kind for op in program.graph.ops if op.phase == FORWARD}
    if NLL in kinds:
        found.append("the loss is the plan's if every rank ignores as many targets")
    if any(kind.startswith("apportion.random") or "dropout" in kind for kind in kinds):
        found.append("random numbers are torch's own on every rank, and so are the losses")
    halves = {"bfloat16", "float16"} & {value.dtype for value in program.graph.values}
    floats = {"float32"} & {value.dtype for value in program.graph.values}
    if layout.shard > 1 and halves and floats:
        found.append(
            "parameters travel in float32 and are cast where they are used; the plan casts first "
            "(see MixedPrecisionPolicy of fully_shard)"
        )
    if plan.cost.mode == INDUCTOR:
        found.append(
            "the plan's peak and seconds are those of kernels that are compiled together, which "
            "hold less; those of this program are predicted by a plan with --compile none"
        )
    return tuple(found)


def program_text(
    program: Program, plan: Plan, layout: MeshLayout, model: str, file: str = "train.py"
) -> str:
    """The program; `file` is its name."""
    own_file = ".py:" in model
    predicted = plan.predicted
    said = [
        f"The plan ({plan.method}) predicts {predicted.step_seconds:.6f} s a step on "
        f"{plan.cluster.name},",
        f"{predicted.bytes_moved} bytes moved and {max(predicted.peak_bytes)} bytes at the peak.",
        *(f"Note: {note}." for note in program_notes(program, plan, layout)),
    ]
    dims = {
        name: placed.shard for name, placed in (layout.placements or {}).items() if placed.shard
    }
    filled = {
        "MODEL": _plain(model),
        "DEVICES": str(layout.devices),
        "FILE": _plain(Path(file).name),
        "SAID": "\n".join(said),
        "MODEL_TEXT": repr(model),
        "REPLICATE": str(layout.replicate),
        "SHARD": str(layout.shard),
        "RESHARD": str(layout.reshard),
        "UNITS": _written(numbered_modules(program.graph)),
        "DIMS": _written(dims),
        "CHECKPOINT": _written(list(layout.checkpoint)),
        "SAMPLE_DIMS": _written(_sample_dims(program)),
        "BUILD": FROM_FILE if own_file else FROM_ZOO,
    }
    text = resources.files("apportion.mesh").joinpath("templates/train.py.txt").read_text()
    for key in sorted(filled, key=len, reverse=True):
        text = text.replace(f"@{key}@", filled[key])
    return text


def _plain(text: str) -> str:
    """A text as it may stand in a docstring."""
    return "".join(c for c in text if c.isprintable() and c not in "\\\"'")


def _written(data: Any) -> str:
    return pprint.pformat(data, width=96, compact=True)


def _sample_dims(program: Program) -> dict[int, int]:
    """By position among the batch's leaves the dimension of the samples."""
    space = Space(program.graph)
    classes, found = sample_classes(space), {}
    for value, position in program.inputs:
        owners = [dim for dim, row in enumerate(space.atoms.dims[value]) for _ in row]
        groups = space.atoms.value_classes[value]
        dims = [dim for dim, group in zip(owners, groups, strict=True) if group in classes]
        if dims:
            found[position] = dims[0]
    return found
