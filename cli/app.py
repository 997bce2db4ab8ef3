"""``hess``: the process it runs in, and the exit code of whatever is raised in it."""

import os
import signal
import sys
import traceback

from hesscore.errors import HessError

from .process import on_interrupt, prepare
from .render import message


def main() -> None:
    """Run ``hess`` and leave with its code.

    Python's own way out would wait for ever for a thread pool whose lock an interrupt has left taken.
    """
    os._exit(_run())


def _run() -> int:
    """The code. What a user can mend ends in one line and its own code; all else is a fault in hess."""
    try:
        prepare()
        try:
            from .commands import app  # not before Ctrl-C is prepared for: it takes a while

            app(prog_name="hess")
        finally:
            on_interrupt(signal.SIG_DFL)  # nothing is left to keep
            sys.stdout.flush()
    except SystemExit as exit:
        return int(exit.code or 0)
    except Exception as error:
        if os.environ.get("HESS_DEBUG") == "1":
            traceback.print_exc()
        if isinstance(error, HessError):
            message(f"hess: {error}")
            return error.code
        message(f"hess: {type(error).__name__}: {error} (a fault in hess; HESS_DEBUG=1 prints the traceback)")
        return HessError.code
    return 0
