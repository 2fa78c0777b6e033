"""Progress of long work, on standard error."""

from __future__ import annotations

import sys
import time

# How often a log, which keeps every line, gets one.
_LOG_EVERY_S = 15.0


class Progress:
    """One line that is rewritten on a terminal; a line now and then in a log."""

    def __init__(self, total: int) -> None:
        """Args: total: how much work there is, in any unit."""
        self._total = total
        self._done = 0
        self._start = time.monotonic()
        self._last = 0.0
        self._terminal = sys.stderr.isatty()

    def say(self, text: str) -> None:
        """Shows what is being done."""
        if self._terminal:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def done(self, what: str, amount: int = 1) -> None:
        """`amount` more of the work is done; it belongs to `what`."""
        self._done += amount
        now = time.monotonic()
        left = (now - self._start) / self._done * (self._total - self._done)
        if not self._terminal and now - self._last < _LOG_EVERY_S:
            return
        self._last = now
        self.say(f"{what}: {100 * self._done // self._total} %, {left:.0f} s left")

    def end(self) -> None:
        """Leaves the terminal clean."""
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
