"""What happens to a launch: output, ends of processes, signals."""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Optional

from gradsync.run.output import Lines, Output, Speaker
from gradsync.run.process import Process

# Most bytes of one read, and of all reads after a process has ended: more than a pipe holds.
_READ = 1 << 16
_LAST_READ = 1 << 21


class Events:
    """Handles output and ends of processes, and tells of signals. One thread, the main one.

    A context manager: inside, the signals do nothing but reach `on_signal`.

    Attributes:
      output_error: why standard output or standard error can take no more; None: they can.
    """

    def __init__(
        self, output: Output, signals: Sequence[int], on_signal: Callable[[int], None]
    ) -> None:
        """Args are kept.

        Args:
          output: is written when it can be.
          signals: that are caught. One that is ignored already stays so, as nohup wants it.
          on_signal: is called with their numbers, within turn().
        """
        self._output = output
        self._signals = signals
        self._on_signal = on_signal
        self._processes: list[Process] = []
        self._streams: dict[int, Lines] = {}
        self.output_error: Optional[OSError] = None

    def __enter__(self) -> Events:
        self._wake, self._write_end = socket.socketpair()
        for end in (self._wake, self._write_end):
            end.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        self._handlers = {
            number: signal.signal(number, lambda *_: None)
            for number in self._signals
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._wake.close()
        self._write_end.close()

    def listen_to(self, process: Process, speaker: Speaker) -> None:
        """From now on `speaker` says what the process prints, and its end is noticed."""
        self._processes.append(process)
        self._streams[process.stdout] = Lines(speaker, 1)
        self._streams[process.stderr] = Lines(speaker, 2)

    def run_until(
        self, done: Callable[[], Any], limit_s: float, wake_on: Optional[socket.socket] = None
    ) -> bool:
        """Handles events until `done()` is true; returns False if `limit_s` seconds pass before.

        Args:
          done: is called first, and after events.
          limit_s: seconds.
          wake_on: `done` is also called when this can be read.
        """
        deadline = time.monotonic() + limit_s
        while not done():
            if time.monotonic() >= deadline:
                return False
            self.turn(deadline, wake_on)
        return True

    def turn(self, wake_at: float, wake_on: Optional[socket.socket] = None) -> None:
        """Waits for events, at most until `wake_at` by time.monotonic(), and handles them."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if wake_on is not None:
            poll.register(wake_on, select.POLLIN)
        waits_for = self._output.waits_for()
        if waits_for is not None:
            poll.register(waits_for, select.POLLOUT)
        processes = {p.pidfd: p for p in self._processes if p.status is None}
        for pidfd in processes:
            poll.register(pidfd, select.POLLIN)
        if not self._output.full:
            for stream in self._streams:
                poll.register(stream, select.POLLIN)
        limit_ms = None
        if wake_at < math.inf:
            limit_ms = 1000 * max(0.0, wake_at - time.monotonic()) + 1
        ready = [descriptor for descriptor, _ in poll.poll(limit_ms)]
        now = time.monotonic()
        for descriptor in ready:
            if descriptor in self._streams:
                self._read(descriptor, now)
            elif descriptor in processes:
                self._reap(processes[descriptor], now)
        if self._wake.fileno() in ready:
            for number in self._wake.recv(4096):
                self._on_signal(number)
        try:
            self._output.write()
        except OSError as error:
            self.output_error = error

    def _reap(self, process: Process, now: float) -> None:
        process.reap(now)
        for stream in (process.stdout, process.stderr):
            left = _LAST_READ
            while left > 0 and stream in self._streams:
                count = self._read(stream, now)
                left = left - count if count else 0
            # A process that the rank started, and that has left its group, keeps the stream open.
            if stream in self._streams:
                self._streams.pop(stream).end(now)
        process.close()

    def _read(self, stream: int, now: float) -> int:
        """Reads some bytes; returns how many. At the stream's end forgets the stream."""
        try:
            data = os.read(stream, _READ)
        except BlockingIOError:
            return 0
        if data:
            self._streams[stream].add(data, now)
        else:
            self._streams.pop(stream).end(now)
        return len(data)
