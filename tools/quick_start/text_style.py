"""How the quick start writes: colors, check marks and a progress bar, where they can be shown."""

from __future__ import annotations

import os
import sys
from typing import Any

_BAR_COLUMNS = 32
_PLAIN_LINES = 6


class TextStyle:
    """What standard output can show.

    Attributes:
      terminal: whether lines can be rewritten.
      unicode: whether it takes UTF-8; where no locale is set it nearly always does.
    """

    def __init__(self) -> None:
        locale = next(
            filter(None, (os.environ.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG"))), ""
        )
        self.unicode = locale not in ("C", "POSIX")
        self.terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._color = self.terminal and not os.environ.get("NO_COLOR")

    def bold(self, text: str) -> str:
        return self._paint("1", text)

    def dim(self, text: str) -> str:
        return self._paint("2", text)

    def mark(self, good: bool) -> str:
        """Whether a check holds."""
        text = ("✓" if good else "✗") if self.unicode else ("ok" if good else "WRONG")
        return self._paint("32" if good else "31", text)

    def bad(self, text: str) -> str:
        """What went wrong, or was made to."""
        return self._paint("31", text)

    def bar(self, done: int, total: int) -> str:
        filled = min(done, total) * _BAR_COLUMNS // total
        full, left = ("━", "─") if self.unicode else ("=", "-")
        return self._paint("32", full * filled) + self.dim(left * (_BAR_COLUMNS - filled))

    def _paint(self, ansi: str, text: str) -> str:
        return f"\033[{ansi}m{text}\033[0m" if self._color else text


class Progress:
    """A bar on a terminal, else a line now and then."""

    def __init__(self, steps: int, style: TextStyle) -> None:
        self._steps = steps
        self._style = style
        self._next_line = 1
        self._shown = -1

    def show(self, report: dict[str, Any]) -> None:
        """Shows a report of a trainer; ignores its last one, which has no "step"."""
        if "step" not in report:
            return
        step = report["step"]
        figures = f"loss {report['loss']:.4f}   test accuracy {report['accuracy']:.1f} %"
        if self._style.terminal:
            bar = self._style.bar(step, self._steps)
            end = "\n" if step >= self._steps else ""
            print(f"\r\033[K  {bar}  {step}/{self._steps}   {figures}", end=end, flush=True)
        elif step >= min(self._next_line, self._steps):
            self._next_line = step + max(1, self._steps // _PLAIN_LINES)
            print(f"  step {step} of {self._steps}   {figures}")

    def show_step(self, step: int) -> None:
        """Shows the step alone, again only when it has changed."""
        step = min(step, self._steps)
        if step == self._shown:
            return
        self._shown = step
        if self._style.terminal:
            bar = self._style.bar(step, self._steps)
            print(f"\r\033[K  {bar}  {step}/{self._steps}", end="", flush=True)
        elif step >= self._next_line:
            self._next_line = step + max(1, self._steps // _PLAIN_LINES)
            print(f"  step {step} of {self._steps}")

    def say(self, text: str) -> None:
        """Shows a line that stays."""
        start = "\r\033[K" if self._style.terminal else ""
        print(f"{start}{text}", flush=True)
        self._shown = -1

    def end(self) -> None:
        """After show_step(): the work is done."""
        if self._style.terminal:
            bar = self._style.bar(self._steps, self._steps)
            print(f"\r\033[K  {bar}  {self._steps}/{self._steps}", flush=True)
