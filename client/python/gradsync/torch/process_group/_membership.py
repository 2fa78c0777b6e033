"""A group's job, and this rank's session in it."""

from __future__ import annotations

import copy
import datetime
import threading
from typing import Any, Callable, Optional

import gradsync
from gradsync.torch import _session
from gradsync.torch.process_group._inner_group import InnerGroup

# Seconds in which the session learns what the inner group has noticed.
_PATIENCE = 2.0


class Membership:
    """Joins the group's job when its session is first needed.

    Args:
      options: PyTorch's `_DistributedBackendOptions`.
      inner: agrees with the other ranks on the job.
      settle: whether nothing of this rank is under way; waits for what ends soon.

    Attributes:
      on_one_node: whether the ranks all use one daemon. Constant.

    Thread-safe. Owns the session.
    """

    def __init__(self, options: Any, inner: InnerGroup, settle: Callable[[], bool]) -> None:
        timeout: datetime.timedelta = options.timeout
        settings = gradsync.SessionOptions.from_environment(
            rank=options.group_rank,
            world_size=options.group_size,
            job_id=inner.agree_on_job(options.group_id),
        )
        settings.step_timeout = timeout.total_seconds()
        settings.connect_timeout = min(60.0, settings.step_timeout)
        self.on_one_node = inner.on_one_node(settings.socket)
        if self.on_one_node:
            settings.coordinator = ""
        self._settings = settings
        self._settle = settle
        self._lock = threading.Lock()
        self._session: Optional[gradsync.Session] = None
        self._failure: Optional[gradsync.Error] = None
        self._left = False

    @property
    def session(self) -> gradsync.Session:
        """The session. Does not wait for other ranks.

        Raises:
          RuntimeError: the group was destroyed.
          gradsync.Error: no daemon answered, or it refused the job; or a collective has failed.
        """
        with self._lock:
            if self._left:
                raise RuntimeError("gradsync: this process group was destroyed; make a new one")
            if self._failure is not None:
                raise copy.copy(self._failure)
            if self._session is None:
                self._session = gradsync.Session.join(self._settings)
                _session.finish_at_exit(self._session, self._settle)
            return self._session

    def end(self, timeout: float) -> Optional[gradsync.Error]:
        """Why the session has ended; None: it has not within `timeout` seconds."""
        with self._lock:
            if self._failure is not None:
                return copy.copy(self._failure)
            session = self._session
        return None if session is None else session.await_end(timeout)

    def query_late_ranks(self, waited: float) -> None:
        """Lets the daemon name the ranks that have begun fewer collectives than this one.

        Args:
          waited: for how many seconds this rank has waited for the inner group.
        """
        with self._lock:
            session = self._session
        try:
            if session is not None:
                session.query_collectives(waited)
        except gradsync.Error:
            pass  # it has ended: end() says why

    def raise_end(self, error: BaseException) -> None:
        """Raises why the session has ended, as the cause of an error of the inner group.

        Does nothing if the session goes on. To know that, it waits 2 s: Gloo can notice a lost rank
        before the daemon does.
        """
        end = self.end(_PATIENCE)
        if end is not None:
            raise end from error

    def fail(self, error: BaseException) -> gradsync.Error:
        """Ends the session after an error in a collective: this rank is lost to the others.

        A rank that went on would reduce its tensors with those of another call.

        Returns:
          What the collective must raise: the first failure. Later calls raise it, too.
        """
        with self._lock:
            if self._failure is None:
                self._failure = error if isinstance(error, gradsync.Error) else _failure_of(error)
            failure, session = self._failure, self._session
        if session is not None:
            session.close()
        return failure if failure is error else copy.copy(failure)

    def leave(self) -> None:
        """Finishes: if another rank still needs this one, it gets RANK_FINISHED."""
        with self._lock:
            self._left = True
            session, self._session = self._session, None
        if session is None:
            return
        try:
            # finish() would wait for an operation that is under way.
            if self._settle():
                session.finish()
        except gradsync.Error:
            pass  # the job has ended, or an operation is under way: this rank is lost to it
        finally:
            session.close()

    def close(self) -> None:
        """Ends the session: this rank is lost to the others."""
        with self._lock:
            session = self._session
        if session is not None:
            session.close()


def _failure_of(error: BaseException) -> gradsync.Error:
    return gradsync.FailedPreconditionError(
        f"a collective of this process group has failed ({type(error).__name__}: {error}), so the "
        "group is of no use: call destroy_process_group() and init_process_group() again",
        reason=gradsync.Reason.CLOSED,
    )
