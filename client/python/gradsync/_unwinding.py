"""Whether an exception is on its way out of the code that runs now."""

from __future__ import annotations

import sys
from typing import Optional

# Python's own signs that a loop or a generator is through.
_GOOD_ENDS = (GeneratorExit, StopIteration, StopAsyncIteration)


class Unwinding:
    """Notices exceptions that were raised after it was made. Used on the thread that made it.

    An exception counts from `raise` to the end of the `except` or `finally` block that it has come
    to. One that was already being handled when this object was made does not count: a program may
    do all of its work in such a block.
    """

    def __init__(self) -> None:
        self._before = id(sys.exc_info()[1])

    def error(self) -> Optional[BaseException]:
        """The exception that is being handled; None: there is none, or it is a good end."""
        error = sys.exc_info()[1]
        if error is None or id(error) == self._before or isinstance(error, _GOOD_ENDS):
            return None
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return None
        return error
