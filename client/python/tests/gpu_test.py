"""Layouts on GPUs: a real gradsyncd with its worker, the library and the package, on fakes.

A process cannot change its fake machine. Therefore each test runs its ranks as threads of a new
process.
"""

import gc
import sys
import types

import gradsync
import pytest
from daemon_process import DaemonProcess
from fake_gpus import CUDA_LIBRARY, NCCL_LIBRARY, Driver, FakeGpus
from gradsync import _handle
from ranks import run_ranks
from threads import job, on_every_rank

COUNT = 100


class Socket:
    """In place of the daemon, for threads.job()."""

    def __init__(self, socket):
        self.socket = socket


@pytest.fixture
def machine(monkeypatch):
    """A machine with two GPUs and a daemon; fails the test if it has seen a violation."""
    gpus = FakeGpus(2)
    for name, value in gpus.environment.items():
        monkeypatch.setenv(name, value)
    daemon = DaemonProcess(f"--cuda_library={CUDA_LIBRARY}", f"--nccl_library={NCCL_LIBRARY}")
    gpus.socket = daemon.socket
    yield gpus
    daemon.close()
    assert gpus.close() == []


def on(machine, body):
    """Runs body(socket, UUID of the first GPU) in a process on the machine."""
    return run_ranks(
        body, 1, Socket(machine.socket), machine.uuids[0], environment=machine.environment
    )[0]


def two_ranks(socket, uuid, buckets=2):
    return job(socket, 2, explicit_buckets=[gradsync.Bucket(COUNT)] * buckets, device=uuid)


def hand_over(driver, layout, step, value, stream):
    """One rank's step, until its stream waits for the averages; the host does not wait."""
    for bucket in range(layout.bucket_count):
        driver.fill(layout.bucket(bucket), value + bucket, stream)
        layout.mark_ready_on_streams(step, bucket, [stream])
    layout.finish_step_on_streams(step, [stream])
    layout.wait_on_stream(step, stream)


# ---- Steps ---------------------------------------------------------------------------------------


def averages(socket, uuid):
    driver = Driver()
    streams = driver.stream(), driver.stream()
    with two_ranks(socket, uuid) as (_, layouts):
        assert layouts[0].device == uuid == gradsync.cuda_device_uuid(0)
        for step in range(1, 5):
            for rank, layout in enumerate(layouts):
                hand_over(driver, layout, step, 10 * step + 2 * rank, streams[rank])
                # The host looks at the last step while this one is open.
                if step > 1:
                    assert layout.wait_step(step - 1).live_ranks == 2
            for rank, layout in enumerate(layouts):
                for bucket in range(2):
                    average = [10 * step + 1 + bucket] * COUNT
                    assert driver.read(layout.bucket(bucket), streams[rank]) == average
                verdict = layout.device_verdict(step)
                assert (verdict.dtype, verdict.count) == (gradsync.DataType.FLOAT32, 1)
                assert verdict.device == uuid
                assert driver.read(verdict, streams[rank]) == [0]
        for layout in layouts:
            layout.wait_step(4)


def test_averages_in_the_order_of_streams(machine):
    on(machine, averages)


def joined_streams(socket, uuid):
    driver = Driver()
    first, second, third = driver.stream(), driver.stream(), driver.stream()
    with two_ranks(socket, uuid, buckets=1) as (_, layouts):
        for layout in layouts:
            for _ in range(20):
                driver.fill(layout.bucket(0), 1, second)
            driver.fill(layout.bucket(0), 5, second)
            layout.mark_ready_on_streams(1, 0, [first, second])
            layout.finish_step_on_streams(1, [first])
        for layout in layouts:
            layout.wait_on_stream(1, third, bucket=0)
            assert driver.read(layout.bucket(0), third) == [5] * COUNT
            layout.wait_step(1)


def test_several_streams_write_one_bucket(machine):
    on(machine, joined_streams)


def void_steps(socket, uuid):
    driver = Driver()
    stream, other = driver.stream(), driver.stream()
    with two_ranks(socket, uuid) as (_, layouts):
        hand_over(driver, layouts[0], 1, 7, stream)
        layouts[1].mark_ready_on_streams(1, 0, [other])
        layouts[1].abandon_step(1, "out of memory")
        # The stream continues, and reads the verdict on the GPU.
        assert driver.read(layouts[0].device_verdict(1), stream) == [1]
        for layout in layouts:
            with pytest.raises(gradsync.AbortedError, match="out of memory") as raised:
                layout.wait_step(1)
            assert (raised.value.reason, raised.value.rank) == (gradsync.Reason.STEP_ABANDONED, 1)
        hand_over(driver, layouts[0], 2, 3, stream)
        hand_over(driver, layouts[1], 2, 3, other)
        assert driver.read(layouts[0].device_verdict(2), stream) == [0]
        for layout in layouts:
            layout.wait_step(2)


def test_a_void_step_is_void_on_the_gpu(machine):
    on(machine, void_steps)


def steps_under_way(socket, uuid):
    driver = Driver()
    streams = driver.stream(), driver.stream()
    with two_ranks(socket, uuid, buckets=1) as (_, layouts):
        for step in (1, 2):
            assert layouts[0].next_step == step
            layouts[0].finish_step_on_streams(step, [streams[0]])
        with pytest.raises(gradsync.FailedPreconditionError, match="verdict of step 1") as raised:
            layouts[0].mark_ready_on_streams(3, 0, [streams[0]])
        assert (raised.value.reason, raised.value.step) == (gradsync.Reason.PROTOCOL_VIOLATION, 3)
        for step in (1, 2):
            layouts[1].finish_step_on_streams(step, [streams[1]])
            for layout in layouts:
                layout.wait_step(step)


def test_two_steps_can_be_open(machine):
    on(machine, steps_under_way)


# ---- What is refused -----------------------------------------------------------------------------


def refusals(socket, uuid):
    driver = Driver()
    stream, other, captured = driver.stream(), driver.stream(), driver.stream()
    driver.capture(captured)
    with two_ranks(socket, uuid, buckets=1) as (_, layouts):
        layout = layouts[0]
        for call in (
            lambda: layout.mark_ready_on_streams(1, 0, [stream, captured]),
            lambda: layout.finish_step_on_streams(1, [captured]),
        ):
            with pytest.raises(gradsync.FailedPreconditionError, match="CUDA graph") as raised:
                call()
            assert (raised.value.reason, raised.value.step) == (gradsync.Reason.CAPTURING, 1)
        for call, reason in (
            (lambda: layout.mark_ready_on_streams(1, 0, []), gradsync.Reason.MALFORMED),
            (lambda: layout.mark_ready_on_streams(1, 1, [stream]), gradsync.Reason.UNKNOWN_BUCKET),
            (lambda: layout.mark_ready(1, 0), gradsync.Reason.MALFORMED),
            (lambda: layout.finish_step(1), gradsync.Reason.MALFORMED),
        ):
            with pytest.raises(gradsync.InvalidArgumentError) as raised:
                call()
            assert raised.value.reason == reason
        # The wait would block the stream that marks the bucket.
        with pytest.raises(gradsync.FailedPreconditionError) as raised:
            layout.wait_on_stream(1, stream)
        assert raised.value.reason == gradsync.Reason.PROTOCOL_VIOLATION
        # None of these calls has marked a bucket.
        layouts[0].finish_step_on_streams(1, [stream])
        layouts[1].finish_step_on_streams(1, [other])
        with pytest.raises(gradsync.FailedPreconditionError) as raised:
            layout.wait_on_stream(1, captured)
        assert raised.value.reason == gradsync.Reason.CAPTURING
        driver.end_capture(captured)
        for layout in layouts:
            layout.wait_step(1)


def test_streams_that_cannot_take_part_are_refused(machine):
    on(machine, refusals)


def unknown_gpus(socket, uuid):
    bucket = [gradsync.Bucket(COUNT)]
    with job(socket, 1) as sessions:
        with pytest.raises(gradsync.FailedPreconditionError, match="there is no|GPU") as raised:
            gradsync.cuda_device_uuid(2)
        assert raised.value.reason == gradsync.Reason.GPU_UNUSABLE
        for device, kind, reason, text in (
            ("GPU-0", gradsync.InvalidArgumentError, gradsync.Reason.MALFORMED, "nvidia-smi -L"),
            ("cuda:0", gradsync.InvalidArgumentError, gradsync.Reason.MALFORMED, "nvidia-smi -L"),
            (
                uuid[:-1] + "7",
                gradsync.FailedPreconditionError,
                gradsync.Reason.GPU_NOT_VISIBLE,
                "CUDA_VISIBLE_DEVICES",
            ),
        ):
            with pytest.raises(kind, match=text) as raised:
                sessions[0].register_layout(explicit_buckets=bucket, device=device)
            assert raised.value.reason == reason


def test_gpus_that_are_not_there_are_refused(machine):
    on(machine, unknown_gpus)


def one_rank_on_a_gpu(socket, uuid):
    with job(socket, 2) as sessions:

        def register(rank):
            with pytest.raises(gradsync.Error) as raised:
                sessions[rank].register_layout(
                    explicit_buckets=[gradsync.Bucket(COUNT)],
                    device=uuid if rank == 0 else None,
                    timeout=20,
                )
            return raised.value

        errors = on_every_rank(2, register)
    return [(error.code, error.reason, str(error)) for error in errors]


def test_a_rank_in_host_memory_and_one_on_a_gpu_do_not_match(machine):
    for code, reason, text in on(machine, one_rank_on_a_gpu):
        assert (code, reason) == ("FAILED_PRECONDITION", gradsync.Reason.LAYOUT_MISMATCH), text
        assert "rank 0" in text and "rank 1" in text


# ---- Lifetimes -----------------------------------------------------------------------------------


def views_outlive(socket, uuid):
    driver = Driver()
    stream, other = driver.stream(), driver.stream()
    with two_ranks(socket, uuid, buckets=1) as (sessions, layouts):
        views = [layout.bucket(0) for layout in layouts]
        verdict = layouts[0].device_verdict(1)
        layouts[0].finish_step_on_streams(1, [stream])
        layouts[1].finish_step_on_streams(1, [other])
        for layout in layouts:
            layout.wait_step(1)
    del sessions, layouts, layout
    gc.collect()
    driver.fill(views[1], 4, stream)
    assert driver.read(views[1], stream) == [4] * COUNT
    del views
    gc.collect()
    assert driver.read(verdict, stream) == [0]  # as any view does, it keeps the memory
    # Kernels that use it may be queued when the last view is freed.
    driver.fill(verdict, 1, stream)
    del verdict
    gc.collect()
    assert not driver.busy(stream)


def test_views_outlive_session_and_layout(machine):
    on(machine, views_outlive)


def dropped_in_a_capture(socket, uuid):
    gc.disable()
    driver = Driver()
    stream, other, captured = driver.stream(), driver.stream(), driver.stream()
    with two_ranks(socket, uuid, buckets=1) as (sessions, layouts):
        for layout, its_stream in zip(layouts, (stream, other)):
            layout.finish_step_on_streams(1, [its_stream])
        for layout in layouts:
            layout.wait_step(1)
        cycle = [layouts]
        cycle.append(cycle)
        gradient = layouts[0].bucket(0)
    del sessions, layouts, layout
    driver.capture(captured)
    del cycle
    gc.collect()
    driver.end_capture(captured)
    assert len(_handle._garbage) == 3  # two layouts, and the mapping that no view keeps
    with two_ranks(socket, uuid, buckets=1):
        assert not _handle._garbage

    # A step of PyTorch that is captured as a whole drops the gradients.
    capturing = True
    torch = types.SimpleNamespace(is_current_stream_capturing=lambda: capturing)
    sys.modules["torch"] = types.SimpleNamespace(cuda=torch)
    driver.capture(captured)
    del gradient
    driver.end_capture(captured)
    assert len(_handle._garbage) == 1
    with two_ranks(socket, uuid, buckets=1) as (_, layouts):
        capturing = False
    assert not _handle._garbage


def test_dropped_layouts_spoil_no_capture(machine):
    on(machine, dropped_in_a_capture)


def streams_at_the_end(socket, uuid):
    driver = Driver()
    stream = driver.stream()
    with two_ranks(socket, uuid) as (sessions, layouts):
        hand_over(driver, layouts[0], 1, 7, stream)
        assert driver.busy(stream)  # rank 1 never marks it
        sessions[1].close()
        assert driver.read(layouts[0].device_verdict(1), stream) == [1]
        with pytest.raises(gradsync.AbortedError) as raised:
            layouts[0].wait_step(1)
        assert (raised.value.reason, raised.value.rank) == (gradsync.Reason.RANK_LOST, 1)


def test_a_lost_rank_releases_streams(machine):
    on(machine, streams_at_the_end)
