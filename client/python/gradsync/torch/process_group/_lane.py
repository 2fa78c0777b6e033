"""The threads of a group: they run what may block, in order."""

from __future__ import annotations

import collections
import threading
from typing import Callable, Optional


class Lane:
    """Runs calls one after the other, in the order of put(), on threads of its own.

    One thread at a time holds the lane. It starts with the first call: a group whose user waits for
    each operation has none. A call that is about to run code of the trainer, which may wait for
    operations behind it, steps aside. Then another thread goes on with the next call.

    The queue has no bound of its own. Each call in it is an operation that the trainer has begun,
    with the trainer's own tensors.

    Thread-safe.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        lock = threading.RLock()
        self._condition = threading.Condition(lock)
        self._settled = threading.Condition(lock)  # the lane is not busy
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._holder: Optional[int] = None  # the thread that holds the lane
        self._idle = 0
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether a call is waiting, or is running and has not stepped aside."""
        return self._holder is not None or bool(self._calls)

    def put(self, call: Callable[[], None]) -> None:
        """Runs `call`, which raises nothing, after those before it."""
        with self._condition:
            self._calls.append(call)
            self._wake()

    def step_aside(self) -> None:
        """In a call: the next one need not wait for the rest of this one."""
        with self._condition:
            if self._holder == threading.get_ident():
                self._holder = None
                self._wake()

    def settle(self, timeout: float) -> bool:
        """Waits until the lane is not busy. False: it still is after `timeout` seconds."""
        with self._condition:
            return self._settled.wait_for(lambda: not self.busy, timeout)

    def close(self) -> None:
        """Ends the threads after the calls that are in the queue."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _wake(self) -> None:
        if self._holder is not None:
            return
        if not self._calls:
            self._settled.notify_all()
            return
        if self._idle > 0:
            self._condition.notify()
        else:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        while (call := self._take()) is not None:
            call()
            del call  # it holds tensors
            with self._condition:
                if self._holder == threading.get_ident():
                    self._holder = None
                    if not self._calls:
                        self._settled.notify_all()

    def _take(self) -> Optional[Callable[[], None]]:
        with self._condition:
            while self._holder is not None or not self._calls:
                if self._closed and not self._calls:
                    return None
                self._idle += 1
                self._condition.wait()
                self._idle -= 1
            self._holder = threading.get_ident()
            return self._calls.popleft()
