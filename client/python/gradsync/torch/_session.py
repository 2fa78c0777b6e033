"""The session that a process shares among its wrapped modules."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import sys
import threading
import weakref
from typing import Any, Callable, Iterator, NoReturn

import gradsync

# Errors that void a step and leave the session alive.
_VOID_REASONS = frozenset({"STEP_ABANDONED", "STEP_TIMEOUT", "STEP_VOID"})
# Anything else ABORTED or UNAVAILABLE is the session's end.
_STEP_REASONS = _VOID_REASONS | {"DAEMON_SILENT"}

# Seconds without a daemon after which somebody should know why nothing happens.
_PATIENCE = 3.0
_log = logging.getLogger("gradsync")

_before_leaving: list[Callable[[gradsync.Session], None]] = []

_lock = threading.Lock()
_default: gradsync.Session | None = None
_over: weakref.WeakSet[gradsync.Session] = weakref.WeakSet()
_names: weakref.WeakKeyDictionary[gradsync.Session, dict[str, int]] = weakref.WeakKeyDictionary()


def init(**options: Any) -> gradsync.Session:
    """Joins the job, for all modules that this process wraps without a session of their own.

    Optional: the first module that is wrapped does it with no options. At the end of the process
    the session leaves the job, unless an exception or `sys.exit` with an error ended the process.

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
                "gradsync.torch.init(): this process is in a job already; call it before the first "
                "module is wrapped, or leave first"
            )
        if _default is not None:
            _default.close()
        chosen = dataclasses.replace(gradsync.SessionOptions.from_environment(), **options)
        patience = threading.Timer(_PATIENCE, _tell_of_waiting, [chosen])
        patience.daemon = True
        patience.start()
        try:
            _default = gradsync.Session.join(chosen)
        finally:
            patience.cancel()
        # Once a session is there: what is registered later runs earlier, and sessions close
        # themselves at the exit.
        atexit.unregister(_leave_at_exit)
        atexit.register(_leave_at_exit)
        if sys.exit is not _exit:
            sys.exit = _exit
        return _default


def _tell_of_waiting(options: gradsync.SessionOptions) -> None:
    _log.warning(
        "waiting for gradsyncd at %s, for %g s at most; start it, or name its socket in "
        "GRADSYNC_SOCKET",
        options.socket,
        60.0 if options.connect_timeout is None else options.connect_timeout,
    )


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


def voids_step(error: gradsync.Error) -> bool:
    """Whether `error` says that a step is void, in a session that goes on."""
    return error.reason in _VOID_REASONS


@contextlib.contextmanager
def noting(session: gradsync.Session) -> Iterator[None]:
    """Notes errors of `session` that leave the context."""
    try:
        yield
    except gradsync.Error as error:
        note(session, error)
        raise


def before_leaving(call: Callable[[gradsync.Session], None]) -> None:
    """Calls `call` before the process's session leaves at the process's end."""
    _before_leaving.append(call)


def end(session: gradsync.Session) -> None:
    """Remembers that `session` has left its job."""
    _over.add(session)


def is_over(session: gradsync.Session) -> bool:
    """Whether it is known that `session` has ended."""
    return session.closed or session in _over


def unique_name(session: gradsync.Session, stem: str) -> str:
    """`stem0`, `stem1`, ...: the same on every rank that makes the same calls."""
    with _lock:
        counts = _names.setdefault(session, {})
        counts[stem] = counts.get(stem, -1) + 1
        return f"{stem}{counts[stem]}"


# What `sys.exit` was called with. SystemExit leaves no trace for functions that run at the exit,
# and torch.multiprocessing.spawn turns every exception into one.
_exit_status: Any = None
_python_exit = sys.exit


def _exit(status: Any = None, /) -> NoReturn:
    global _exit_status
    _exit_status = status
    _python_exit(status)


def _leave_at_exit() -> None:
    session = _default
    if session is None or session.closed:
        return
    # After an error the other ranks must not go on as if this one had finished.
    failed = getattr(sys, "last_type", None) is not None or _exit_status not in (None, 0)
    try:
        if not failed and session not in _over:
            for call in _before_leaving:
                call(session)
            session.leave()
    except gradsync.Error:
        pass  # a step is open, or the session is over: the others see a loss, which it is
    finally:
        session.close()
