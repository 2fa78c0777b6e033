"""Time-outs: seconds in Python, nanoseconds in the library."""

from __future__ import annotations

import math
from typing import Optional

from gradsync import errors

# GRADSYNC_FOREVER in gradsync.h.
FOREVER = 2**63 - 1
# What the C++ interface takes for operations of the job.
OPERATION = 30 * 60 * 10**9


def nanoseconds(seconds: Optional[float], name: str, *, default: int) -> int:
    """Nanoseconds of `seconds`, rounded up; `default` for None.

    Raises:
      InvalidArgumentError: negative or not a number; `name` is the argument's.
    """
    if seconds is None:
        return default
    if math.isnan(seconds) or seconds < 0:
        raise errors.InvalidArgumentError(
            f"{name} is {seconds}: give seconds, not negative, or None", reason="MALFORMED"
        )
    if seconds >= FOREVER / 1e9:
        return FOREVER
    return math.ceil(seconds * 1e9)
