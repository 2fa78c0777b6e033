"""Says which ranks a wait waits for, by the logger "gradsync".

The daemon tells a rank that waits for others after 5 s, and then every 30 s, which ranks are late.
The library keeps the newest notice of each session. A thread of this module looks for it and says
it, because the thread that waits can be inside of C++, as PyTorch's wrapper is. The thread says
nothing while the interpreter exits: that could end the process with an error.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import threading
import time
import weakref
from typing import Optional

from gradsync._handle import SessionHandle
from gradsync._library import library

# Seconds between two looks for a notice.
LOOK = 0.5

# A wait that the daemon does not see names late ranks at the same times as one that it sees.
FIRST = 5.0
AGAIN = 30.0

_NOTICE_SIZE = 2048  # GRADSYNC_NOTICE_SIZE

_log = logging.getLogger("gradsync")

# Appending, copying and removing are atomic.
_sessions: list[weakref.ref[SessionHandle]] = []

_lock = threading.RLock()  # guards _thread
_thread: Optional[threading.Thread] = None
_saying = threading.RLock()  # held while something is said
_exit = threading.Event()


class Clock:
    """Says when a wait, which begins now, should name the late ranks. Not thread-safe."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._next = FIRST

    @property
    def waited(self) -> float:
        """Seconds."""
        return time.monotonic() - self._began

    def due(self) -> bool:
        """Whether to name them now: after 5 s, and then every 30 s."""
        if self.waited < self._next:
            return False
        self._next = self.waited + AGAIN
        return True


def watch(session: SessionHandle) -> None:
    """Says this session's notices, as long as it lives."""
    global _thread
    with _lock:
        _sessions.append(weakref.ref(session, _sessions.remove))
        if _thread is not None and _thread.is_alive():
            return
        thread = threading.Thread(target=_run, name="gradsync-notices", daemon=True)
        # RuntimeError: no more threads can start, or the interpreter ends.
        with contextlib.suppress(RuntimeError):
            thread.start()
            _thread = thread


def say(text: str, *arguments: object) -> None:
    """Logs a warning, but not while the interpreter exits."""
    with _saying:
        if not _exit.is_set():
            _log.warning(text, *arguments)


def _run() -> None:
    global _thread
    while not _exit.wait(LOOK):
        with _lock:
            if not _sessions:
                _thread = None
                return
        for reference in list(_sessions):
            rank, text = _take(reference)
            if text:
                # A filter or handler of the user's may raise. Later notices must still come.
                with contextlib.suppress(Exception):
                    say("gradsync: rank %d still waits for %s", rank, text)


def _take(reference: weakref.ref[SessionHandle]) -> tuple[int, str]:
    """The session's rank, and its new notice or "". Keeps no reference to the session."""
    session = reference()
    if session is None:
        return 0, ""
    notice = ctypes.create_string_buffer(_NOTICE_SIZE)
    with session.use() as usable:
        if usable:
            library.session_take_notice(session, notice, _NOTICE_SIZE)
    return session.rank, notice.value.decode("utf-8", "replace")


def _stop() -> None:
    _exit.set()
    if _saying.acquire(timeout=5):
        _saying.release()


def _after_fork() -> None:
    """A child has no such thread, and uses none of its parent's sessions."""
    global _lock, _thread, _saying, _exit
    # Another thread may have held any of the old ones.
    _lock, _saying, _exit = threading.RLock(), threading.RLock(), threading.Event()
    _thread = None
    _sessions.clear()


atexit.register(_stop)
os.register_at_fork(after_in_child=_after_fork)
