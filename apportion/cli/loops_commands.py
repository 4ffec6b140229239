"""The commands about parallel loops: loops show.

Part of the room cli. A loop in a user's file comes in; how it is divided and what a pass takes is
printed. Everything heavy is imported inside the commands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from apportion.cli.options import AsJson, ClusterName
from apportion.show import answer, stdout_kept

if TYPE_CHECKING:
    from apportion.loops import LoopExplanation, LoopPrediction, ParallelLoop

loops_app = typer.Typer(
    name="loops",
    help="Loops that keep their meaning when processes share them.\n\n"
    "Example: apportion loops show examples/sgd_mf.py:build --cluster local:2",
    no_args_is_help=True,
)

LoopName = Annotated[
    str,
    typer.Argument(
        metavar="FILE.py:LOOP",
        help="A loop made by loops.parallel, or a function that returns one and its arguments.",
    ),
]


@loops_app.callback()
def _loops() -> None:
    pass


@loops_app.command("show")
def show_loop_command(
    loop: LoopName, cluster: ClusterName = "local:2", as_json: AsJson = False
) -> None:
    """Show how a loop is divided, why, and what a pass takes on a cluster.

    The body's dependence vectors are derived from its source, and the scheme that moves the fewest
    bytes of those that keep them is simulated on the cluster; an element is timed here. Arrays
    are those of the parameters' names where the loop is defined.

    Example: apportion loops show examples/sgd_mf.py:build --cluster local:2
    """
    from apportion.machine import cluster as named_cluster

    place = named_cluster(cluster)
    with stdout_kept(as_json):
        found, arguments = _loaded(loop)
        explained = found.explain(*arguments, processes=len(place.devices))
        predicted = None
        if explained.scheme is not None:
            predicted = found.predict(place, *arguments)
    shown = [] if predicted is None else ["", str(predicted)]
    answer(as_json, _facts(explained, predicted, place.name), [str(explained), *shown])
    if predicted is None:
        raise RuntimeError("No scheme keeps the meaning of this loop.")


def _loaded(spec: str) -> tuple[ParallelLoop, tuple[Any, ...]]:
    from apportion.loops import ParallelLoop
    from apportion.zoo import made_by_file

    made = made_by_file(spec, lambda found: isinstance(found, ParallelLoop))
    loop, *arguments = made if isinstance(made, tuple) else (made,)
    if not isinstance(loop, ParallelLoop):
        raise ValueError(
            f"{spec} is not a loop: decorate its body with loops.parallel, or return the loop and "
            "its arguments"
        )
    return loop, tuple(arguments)


def _facts(
    explained: LoopExplanation, predicted: LoopPrediction | None, cluster: str
) -> dict[str, Any]:
    vectors = [
        {"array": each.array, "distance": [str(part) for part in each.distance]}
        for each in explained.analysis.dependences.vectors
    ]
    facts: dict[str, Any] = {
        "cluster": cluster,
        "scheme": None if explained.scheme is None else str(explained.scheme),
        "kind": explained.kind,
        "dependences": vectors,
        "placements": {
            name: use.placement
            for name, use in (explained.choices[0].uses.items() if explained.choices else ())
        },
        "feasible": explained.scheme is not None,
    }
    if predicted is not None:
        facts |= {
            "pass_seconds": predicted.seconds,
            "idle": predicted.idle,
            "bytes_moved": predicted.timeline.bytes_moved,
            "array_bytes": list(predicted.array_bytes),
            "imbalance": predicted.imbalance,
            "elements": predicted.elements,
        }
    return facts
