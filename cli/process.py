"""What hess needs of its process: a stdout that says when it fails, a stderr that never does, and Ctrl-C."""

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from hesscore.errors import UsageError


def prepare() -> None:
    """Take over the streams and Ctrl-C, which ends hess at once until there is something to keep.

    ``UsageError`` where there is no stdout: the first file that is opened would become it.
    """
    if sys.stderr is None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # or the first file that is opened would become it
        sys.stderr = os.fdopen(2, "w")
    else:
        sys.stderr = _Stderr(sys.stderr.buffer, sys.stderr.encoding, sys.stderr.errors, line_buffering=True)
    on_interrupt(_leave)
    # Threads that wait for work would spin, and take the cores from those that work on parts of the data.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if sys.stdout is None:
        raise UsageError("stdout is closed: send it to /dev/null if nobody reads it")
    terminal = sys.stdout.isatty()
    sys.stdout = _Stdout(sys.stdout.buffer, sys.stdout.encoding, "backslashreplace", line_buffering=terminal)


def keep_on_interrupt() -> None:
    """From here on Ctrl-C raises ``KeyboardInterrupt``: call it once there is something to finish or to clean up."""
    on_interrupt(signal.default_int_handler)


def on_interrupt(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> None:
    """Set what Ctrl-C does, unless hess was started to ignore it, as in the background of a script."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)


def _leave(signum: int, frame: FrameType | None) -> None:
    """Not an exception, which the imports of torch and numpy turn into others; nor print, which it may interrupt."""
    with suppress(OSError):
        os.write(2, b"interrupted: nothing is finished\n")
    os._exit(130)


class _Stdout(io.TextIOWrapper):
    """A failure to write is the user's to mend; a reader that has seen enough (`| head`) ends hess quietly."""

    def write(self, text: str) -> int:
        with _mendable():
            return super().write(text)

    def flush(self) -> None:
        with _mendable():
            super().flush()


@contextmanager
def _mendable() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # ended by the signal, as any other filter; another pipe's reader does not end hess
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.raise_signal(signal.SIGPIPE)
    except OSError as error:
        raise UsageError(f"stdout: cannot be written: {error.strerror}") from error


class _Stderr(io.TextIOWrapper):
    """Where nothing can be said, the work goes on."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()
