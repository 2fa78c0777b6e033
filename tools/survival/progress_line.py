"""Progress of long work, on standard error."""

from __future__ import annotations

import sys
import time

# How often a log, which keeps every line, gets one.
_LOG_EVERY_S = 15.0
_TERMINAL_EVERY_S = 0.1


class ProgressLine:
    """One line that is rewritten on a terminal; a line now and then in a log."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = time.monotonic()

    def show(self, text: str) -> None:
        """Shows what is being done, unless it did so a moment ago."""
        now = time.monotonic()
        if now - self._last < (_TERMINAL_EVERY_S if self._terminal else _LOG_EVERY_S):
            return
        self._last = now
        if self._terminal:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Leaves the terminal clean."""
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
