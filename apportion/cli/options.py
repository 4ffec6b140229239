"""The arguments and options that several commands share.

Part of the room cli. Nothing heavy is imported here, so that `apportion --help` comes at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from apportion.search import METHODS

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A zoo model (gpt2, mlp:tiny, gpt2:layers=4,batch=8), one of transformers "
        "or the hub (meta-llama/Llama-3.1-8B, hf:llama,hidden_size=512), a folder with a "
        "config.json or FILE.py:FUNCTION.",
    ),
]
ClusterName = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="C",
        help="A preset, a TOML file, local:N, or a count such as 8xh100.",
    ),
]
METHOD_NAMES = ", ".join(("auto", *METHODS))
Method = Annotated[
    str, typer.Option("--method", metavar="M", help=f"How to search: {METHOD_NAMES}.")
]
Budget = Annotated[
    float,
    typer.Option(
        "--budget", metavar="S", min=0.0, help="Seconds that it, or each method, may take."
    ),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        metavar="SIZE",
        help="What a device may hold: 16GB, 512MiB, or none for no limit. Default: its memory. "
        "What would not fit is recomputed and, on GPUs, moved to the host, unless --recompute, "
        "--offload or --host-state say what may be done.",
    ),
]
Recompute = Annotated[
    str | None,
    typer.Option(
        "--recompute",
        metavar="WHAT",
        help="What the backward computes again instead of keeping it: none, auto (what must be "
        "for the plan to fit), modules (as few whole layers as must be; export writes them as "
        "checkpoints) or full.",
    ),
]
Staleness = Annotated[
    int | None,
    typer.Option(
        "--staleness",
        metavar="S",
        min=0,
        help="For --method ssp: how many steps old the parameters may be that ranks train on. The "
        "result is then not the single device's.",
    ),
]
Offload = Annotated[
    str | None,
    typer.Option(
        "--offload",
        metavar="WHAT",
        help="What lies in the host's memory until the backward reads it: none, auto (what must "
        "for the plan to fit) or full.",
    ),
]
HostStateMode = Annotated[
    str | None,
    typer.Option(
        "--host-state",
        metavar="WHAT",
        help="Which parameters lie on the host with their optimizer's state: none, auto (what must "
        "for the plan to fit), host (all large ones, updated there) or device (all large ones, "
        "updated on the device).",
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="S", min=0, help="Of the model, its batch and the search.")
]
PlanOut = Annotated[
    Path | None,
    typer.Option("--out", metavar="PLAN", help="Save it as JSON; for --devices a folder."),
]
BookSizes = Annotated[
    str | None,
    typer.Option(
        "--devices",
        metavar="N,M,...",
        help="A plan for each number of the cluster's devices: a plan book, for a job that may "
        "lose some.",
    ),
]
ResumedSeed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        metavar="S",
        min=0,
        help="Of the model, its batch and the search (0, or that of the checkpoint).",
    ),
]
SaveFolder = Annotated[
    Path | None,
    typer.Option(
        "--save",
        metavar="DIR",
        help="Save checkpoints into this folder: after the last step, and as --save-every says.",
    ),
]
SaveEvery = Annotated[
    int | None,
    typer.Option("--save-every", metavar="K", min=1, help="Save after every K steps too."),
]
KeepLast = Annotated[
    int, typer.Option("--keep", metavar="K", min=1, help="Checkpoints that stay in the folder.")
]
Resume = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="DIR",
        help="Go on with the next steps from the last checkpoint in this folder, whatever plan "
        "and number of processes saved it; --steps counts from there.",
    ),
]
Metrics = Annotated[
    list[str] | None,
    typer.Option(
        "--metrics",
        metavar="WHERE",
        help="Write the metrics of each step: print, FILE.jsonl or tensorboard:DIR; repeatable.",
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option("--batch", metavar="N", min=1, help="Samples of a batch, of a named model."),
]
SequenceLength = Annotated[
    int | None,
    typer.Option("--seq", metavar="N", min=1, help="Tokens of a sample, of a named model."),
]
Wire = Annotated[
    str,
    typer.Option(
        "--wire",
        metavar="P",
        help="Precision in which partial sums of float32 gradients travel: bf16.",
    ),
]
_COMMUNICATION = typer.Option(
    "--communication",
    metavar="POLICY",
    help="When gradients travel, and in what pieces: none (after the backward), wfbp (while it "
    "goes on), p3, tictac or bytescheduler (the next step begins meanwhile), or auto (whichever "
    "is predicted to be fastest).",
)
CommunicationPolicy = Annotated[str, _COMMUNICATION]
CommunicationOfRun = Annotated[str | None, _COMMUNICATION]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="P",
        help="Of a named model: float32, bf16 (everything), bf16-mixed or fp16-mixed (autocast, "
        "float32 parameters).",
    ),
]
Accumulate = Annotated[
    int | None,
    typer.Option(
        "--accumulate",
        metavar="K",
        min=1,
        help="Micro-batches that the batch of a named model is taken in, their gradients added.",
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
]
Check = Annotated[
    bool,
    typer.Option("--check", help="Compare with a single device, in float64, and ranks' copies."),
]
ShareGpu = Annotated[
    bool, typer.Option("--share-gpu", help="Run all processes on this machine's first GPU.")
]
Procs = Annotated[
    int | None, typer.Option("--procs", metavar="N", min=1, help="N local processes (2).")
]
Calibrate = Annotated[
    bool, typer.Option("--calibrate/--no-calibrate", help="On local:N, measure what is not known.")
]
Trace = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="Write the step for Perfetto too.")
]
Measure = Annotated[
    int | None,
    typer.Option(
        "--measure",
        metavar="K",
        min=1,
        help="On local:N, run the K best plans for a few steps and keep the really fastest.",
    ),
]
CompileMode = Annotated[
    str | None,
    typer.Option(
        "--compile",
        metavar="MODE",
        help="How the work between exchanges runs: none (task by task), generated (the default), "
        "graph, inductor, or auto (the fastest that works here).",
    ),
]
Fast = Annotated[bool, typer.Option("--fast", help="The same as --compile auto.")]
PolicyFile = Annotated[
    Path | None,
    typer.Option(
        "--policy",
        metavar="FILE",
        help="What a method that learns has learned before, as policy train writes it.",
    ),
]
CostsFile = Annotated[
    Path | None,
    typer.Option(
        "--costs", metavar="FILE", help="What such devices cost, as calibrate --out writes it."
    ),
]
Compile = Annotated[
    str,
    typer.Option(
        "--compile",
        metavar="MODE",
        help="How ranks are compiled: none, generated, graph, inductor or auto.",
    ),
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A file written by plan --out.")]
