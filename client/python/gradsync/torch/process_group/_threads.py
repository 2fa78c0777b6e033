"""Threads for what may block, shared by all groups of the process."""

from __future__ import annotations

import os
import queue
import threading
from typing import Callable, Optional

Call = Callable[[], None]

# Seconds after which a thread without work ends.
IDLE_S = 5.0


class Threads:
    """Runs each call at once: on the thread that became idle last, else on a new one.

    So there are as many threads as calls that run at the same time. A thread that has had no work
    for IDLE_S ends. They are daemon threads: a call that waits for a lost rank does not keep the
    process from ending.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._idle: list[queue.SimpleQueue[Call]] = []  # of each idle thread; the last one is next

    def run(self, call: Call) -> None:
        """Runs `call`, which raises nothing.

        Raises:
          RuntimeError: the system starts no more threads.
        """
        with self._lock:
            calls = self._idle.pop() if self._idle else None
            if calls is not None:
                calls.put(call)
                return
        threading.Thread(
            target=self._serve, args=(call,), name="gradsync-groups", daemon=True
        ).start()

    def _serve(self, call: Optional[Call]) -> None:
        calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        while call is not None:
            call()
            del call  # it holds tensors
            with self._lock:
                self._idle.append(calls)
            call = self._next(calls)

    def _next(self, calls: queue.SimpleQueue[Call]) -> Optional[Call]:
        try:
            return calls.get(timeout=IDLE_S)
        except queue.Empty:
            with self._lock:
                if calls in self._idle:
                    self._idle.remove(calls)
                    return None
        return calls.get()  # run() has chosen this thread


threads = Threads()


def _after_fork() -> None:
    """A child has none of its parent's threads."""
    global threads
    threads = Threads()


os.register_at_fork(after_in_child=_after_fork)
