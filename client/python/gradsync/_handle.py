"""Pointers to the library's objects, and when these are destroyed."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterator
from typing import Any, Callable

from gradsync import errors
from gradsync.reason import Reason


class Handle(ctypes.c_void_p):
    """A pointer that the library's functions take; it owns the object that it points to.

    The object is destroyed with the last reference to the handle. A call holds a reference to its
    arguments, so no call uses an object that was destroyed. Objects that exist at the interpreter's
    exit end with the process.
    """

    finalizer: weakref.finalize[Any, Any]

    @classmethod
    def adopt(cls, pointer: int, destroy: Callable[[int], Any]) -> Any:
        """Takes ownership of an object that the library has made."""
        handle = cls(pointer)
        handle.finalizer = weakref.finalize(handle, destroy, pointer)
        handle.finalizer.atexit = False
        return handle


class SessionHandle(Handle):
    """A session. close() destroys it early, the interpreter's exit at the latest.

    A call keeps it from being destroyed until the call returns. Thread-safe: use() writes `users`
    and then reads `closed`, close() writes `closed` and then reads `users`. So when one thread
    begins a call while another closes the session, at least one of them notices the other.
    """

    users: list[None]
    closed: bool
    job: str
    rank: int

    @classmethod
    def adopt_session(
        cls, pointer: int, destroy: Callable[[int], Any], job: str, rank: int
    ) -> SessionHandle:
        """Takes ownership of the session of rank `rank` in job `job`."""
        handle = cls(pointer)
        handle.job = job
        handle.rank = rank
        users: list[None] = []
        handle.users = users
        handle.closed = False
        handle.finalizer = weakref.finalize(handle, _destroy_unused, users, destroy, pointer)
        return handle

    @contextlib.contextmanager
    def use(self) -> Iterator[bool]:
        """A context for one call. Gives False if the session is closed: then do not call."""
        self.users.append(None)
        try:
            yield not self.closed
        finally:
            self.users.pop()
            if self.closed and not self.users:
                self.finalizer()

    def closed_error(self, what: str) -> errors.FailedPreconditionError:
        """The error of a call after close(); `what` names what was closed."""
        return errors.FailedPreconditionError(
            f"{what} was closed", reason=Reason.CLOSED, job=self.job, rank=self.rank
        )

    def close(self) -> None:
        """Destroys the session now, or when the last call that uses it returns."""
        self.closed = True
        if not self.users:
            self.finalizer()


def _destroy_unused(users: list[None], destroy: Callable[[int], Any], pointer: int) -> None:
    # At the interpreter's exit a thread may still be inside a call that never returns.
    if not users:
        destroy(pointer)
