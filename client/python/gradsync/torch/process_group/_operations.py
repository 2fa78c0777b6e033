"""Operations of a group that are under way."""

from __future__ import annotations

import threading
import time
from typing import Callable, Optional, Protocol

import gradsync


class Operation(Protocol):
    """One collective of this rank. Thread-safe."""

    def finish(self, timeout: Optional[float]) -> bool:
        """Waits until the result is in the caller's tensors.

        Args:
          timeout: seconds; None: the operation's own.

        Returns:
          False if it is not there within `timeout`.

        Raises:
          gradsync.Error: the operation has failed; again in each call.
        """


# Takes the error of an operation, ends the group's session, and returns what to raise.
Fail = Callable[[BaseException], BaseException]


class QueuedOperation:
    """An operation that the group's lane carries out when its turn comes."""

    def __init__(self, body: Callable[[], None], fail: Fail) -> None:
        """Args: body: blocks until the result is in the tensors, or raises."""
        self._body: Optional[Callable[[], None]] = body
        self._fail: Optional[Fail] = fail
        self._ended = threading.Event()
        self._error: Optional[BaseException] = None

    def run(self) -> None:
        """On the group's lane: carries it out."""
        assert self._body is not None and self._fail is not None
        try:
            self._body()
        except BaseException as error:
            self._error = self._fail(error)
        self._body = self._fail = None
        self._ended.set()

    def finish(self, timeout: Optional[float]) -> bool:
        """See Operation. The body has a time-out of its own."""
        if not self._ended.wait(timeout):
            return False
        if self._error is not None:
            raise self._error
        return True


class StartedOperation:
    """An operation whose data the daemon has; the first caller of finish() fetches the result."""

    def __init__(self, fetch: Callable[[float], None], timeout: float, fail: Fail) -> None:
        """Args: fetch: blocks for at most so many seconds; timeout: the operation's, from now."""
        self._fetch: Optional[Callable[[float], None]] = fetch
        self._fail: Optional[Fail] = fail
        self._deadline = time.monotonic() + timeout
        self._lock = threading.Lock()
        self._error: Optional[BaseException] = None

    @property
    def ended(self) -> bool:
        """Whether finish() has returned True, or raised."""
        return self._fetch is None

    def finish(self, timeout: Optional[float]) -> bool:
        """See Operation."""
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            return False
        try:
            if self._fetch is not None:
                left = max(0.0, self._deadline - time.monotonic())
                if not self._try(left if timeout is None else min(timeout, left), left):
                    return False
            if self._error is not None:
                raise self._error
            return True
        finally:
            self._lock.release()

    def _try(self, seconds: float, left: float) -> bool:
        assert self._fetch is not None and self._fail is not None
        try:
            self._fetch(seconds)
        except gradsync.DeadlineExceededError as error:
            if error.reason == gradsync.Reason.WAIT_TIMEOUT and seconds < left:
                return False
            self._error = self._fail(error)
        except gradsync.Error as error:
            self._error = self._fail(error)
        self._fetch = self._fail = None
        return True
