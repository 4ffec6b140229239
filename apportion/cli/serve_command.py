"""The command serve: a page on this machine to search, compare and change plans.

Part of the room cli. Everything heavy is imported inside the command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from apportion.show import note, say


def serve_command(
    plans: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[PLAN ...]", help="Plans to open at once."),
    ] = None,
    port: Annotated[
        int,
        typer.Option("--port", metavar="N", min=0, max=65535, help="0: any that is free."),
    ] = 8321,
    open_page: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in a browser.")
    ] = False,
) -> None:
    """Open a page that stays: search, compare plans, change cuts and see what that does.

    Pick a model, a cluster and a limit, and watch searches run. Click an operator to see
    how else it can be cut and what each cut would cost; keep a change, pin it, search
    again around what is pinned, and download the plan.

    The page is served to this machine alone, at an address with a token that is printed.
    Ctrl-C ends it, and all searches with it.

    Example: apportion serve

    Example: apportion serve p.json q.json --port 0
    """
    from apportion.plan import Plan
    from apportion.serve import serve

    opened = {str(path): Plan.load(path) for path in plans or ()}

    def tell(address: str) -> None:
        say(address)
        note("Ctrl-C ends it.")
        if open_page:
            import webbrowser

            webbrowser.open(address)

    try:
        serve(port, opened, tell)
    except OSError as error:
        raise ValueError(
            f"cannot serve on port {port}: {error.strerror}; try --port 0 for any that is free"
        ) from None
