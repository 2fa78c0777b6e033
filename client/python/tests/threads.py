"""Ranks as threads of the test's own process: the cheapest job there is."""

import concurrent.futures
import contextlib
import ctypes
import signal
import threading
import time
import uuid

import gradsync


def options(daemon, rank=0, world_size=1, job_id=None, **others):
    """Options of a rank; without job_id, the job is a new one."""
    return gradsync.SessionOptions(
        socket=daemon.socket,
        job_id=job_id or uuid.uuid4().hex,
        rank=rank,
        world_size=world_size,
        **others,
    )


def on_every_rank(world_size, body, *args):
    """Runs body(rank, *args) on one thread for each rank; returns the results in rank order.

    Raises the first error at once: the other ranks may wait for that rank. Their waits end when the
    caller closes their sessions.
    """
    pool = concurrent.futures.ThreadPoolExecutor(world_size)
    try:
        futures = [pool.submit(body, rank, *args) for rank in range(world_size)]
        for future in concurrent.futures.as_completed(futures):
            future.result()
    finally:
        pool.shutdown(wait=False)
    return [future.result() for future in futures]


@contextlib.contextmanager
def job(daemon, world_size, buckets=None, **spec):
    """Every rank's session, and its layout if `buckets` (float32 counts) or a spec is given."""
    job_id = uuid.uuid4().hex
    if buckets is not None:
        spec["explicit_buckets"] = [gradsync.Bucket(count) for count in buckets]

    def join(rank):
        session = gradsync.Session.join(options(daemon, rank, world_size, job_id))
        return session, session.register_layout(**spec) if spec else None

    sessions, layouts = zip(*on_every_rank(world_size, join))
    try:
        yield (sessions, layouts) if spec else sessions
    finally:
        for session in sessions:
            session.close()


def finish_step(layouts, step):
    """Marks every bucket on every rank, ends the step, waits, and returns rank 0's result."""
    for layout in layouts:
        for bucket in range(layout.bucket_count):
            layout.mark_ready(step, bucket)
        layout.end_step(step)
    return [layout.wait_step(step, 30) for layout in layouts][0]


# ---- Threads for which the main thread waits -----------------------------------------------------

_libc = ctypes.CDLL(None)


def on_another_thread(call):
    """Runs call() on another thread, and raises what it raises. The caller waits outside of Python.

    PyTorch waits so for the threads of a backward pass. On the main thread no signal handler runs.
    """
    mutex = ctypes.create_string_buffer(64)  # a pthread_mutex_t of zeros is unlocked
    locked = threading.Event()
    errors = []

    def run():
        _libc.pthread_mutex_lock(mutex)
        locked.set()
        try:
            call()
        except BaseException as error:
            errors.append(error)
        _libc.pthread_mutex_unlock(mutex)

    thread = threading.Thread(target=run)
    thread.start()
    locked.wait()
    _libc.pthread_mutex_lock(mutex)
    thread.join()
    if errors:
        raise errors[0]


class _SignalEvent(ctypes.Structure):
    """sigevent of <signal.h>: zeros of `notify` mean "send `signal` to the process"."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 48),
    ]


class _TimerTimes(ctypes.Structure):
    """itimerspec of <time.h>."""

    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "after_s", "after_ns")]


@contextlib.contextmanager
def ctrl_c_after(seconds):
    """Ctrl-C comes after `seconds`; the body must end soon then.

    On a busy machine it may come before the body begins. So the caller expects KeyboardInterrupt
    around this: `with pytest.raises(KeyboardInterrupt), ctrl_c_after(1):`.

    The kernel sends the signal. A thread that sends it, such as threading.Timer, would have to be
    started and joined, and an exception in the middle of that leaves Python's locks locked.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    start = time.monotonic()
    timer = ctypes.c_void_p()
    event = _SignalEvent(signal=signal.SIGINT)
    times = _TimerTimes(after_s=int(seconds), after_ns=int(seconds % 1 * 1e9))
    assert _libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) == 0
    try:
        assert _libc.timer_settime(timer, 0, ctypes.byref(times), None) == 0
        yield
        raise AssertionError("the body ended before Ctrl-C came")
    finally:
        _libc.timer_delete(timer)
        signal.signal(signal.SIGINT, before)
        assert time.monotonic() - start < seconds + 30
