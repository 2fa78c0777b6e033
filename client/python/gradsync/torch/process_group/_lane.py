"""The lane of a group: it runs what may block, in order."""

from __future__ import annotations

import collections
import contextlib
import threading
from typing import Callable, Optional

from gradsync.torch.process_group import _threads


class Lane:
    """Runs calls one after the other, in the order of put(), on threads that all groups share.

    A lane has a thread while it has calls. A call that is about to run code of the trainer, which
    may wait for operations behind it, steps aside. Then another thread goes on with the next call.

    The queue has no bound of its own. Each call in it is an operation that the trainer has begun,
    with the trainer's own tensors.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._settled = threading.Condition(threading.RLock())  # the lane is not busy
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        # What runs the calls; a new one where a call has stepped aside.
        self._runner: Optional[_Runner] = None

    @property
    def busy(self) -> bool:
        """Whether a call is waiting, or is running and has not stepped aside."""
        return self._runner is not None

    def put(self, call: Callable[[], None]) -> None:
        """Runs `call`, which raises nothing, after those before it.

        Raises:
          RuntimeError: the system starts no more threads; the call is not in the lane.
        """
        with self._settled:
            self._calls.append(call)
            if self._runner is None:
                try:
                    self._go_on()
                except BaseException:
                    self._calls.pop()
                    raise

    def step_aside(self) -> None:
        """In a call: the next one need not wait for the rest of this one."""
        with self._settled:
            if self._runner is not None and self._runner.thread == threading.get_ident():
                # RuntimeError: no more threads; this one goes on with the next call later.
                with contextlib.suppress(RuntimeError):
                    self._go_on()

    def settle(self, timeout: float) -> bool:
        """Waits until the lane is not busy. False: it still is after `timeout` seconds."""
        with self._settled:
            return self._settled.wait_for(lambda: not self.busy, timeout)

    def _go_on(self) -> None:
        """Leaves the calls that wait to a new runner. Under the lock."""
        if self._calls:
            runner = _Runner(self)
            _threads.threads.run(runner.run)
            self._runner = runner
        else:
            self._runner = None
            self._settled.notify_all()

    def _next(self, runner: _Runner) -> Optional[Callable[[], None]]:
        """The runner's next call; None: it has stepped aside, or no call is left."""
        with self._settled:
            if self._runner is not runner:
                return None
            if not self._calls:
                self._go_on()
                return None
            return self._calls.popleft()


class _Runner:
    """Runs the calls of a lane until one steps aside, or none is left."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self.thread: Optional[int] = None

    def run(self) -> None:
        self.thread = threading.get_ident()
        while (call := self._lane._next(self)) is not None:
            call()
            del call  # it holds tensors
