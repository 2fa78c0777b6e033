"""Calls that block, and that Ctrl-C interrupts all the same.

Python runs signal handlers on the main thread, between its byte codes: not while that thread is
inside the library. So the main thread has such a call made by a helper thread and waits for it in
Python. Interrupted, it goes on without the result, which the helper drops when it comes. Calls of
other threads are made by themselves, 50 us faster.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from typing import Any, Callable, Optional, TypeVar

_Result = TypeVar("_Result")
_Job = tuple[Callable[[], Any], "queue.SimpleQueue[tuple[Any, Optional[BaseException]]]"]

# Helpers without a call. Appending and popping are atomic.
_idle: list[queue.SimpleQueue[_Job]] = []
# A forked child has none of its parent's threads.
os.register_at_fork(after_in_child=_idle.clear)


def on_main_thread() -> bool:
    """Whether this is the thread that runs signal handlers."""
    return threading.get_ident() == threading.main_thread().ident


def call(function: Callable[[], _Result]) -> _Result:
    """Returns function(), or raises what it raises; on the main thread, interruptibly.

    The function keeps running after an interruption, and so must own what it uses.
    """
    if not on_main_thread():
        return function()
    try:
        inbox = _idle.pop()
    except IndexError:
        try:
            inbox = _start()
        except RuntimeError:  # no more threads, or the interpreter ends
            return function()
    outcome: queue.SimpleQueue[tuple[Any, Optional[BaseException]]] = queue.SimpleQueue()
    inbox.put((function, outcome))
    result, error = outcome.get()
    if error is not None:
        try:
            raise error
        finally:
            del error  # it refers to this frame
    return result  # type: ignore[no-any-return]


def _start() -> queue.SimpleQueue[_Job]:
    inbox: queue.SimpleQueue[_Job] = queue.SimpleQueue()
    threading.Thread(target=_help, args=(inbox,), name="gradsync-wait", daemon=True).start()
    return inbox


def _help(inbox: queue.SimpleQueue[_Job]) -> None:
    # The process's signals are for the threads that wait.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        function, outcome = inbox.get()
        result: Any = None
        error: Optional[BaseException] = None
        try:
            result = function()
        except BaseException as raised:  # the caller's, whatever it is
            error = raised
        _idle.append(inbox)
        outcome.put((result, error))
        # Nothing of this call may live until the next one comes.
        del function, outcome, result, error
