"""The core of a discrete-event simulation: time, processes, signals, queues.

A process is a generator. It yields a number to let that many seconds pass, or a Signal to wait for
it. Events of the same time happen in the order in which they were asked for, so a run repeats
itself to the last bit.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Generator
from typing import Callable, Union

Action = Callable[[], None]


class Signal:
    """Fires once and resumes the processes that wait for it, in the order in which they came."""

    def __init__(self) -> None:
        self.fired = False
        self._actions: list[Action] = []

    def fire(self) -> None:
        """May be called once."""
        assert not self.fired
        self.fired = True
        for action in self._actions:
            action()
        self._actions.clear()

    def then(self, action: Action) -> None:
        """Calls `action` when the signal fires, or now if it has fired."""
        if self.fired:
            action()
        else:
            self._actions.append(action)


Process = Generator[Union[float, Signal], None, None]


class Simulator:
    """The clock, in seconds from 0, and the events to come."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Action]] = []
        self._asked = 0

    def after(self, delay: float, action: Action) -> None:
        """Calls `action` in `delay` seconds, at least 0."""
        if not delay >= 0:
            raise ValueError(f"a delay of {delay} seconds is not at least 0")
        heapq.heappush(self._heap, (self.now + delay, self._asked, action))
        self._asked += 1

    def start(self, process: Process) -> None:
        """Runs a process from now on."""
        self.after(0.0, lambda: self._advance(process))

    def run(self) -> None:
        """Runs until no event is left."""
        while self._heap:
            self.now, _, action = heapq.heappop(self._heap)
            action()

    def _advance(self, process: Process) -> None:
        try:
            waits_for = next(process)
        except StopIteration:
            return
        if isinstance(waits_for, Signal):
            waits_for.then(lambda: self._advance(process))
        else:
            self.after(waits_for, lambda: self._advance(process))


class Resource:
    """Serves one process at a time, in the order in which they asked."""

    def __init__(self) -> None:
        self._held = False
        self._queue: collections.deque[Signal] = collections.deque()

    def acquire(self) -> Signal:
        """The signal fires when the caller holds the resource; the caller then calls release()."""
        mine = Signal()
        self._queue.append(mine)
        if not self._held:
            self._serve()
        return mine

    def release(self) -> None:
        """Called by the holder."""
        assert self._held
        self._held = False
        if self._queue:
            self._serve()

    def use(self, seconds: float) -> Process:
        """Holds the resource for that long: `yield from resource.use(seconds)`."""
        yield self.acquire()
        yield seconds
        self.release()

    def _serve(self) -> None:
        self._held = True
        self._queue.popleft().fire()
