"""The last exception, which an interactive shell keeps with all frames that it went through."""

from __future__ import annotations

import gc
import sys
import traceback


def free_its_objects() -> None:
    """Frees what only that exception's frames, or garbage, still hold.

    After an error a notebook's user may delete a wrapper, and not know that these frames hold it. A
    debugger that looks at the exception afterwards finds the frames, without local variables.
    """
    exceptions = [getattr(sys, name, None) for name in ("last_exc", "last_value")]
    seen: set[int] = set()
    while exceptions:
        exception = exceptions.pop()
        if exception is None or id(exception) in seen:
            continue
        seen.add(id(exception))
        traceback.clear_frames(exception.__traceback__)
        exceptions += [exception.__cause__, exception.__context__]
    gc.collect()
