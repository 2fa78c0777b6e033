"""The session that a process shares among its wrapped modules."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import logging
import sys
import threading
import weakref
from typing import Any, Callable, Iterator, NoReturn

import gradsync

# Reasons of errors that void a step in a session that continues.
_VOID_REASONS = frozenset(
    {gradsync.Reason.STEP_ABANDONED, gradsync.Reason.STEP_TIMEOUT, gradsync.Reason.STEP_VOID}
)
# Every other error with code ABORTED or UNAVAILABLE is the session's end.
_STEP_REASONS = _VOID_REASONS | {gradsync.Reason.DAEMON_SILENT}

# Seconds without a daemon before a warning says what init() waits for.
_PATIENCE = 3.0
_log = logging.getLogger("gradsync")

_before_finishing: list[Callable[[gradsync.Session], None]] = []

_lock = threading.Lock()
_default: gradsync.Session | None = None
_ended: weakref.WeakSet[gradsync.Session] = weakref.WeakSet()
_finishing: weakref.WeakKeyDictionary[gradsync.Session, Callable[[], bool]] = (
    weakref.WeakKeyDictionary()
)
_names: weakref.WeakKeyDictionary[gradsync.Session, dict[str, int]] = weakref.WeakKeyDictionary()


def init(**options: Any) -> gradsync.Session:
    """Joins the job, for all modules that this process wraps without `session=`.

    Optional: without it, wrapping the first module joins the job, with no options. If the
    process exits with status 0, the session finishes (`gradsync.Session.finish`). If an exception
    or `sys.exit`, `exit` or `quit` with an error ends the process, this rank is lost. Python does
    not show how a bare `raise SystemExit(1)` ends: it counts as a good end, so call `sys.exit(1)`.

    Args:
      **options: fields of `gradsync.SessionOptions` that differ from torchrun's environment, for
        example `divisor="world"` or `step_timeout=600.0` (seconds). A variable whose option is
        given is not needed: with `rank`, `world_size` and `job_id`, none is. With
        `on_rank_loss="hold"` a lost rank is replaced: see `gradsync.torch.Training`.

    Returns:
      The session; `gradsync.Session.join` says which errors it can raise.

    Raises:
      RuntimeError: this process has a session already.
    """
    global _default
    with _lock:
        if _default is not None and not _default.closed and _default not in _ended:
            raise RuntimeError(
                "gradsync.torch.init(): this process is in a job already; call init() before the "
                "first module is wrapped, or leave() first"
            )
        if _default is not None:
            _default.close()
        chosen = gradsync.SessionOptions.from_environment(**options)
        patience = threading.Timer(_PATIENCE, _warn_of_waiting, [chosen])
        patience.daemon = True
        patience.start()
        try:
            _default = gradsync.Session.join(chosen)
        finally:
            patience.cancel()
        finish_at_exit(_default)
        return _default


def _warn_of_waiting(options: gradsync.SessionOptions) -> None:
    _log.warning(
        "waiting for gradsyncd at %s, for at most %g s; start it, or name its socket in "
        "GRADSYNC_SOCKET",
        options.socket,
        60.0 if options.connect_timeout is None else options.connect_timeout,
    )


def default_session() -> gradsync.Session:
    """The session of this process. Joins the job if there is none or if it has ended."""
    with _lock:
        session = _default
    if session is None or session.closed or session in _ended:
        return init()
    return session


def is_default(session: gradsync.Session) -> bool:
    """Whether `session` is the one of this process."""
    return session is _default


def note(session: gradsync.Session, error: gradsync.Error) -> None:
    """Remembers that `session` has ended if `error` says so; the next module then joins anew."""
    if error.code in ("ABORTED", "UNAVAILABLE") and error.reason not in _STEP_REASONS:
        _ended.add(session)


def voids_step(error: gradsync.Error) -> bool:
    """Whether `error` says that a step is void, in a session that continues."""
    return error.reason in _VOID_REASONS


@contextlib.contextmanager
def noting(session: gradsync.Session) -> Iterator[None]:
    """A context that calls note() for errors of `session`."""
    try:
        yield
    except gradsync.Error as error:
        note(session, error)
        raise


def before_finishing(call: Callable[[gradsync.Session], None]) -> None:
    """At the end of the process, calls `call` before its session finishes."""
    _before_finishing.append(call)


def end(session: gradsync.Session) -> None:
    """Remembers that `session` has left its job."""
    _ended.add(session)


def has_ended(session: gradsync.Session) -> bool:
    """Whether this process knows that `session` has ended."""
    return session.closed or session in _ended


def unique_name(session: gradsync.Session, stem: str) -> str:
    """`stem0`, `stem1`, ...: the same names on all ranks that make the same calls."""
    with _lock:
        counts = _names.setdefault(session, {})
        counts[stem] = counts.get(stem, -1) + 1
        return f"{stem}{counts[stem]}"


class _Exit(SystemExit):
    """What `sys.exit` raises. Functions that run at the exit cannot see it.

    Python frees an uncaught one at the end of the process, after all Python code. If it is freed
    while Python code runs, somebody has caught it: then the exit is forgotten.
    """

    def __del__(self) -> None:
        global _exit_status, _last_exit
        if id(self) == _last_exit:
            _last_exit = 0
            if sys._getframe().f_back is not None:
                _exit_status = None


# The argument of the last `sys.exit` that nobody has caught. torch.multiprocessing.spawn turns
# every exception into a SystemExit.
_exit_status: Any = None
_last_exit = 0  # its id() while it lives


def _exit(status: Any = None, /) -> NoReturn:
    raise _new_exit(status)


def _new_exit(status: Any) -> _Exit:
    # Not in _exit(), whose frame the traceback keeps: the exception would keep itself alive.
    global _exit_status, _last_exit
    error = _Exit(status)
    _exit_status, _last_exit = status, id(error)
    return error


def finish_at_exit(session: gradsync.Session, settle: Callable[[], bool] = lambda: True) -> None:
    """When the process exits with status 0, `session` finishes; after an error this rank is lost.

    It is also lost if `settle()` is False then: this rank is in the middle of something.
    """
    _finishing[session] = settle
    finish_before_others_at_exit()
    if sys.exit is not _exit:
        sys.exit = _exit
    if not hasattr(sys, "ps1"):  # a notebook's exit() is its own
        builtins.exit = builtins.quit = _exit  # type: ignore[assignment]


def finish_before_others_at_exit() -> None:
    """At the exit, sessions finish first. Then they stop serving the state, and close themselves.

    Functions that are registered later run earlier. So call this after everything that registers
    one.
    """
    atexit.unregister(_finish_all)
    atexit.register(_finish_all)


def _finish_all() -> None:
    # After an error the other ranks must not continue as if this one had finished. In an
    # interactive session, such as a notebook's, an error does not end the process, and the session
    # keeps a SystemExit that it has caught.
    interactive = hasattr(sys, "ps1")
    raised = getattr(sys, "last_type", None) is not None and not interactive
    exited = _exit_status not in (None, 0) and not (interactive and _last_exit)
    failed = raised or exited
    for session, settle in list(_finishing.items()):
        _finish(session, failed or session.closed or not settle())


def _finish(session: gradsync.Session, failed: bool) -> None:
    if session.closed:
        return
    try:
        if not failed and session not in _ended:
            for call in _before_finishing:
                call(session)
            session.finish()
    except gradsync.Error:
        pass  # a step is open, or the session has ended: to the other ranks this rank is lost
    finally:
        session.close()
