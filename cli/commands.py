"""The commands of ``hess``."""

from collections.abc import Callable
from typing import Annotated

import typer

from hesscore import __version__

from .analyze import analyze
from .bench import bench
from .bounds import bounds
from .describe import describe
from .diff import diff
from .plot import plot
from .scaling import scaling
from .verify import verify

# One function a command, one file a function. A command imports torch and the heavy parts of hesscore inside
# its function, because `hess --help` imports all these files.
COMMANDS: tuple[Callable[..., None], ...] = (
    analyze,
    bounds,
    describe,
    verify,
    diff,
    plot,
    scaling,
    bench,
)

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
