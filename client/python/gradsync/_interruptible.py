"""Blocking calls that Ctrl-C can interrupt.

Python runs signal handlers on the main thread, between two byte codes: never while that thread is
inside the library. Therefore a helper thread makes the main thread's blocking calls, and the main
thread waits for it in Python. After Ctrl-C the main thread continues, and the helper drops the
result when the call returns. Other threads make their calls themselves, which is 50 us faster.

**For the main thread.** Where a backward pass is on a GPU, PyTorch runs its hooks on a thread of
its own, while the main thread waits outside of Python. There the hooks' thread must notice Ctrl-C:

    watch_ctrl_c()                  # the main thread, before the pass
    begin_pass(number)              # the hooks' thread, at the beginning of the pass
    with for_main_thread():         # the hooks' thread: the calls in this context are interrupted
        ...

The context raises nothing: it ends early. As soon as the pass has ended too, Python raises
KeyboardInterrupt on the main thread.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Iterator
from typing import Any, Callable, Optional, TypeVar

_Result = TypeVar("_Result")
_Told = tuple[Any, Optional[BaseException]]
_Job = tuple[Callable[[], Any], "_Outcome"]


class _Outcome:
    """What one call returns or raises, unless its caller has been interrupted."""

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[_Told] = queue.SimpleQueue()
        self._dropped = False

    def put(self, told: _Told) -> None:
        self._told.put(told)
        if self._dropped:
            self._forget()

    def get(self, timeout: float) -> _Told:
        """Raises: queue.Empty."""
        return self._told.get(timeout=timeout)

    def drop(self) -> None:
        """Frees the result, now or when it comes. The exception's frames keep this object."""
        self._dropped = True
        self._forget()

    def _forget(self) -> None:
        with contextlib.suppress(queue.Empty):
            self._told.get_nowait()


# Inboxes of idle helpers. Appending and popping are atomic.
_idle: list[queue.SimpleQueue[_Job]] = []

# Seconds between two looks for Ctrl-C: of the main thread, and of a thread for which it waits.
_MAIN_SLICE = 0.5
_SLICE = 0.05

# The ends of a pipe into which Python writes the number of each signal that it will handle; None
# before the first watch_ctrl_c().
_pipe: Optional[tuple[int, int]] = None
# The backward pass that began last, and whether Ctrl-C has come in it.
_pass: Optional[int] = None
_pressed = False
_thread = threading.local()  # `for_main`: whether this thread is in for_main_thread()


class _Pressed(BaseException):
    """Ctrl-C ends a call of a thread for which the main thread waits."""


def _after_fork() -> None:
    global _pipe
    _idle.clear()  # a child does not have its parent's threads
    if _pipe is not None:
        # Its parent reads the pipe.
        if (other := signal.set_wakeup_fd(-1)) not in (-1, _pipe[1]):
            signal.set_wakeup_fd(other)
        os.close(_pipe[0])
        os.close(_pipe[1])
        _pipe = None


os.register_at_fork(after_in_child=_after_fork)


def watch_ctrl_c() -> None:
    """On the main thread: lets other threads notice Ctrl-C from now on. Elsewhere does nothing.

    If another library, such as asyncio, has called `signal.set_wakeup_fd`, it keeps the signals.
    """
    global _pipe
    if not on_main_thread():
        return
    if _pipe is None:
        _pipe = os.pipe()
        for end in _pipe:
            os.set_blocking(end, False)
    other = signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
    if other not in (-1, _pipe[1]):
        signal.set_wakeup_fd(other)
        if missed := _read_signals():
            os.write(other, missed)


def begin_pass(number: Optional[int]) -> None:
    """Backward pass `number` has begun: forgets what was pressed before."""
    global _pass, _pressed
    if number != _pass:
        _read_signals()
        _pass, _pressed = number, False


@contextlib.contextmanager
def for_main_thread() -> Iterator[None]:
    """Lets Ctrl-C end one of this context's waits, while the main thread waits for this thread.

    Does nothing on the main thread, where Ctrl-C raises KeyboardInterrupt anyway. Does nothing if
    the user has a handler for SIGINT, because such a handler need not raise an exception.
    """
    _thread.for_main = True
    try:
        yield
    except _Pressed:
        pass
    finally:
        _thread.for_main = False


def _ctrl_c_came() -> bool:
    global _pressed
    if signal.SIGINT in _read_signals():
        _pressed = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return _pressed


def _read_signals() -> bytes:
    try:
        return b"" if _pipe is None else os.read(_pipe[0], 4096)
    except BlockingIOError:
        return b""


def is_interruptible() -> bool:
    """Whether Ctrl-C must interrupt calls of this thread."""
    return on_main_thread() or getattr(_thread, "for_main", False)


def on_main_thread() -> bool:
    """Whether this is the thread that runs signal handlers."""
    return threading.get_ident() == threading.main_thread().ident


def call(function: Callable[[], _Result]) -> _Result:
    """Returns function(), or raises what it raises. Ctrl-C interrupts it where it must.

    After an interruption the function keeps running, so it must own what it uses.
    """
    if not is_interruptible():
        return function()
    try:
        inbox = _idle.pop()
    except IndexError:
        try:
            inbox = _start()
        except RuntimeError:  # no more threads can start, or the interpreter ends
            return function()
    outcome = _Outcome()
    try:
        inbox.put((function, outcome))
        result, error = _await(outcome)
    except BaseException:
        outcome.drop()
        raise
    if error is not None:
        try:
            raise error
        finally:
            del error  # it refers to this frame, which would keep the error alive
    return result  # type: ignore[no-any-return]


def _await(outcome: _Outcome) -> _Told:
    # A signal that comes just before Python begins to wait does not end the wait. So every wait is
    # short: after it the main thread runs the signal's handler.
    on_main = on_main_thread()
    while on_main or not _ctrl_c_came():
        try:
            return outcome.get(timeout=_MAIN_SLICE if on_main else _SLICE)
        except queue.Empty:
            pass
    raise _Pressed


def _start() -> queue.SimpleQueue[_Job]:
    inbox: queue.SimpleQueue[_Job] = queue.SimpleQueue()
    threading.Thread(target=_help, args=(inbox,), name="gradsync-wait", daemon=True).start()
    return inbox


def _help(inbox: queue.SimpleQueue[_Job]) -> None:
    # Signals must reach the main thread, not helpers.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        function, outcome = inbox.get()
        result: Any = None
        error: Optional[BaseException] = None
        try:
            result = function()
        except BaseException as raised:  # the main thread raises it
            error = raised
        _idle.append(inbox)
        outcome.put((result, error))
        # Otherwise this call's objects would live until the next call.
        del function, outcome, result, error
