"""Time-outs: seconds in Python, nanoseconds in the library."""

from __future__ import annotations

import math
from typing import Optional

from gradsync import errors
from gradsync.reason import Reason

# GRADSYNC_FOREVER in gradsync.h.
FOREVER = 2**63 - 1
# Nanoseconds; the default of the C++ interface for operations of the job: 30 min.
OPERATION = 30 * 60 * 10**9


def nanoseconds(seconds: Optional[float], name: str, *, default: int) -> int:
    """`seconds` in nanoseconds, rounded up; `default` for None.

    Raises:
      InvalidArgumentError: it is negative or not a number; the message says `name`.
    """
    if seconds is None:
        return default
    if math.isnan(seconds) or seconds < 0:
        raise errors.InvalidArgumentError(
            f"{name} is {seconds}; give seconds, at least 0, or None", reason=Reason.MALFORMED
        )
    if seconds >= FOREVER / 1e9:
        return FOREVER
    return math.ceil(seconds * 1e9)
