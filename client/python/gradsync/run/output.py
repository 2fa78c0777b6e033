"""What the launcher shows: whole lines, each with its rank in front."""

from __future__ import annotations

import collections
import os
import select
from typing import Optional

_LONGEST_LINE = 1 << 16
_MOST_QUEUED = 1 << 20
_LINES_KEPT = 20
# A pipe that is ready to be written takes this many bytes without blocking (PIPE_BUF).
_CHUNK = 4096
_PROGRESS_S = 5.0
# Cyan, magenta, yellow, blue, green, and the same bright. Red is for errors.
_COLOURS = ("36", "35", "33", "34", "32", "96", "95", "93", "94", "92")
_TRACEBACK = b"Traceback (most recent call last)"


class Output:
    """Writes lines to standard output and standard error, in order, and never blocks. One thread.

    The queue is bounded only if the caller reads no output of processes while it is `full`.
    """

    def __init__(self) -> None:
        self._queue: collections.deque[tuple[int, bytes]] = collections.deque()
        self._bytes = 0
        self._coloured = {descriptor: _takes_colour(descriptor) for descriptor in (1, 2)}

    @property
    def full(self) -> bool:
        return self._bytes >= _MOST_QUEUED

    def waits_for(self) -> Optional[int]:
        """The file descriptor that has to take the next bytes; None: there are none."""
        return self._queue[0][0] if self._queue else None

    def coloured(self, descriptor: int, colour: str, text: bytes) -> bytes:
        """The text in a colour, where the descriptor is a terminal that shows it."""
        if not self._coloured[descriptor]:
            return text
        return b"\033[" + colour.encode() + b"m" + text + b"\033[0m"

    def add(self, descriptor: int, line: bytes) -> None:
        """Queues a line, without its line feed."""
        self._queue.append((descriptor, line + b"\n"))
        self._bytes += len(line) + 1

    def say(self, text: str) -> None:
        """Queues a message of the launcher itself."""
        self.add(2, self.coloured(2, "1", b"gradsync.run:") + b" " + _encode(text))

    def write(self) -> None:
        """Writes what can be written now.

        Raises:
          OSError: nobody reads any more, or the disk is full. The queue is empty then.
        """
        while self._queue:
            descriptor, data = self._queue[0]
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            if not poll.poll(0):
                return
            try:
                count = os.write(descriptor, data[:_CHUNK])
            except OSError:
                self._queue.clear()
                self._bytes = 0
                raise
            self._bytes -= count
            if count == len(data):
                self._queue.popleft()
            else:
                self._queue[0] = (descriptor, data[count:])


class Speaker:
    """What one process prints. It goes to the output, and its last lines are kept.

    Attributes:
      last_lines: without the name in front.
      traceback_at: when its last traceback was read; None: there was none.
    """

    def __init__(self, output: Output, name: str, number: Optional[int]) -> None:
        """Args are kept.

        Args:
          output: where it is shown.
          name: what is put in front of every line.
          number: chooses the colour; None: nothing is shown.
        """
        self._output = output
        self._shown = number is not None
        self._name = f"{name} |".encode()
        self._colour = _COLOURS[(number or 0) % len(_COLOURS)]
        self.last_lines: collections.deque[str] = collections.deque(maxlen=_LINES_KEPT)
        self.traceback_at: Optional[float] = None

    def say(self, descriptor: int, line: bytes, now: float) -> None:
        """One line, for standard output (1) or standard error (2)."""
        if _TRACEBACK in line:
            self.traceback_at = now
        self.last_lines.append(line.decode(errors="replace"))
        if self._shown:
            name = self._output.coloured(descriptor, self._colour, self._name)
            self._output.add(descriptor, name + (b" " + line if line else b""))


class Lines:
    """Cuts one stream of a process into lines.

    While carriage returns overwrite a line, as in a progress bar, it is shown at most every 5 s.
    """

    def __init__(self, speaker: Speaker, descriptor: int) -> None:
        """Args are kept; the descriptor is 1 for standard output, 2 for standard error."""
        self._speaker = speaker
        self._descriptor = descriptor
        self._rest = b""
        self._progress_due = 0.0

    def add(self, data: bytes, now: float) -> None:
        """Bytes that the process has written, and when they are read, by time.monotonic()."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._say(line, now)
        if b"\r" in self._rest:
            # Everything before the last text is overwritten already.
            text = self._rest.rstrip(b"\r")
            overwritten, _, last = text.rpartition(b"\r")
            self._rest = last + self._rest[len(text) :][:1]
            if overwritten and now >= self._progress_due:
                self._progress_due = now + _PROGRESS_S
                self._say(overwritten, now)
        while len(self._rest) > _LONGEST_LINE:
            self._speaker.say(self._descriptor, self._rest[:_LONGEST_LINE], now)
            self._rest = self._rest[_LONGEST_LINE:]

    def end(self, now: float) -> None:
        """The stream has ended, perhaps within a line."""
        if self._rest.strip(b"\r"):
            self._say(self._rest, now)
        self._rest = b""

    def _say(self, line: bytes, now: float) -> None:
        # What a terminal would show in the end.
        shown = line.rstrip(b"\r").rpartition(b"\r")[2]
        for start in range(0, max(1, len(shown)), _LONGEST_LINE):
            self._speaker.say(self._descriptor, shown[start : start + _LONGEST_LINE], now)


def _takes_colour(descriptor: int) -> bool:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not plain and os.isatty(descriptor)


def _encode(text: str) -> bytes:
    return text.encode(errors="surrogateescape")
