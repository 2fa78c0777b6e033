"""Pointers to the library's objects, and who destroys them when."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterator
from typing import Any, Callable


class Handle(ctypes.c_void_p):
    """A pointer that the library's functions take, whose object is destroyed with it.

    A call holds a reference to its arguments, so the object outlives every call that uses it. At
    the interpreter's exit what still exists is left to the process's end.
    """

    finalizer: weakref.finalize[Any, Any]

    @classmethod
    def adopt(cls, pointer: int, destroy: Callable[[int], Any]) -> Any:
        """Takes over what a function handed out."""
        handle = cls(pointer)
        handle.finalizer = weakref.finalize(handle, destroy, pointer)
        handle.finalizer.atexit = False
        return handle


class SessionHandle(Handle):
    """A session: destroyed early by close(), at the latest at the interpreter's exit.

    Never while a call uses it. `users` and `closed` are each read after the other is written: a
    thread that begins a call while another one closes the session sees that, or is seen.
    """

    users: list[None]
    closed: bool

    @classmethod
    def adopt(cls, pointer: int, destroy: Callable[[int], Any]) -> Any:
        """Takes over a session."""
        handle = cls(pointer)
        users: list[None] = []
        handle.users = users
        handle.closed = False
        handle.finalizer = weakref.finalize(handle, _destroy_unused, users, destroy, pointer)
        return handle

    @contextlib.contextmanager
    def use(self) -> Iterator[bool]:
        """Accompanies a call; gives False if the session is closed and must not be called."""
        self.users.append(None)
        try:
            yield not self.closed
        finally:
            self.users.pop()
            if self.closed and not self.users:
                self.finalizer()

    def close(self) -> None:
        """Destroys the session, or leaves that to the last call that uses it."""
        self.closed = True
        if not self.users:
            self.finalizer()


def _destroy_unused(users: list[None], destroy: Callable[[int], Any], pointer: int) -> None:
    # At the interpreter's exit a thread may be inside a call for ever.
    if not users:
        destroy(pointer)
