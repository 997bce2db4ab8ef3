"""Numbers as a person reads them, with their errors."""

from __future__ import annotations

from math import ceil, isfinite
from typing import NamedTuple


class Measured(NamedTuple):
    """A number with its error, shown to four digits: ``2.374(3)`` is 2.374 within 0.003, ``2.374`` within 0.001.

    Errors are rounded up, and hold what is lost by rounding the value.
    """

    value: float | None
    error: float | None = 0.0

    def __str__(self) -> str:
        if self.value is None or self.error is None:
            return "-"
        if not (isfinite(self.value) and isfinite(self.error)):
            return f"{self.value:g} ± {self.error:g}"
        if self.value == self.error == 0:
            return "0"
        exponent = _exponent(max(abs(self.value), self.error), digits=4)
        shift = 0 if -4 < exponent < 6 else exponent
        value, error = self.value / 10.0**shift, self.error / 10.0**shift
        last = exponent - shift - 3  # the decimal place of the fourth digit
        doubt = ""
        if error > 0.5 * 10.0**last:
            last = max(last, _exponent(error, digits=1))
            lost = abs(round(value, -last) - value)
            doubt = f"({ceil((error + lost) / 10.0**last - 1e-9) * 10 ** max(last, 0)})"
        power = f"e{shift:+d}" if shift else ""
        return f"{round(value, -last) + 0.0:.{max(-last, 0)}f}{doubt}{power}"  # + 0.0: there is no -0


def _exponent(size: float, digits: int) -> int:
    """The power of ten of a number that is rounded to so many digits."""
    return int(f"{size:.{digits - 1}e}".partition("e")[2])
