"""Ctrl-C in waits, and other threads during waits."""

import contextlib
import os
import signal
import threading
import time
import uuid

import gradsync
import numpy
import pytest
from threads import finish_step, job, options

# Seconds. The first signal arrives while the main thread is inside the library, the second after a
# helper thread has taken over.
MOMENTS = [0.02, 0.4]


class Interrupted(Exception):
    pass


@contextlib.contextmanager
def interrupted_after(seconds):
    """A signal whose handler raises arrives after `seconds`; the body must not run much longer."""

    def handle(number, frame):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, handle)
    start = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with pytest.raises(Interrupted):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - start < seconds + 5


@pytest.mark.parametrize("moment", MOMENTS)
def test_waits_are_interrupted_and_can_be_repeated(daemon, moment):
    with job(daemon, 2, [1]) as (_, layouts):
        layouts[0].mark_ready(1, 0)
        for wait in (
            lambda: layouts[0].wait_step(1),
            lambda: layouts[0].wait_bucket(1, 0),
            lambda: layouts[0].wait_step(1, 60),
        ):
            with interrupted_after(moment):
                wait()
        layouts[1].mark_ready(1, 0)
        for layout in layouts:
            layout.end_step(1)
        assert layouts[0].wait_step(1).step == 1


@pytest.mark.parametrize("moment", MOMENTS)
def test_operations_are_interrupted(daemon, moment):
    values = numpy.zeros(4)
    for operation in (
        lambda session: session.barrier(),
        lambda session: session.broadcast(values, 1),
        lambda session: session.all_reduce(values),
        lambda session: session.leave_and_stay(),
        lambda session: session.register_layout(explicit_buckets=[gradsync.Bucket(1)]),
    ):
        with job(daemon, 2) as sessions:
            with interrupted_after(moment):
                operation(sessions[0])
            # Ends the helper's call.
            sessions[1].close()


def test_joining_is_interrupted():
    absent = gradsync.SessionOptions(socket=f"/tmp/{uuid.uuid4().hex}.sock", job_id="job")
    with interrupted_after(0.02):
        gradsync.Session.join(absent)


def test_ctrl_c_ends_a_wait(daemon):
    with job(daemon, 2, [1]) as (_, layouts):
        timer = threading.Timer(0.4, os.kill, [os.getpid(), signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            layouts[0].wait_step(1)
        timer.join()
        assert finish_step(layouts, 1).step == 1


def test_the_result_of_an_interrupted_wait_is_dropped(daemon):
    """The result of an interrupted wait is dropped, and its helper is used again."""
    with job(daemon, 2, [1]) as (_, layouts):
        for step in (1, 2, 3):
            with interrupted_after(0.3):
                layouts[0].wait_step(step)
            finish_step(layouts, step)
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("gradsync-wait") < 20


@pytest.mark.parametrize("on_main_thread", [True, False])
@pytest.mark.parametrize("operation", ["wait_step", "wait_bucket", "barrier"])
def test_other_threads_run_during_a_wait(daemon, operation, on_main_thread):
    with job(daemon, 2, [1]) as (sessions, layouts):
        ended = threading.Event()
        calls = {
            "wait_step": lambda: layouts[0].wait_step(1, 0.4),
            "wait_bucket": lambda: layouts[0].wait_bucket(1, 0, 0.4),
            "barrier": lambda: sessions[0].barrier(0.4),
        }

        def wait():
            with pytest.raises(gradsync.DeadlineExceededError):
                calls[operation]()
            ended.set()

        rounds = 0

        def count():
            nonlocal rounds
            while not ended.is_set():
                rounds += 1

        waiter, counter = (wait, count) if on_main_thread else (count, wait)
        thread = threading.Thread(target=counter)
        thread.start()
        waiter()
        thread.join()
        assert rounds > 10_000


def test_close_waits_for_another_threads_call(daemon):
    """That call runs to its end, and then the session ends."""
    session = gradsync.Session.join(options(daemon, 0, 2))
    ended = session._handle.finalizer

    def wait():
        with pytest.raises(gradsync.DeadlineExceededError):
            session.barrier(0.3)

    thread = threading.Thread(target=wait)
    thread.start()
    while not session._handle.users:
        assert thread.is_alive()
    session.close()
    assert session.closed and ended.alive
    with pytest.raises(gradsync.FailedPreconditionError):
        session.barrier()
    thread.join()
    assert not ended.alive
