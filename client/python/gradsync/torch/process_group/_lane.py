"""The thread of a group: runs what may block, in order."""

from __future__ import annotations

import queue
import threading
from typing import Callable, Optional


class Lane:
    """Runs calls one after the other, in the order of put(), on a thread of its own.

    The thread starts with the first call: a group whose user waits for each of its operations has
    none. The queue has no bound of its own. Each call in it is an operation that the trainer has
    begun, with the trainer's own tensors.

    Thread-safe.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Optional[Callable[[], None]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unfinished = 0
        self._thread: Optional[threading.Thread] = None

    @property
    def busy(self) -> bool:
        """Whether a call is waiting or running."""
        return self._unfinished > 0

    def put(self, call: Callable[[], None]) -> None:
        """Runs `call`, which raises nothing, after those before it."""
        with self._lock:
            self._unfinished += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._calls.put(call)

    def close(self) -> None:
        """Ends the thread after the calls that are in the queue."""
        with self._lock:
            if self._thread is not None:
                self._calls.put(None)
                self._thread = None

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # it holds tensors
            with self._lock:
                self._unfinished -= 1
