"""The number of examples that a property test tries."""

from __future__ import annotations

import os
from typing import Final

_TIMES: Final = float(os.environ.get("GRADSERVER_TEST_EXAMPLES", "0.4"))
"""The fast suite tries a share of the examples, as it is to take some minutes.

`make test-long`, which selects these tests by the mark that hypothesis gives them, tries ten times the full number.
"""


def examples(count: int) -> int:
    """Return ``count``, times the environment's factor."""
    return max(1, round(count * _TIMES))
