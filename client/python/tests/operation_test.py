"""The job's own operations: barrier, broadcast, all-reduce."""

import array
import ctypes

import gradsync
import numpy
import pytest
from threads import job, on_every_rank


def test_numpy_arrays_are_averaged_in_place(daemon):
    with job(daemon, 2) as sessions:
        for dtype in (numpy.float32, numpy.float64, numpy.float16):

            def average(rank, dtype=dtype):
                values = numpy.full((3, 2), rank, dtype)
                sessions[rank].all_reduce(values)
                return values

            for values in on_every_rank(2, average):
                assert values.dtype == dtype and (values == 0.5).all()


def test_all_reduce_sums_other_buffers(daemon):
    with job(daemon, 2) as sessions:

        def add(rank):
            floats = array.array("d", [rank, 4.0])
            sessions[rank].all_reduce(floats, op="sum")
            bits = numpy.array([0x3F80, 0x4000], numpy.uint16)  # 1 and 2 in bfloat16
            sessions[rank].all_reduce(bits, gradsync.DataType.BFLOAT16, "sum")
            empty = numpy.zeros(0, numpy.float32)
            sessions[rank].all_reduce(empty)
            return list(floats), list(bits)

        assert on_every_rank(2, add) == [([1.0, 8.0], [0x4000, 0x4080])] * 2


def test_broadcast_takes_any_buffer(daemon):
    with job(daemon, 2) as sessions:

        def receive(rank):
            text = bytearray(b"from one" if rank == 1 else b"        ")
            sessions[rank].broadcast(text, 1)
            table = numpy.full((2, 3), rank, numpy.int64)
            sessions[rank].broadcast(table, 0, timeout=30)
            number = ctypes.c_uint32(rank + 7)
            address = ctypes.addressof(number)
            sessions[rank].broadcast_address(address, 4, 1, owner=number)
            return bytes(text), table.sum(), number.value

        assert on_every_rank(2, receive) == [(b"from one", 0, 8)] * 2


def test_all_reduce_takes_an_address(daemon):
    with job(daemon, 2) as sessions:

        def add(rank):
            numbers = (ctypes.c_float * 2)(rank, 1)
            sessions[rank].all_reduce_address(
                ctypes.addressof(numbers), 2, gradsync.DataType.FLOAT32, "sum", 30
            )
            return list(numbers)

        assert on_every_rank(2, add) == [[1.0, 2.0]] * 2


def test_broadcast_may_exceed_the_staging_memory(daemon):
    count = 20 << 20  # float32: more than the staging memory holds
    with job(daemon, 2) as sessions:

        def receive(rank):
            values = numpy.full(count, float(rank), numpy.float32)
            values[-1] += 1
            sessions[rank].broadcast(values, 1)
            return values[0], values[-1]

        assert on_every_rank(2, receive) == [(1.0, 2.0)] * 2


def test_the_lowest_live_rank_is_the_root_on_every_rank(daemon):
    with job(daemon, 3) as sessions:

        def receive(rank):
            name = bytearray(b"rank %d" % rank)
            sessions[rank].broadcast(name, gradsync.LOWEST_LIVE_RANK)
            if rank == 0:
                sessions[rank].leave()
            else:
                later = bytearray(b"then %d" % rank)
                sessions[rank].broadcast(later, gradsync.LOWEST_LIVE_RANK)
                name += later
            return bytes(name)

        assert on_every_rank(3, receive) == [b"rank 0", b"rank 0then 1", b"rank 0then 1"]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda s: s.broadcast(b"read-only", 0), "writable"),
        (lambda s: s.broadcast(numpy.zeros((4, 4))[:, 0], 0), "contiguous"),
        (lambda s: s.broadcast(3, 0), "buffer"),
        (lambda s: s.broadcast(bytearray(1), 1), "root 1"),
        (lambda s: s.broadcast(bytearray(1), -1), "root is -1"),
        (lambda s: s.all_reduce(numpy.zeros(2, numpy.uint32)), "format 'I'"),
        (lambda s: s.all_reduce(object()), "buffer"),
        (lambda s: s.all_reduce(bytearray(3), gradsync.DataType.FLOAT32), "3 bytes"),
        (lambda s: s.all_reduce(numpy.zeros(2), op="median"), "op is 'median'"),
        (
            lambda s: s.all_reduce(numpy.zeros(2, numpy.int32)),
            "all-reduce of int32: integers have no average here: sum them, and divide the sum",
        ),
        (lambda s: s.all_reduce(numpy.zeros(5 << 20)), "staging memory"),
        (lambda s: s.barrier(-1), "timeout is -1"),
        (lambda s: s.begin_collective(""), "has 0 bytes"),
        (lambda s: s.begin_collective("x" * 257), "has 257 bytes"),
        (lambda s: s.begin_collective("a\0b"), "description"),
    ],
)
def test_bad_arguments_are_refused(daemon, call, message):
    with job(daemon, 1) as (session,):
        with pytest.raises(gradsync.InvalidArgumentError, match=message):
            call(session)
        session.barrier()


def test_a_missing_rank_is_named(daemon):
    with job(daemon, 2) as sessions:
        with pytest.raises(gradsync.DeadlineExceededError, match="rank"):
            sessions[0].barrier(0.05)


def test_different_operations_are_refused(daemon):
    with job(daemon, 2) as sessions:

        def operate(rank):
            call = (sessions[0].barrier, lambda: sessions[1].all_reduce(numpy.zeros(1)))[rank]
            with pytest.raises(gradsync.FailedPreconditionError) as raised:
                call()
            return raised.value.reason

        assert on_every_rank(2, operate) == [gradsync.Reason.OPERATION_MISMATCH] * 2


def test_different_collectives_end_the_job_on_every_rank(daemon):
    with job(daemon, 3) as sessions:
        for session in sessions:
            session.begin_collective("barrier")
        sessions[0].begin_collective("gather of 3 int8")
        assert sessions[0].await_end(0) is None
        sessions[2].begin_collective("gather of 4 int8")

        def end_of(rank):
            end = sessions[rank].await_end(30)
            with pytest.raises(gradsync.FailedPreconditionError) as raised:
                sessions[rank].barrier()
            assert str(raised.value) == str(end)
            return end

        for end in on_every_rank(3, end_of):
            assert end.reason == gradsync.Reason.OPERATION_MISMATCH
            # The daemon names the one first whose call it heard first.
            assert "collective 2: rank" in end.message
            assert "rank 0 called gather of 3 int8" in end.message
            assert "rank 2 called gather of 4 int8" in end.message


def test_the_end_of_a_session_can_be_awaited(daemon):
    with job(daemon, 2) as sessions:
        assert sessions[0].await_end(0.01) is None
        sessions[1].close()
        assert sessions[0].await_end(30).reason == gradsync.Reason.RANK_LOST
