"""Says which ranks a wait waits for, by the logger "gradsync".

The daemon tells a rank that waits for others after 5 s, and then every 30 s, which ranks are late.
The library keeps the newest notice of each session. The threads that wait in Python say it between
two slices of their time. No other thread does: a thread that logs while the interpreter exits can
end the process with an error.
"""

from __future__ import annotations

import ctypes
import logging
import weakref

from gradsync._handle import SessionHandle
from gradsync._library import library

# Seconds of a slice.
SLICE = 0.5

_NOTICE_SIZE = 2048  # GRADSYNC_NOTICE_SIZE

_log = logging.getLogger("gradsync")

# Appending, copying and removing are atomic.
_sessions: list[weakref.ref[SessionHandle]] = []


def watch(session: SessionHandle) -> None:
    """Lets say() ask this session, as long as it lives."""
    _sessions.append(weakref.ref(session, _sessions.remove))


def say() -> None:
    """Says the new notices of this process's sessions."""
    for reference in list(_sessions):
        session = reference()
        if session is None:
            continue
        with session.use() as usable:
            text = _take(session) if usable else ""
        if text:
            _log.warning("gradsync: rank %d still waits for %s", session.rank, text)


def _take(session: SessionHandle) -> str:
    notice = ctypes.create_string_buffer(_NOTICE_SIZE)
    library.session_take_notice(session, notice, _NOTICE_SIZE)
    return notice.value.decode("utf-8", "replace")
