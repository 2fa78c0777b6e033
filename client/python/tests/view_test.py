"""Views own the mapping: their memory stays valid after layout and session have ended."""

import ctypes
import gc
import os
import subprocess
import sys
import weakref

import gradsync
import numpy
import pytest
from gradsync import _handle
from threads import options


def mappings():
    """Mappings of arenas that this process still holds, as the kernel lists them."""
    with open("/proc/self/maps") as maps:
        return sum("gradsync" in line for line in maps)


@pytest.fixture
def view(daemon):
    session = gradsync.Session.join(options(daemon))
    layout = session.register_layout(parameters=[gradsync.Parameter("weight", (1000, 100))])
    gone = [weakref.ref(session), weakref.ref(layout), weakref.ref(layout._handle)]
    view = layout.gradient(0)
    view.numpy()[:] = 7
    session.close()
    del session, layout
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3
    return view


def test_a_view_outlives_session_and_layout(view):
    values = view.numpy()
    assert (values == 7).all()
    values[:] = 8
    assert (view.numpy() == 8).all()


@pytest.mark.parametrize(
    "use",
    [
        lambda view: view.buffer,
        lambda view: view.numpy()[10:20],
        lambda view: memoryview(view.buffer).cast("B")[40:80],
        lambda view: numpy.frombuffer(view.buffer, numpy.float32, 10),
        lambda view: (ctypes.c_float * 10).from_buffer(view.buffer),
    ],
)
def test_everything_made_of_a_view_owns_the_mapping(view, use):
    mapping = weakref.ref(view.buffer.gradsync_mapping)
    # The test's list of arguments holds the view, too.
    alive = use(gradsync_copy(view))
    view.buffer.gradsync_mapping = None
    assert isinstance(mapping(), _handle.Handle)
    assert bytes(alive)[:4] == numpy.float32(7).tobytes()
    del alive
    gc.collect()
    assert mapping() is None


def gradsync_copy(view):
    """Another view of the same memory."""
    struct = gradsync.view._structs.ViewStruct(view.address, view.count, view.bucket, view.dtype)
    return gradsync.View(struct, view.buffer.gradsync_mapping)


def test_memory_is_unmapped_with_the_last_user(daemon):
    def run():
        with gradsync.Session.join(options(daemon)) as session:
            layout = session.register_layout(explicit_buckets=[gradsync.Bucket(100)])
            return layout.bucket(0).numpy()

    def count():
        gc.collect()
        return mappings()

    before = count()
    values = [run() for _ in range(3)]
    assert count() > before
    assert sum(float(array.sum()) for array in values) == 0
    del values
    assert count() == before


def test_torch_makes_a_tensor_of_a_buffer(daemon):
    torch = pytest.importorskip("torch")  # the package itself does not need it
    with gradsync.Session.join(options(daemon)) as session:
        layout = session.register_layout(
            explicit_buckets=[gradsync.Bucket(100, gradsync.DataType.BFLOAT16)]
        )
        tensor = torch.frombuffer(layout.bucket(0).buffer, dtype=torch.bfloat16)
        assert tensor.data_ptr() == layout.bucket(0).address
    del layout, session
    gc.collect()
    tensor.fill_(1.5)
    assert tensor.sum() == 1.5 * len(tensor)


def test_empty_buckets_have_views(daemon):
    with gradsync.Session.join(options(daemon)) as session:
        buckets = [gradsync.Bucket(0), gradsync.Bucket(1, gradsync.DataType.FLOAT16)]
        layout = session.register_layout(explicit_buckets=buckets)
        assert layout.bucket(0).numpy().shape == (0,)
        assert layout.bucket(1).numpy().dtype == numpy.float16
        assert "float16, bucket 1" in repr(layout.bucket(1))


EXIT = """
import sys, threading, gradsync
session = gradsync.Session.join(gradsync.SessionOptions(
    socket=sys.argv[1], job_id=sys.argv[2], world_size=2))
if sys.argv[2] == "thread":
    # For ever: rank 1 never comes.
    entered = threading.Event()
    def wait():
        entered.set()
        session.barrier()
    threading.Thread(target=wait, daemon=True).start()
    entered.wait()
elif sys.argv[2] == "layouts":
    other = gradsync.Session.join(gradsync.SessionOptions(
        socket=sys.argv[1], job_id=sys.argv[2], world_size=2, rank=1))
    layouts = [None, None]
    def register(rank):
        one = (session, other)[rank]
        layouts[rank] = one.register_layout(explicit_buckets=[gradsync.Bucket(100)])
    thread = threading.Thread(target=register, args=(1,))
    thread.start()
    register(0)
    thread.join()
    values = layouts[0].bucket(0).numpy()
    layouts[0].mark_ready(1, 0)
    cycle = [session, layouts, values]
    cycle.append(cycle)
    layouts[0].wait_step, layouts[1].cycle = None, cycle
"""


@pytest.mark.parametrize("case", ["session", "thread", "layouts"])
def test_the_interpreter_exits_with_everything_alive(daemon, case):
    run = subprocess.run(
        [sys.executable, "-c", EXIT, daemon.socket, case],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    assert (run.returncode, run.stderr) == (0, "")
