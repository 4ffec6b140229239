"""The command line. Exit status: 0 success, 1 the work failed, 2 the request was wrong.

Part of the room cli. Results go to stdout, everything else to stderr; with `--json` stdout is
exactly one JSON object. Commands import what they need when they are called, because torch takes
seconds and `--help` should not. Each module ..._command(s).py holds the commands that it names.
"""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from apportion.cli.look_commands import (
    clusters_command,
    models_command,
    ops_command,
    show_command,
)
from apportion.cli.loops_commands import loops_app
from apportion.cli.mesh_commands import export_command, import_command
from apportion.cli.place_commands import place_command
from apportion.cli.plan_commands import calibrate_command, compare_command, plan_command
from apportion.cli.policy_commands import policy_app
from apportion.cli.run_command import run_command
from apportion.cli.saved_plan_commands import explain_command, report_command, simulate_command
from apportion.cli.serve_command import serve_command
from apportion.place import placers_help
from apportion.search import help_text
from apportion.show import note, say
from apportion.version import VERSION
from apportion.work_clock import WORK_CLOCK

app = typer.Typer(
    name="apportion",
    help="Divides a PyTorch training step written for one device over many.",
    epilog="A first try: apportion run gpt2:tiny --procs 4 --method data --check",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits."""
    gc.set_threshold(1_000_000, 50, 50)  # torch alone is a million objects to look through
    signal.signal(signal.SIGTERM, _terminate)
    code = status(sys.argv[1:] if arguments is None else arguments)
    gc.freeze()  # the end of the process need not look through them either
    sys.exit(code)


def status(arguments: Sequence[str]) -> int:
    """Runs the command line and returns its exit status; mistakes become one line on stderr."""
    WORK_CLOCK.announce = note
    try:
        code = app(list(arguments) or ["--help"], prog_name="apportion", standalone_mode=False)
    except typer.TyperException as error:
        return _complain(error.format_message(), error.exit_code)
    except ValueError as error:
        return _complain(str(error), 2)
    except (RuntimeError, OSError) as error:
        if isinstance(error, OSError) and error.filename:  # a file that the request names
            return _complain(f"{error.filename}: {error.strerror}.", 2)
        return _complain(str(error), 1)
    except KeyboardInterrupt:
        code = 130
    if code == 130 and _TERMINATED:
        return _complain("Ended by SIGTERM.", 143)
    if code == 130:
        return _complain("Interrupted.", 130)
    return int(code or 0)


_TERMINATED: list[int] = []


def _terminate(*_: object) -> NoReturn:
    """Ends a command as Ctrl-C does: processes and temporary folders go with it."""
    _TERMINATED.append(1)
    raise KeyboardInterrupt


def _complain(text: str, code: int) -> int:
    if text:  # a group without a command has shown its help, and says no more
        note(f"apportion: {' '.join(text.split())}")
    return code


def _version(wanted: bool) -> None:
    if wanted:
        say(f"apportion {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_version, help="Print the version."),
    ] = False,
) -> None:
    pass


METHODS_HELP = f"Methods:\n\n{help_text()}"
PLACERS_HELP = f"Methods:\n\n{placers_help()}"

# In the order in which `apportion --help` lists them.
app.command("models")(models_command)
app.command("show")(show_command)
app.command("clusters")(clusters_command)
app.command("ops")(ops_command)
app.command("plan", epilog=METHODS_HELP)(plan_command)
app.command("compare", epilog=METHODS_HELP)(compare_command)
app.command("place", epilog=PLACERS_HELP)(place_command)
app.add_typer(policy_app)
app.add_typer(loops_app)
app.command("calibrate")(calibrate_command)
app.command("simulate")(simulate_command)
app.command("report")(report_command)
app.command("explain")(explain_command)
app.command("run")(run_command)
app.command("serve")(serve_command)
app.command("export")(export_command)
app.command("import")(import_command)
