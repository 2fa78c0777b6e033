"""The work of a collective that the inner group carries out."""

from __future__ import annotations

import datetime
import threading
import time
from typing import Any, Callable, Optional

import torch

import gradsync
from gradsync import _notices
from gradsync.torch.process_group._contiguous import ContiguousArguments
from gradsync.torch.process_group._kept_work import KeptWork
from gradsync.torch.process_group._membership import Membership

# Between two looks whether the session has ended: Gloo itself learns nothing of that.
_LOOK = datetime.timedelta(milliseconds=100)


class ForwardedWork(KeptWork):
    """Waits for the inner work, or for the end of the session.

    If another rank calls another collective, or is lost, the daemon ends the session. Gloo would
    wait for its own time-out. The daemon also names the ranks that are late. Thread-safe, as
    PyTorch's works are.

    Args:
      work: the inner group's.
      arguments: get the results.
      membership: of the group; None: a group of one rank.
      collective: False: a message between two ranks, for which only the inner work counts.
      then: what is left to do when the result is there.
    """

    def __init__(
        self,
        work: Any,
        arguments: ContiguousArguments,
        membership: Optional[Membership],
        collective: bool,
        then: Optional[Callable[[], None]],
    ) -> None:
        super().__init__()
        self._work = work
        self._arguments = arguments
        self._membership = membership
        self._collective = collective
        self._then = then
        self._lock = threading.Lock()
        self._finished = False
        self._failure: Optional[RuntimeError] = None  # of the inner work
        self._future: Optional[torch.futures.Future[Any]] = None

    def wait(self, timeout: Optional[datetime.timedelta] = None) -> bool:
        """Waits until the result is in the tensors.

        Raises:
          gradsync.Error: the session has ended.
          RuntimeError: the inner group's error.
        """
        try:
            if not self._collective:
                self._work.wait(timeout) if timeout else self._work.wait()
            else:
                self._wait_and_look(timeout)
        except gradsync.Error:
            raise
        except RuntimeError as error:
            if self._work.is_completed():
                self._failure = error
            if self._membership is not None:
                self._membership.raise_end(error)
            raise
        self._finish()
        self._waited = True
        return True

    def _wait_and_look(self, timeout: Optional[datetime.timedelta]) -> None:
        deadline = time.monotonic() + timeout.total_seconds() if timeout else None
        clock = _notices.Clock()
        while True:
            try:
                self._work.wait(min(_LOOK, timeout) if timeout else _LOOK)
                return
            except RuntimeError:
                if self._work.is_completed():
                    self._work.wait()  # raises why it failed
                    return
                if deadline is not None and time.monotonic() >= deadline:
                    raise
            if (end := self._end()) is not None:
                raise end
            if self._membership is not None and clock.due():
                self._membership.query_late_ranks(clock.waited)

    def _finish(self) -> None:
        with self._lock:
            if not self._finished:
                self._finished = True
                self._arguments.copy_back()
                if self._then is not None:
                    self._then()

    def synchronize(self) -> None:
        """As wait()."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether wait() would return, or raise, at once."""
        if self._work.is_completed():
            self._settle()
            return True
        return self._end() is not None

    def is_success(self) -> bool:
        """Whether the result is in the tensors."""
        return bool(self._work.is_completed()) and self._settle() is None

    def exception(self) -> Optional[Exception]:
        """What wait() would raise at once; None: nothing."""
        return self._settle() if self._work.is_completed() else self._end()

    def _settle(self) -> Optional[RuntimeError]:
        """The inner work is completed: fetches its result, or returns why it failed.

        A message's work must not be waited for twice; it is completed only after the first wait.
        """
        if not self._finished and self._failure is None:
            try:
                self._work.wait()  # is_success() and exception() print that they are deprecated
            except RuntimeError as error:
                self._failure = error
            else:
                self._finish()
        return self._failure

    def _end(self) -> Optional[gradsync.Error]:
        """Why the session has ended, of which the inner work learns nothing."""
        if not self._collective or self._membership is None:
            return None
        return self._membership.end(0.0)

    def result(self) -> Any:
        """The tensors."""
        return self._arguments.restore(self._work.result())

    def source_rank(self) -> int:
        """The rank that sent the message, if it may come from any rank."""
        return int(self._work._source_rank())

    _source_rank = source_rank  # torch.distributed.recv calls it so

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensors."""
        if self._future is None:

            def finish(inner: torch.futures.Future[Any]) -> Any:
                try:
                    value = inner.value()
                except RuntimeError as error:
                    if self._membership is not None:
                        self._membership.raise_end(error)
                    raise
                self._finish()
                return self._arguments.restore(value)

            self._future = self._work.get_future().then(finish)
        return self._future
