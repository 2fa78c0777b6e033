"""Ctrl-C in waits, and other threads during waits."""

import contextlib
import itertools
import os
import signal
import socket
import threading
import time
import uuid
import weakref

import gradsync
import numpy
import pytest
from gradsync import _interruptible
from threads import ctrl_c_after, finish_step, job, on_another_thread

# Seconds. The first signal arrives while the main thread is inside the library, the second after a
# helper thread has taken over.
MOMENTS = [0.02, 0.4]


class Interrupted(Exception):
    pass


@contextlib.contextmanager
def signal_after(seconds):
    """A signal whose handler raises Interrupted comes after `seconds`; the body must end soon then.

    On a busy machine it may come before the body begins. So the caller expects it around this.
    """

    def handle(number, frame):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, handle)
    start = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise AssertionError("the body ended before the signal came")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        assert time.monotonic() - start < seconds + 30


@pytest.mark.parametrize("moment", MOMENTS)
def test_waits_are_interrupted_and_can_be_repeated(daemon, moment):
    with job(daemon, 2, [1]) as (_, layouts):
        layouts[0].mark_ready(1, 0)
        for wait in (
            lambda: layouts[0].wait_step(1),
            lambda: layouts[0].wait_bucket(1, 0),
            lambda: layouts[0].wait_step(1, 60),
        ):
            with pytest.raises(Interrupted), signal_after(moment):
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
            with pytest.raises(Interrupted), signal_after(moment):
                operation(sessions[0])
            # Ends the helper's call.
            sessions[1].close()


def test_joining_is_interrupted():
    absent = gradsync.SessionOptions(socket=f"/tmp/{uuid.uuid4().hex}.sock", job_id="job")
    with pytest.raises(Interrupted), signal_after(0.02):
        gradsync.Session.join(absent)


def test_ctrl_c_ends_a_wait(daemon):
    with job(daemon, 2, [1]) as (_, layouts):
        with pytest.raises(KeyboardInterrupt), ctrl_c_after(0.4):
            layouts[0].wait_step(1)
        assert finish_step(layouts, 1).step == 1


def test_a_signal_that_does_not_end_the_main_threads_wait_is_noticed():
    """As one does that comes just before the main thread begins to wait."""
    begun = threading.Event()
    ends = threading.Event()

    def signal_this_thread():
        begun.wait(60)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    def blocking_call():
        begun.set()
        ends.wait(60)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=signal_this_thread, daemon=True)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        thread.start()
        _interruptible.call(blocking_call)
    assert time.monotonic() - start < 30
    ends.set()
    thread.join()
    signal.signal(signal.SIGINT, before)


# ---- Waits of a thread for which the main thread waits -------------------------------------------

_passes = itertools.count()


def for_main_thread(call, *args):
    """Runs call(*args) as PyTorch runs the end of a backward pass on a GPU."""

    def end_of_pass():
        with _interruptible.for_main_thread():
            call(*args)

    _interruptible.begin_pass(next(_passes))
    on_another_thread(end_of_pass)


@pytest.fixture
def watching():
    _interruptible.watch_ctrl_c()
    yield
    signal.set_wakeup_fd(-1)


# The first signal arrives while the thread is inside the library.
@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_ends_waits_for_the_main_thread(daemon, watching, moment):
    with job(daemon, 2, [1]) as (sessions, layouts):
        for call in (
            lambda: layouts[0].wait_step(1, 120),
            lambda: [layouts[0].wait_step(1, 120), layouts[0].wait_bucket(1, 0, 120)],
        ):
            with pytest.raises(KeyboardInterrupt), ctrl_c_after(moment):
                for_main_thread(call)
        assert finish_step(layouts, 1).step == 1
        for_main_thread(layouts[0].wait_step, 1)


# A signal may arrive before the barrier has begun, so the other rank does not come to it.
@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_ends_a_barrier_for_the_main_thread(daemon, watching, moment):
    with job(daemon, 2) as sessions:
        with pytest.raises(KeyboardInterrupt), ctrl_c_after(moment):
            for_main_thread(sessions[0].barrier, 120)
        sessions[1].close()


def waits_to_its_end(layout):
    with pytest.raises(gradsync.DeadlineExceededError):
        for_main_thread(layout.wait_step, 1, 0.5)


def test_signals_that_do_not_raise_end_no_wait(daemon, watching):
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append("handled"))
    with job(daemon, 2, [1]) as (_, layouts):
        timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT])
        timer.start()
        waits_to_its_end(layouts[0])
        timer.join()
    signal.signal(signal.SIGINT, before)
    assert seen == ["handled"]


def test_ctrl_c_before_a_pass_or_in_a_forked_child_ends_no_wait(daemon, watching):
    with job(daemon, 2, [1]) as (_, layouts):
        with pytest.raises(KeyboardInterrupt), ctrl_c_after(0.1):
            threading.Event().wait(60)

        def interrupted_child():
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGINT, lambda *_: os._exit(0))
                signal.raise_signal(signal.SIGINT)
                os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
            layouts[0].wait_step(1, 0.5)

        with pytest.raises(gradsync.DeadlineExceededError):
            for_main_thread(interrupted_child)


def test_another_users_wakeup_descriptor_is_kept():
    theirs, ours = socket.socketpair()
    with theirs, ours:
        theirs.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno())
        _interruptible.watch_ctrl_c()
        assert signal.set_wakeup_fd(-1) == theirs.fileno()
    _interruptible.watch_ctrl_c()
    assert signal.set_wakeup_fd(-1) != -1


def test_the_result_of_an_interrupted_wait_is_dropped(daemon):
    """The result of an interrupted wait is dropped, and its helper is used again."""
    with job(daemon, 2, [1]) as (_, layouts):
        for step in (1, 2, 3):
            with pytest.raises(Interrupted), signal_after(0.3):
                layouts[0].wait_step(step)
            finish_step(layouts, step)
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("gradsync-wait") < 20


def test_the_result_is_freed_though_somebody_keeps_the_exception():
    """As a notebook does. An interrupted join() gives a session that nobody else can end."""
    goes_on, freed = threading.Event(), threading.Event()

    def blocking_call():
        os.kill(os.getpid(), signal.SIGALRM)
        goes_on.wait(60)
        result = {1, 2}
        weakref.finalize(result, freed.set)
        return result

    with pytest.raises(Interrupted) as kept, signal_after(60):
        _interruptible.call(blocking_call)
    goes_on.set()
    assert freed.wait(60)
    assert kept.value.__traceback__ is not None


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
    with job(daemon, 2) as (session, other):
        ended = session._handle.finalizer
        thread = threading.Thread(target=session.barrier)
        thread.start()
        while not session._handle.users:
            assert thread.is_alive()
        session.close()
        assert session.closed and ended.alive
        with pytest.raises(gradsync.FailedPreconditionError):
            session.barrier()
        other.barrier()
        thread.join()
        assert not ended.alive
