"""Blocking calls that Ctrl-C can interrupt.

Python runs signal handlers on the main thread, between two byte codes: never while that thread is
inside the library. Therefore a helper thread makes the main thread's blocking calls, and the main
thread waits for it in Python. After Ctrl-C the main thread continues, and the helper drops the
result when the call returns. Other threads make their calls themselves, which is 50 us faster.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from typing import Any, Callable, Optional, TypeVar

_Result = TypeVar("_Result")
_Job = tuple[Callable[[], Any], "queue.SimpleQueue[tuple[Any, Optional[BaseException]]]"]

# Inboxes of idle helpers. Appending and popping are atomic.
_idle: list[queue.SimpleQueue[_Job]] = []
# A forked child does not have its parent's threads.
os.register_at_fork(after_in_child=_idle.clear)


def on_main_thread() -> bool:
    """Whether this is the thread that runs signal handlers."""
    return threading.get_ident() == threading.main_thread().ident


def call(function: Callable[[], _Result]) -> _Result:
    """Returns function(), or raises what it raises. Ctrl-C interrupts it on the main thread.

    After an interruption the function keeps running, so it must own what it uses.
    """
    if not on_main_thread():
        return function()
    try:
        inbox = _idle.pop()
    except IndexError:
        try:
            inbox = _start()
        except RuntimeError:  # no more threads can start, or the interpreter ends
            return function()
    outcome: queue.SimpleQueue[tuple[Any, Optional[BaseException]]] = queue.SimpleQueue()
    inbox.put((function, outcome))
    result, error = outcome.get()
    if error is not None:
        try:
            raise error
        finally:
            del error  # it refers to this frame, which would keep the error alive
    return result  # type: ignore[no-any-return]


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
