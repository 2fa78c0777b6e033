"""The session that a process shares among its wrapped modules."""

from __future__ import annotations

import atexit
import dataclasses
import sys
import threading
import weakref
from typing import Any

import gradsync

# Errors that void a step and leave the session alive; anything else ABORTED or UNAVAILABLE is its
# end.
_STEP_REASONS = frozenset({"STEP_ABANDONED", "STEP_TIMEOUT", "STEP_VOID", "DAEMON_SILENT"})

_lock = threading.Lock()
_default: gradsync.Session | None = None
_over: weakref.WeakSet[gradsync.Session] = weakref.WeakSet()
_names: weakref.WeakKeyDictionary[gradsync.Session, dict[str, int]] = weakref.WeakKeyDictionary()


def init(**options: Any) -> gradsync.Session:
    """Joins the job, for every module that this process wraps from now on without a session of its
    own.

    Optional: the first module that is wrapped does it with no options. At the end of the process
      the
    session leaves the job, if no exception ended the process.

    Args:
      **options: fields of `gradsync.SessionOptions` that shall differ from what torchrun's
        environment says, for example `divisor="world"` or `step_timeout=600.0` (seconds).

    Returns:
      The session; `gradsync.Session.join` says which errors it can raise.

    Raises:
      RuntimeError: this process has a session already.
    """
    global _default
    with _lock:
        if _default is not None and not _default.closed and _default not in _over:
            raise RuntimeError(
                "gradsync.torch.init(): this process is in a job already; call it before the "
                "first module is wrapped, or leave first"
            )
        if _default is not None:
            _default.close()
        _default = gradsync.Session.join(
            dataclasses.replace(gradsync.SessionOptions.from_environment(), **options)
        )
        # Once a session is there: what is registered later runs earlier, and sessions close
        # themselves at the exit.
        atexit.unregister(_leave_at_exit)
        atexit.register(_leave_at_exit)
        return _default


def default_session() -> gradsync.Session:
    """The session of this process; joins the job if it is in none or its session has ended."""
    with _lock:
        session = _default
    if session is None or session.closed or session in _over:
        return init()
    return session


def note(session: gradsync.Session, error: gradsync.Error) -> None:
    """Remembers that `session` has ended, if `error` says so: the next module joins anew."""
    if error.code in ("ABORTED", "UNAVAILABLE") and error.reason not in _STEP_REASONS:
        _over.add(session)


def is_over(session: gradsync.Session) -> bool:
    """Whether `note` was told of the session's end."""
    return session in _over


def unique_name(session: gradsync.Session, stem: str) -> str:
    """`stem0`, `stem1`, ...: the same on every rank that makes the same calls."""
    with _lock:
        counts = _names.setdefault(session, {})
        counts[stem] = counts.get(stem, -1) + 1
        return f"{stem}{counts[stem]}"


def _leave_at_exit() -> None:
    session = _default
    if session is None or session.closed:
        return
    # After an exception the other ranks must not go on as if this one had finished.
    failed = getattr(sys, "last_type", None) is not None
    try:
        if not failed and session not in _over:
            session.leave()
    except gradsync.Error:
        pass  # a step is open, or the session is over: the others see a loss, which it is
    finally:
        session.close()
