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
        "(hf:llama,hidden_size=512, hf:config.json) or FILE.py:FUNCTION.",
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
        help="What a device may hold: 16GB, 512MiB, or none for no limit. Default: its memory.",
    ),
]
Recompute = Annotated[
    str,
    typer.Option(
        "--recompute",
        metavar="WHAT",
        help="What the backward computes again instead of keeping it: none, auto (what must be "
        "for the plan to fit) or full.",
    ),
]
Offload = Annotated[
    str,
    typer.Option(
        "--offload",
        metavar="WHAT",
        help="What lies in the host's memory until the backward reads it: none, auto (what must "
        "for the plan to fit) or full.",
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="S", min=0, help="Of the model, its batch and the search.")
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
CommunicationPolicy = Annotated[
    str,
    typer.Option(
        "--communication",
        metavar="POLICY",
        help="When gradients travel: wfbp (while the backward goes on), p3 (the next step begins "
        "meanwhile) or auto (whichever is predicted to be faster).",
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="P",
        help="Of a named model: float32, bf16 (everything), bf16-mixed or fp16-mixed (autocast, "
        "float32 parameters).",
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
