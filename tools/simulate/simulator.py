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
    """Fires once; whoever waits for it then goes on, in the order in which they came."""

    def __init__(self) -> None:
        self.fired = False
        self._actions: list[Action] = []

    def fire(self) -> None:
        """Once only."""
        assert not self.fired
        self.fired = True
        for action in self._actions:
            action()
        self._actions.clear()

    def then(self, action: Action) -> None:
        """Calls `action` when it fires, or now if it has."""
        if self.fired:
            action()
        else:
            self._actions.append(action)


Process = Generator[Union[float, Signal], None, None]


class Simulator:
    """The clock, in seconds from 0, and what is still to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Action]] = []
        self._asked = 0

    def after(self, delay: float, action: Action) -> None:
        """Calls `action` in `delay` seconds, at least 0."""
        if not delay >= 0:
            raise ValueError(f"{delay} seconds from now is no time to come")
        heapq.heappush(self._heap, (self.now + delay, self._asked, action))
        self._asked += 1

    def start(self, process: Process) -> None:
        """Runs a process from now on."""
        self.after(0.0, lambda: self._advance(process))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._heap:
            self.now, _, action = heapq.heappop(self._heap)
            self.events += 1
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
    """Serves one at a time, in the order in which they asked.

    Attributes:
      busy: seconds in which somebody held it.
      served: how many have held it.
    """

    def __init__(self, simulator: Simulator) -> None:
        self.busy = 0.0
        self.served = 0
        self._simulator = simulator
        self._held = False
        self._since = 0.0
        self._queue: collections.deque[Signal] = collections.deque()

    def acquire(self) -> Signal:
        """Fires when it is the caller's, who then has to release() it."""
        mine = Signal()
        self._queue.append(mine)
        if not self._held:
            self._serve()
        return mine

    def release(self) -> None:
        """By the one who holds it."""
        assert self._held
        self.busy += self._simulator.now - self._since
        self._held = False
        if self._queue:
            self._serve()

    def use(self, seconds: float) -> Process:
        """Holds it for that long: `yield from resource.use(seconds)`."""
        yield self.acquire()
        yield seconds
        self.release()

    def _serve(self) -> None:
        self._held = True
        self._since = self._simulator.now
        self.served += 1
        self._queue.popleft().fire()
