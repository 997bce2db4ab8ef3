"""Pictures, a page and a summary of a report, from its content alone: what its JSON holds."""

from collections.abc import Mapping
from typing import Any

Content = Mapping[str, Any]
"""The JSON of a report."""
