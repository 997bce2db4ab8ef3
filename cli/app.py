"""``hess``: its commands, and the exit code of whatever they raise."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Annotated

import typer

from hesscore import __version__
from hesscore.errors import HessError

from .analyze import analyze
from .render import message
from .verify import verify

# One function a command, one file a function. A command imports torch and the heavy parts of hesscore inside
# its function, because `hess --help` imports all these files.
COMMANDS: tuple[Callable[..., None], ...] = (analyze, verify)

# Plain help: the same in a pipe as on a terminal, errors on one line, and rich need not be loaded for it.
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
for command in COMMANDS:
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hess {__version__}")
        raise typer.Exit


@app.callback()
def hess(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Exact curvature (Hessians) of Transformers."""


def main() -> None:
    """Run ``hess``. What a user can mend ends in one line and its own code; all else is a fault in hess."""
    if hasattr(signal, "SIGPIPE"):
        # A reader that has seen enough (`| head`) ends hess quietly, as it ends any other filter.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        app(prog_name="hess")
    except Exception as error:
        if os.environ.get("HESS_DEBUG") == "1":
            traceback.print_exc()
        if isinstance(error, HessError):
            message(f"hess: {error}")
            sys.exit(error.code)
        message(f"hess: {type(error).__name__}: {error} (a fault in hess; HESS_DEBUG=1 prints the traceback)")
        sys.exit(HessError.code)
    except SystemExit as exit:
        if exit.code == 130:
            # The interrupt may have struck a thread pool that held its lock: Python's exit would wait for it for ever.
            sys.stdout.flush()
            os._exit(130)
        raise
