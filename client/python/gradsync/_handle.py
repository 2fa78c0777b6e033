"""Pointers to the library's objects, and when these are destroyed."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Callable, Optional

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

    @classmethod
    def adopt_on_gpu(cls, pointer: int, destroy: Callable[[int], Any]) -> Any:
        """As adopt(), but does not destroy the object during a garbage collection or a capture.

        destroy_garbage() destroys it later.
        """
        return cls.adopt(pointer, lambda found: _destroy_on_gpu(destroy, found))


# To destroy an object on a GPU, the library waits for all streams of the GPU. Where any of them is
# being captured into a CUDA graph, that fails and spoils the capture, in whatever thread and mode.
# The garbage collector may run then, so it destroys no such object.

# Objects that the collector found, or that were dropped during a capture, each with the function
# that destroys it.
_garbage: collections.deque[tuple[Callable[[int], Any], int]] = collections.deque()
# The thread on which the collector runs; None if it does not run.
_collecting: Optional[int] = None


def _note_collection(phase: str, _: dict[str, int]) -> None:
    global _collecting
    _collecting = threading.get_ident() if phase == "start" else None


gc.callbacks.append(_note_collection)


def _destroy_on_gpu(destroy: Callable[[int], Any], pointer: int) -> None:
    _garbage.append((destroy, pointer))
    if _collecting != threading.get_ident() and not _capturing():
        destroy_garbage()


def _capturing() -> bool:
    """Whether PyTorch captures a CUDA graph on this thread: the trainer may drop gradients then."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_current_stream_capturing())


def destroy_garbage() -> None:
    """Destroys the objects on GPUs that were kept for it. Waits for the GPUs' streams."""
    with contextlib.suppress(IndexError):  # another thread may take the last one
        while True:
            destroy, pointer = _garbage.popleft()
            destroy(pointer)


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
    state_server: Optional[object]  # of _state_source

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
        handle.state_server = None
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
            # Only now, since the session's end releases the streams that wait.
            destroy_garbage()


def _destroy_unused(users: list[None], destroy: Callable[[int], Any], pointer: int) -> None:
    # At the interpreter's exit a thread may still be inside a call that never returns.
    if not users:
        destroy(pointer)
