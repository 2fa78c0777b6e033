"""A group's job, and this rank's session in it."""

from __future__ import annotations

import datetime
import threading
from typing import Any, Optional

import gradsync
from gradsync.torch.process_group._inner_group import InnerGroup


class Membership:
    """Joins the group's job when its session is first needed.

    Args:
      options: PyTorch's `_DistributedBackendOptions`.
      inner: agrees with the other ranks on the job.

    Thread-safe. Owns the session.
    """

    def __init__(self, options: Any, inner: InnerGroup) -> None:
        timeout: datetime.timedelta = options.timeout
        settings = gradsync.SessionOptions.from_environment(
            rank=options.group_rank,
            world_size=options.group_size,
            job_id=inner.agree_on_job(options.group_id),
        )
        settings.step_timeout = timeout.total_seconds()
        if inner.on_one_node(settings.socket):
            settings.coordinator = ""
        self._settings = settings
        self._lock = threading.Lock()
        self._session: Optional[gradsync.Session] = None
        self._left = False

    @property
    def session(self) -> gradsync.Session:
        """The session. Does not wait for other ranks.

        Raises:
          RuntimeError: the group was destroyed.
          gradsync.Error: no daemon answered, or it refused the job.
        """
        with self._lock:
            if self._left:
                raise RuntimeError("gradsync: this process group was destroyed; make a new one")
            if self._session is None:
                self._session = gradsync.Session.join(self._settings)
            return self._session

    def leave(self) -> None:
        """The others go on without this rank."""
        with self._lock:
            self._left = True
            session, self._session = self._session, None
        if session is None:
            return
        try:
            session.leave()
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
