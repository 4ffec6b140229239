"""The commands about a saved plan: simulate, report and explain. They need no model.

Part of the room cli. A file of a Plan comes in. Everything heavy is imported inside the commands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from apportion.cli.options import AsJson, Budget, CostsFile, PlanFile, Trace
from apportion.cli.requests import check_outputs
from apportion.show import answer, note, plan_facts, plan_tables, say, stdout_kept, why_facts


def simulate_command(
    plan: PlanFile,
    trace: Trace = None,
    chakra: Annotated[
        Path | None,
        typer.Option("--chakra", metavar="DIR", help="Write Chakra execution traces there too."),
    ] = None,
    costs: CostsFile = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a saved plan; neither the model nor a device is needed.

    A plan has the costs that it was made with. What --costs says counts for more.

    Example: apportion simulate p.json --trace p.trace.json
    """
    from apportion.plan import Plan, with_costs
    from apportion.show import export

    check_outputs(trace, inputs=(plan, costs))
    with stdout_kept(as_json):
        made = Plan.load(plan)
        made = (made if costs is None else with_costs(made, costs)).simulate()
        if trace is not None:
            made.trace(trace)
        if chakra is not None:
            paths = export(made.timeline, made.tasks, made.space.graph, chakra)
            note(f"wrote {paths[0]} to {paths[-1].name}")
    answer(as_json, plan_facts(made) | why_facts(made), plan_tables.planned(made))


def report_command(
    plan: PlanFile,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="PAGE", help="The page to write.")],
    trace: Trace = None,
) -> None:
    """Write a saved plan as one HTML page: timeline, memory, traffic, the choice of each operator.

    Example: apportion report p.json -o p.html --trace p.trace.json
    """
    from apportion.plan import Plan

    check_outputs(out, trace, inputs=(plan,))
    made = Plan.load(plan)
    made.report(out)
    say(f"wrote {out}")
    if trace is not None:
        made.trace(trace)
        say(f"wrote {trace}")


def explain_command(
    plan: PlanFile,
    op: Annotated[str, typer.Argument(metavar="OP", help="An operator, its number, or a module.")],
    alternatives: Annotated[
        int, typer.Option("--alternatives", metavar="N", min=1, help="How many to show.")
    ] = 12,
    budget: Budget = 10.0,
    as_json: AsJson = False,
) -> None:
    """Say why an operator of a saved plan is divided as it is, and what else it would cost.

    Each alternative is simulated, for the operator alone and with its group (its backward
    operators and the updates of its parameters); of a module it is the heaviest operator.

    Example: apportion explain p.json blocks.0.attn.qkv
    """
    from apportion.cli.explain_plan import explained

    with stdout_kept(as_json):
        facts, shown = explained(plan, op, alternatives, budget, not as_json)
    answer(as_json, facts, [shown])
