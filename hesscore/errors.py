"""What can go wrong for a user: each kind has the exit code that ``hess`` leaves with.

Messages are one line and say what to do. Anything else that is raised is a fault in hess.
"""

from typing import ClassVar


class HessError(Exception):
    """Raise one of the subclasses; the code of this base says that nobody did."""

    code: ClassVar[int] = 70


class UsageError(HessError):
    """The command line, a setting or a call asks for something that cannot be done."""

    code = 2


class InputError(HessError):
    """The input cannot be read, or nothing in it can be analysed."""

    code = 3
