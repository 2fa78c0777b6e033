"""States that cannot be read, read too late, or differ; and waits that end while one is read."""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import uuid

import gradsync
import numpy
import pytest
from gradsync import Reason, _interruptible, _state_source
from threads import ctrl_c_after, finish_step, job, on_another_thread, on_every_rank, options

PATIENCE_S = 60


def one_step(given):
    """The rank that is lost: a process of its own, which a signal ends after its first step."""
    session = gradsync.Session.join(given)
    layout = session.register_layout(explicit_buckets=[gradsync.Bucket(4)])
    finish_step([layout], 1)
    signal.pause()


def elsewhere(given, told):
    """A replacement whose loop does not skip what is done."""
    session = gradsync.Session.join(given)
    layout = session.register_layout(explicit_buckets=[gradsync.Bucket(4)])
    state = numpy.zeros(10)
    session.serve_state(lambda: [("state", state)])
    state[:] = numpy.frombuffer(session.fetch_state(PATIENCE_S).items["state"])
    session.confirm_state(PATIENCE_S)
    layout.set_position(0, 0)
    layout.finish_step(2)
    told.send(session.await_end(PATIENCE_S).reason)


class Held:
    """Ranks with on_rank_loss="hold", as threads; the last one is a process, which lose() kills."""

    def __init__(self, daemon, world_size, **others):
        job_id = uuid.uuid4().hex
        self._options = [
            options(daemon, rank, world_size, job_id, on_rank_loss="hold", **others)
            for rank in range(world_size)
        ]
        self._context = multiprocessing.get_context("forkserver")
        self._victim = self._context.Process(target=one_step, args=self._options[-1:])
        self._victim.start()
        self.sessions = [gradsync.Session.join(given) for given in self._options[:-1]]
        self.states = [numpy.arange(10.0) for _ in self._options]
        self.layouts = on_every_rank(world_size - 1, self._register)
        finish_step(self.layouts, 1)

    def _register(self, rank):
        return self.sessions[rank].register_layout(explicit_buckets=[gradsync.Bucket(4)])

    def serve(self, rank, read=None):
        self.sessions[rank].serve_state(read or (lambda: [("state", self.states[rank])]))

    def lose(self):
        self._victim.kill()
        self._victim.join()

    def end_of_replacement(self, program):
        """What a process that takes the place of the lost rank tells about its session's end."""
        end, told = self._context.Pipe(duplex=False)
        process = self._context.Process(target=program, args=(self._options[-1], told))
        process.start()
        assert end.poll(PATIENCE_S)
        process.join(PATIENCE_S)
        return end.recv()

    def replace(self):
        """A session that takes the place of the lost rank; its layout becomes the last one."""
        rank = len(self._options) - 1
        del self.sessions[rank:], self.layouts[rank:]
        self.sessions.append(gradsync.Session.join(self._options[rank]))
        assert self.sessions[rank].is_replacement
        self.layouts.append(self._register(rank))
        self.states[rank] = numpy.zeros(10)
        return self.sessions[rank]

    def load(self, rank, image):
        self.states[rank][:] = numpy.frombuffer(image.items["state"])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.lose()
        for session in self.sessions:
            session.close()


@pytest.fixture
def held(daemon):
    """Three ranks with one complete step."""
    with Held(daemon, 3) as held:
        yield held


def begin_second_step(held):
    """Without the last rank, which is lost."""
    held.lose()
    for layout in held.layouts[:2]:
        layout.finish_step(2)


def waiting(layout, step=2):
    """A thread that waits for the step; its result() is the step's, or the error."""
    outcome = []

    def wait():
        try:
            outcome.append(layout.wait_step(step, PATIENCE_S))
        except gradsync.Error as error:
            outcome.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()

    def result():
        thread.join(PATIENCE_S)
        return outcome[0]

    return result


def finish_second_step(held, waits):
    held.layouts[2].finish_step(2)
    assert held.layouts[2].wait_step(2, PATIENCE_S).step == 2
    assert [wait().step for wait in waits] == [2, 2]


def test_a_replacement_gets_the_state_of_a_survivor(held):
    for rank in range(2):
        held.serve(rank)
    begin_second_step(held)
    waits = [waiting(layout) for layout in held.layouts[:2]]
    new = held.replace()
    with pytest.raises(gradsync.FailedPreconditionError, match="fetch_state|FetchState"):
        held.layouts[2].mark_ready(2, 0)
    held.serve(2)
    image = new.fetch_state(PATIENCE_S)
    assert image.source in (0, 1) and list(image.items) == ["state"]
    held.load(2, image)
    new.confirm_state(PATIENCE_S)
    assert (held.states[2] == numpy.arange(10.0)).all()
    finish_second_step(held, waits)
    # It takes part in everything again.
    on_every_rank(3, lambda rank: held.sessions[rank].check_in_sync(lambda: [("a", b"1")]))


@pytest.mark.parametrize("ended", [1, 0])
def test_survivors_that_wait_for_a_bucket_are_asked(held, ended):
    for rank in range(2):
        held.serve(rank)
    held.lose()
    for layout in held.layouts[:ended]:
        layout.finish_step(2)
    waits = []
    for layout in held.layouts[ended:2]:
        layout.mark_ready(2, 0)
        waits.append(threading.Thread(target=layout.wait_bucket, args=(2, 0, PATIENCE_S)))
        waits[-1].start()
    new = held.replace()
    held.serve(2)
    held.load(2, new.fetch_state(PATIENCE_S))
    new.confirm_state(PATIENCE_S)
    held.layouts[2].mark_ready(2, 0)
    for wait in waits:
        wait.join(PATIENCE_S)
    for layout in held.layouts[ended:]:
        layout.end_step(2)
    assert [layout.wait_step(2, PATIENCE_S).step for layout in held.layouts] == [2, 2, 2]


def test_a_source_that_raises_is_replaced_by_another(held):
    reads = []

    def raises():
        reads.append(threading.current_thread())
        raise KeyError("no optimizer yet")

    held.serve(0, raises)
    held.serve(1)
    begin_second_step(held)
    waits = [waiting(layout) for layout in held.layouts[:2]]
    new = held.replace()
    held.serve(2)
    image = new.fetch_state(PATIENCE_S)
    assert image.source == 1
    assert reads and threading.main_thread() not in reads
    held.load(2, image)
    new.confirm_state(PATIENCE_S)
    finish_second_step(held, waits)


def test_if_every_source_raises_the_reasons_are_said(held):
    def raises():
        raise ValueError("broken state")

    held.serve(0, raises)
    held.serve(1, raises)
    begin_second_step(held)
    waits = [waiting(layout) for layout in held.layouts[:2]]
    new = held.replace()
    with pytest.raises(gradsync.Error, match="ValueError: broken state") as raised:
        new.fetch_state(PATIENCE_S)
    assert raised.value.reason == Reason.STATE_UNAVAILABLE
    assert len(waits) == 2


def test_a_replacement_that_loads_something_else_ends_alone(held):
    for rank in range(2):
        held.serve(rank)
    begin_second_step(held)
    waits = [waiting(layout) for layout in held.layouts[:2]]
    new = held.replace()
    held.serve(2)
    held.load(2, new.fetch_state(PATIENCE_S))
    held.states[2][3] += 1
    with pytest.raises(gradsync.FailedPreconditionError, match="'state' differs") as raised:
        new.confirm_state(PATIENCE_S)
    assert raised.value.reason == Reason.RANKS_DIVERGED and new.ended
    new.close()
    # The others are still held, and the next one does it right.
    new = held.replace()
    held.serve(2)
    held.load(2, new.fetch_state(PATIENCE_S))
    new.confirm_state(PATIENCE_S)
    finish_second_step(held, waits)


def test_a_replacement_whose_function_raises_ends_alone(held):
    for rank in range(2):
        held.serve(rank)
    begin_second_step(held)
    waits = [waiting(layout) for layout in held.layouts[:2]]
    new = held.replace()

    def raises():
        raise RuntimeError("nothing is loaded")

    held.serve(2, raises)
    new.fetch_state(PATIENCE_S)
    with pytest.raises(gradsync.FailedPreconditionError, match="nothing is loaded") as raised:
        new.confirm_state(PATIENCE_S)
    assert raised.value.reason == Reason.STATE_REFUSED
    new.close()
    new = held.replace()
    held.serve(2)
    held.load(2, new.fetch_state(PATIENCE_S))
    new.confirm_state(PATIENCE_S)
    finish_second_step(held, waits)


def test_a_replacement_at_another_position_ends_alone(held):
    for rank in range(2):
        held.serve(rank)
    held.lose()
    for layout in held.layouts[:2]:
        layout.set_position(0, 1)
        layout.finish_step(2)
    waits = [waiting(layout) for layout in held.layouts[:2]]
    assert held.end_of_replacement(elsewhere) == Reason.POSITION_MISMATCH
    # The others are still held, and the next one does it right.
    new = held.replace()
    held.serve(2)
    held.load(2, new.fetch_state(PATIENCE_S))
    new.confirm_state(PATIENCE_S)
    held.layouts[2].set_position(0, 1)
    finish_second_step(held, waits)


def test_survivors_that_differ_end_the_job(held):
    for rank in range(2):
        held.serve(rank)
    held.states[1][5] = -1
    begin_second_step(held)
    waits = [waiting(layout) for layout in held.layouts[:2]]
    new = held.replace()
    held.serve(2)
    with pytest.raises(gradsync.Error) as raised:
        held.load(2, new.fetch_state(PATIENCE_S))
        new.confirm_state(PATIENCE_S)
    reasons = {raised.value.reason, *(wait().reason for wait in waits)}
    assert Reason.RANKS_DIVERGED in reasons, reasons


def test_a_void_step_interrupts_the_confirmation(held):
    for rank in range(2):
        held.serve(rank)
    held.lose()
    held.layouts[0].mark_ready(2, 0)
    held.layouts[1].finish_step(2)
    wait = waiting(held.layouts[1])
    new = held.replace()
    held.serve(2)
    image = new.fetch_state(PATIENCE_S)
    assert image.source == 1  # rank 0 may still change its state
    held.load(2, image)
    held.layouts[0].abandon_step(2, "changed its mind")
    assert wait().reason == Reason.STEP_ABANDONED
    with pytest.raises(gradsync.AbortedError) as raised:
        new.confirm_state(PATIENCE_S)
    assert raised.value.reason == Reason.STATE_INTERRUPTED
    for layout in held.layouts[:2]:
        layout.finish_step(3)
    waits = [waiting(layout, 3) for layout in held.layouts[:2]]
    held.load(2, new.fetch_state(PATIENCE_S))
    new.confirm_state(PATIENCE_S)
    assert held.layouts[2].next_step == 3
    held.layouts[2].finish_step(3)
    assert [wait().step for wait in waits] == [3, 3]


# ---- Waits that end while the state is read ------------------------------------------------------


class EndlessState:
    """A state that nobody hashes in the time of a test: zeros, which take no memory."""

    BYTES = 1 << 40

    def __init__(self):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        # PROT_READ; MAP_PRIVATE, MAP_ANONYMOUS and MAP_NORESERVE.
        self._address = libc.mmap(None, self.BYTES, 1, 0x2 | 0x20 | 0x4000, -1, 0)
        self.begun = threading.Event()

    def read(self):
        self.begun.set()
        return [("endless", gradsync.StateMemory(self._address, self.BYTES, self))]


@pytest.fixture
def reading(held):
    """Rank 1 of a held step, which hashes its state without end; rank 0 is the source."""
    state = EndlessState()
    held.serve(0)
    held.serve(1, state.read)
    begin_second_step(held)
    held.replace().fetch_state(PATIENCE_S)
    assert state.begun.wait(PATIENCE_S)
    yield held.layouts[1], held.sessions[1], state


def expect_reading(layout, state):
    """A wait of this thread lets the library read the state again."""
    state.begun.clear()
    for timeout in (0.5, 5, 30):
        with pytest.raises(gradsync.DeadlineExceededError):
            layout.wait_step(2, timeout)
        if state.begun.is_set():
            return
    pytest.fail("nobody reads the state")


def test_time_outs_are_kept_while_the_state_is_read(reading):
    layout, *_ = reading
    for timeout in (0.3, 0.5, 0):
        start = time.monotonic()
        with pytest.raises(gradsync.DeadlineExceededError) as raised:
            layout.wait_step(2, timeout)
        assert raised.value.reason == Reason.WAIT_TIMEOUT
        assert time.monotonic() - start < timeout + 10


@pytest.mark.parametrize("moment", [0.02, 0.5])
def test_ctrl_c_ends_the_reading(reading, moment):
    layout, _, state = reading
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), ctrl_c_after(moment):
            layout.wait_step(2)
        # Nobody reads any more. The reading begins again with the next wait.
    expect_reading(layout, state)


def test_a_wait_that_ctrl_c_overtook_reads_nothing(reading, monkeypatch):
    layout, _, state = reading
    late = []

    def call(function):
        """Ctrl-C comes before the helper thread has begun the call."""
        late.append(function)
        raise KeyboardInterrupt

    monkeypatch.setattr(_interruptible, "call", call)
    with pytest.raises(KeyboardInterrupt):
        layout.wait_step(2, 0.5)
    state.begun.clear()
    with pytest.raises(gradsync.DeadlineExceededError):
        on_another_thread(late[0])
    assert not state.begun.is_set()


def test_ctrl_c_elsewhere_does_not_keep_a_thread_from_reading(reading):
    layout, session, state = reading

    def train():
        session.serve_state(state.read)
        _state_source.pause(session._handle)  # Ctrl-C on the main thread
        expect_reading(layout, state)

    on_another_thread(train)


def test_an_abandoned_step_ends_the_reading(reading):
    layout, *_ = reading
    start = time.monotonic()
    with pytest.raises(gradsync.Error):
        layout.abandon_step(2, "no more")  # it has ended the step
    layout.close()
    assert time.monotonic() - start < 10


def test_a_closed_session_ends_the_reading(reading):
    layout, session, _ = reading
    wait = waiting(layout)
    start = time.monotonic()
    session.close()
    assert wait().reason == Reason.CLOSED
    assert time.monotonic() - start < 10


EXIT = """
import atexit, logging, sys, threading
import gradsync

# On a busy machine the other rank may come late, and this one would say so.
logging.getLogger("gradsync").setLevel(logging.ERROR)

session = gradsync.Session.join(
    socket=sys.argv[1], job_id=sys.argv[2], rank=0, world_size=2, on_rank_loss="hold"
)
layout = session.register_layout(explicit_buckets=[gradsync.Bucket(4)])
begun = threading.Event()
ends = threading.Event()

def read():
    begun.set()
    ends.wait(60)
    return [("state", bytes(1 << 20))]

session.serve_state(read)
atexit.register(ends.set)  # runs before the package's own handlers
layout.finish_step(1)
layout.wait_step(1)
layout.finish_step(2)
print("ended step 2", file=sys.stderr, flush=True)
begun.wait(60)
"""


def test_the_interpreter_ends_while_the_state_is_read(daemon):
    job_id = uuid.uuid4().hex
    script = subprocess.Popen(
        [sys.executable, "-c", EXIT, daemon.socket, job_id],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    given = options(daemon, 1, 2, job_id, on_rank_loss="hold")
    victim = multiprocessing.get_context("forkserver").Process(target=one_step, args=(given,))
    victim.start()
    assert script.stderr.readline() == "ended step 2\n"
    victim.kill()
    victim.join()
    with gradsync.Session.join(given) as new:
        layout = new.register_layout(explicit_buckets=[gradsync.Bucket(4)])
        fetching = threading.Thread(target=lambda: pytest.raises(gradsync.Error, new.fetch_state))
        fetching.start()
        _, errors = script.communicate(timeout=PATIENCE_S)
        assert (script.returncode, errors) == (0, "")
        layout.close()
        new.close()
        fetching.join(PATIENCE_S)


# ---- Smaller things ------------------------------------------------------------------------------


def test_ranks_with_the_same_state_are_in_sync(daemon):
    with job(daemon, 3) as sessions:
        value = numpy.arange(100, dtype="f4")

        def check(rank):
            mine = value.copy()
            sessions[rank].check_in_sync(lambda: [("weight", mine), ("empty", b"")])
            if rank == 2:
                mine[7] += 1
            with pytest.raises(gradsync.FailedPreconditionError) as raised:
                sessions[rank].check_in_sync(lambda: [("step", b"12"), ("weight", mine)])
            sessions[rank].barrier()
            return raised.value.reason, raised.value.rank, str(raised.value)

        results = on_every_rank(3, check)
        assert results == results[:1] * 3
        reason, rank, text = results[0]
        assert (reason, rank) == (Reason.RANKS_DIVERGED, 2)
        assert "rank 2 differs in 'weight'" in text


@pytest.mark.parametrize(
    "items, message",
    [
        ([("a", 5)], "item 'a' of the state is no contiguous buffer"),
        ([("a", numpy.zeros((3, 3))[:, 1])], "item 'a'"),
        ([("a", b"1"), ("a", b"2")], "has the name of an earlier one"),
        ([("", b"1")], "needs a name"),
        ([("n" * 1025, b"1")], "needs a name"),
        ([("a\0b", b"1")], "NUL"),
        ([("a", gradsync.StateMemory(0, 5, None))], "null pointer"),
    ],
)
def test_a_malformed_item_is_named(daemon, items, message):
    with gradsync.Session.join(options(daemon)) as session:
        with pytest.raises(gradsync.InvalidArgumentError, match=message):
            session.check_in_sync(lambda: items)


def test_an_error_of_the_function_is_raised(daemon):
    with gradsync.Session.join(options(daemon)) as session:
        with pytest.raises(ZeroDivisionError):
            session.check_in_sync(lambda: 1 / 0)


def test_ranks_with_different_positions_are_named(daemon):
    with job(daemon, 2, [1]) as (sessions, layouts):
        for layout in layouts:
            layout.set_position(3, 7)
        finish_step(layouts, 1)
        layouts[0].set_position(3, 8)
        layouts[1].set_position(4, 0)
        for layout in layouts:
            layout.finish_step(2)
        ends = on_every_rank(2, lambda rank: sessions[rank].await_end(PATIENCE_S))
        mismatch = [end for end in ends if end.reason == Reason.POSITION_MISMATCH]
        assert len(mismatch) == 1 and {end.reason for end in ends} >= {Reason.RANK_LOST}
        assert "epoch 3, batch 8" in str(mismatch[0]) and "epoch 4, batch 0" in str(mismatch[0])
        with pytest.raises(gradsync.InvalidArgumentError):
            layouts[0].set_position(-1, 0)


def test_buffers_of_rank_0_reach_every_rank(daemon):
    with job(daemon, 2, [10], buffer_bytes=5) as (_, layouts):
        assert layouts[0].bucket_count == 2
        for layout, value in zip(layouts, (b"hello", bytes(5))):
            layout.bucket(0).numpy()[:] = 3
            assert layout.buffers.nbytes == 5 and layout.buffers.dtype == gradsync.DataType.UINT8
            layout.buffers.numpy()[:] = numpy.frombuffer(value, "u1")
        result = finish_step(layouts, 1)
        assert [bytes(layout.buffers.buffer) for layout in layouts] == [b"hello"] * 2
        assert result.gradient_norm == pytest.approx(90**0.5)
    with job(daemon, 1, [10]) as (_, layouts):
        assert layouts[0].buffers is None


def test_only_a_replacement_has_current_layouts_and_fetches(daemon):
    with gradsync.Session.join(options(daemon)) as session:
        assert session.current_layouts() == []
        for call in (session.fetch_state, session.confirm_state):
            with pytest.raises(gradsync.FailedPreconditionError) as raised:
                call()
            assert raised.value.reason == Reason.PROTOCOL_VIOLATION


def test_a_child_cannot_serve(daemon):
    with gradsync.Session.join(options(daemon)) as session:
        session.serve_state(lambda: [])
        pid = os.fork()
        if pid == 0:
            try:
                for call in (
                    lambda: session.serve_state(lambda: []),
                    session.fetch_state,
                    session.confirm_state,
                    lambda: session.check_in_sync(lambda: []),
                ):
                    with pytest.raises(gradsync.FailedPreconditionError) as raised:
                        call()
                    assert raised.value.reason == Reason.FORKED
                session.close()
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
