"""The commands that plan: plan, compare, and calibrate, which measures costs for them.

Part of the room cli. A model and a cluster come in, Plans are printed and saved. Everything heavy
is imported inside the commands.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from apportion.cli.options import (
    Accumulate,
    AsJson,
    BatchSize,
    BookSizes,
    Budget,
    Calibrate,
    ClusterName,
    CommunicationPolicy,
    Compile,
    CostsFile,
    HostStateMode,
    Measure,
    MemoryLimit,
    Method,
    Model,
    Offload,
    PlanOut,
    PolicyFile,
    Precision,
    Procs,
    Recompute,
    Seed,
    SequenceLength,
    Staleness,
    Trace,
    Wire,
)
from apportion.cli.plan_book_request import check_book, plan_book
from apportion.cli.requests import (
    capture_without_data,
    check_outputs,
    complain,
    keep_result,
    note_slow_halves,
    sized,
)
from apportion.quantity import parse_size_limit
from apportion.show import (
    answer,
    comparison_facts,
    note,
    plan_facts,
    plan_tables,
    stdout_kept,
    warnings_noted,
    way_facts,
    why_facts,
)

if TYPE_CHECKING:
    from apportion.capture import Program
    from apportion.machine import Cluster
    from apportion.plan import Plan
    from apportion.run import WayOut


def plan_command(
    model: Model,
    cluster: ClusterName,
    method: Method = "auto",
    budget: Budget = 30.0,
    memory_limit: MemoryLimit = None,
    recompute: Recompute = None,
    offload: Offload = None,
    host_state: HostStateMode = None,
    seed: Seed = 0,
    batch: BatchSize = None,
    seq: SequenceLength = None,
    precision: Precision = None,
    accumulate: Accumulate = None,
    out: PlanOut = None,
    devices: BookSizes = None,
    trace: Trace = None,
    calibrate: Calibrate = True,
    measure: Measure = None,
    certify: Annotated[
        bool, typer.Option("--certify", help="Also prove how few bytes a plan must move.")
    ] = False,
    policy: PolicyFile = None,
    costs: CostsFile = None,
    compile: Compile = "generated",
    wire: Wire = "",
    communication: CommunicationPolicy = "auto",
    staleness: Staleness = None,
    as_json: AsJson = False,
) -> None:
    """Search for a good way to divide a model over a cluster.

    Every plan is simulated. The method auto tries many methods, the baselines
    always and the others while --budget lasts, and keeps the fastest plan that
    fits into the memory of every device. Ctrl-C ends the search with the best
    plan so far.

    What would not fit is recomputed in the backward and, on GPUs, moved to the
    host, as far as it must be; --recompute none forbids that.

    If nothing fits even so, the nearest plan is shown (and saved), with what is over the
    limit, what takes the space and how many devices would do, and then what else
    would fit: recomputation, mixed precision, micro-batches, offloading, the largest
    batch, another cluster, each with its figures. The status is 1.

    --measure runs the best plans for a few steps each, on local:N, keeps the one
    that is really the fastest, and shows predicted and measured of each.

    --certify proves, within --budget more seconds, how far the bytes that tofu's
    partition moves are from the fewest possible, and says for which space.

    Steps are predicted for ranks compiled as --compile says. --costs has what kernels
    cost on the cluster's devices, as calibrate --device cuda measured on one of them.

    Example: apportion plan gpt2:tiny --cluster local:4 --out p.json

    Example: apportion plan llama:layers=8 --cluster 8xh100 --method tofu --memory-limit 40GB

    Example: apportion plan gpt2 --cluster 1xh100 --memory-limit 8GB

    Example: apportion plan gpt2:layers=48 --cluster 1xh200 --memory-limit 12GB
    --recompute auto --host-state auto

    Example: apportion plan meta-llama/Llama-3.1-8B --batch 16 --seq 8192 --cluster 8xh100

    Example: apportion plan hf:llama,num_hidden_layers=8 --batch 8 --seq 2048 --cluster 8xh100

    Example: apportion plan gpt2:layers=24 --precision bf16-mixed --cluster 8xh100

    Example: apportion plan gpt2 --cluster 8xh100 --devices 8,6,4 --method fsdp --out book/
    """
    from apportion.machine import cluster as cluster_of
    from apportion.plan import with_certificate

    limit = None if memory_limit is None else parse_size_limit(memory_limit)
    check_book(devices, out, trace, certify)
    check_outputs(None if devices else out, trace)
    with stdout_kept(as_json), warnings_noted():
        place = cluster_of(cluster)
        model = sized(model, batch, seq, precision, accumulate)
        program = capture_without_data(model, seed)
        note_slow_halves(program, place)
        how = (budget, limit, seed, calibrate, measure, policy)
        also = (costs, compile, wire, recompute, offload, communication, staleness, host_state)
        planned = partial(_planned, program, model, method, how, also, not as_json)
        if devices is not None:
            raise typer.Exit(plan_book(devices, out, place, planned, as_json))
        made = planned(place)
        if certify:
            made = with_certificate(made, budget)
        lost = [keep_result(made.save, out), keep_result(made.trace, trace)]
        decides = not (recompute or offload or host_state)
        ways = () if made.feasible else _ways_out(made, program, seed, decides)
    facts = plan_facts(made) | why_facts(made) | way_facts(made, ways) if as_json else {}
    answer(as_json, facts, [*plan_tables.planned(made), *plan_tables.ways(ways)])
    complain(lost)
    raise typer.Exit(1 if any(lost) or not made.feasible else 0)


def _planned(
    program: Program,
    model: str,
    method: str,
    how: tuple[Any, ...],
    also: tuple[Any, ...],
    shows: bool,
    place: Cluster,
) -> Plan:
    """A plan for a cluster, with its progress shown if it `shows`."""
    from apportion.plan import with_model
    from apportion.run import plan as make_plan
    from apportion.run import source_of_model
    from apportion.show import progress

    budget, limit, seed, calibrate, measure, policy = how
    source = source_of_model(program, model, seed)
    with progress(wanted=shows) as told:
        asked = (budget, limit, seed, calibrate, note, source, told, measure, None, policy)
        return with_model(make_plan(program, place, method, *asked, *also), model)


def _ways_out(made: Plan, program: Program, seed: int, decides: bool) -> tuple[WayOut, ...]:
    from apportion.run import ways_out

    return ways_out(made, program, seed, tell=note, decides=decides)


def compare_command(
    model: Model,
    cluster: ClusterName,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            metavar="A,B,...",
            help="All but auto and those that first have to learn, unless given.",
        ),
    ] = None,
    budget: Budget = 30.0,
    memory_limit: MemoryLimit = None,
    recompute: Recompute = None,
    offload: Offload = None,
    host_state: HostStateMode = None,
    seed: Seed = 0,
    batch: BatchSize = None,
    seq: SequenceLength = None,
    precision: Precision = None,
    accumulate: Accumulate = None,
    calibrate: Calibrate = True,
    policy: PolicyFile = None,
    costs: CostsFile = None,
    compile: Compile = "generated",
    communication: CommunicationPolicy = "auto",
    as_json: AsJson = False,
) -> None:
    """Plan with several methods and set the results side by side, under one simulator.

    The table has what a step is predicted to cost, how long the search took, and
    the bound that a method has proven, with what it is a bound of. Methods that
    are not for the cluster or the step are left out with a note. Ctrl-C ends it
    with what is done so far.

    Example: apportion compare gpt2:tiny --cluster local:4 --methods auto,data,fsdp
    """
    from apportion.machine import cluster as cluster_of
    from apportion.run import compare as compare_methods
    from apportion.run import source_of_model
    from apportion.show import progress

    limit = None if memory_limit is None else parse_size_limit(memory_limit)
    names = None if methods is None else [name.strip() for name in methods.split(",")]
    with stdout_kept(as_json), warnings_noted():
        place = cluster_of(cluster)
        model = sized(model, batch, seq, precision, accumulate)
        program = capture_without_data(model, seed)
        note_slow_halves(program, place)
        source = source_of_model(program, model, seed)
        with progress(wanted=not as_json) as told:
            how = (budget, limit, seed, calibrate, note, source, told)
            given = (policy, costs, compile, None, recompute, offload, communication)
            plans = compare_methods(program, place, names, *how, *given, host_state=host_state)
    plans = [replace(made, model=model) for made in plans]
    answer(as_json, comparison_facts(model, place.name, plans), plan_tables.compared(plans))
    raise typer.Exit(0 if any(made.feasible for made in plans) else 1)


def calibrate_command(
    models: Annotated[list[str] | None, typer.Argument(metavar="[MODEL ...]")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", metavar="C", help="local:N (as --procs N), or one with this GPU."
        ),
    ] = None,
    procs: Procs = None,
    budget: Budget = 60.0,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    seed: Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write the table as JSON too; with --hosts the cluster file."),
    ] = None,
    hosts: Annotated[
        bool,
        typer.Option("--hosts", help="Measure the network between the hosts of a torchrun job."),
    ] = False,
    interface: Annotated[
        str | None,
        typer.Option("--interface", metavar="NAME", help="With --hosts: over this interface."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what kernels, copies and messages cost on this machine, and keep it.

    Kernel calls are those of the models' steps, whole and divided in several ways;
    on a GPU whole ones, for all clusters with such devices. The kind of a GPU that
    no preset has is that of the devices of --cluster.

    Example: apportion calibrate gpt2:tiny mlp:tiny --procs 2

    --hosts is run on every host by torchrun and writes a cluster file: the hosts of
    the job, their processes, and what the links between them were measured to do.

    Example: apportion calibrate gpt2 resnet50 --device cuda --out table.json

    Example: torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend apportion
    --rdzv-endpoint 10.0.0.1:29400 --no-python apportion calibrate --hosts
    --interface eth0 --out hosts.toml
    """
    check_outputs(out)
    if hosts:
        _measure_hosts(models, cluster or procs, out, interface, as_json)
        return
    from apportion.cli.calibrate_models import facts, measured, shown

    with stdout_kept(as_json), warnings_noted():
        table = measured(tuple(models or ()), cluster, procs, budget, device, seed, out, note)
    answer(as_json, facts(table), shown(table))


def _measure_hosts(
    models: object, given: object, out: Path | None, interface: str | None, as_json: bool
) -> None:
    from apportion.cli.host_network import (
        check_hosts_request,
        measured_network,
        network_facts,
        network_shown,
    )

    check_hosts_request(models, given, out)
    assert out is not None
    with stdout_kept(as_json):
        network = measured_network(interface, out)
    if network is not None:
        answer(as_json, network_facts(network, out), network_shown(network, out))
