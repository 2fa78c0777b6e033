"""Joining a job, leaving it, and losing a rank."""

import dataclasses
import os
import uuid

import gradsync
import pytest
from ranks import Ranks, run_ranks
from threads import job, on_every_rank, options


def one_step():
    with gradsync.Session.join() as session:
        layout = session.register_layout(explicit_buckets=[gradsync.Bucket(10)])
        bucket = layout.bucket(0).numpy()
        bucket[:] = session.rank
        step = layout.next_step
        layout.mark_ready(step, 0)
        layout.end_step(step)
        result = layout.wait_step(step)
        statistics = session.statistics()
    return session.rank, float(bucket[0]), result, statistics, repr(session)


def test_processes_join_from_the_environment_and_run_a_step(daemon):
    results = run_ranks(one_step, 3)
    assert [rank for rank, *_ in results] == [0, 1, 2]
    assert [value for _, value, *_ in results] == [1.0, 1.0, 1.0]
    first = results[0][2]
    assert (first.step, first.live_ranks, first.divisor, first.used) == (1, 3, 3, None)
    for _, _, result, statistics, text in results:
        assert result == first and result.buckets == first.buckets
        assert (statistics.steps_complete, statistics.steps_void) == (1, 0)
        assert statistics.buckets_marked == 1 and statistics.bytes_reduced >= 40
        assert 0 < statistics.mark_ready_total < 1 and 0 < statistics.exposed_total < 10
        assert "closed" in text


def test_options_come_from_the_environment(monkeypatch):
    for name, value in {
        "RANK": "3",
        "WORLD_SIZE": "5",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
        "TORCHELASTIC_RUN_ID": "run",
        "GRADSYNC_SOCKET": "/tmp/x.sock",
        "GRADSYNC_JOB_TOKEN": "secret",
    }.items():
        monkeypatch.setenv(name, value)
    found = gradsync.SessionOptions.from_environment()
    assert found == gradsync.SessionOptions(
        socket="/tmp/x.sock",
        job_id="run@10.0.0.1:1234",
        token="secret",
        rank=3,
        world_size=5,
        coordinator="10.0.0.1",
    )
    monkeypatch.setenv("GRADSYNC_COORDINATOR", "node0:7418")
    assert gradsync.SessionOptions.from_environment().coordinator == "node0:7418"
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(gradsync.InvalidArgumentError, match="MASTER_PORT is not set"):
        gradsync.SessionOptions.from_environment()


_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


def test_options_that_are_given_win_over_the_environment(monkeypatch):
    for name, value in zip(_TORCHRUN, ("3", "5", "10.0.0.1", "1234", "run")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GRADSYNC_JOB_TOKEN", "secret")
    from_environment = gradsync.SessionOptions.from_environment
    found = from_environment(rank=0, coordinator="", token="", divisor="world")
    assert (found.rank, found.world_size, found.coordinator, found.token) == (0, 5, "", "")
    assert (found.job_id, found.divisor) == ("run@10.0.0.1:1234", "world")
    monkeypatch.delenv("RANK")
    assert from_environment(rank=0).rank == 0
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name)
    assert from_environment(rank=4, job_id="mine") == gradsync.SessionOptions(
        socket=found.socket, job_id="mine", token="secret", rank=4, world_size=5
    )


def test_join_needs_no_environment_with_every_option_given(daemon, monkeypatch):
    for name in _TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    given = {"socket": daemon.socket, "job_id": uuid.uuid4().hex, "rank": 0, "world_size": 1}
    with gradsync.Session.join(**given) as session:
        assert (session.rank, session.world_size) == (0, 1)
    job_id = uuid.uuid4().hex
    with gradsync.Session.join(options(daemon, 1, 2, job_id), rank=0, world_size=1) as session:
        assert (session.rank, session.world_size) == (0, 1)


@pytest.mark.parametrize(
    "given, variable, option",
    [
        ({}, "RANK", "rank"),
        ({"rank": 0}, "WORLD_SIZE", "world_size"),
        ({"rank": 0, "world_size": 1}, "MASTER_ADDR", "job_id"),
    ],
)
def test_a_missing_option_is_named_with_its_variable(monkeypatch, given, variable, option):
    for name in _TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(gradsync.InvalidArgumentError) as raised:
        gradsync.Session.join(**given)
    message = str(raised.value)
    assert f"variable {variable} is not set, and the option {option} is not given" in message
    assert "torchrun --nproc_per_node=" in message


def test_a_malformed_given_option_is_named():
    with pytest.raises(gradsync.InvalidArgumentError, match="world_size is 0"):
        gradsync.SessionOptions.from_environment(rank=0, world_size=0)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"job_id": ""}, "job_id"),
        ({"job_id": "a\0b"}, "job_id holds a NUL"),
        ({"rank": 2}, "rank"),
        ({"rank": -1}, "rank is -1"),
        ({"world_size": 2**32}, "world_size is 4294967296"),
        ({"socket": "relative"}, "socket"),
        ({"divisor": "ranks"}, "divisor is 'ranks'; give one of live_ranks, world"),
        ({"on_rank_loss": "ignore"}, "on_rank_loss is 'ignore'"),
        ({"step_timeout": 0}, "step_timeout is 0"),
        ({"step_timeout": -1}, "step_timeout is -1"),
        ({"connect_timeout": float("nan")}, "connect_timeout is nan"),
        ({"nccl_max_ctas": 0}, "nccl_max_ctas is 0"),
        ({"nccl_max_ctas": 65}, "nccl.max_ctas is 65; 0 to 64"),
        ({"nccl_algorithm": "star"}, "nccl_algorithm is 'star'; give one of auto, tree, ring"),
        ({"nccl_protocol": "tcp"}, "nccl_protocol is 'tcp'"),
        ({"nccl_wire_type": "float8"}, "nccl_wire_type is 'float8'; give one of auto, same"),
    ],
)
def test_a_malformed_option_is_named(daemon, changes, message):
    good = options(daemon, 0, 2)
    with pytest.raises(gradsync.InvalidArgumentError, match=message) as raised:
        gradsync.Session.join(dataclasses.replace(good, **changes))
    assert raised.value.reason == gradsync.Reason.MALFORMED
    assert isinstance(raised.value, ValueError)


def test_without_a_daemon_joining_fails(tmp_path):
    absent = gradsync.SessionOptions(
        socket=f"/tmp/{uuid.uuid4().hex}.sock", job_id="job", connect_timeout=0
    )
    with pytest.raises(gradsync.UnavailableError) as raised:
        gradsync.Session.join(absent)
    assert absent.socket in str(raised.value)
    assert isinstance(raised.value, ConnectionError)


def test_an_occupied_rank_is_refused(daemon):
    mine = options(daemon, 0, 2)
    with gradsync.Session.join(mine) as session:
        with pytest.raises(gradsync.AlreadyExistsError) as raised:
            gradsync.Session.join(mine)
        assert (raised.value.job, raised.value.rank) == (mine.job_id, 0)
        assert session.options == mine and session.options is not mine


def test_different_world_sizes_are_refused(daemon):
    mine = options(daemon, 0, 2)
    with gradsync.Session.join(mine):
        with pytest.raises(gradsync.FailedPreconditionError) as raised:
            gradsync.Session.join(dataclasses.replace(mine, rank=1, world_size=3))
        assert raised.value.rank == 1


def test_different_wire_types_are_refused(daemon):
    mine = dataclasses.replace(options(daemon, 0, 2), nccl_wire_type="bfloat16")
    with gradsync.Session.join(mine):
        with pytest.raises(gradsync.FailedPreconditionError, match="is float16, .* have bfloat16"):
            gradsync.Session.join(dataclasses.replace(mine, rank=1, nccl_wire_type="float16"))


def test_different_layouts_are_refused(daemon):
    with job(daemon, 2) as sessions:

        def register(rank):
            parameters = [gradsync.Parameter("weight", (3, 4 + rank))]
            with pytest.raises(gradsync.FailedPreconditionError, match="weight") as raised:
                sessions[rank].register_layout(parameters=parameters)
            return raised.value.reason

        assert on_every_rank(2, register) == [gradsync.Reason.LAYOUT_MISMATCH] * 2


def test_a_rank_that_does_not_register_is_named(daemon):
    with job(daemon, 2) as sessions:
        with pytest.raises(gradsync.DeadlineExceededError):
            sessions[0].register_layout(explicit_buckets=[gradsync.Bucket(1)], timeout=0.05)


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"op": "maximum", "explicit_buckets": [gradsync.Bucket(1)]},
        {"parameters": [gradsync.Parameter("p", (-1,))]},
        {"parameters": [gradsync.Parameter("a\0b", ())]},
        {"explicit_buckets": [gradsync.Bucket(-1)]},
        {"bucket_cap_bytes": 0, "parameters": [gradsync.Parameter("p", (1,))]},
        {"last_bucket_cap_bytes": 0, "parameters": [gradsync.Parameter("p", (1,))]},
        {"timeout": -1.0, "parameters": [gradsync.Parameter("p", (1,))]},
        {"name": "\ud800", "parameters": [gradsync.Parameter("p", (1,))]},
    ],
)
def test_a_malformed_layout_is_refused(daemon, spec):
    with gradsync.Session.join(options(daemon)) as session:
        with pytest.raises(gradsync.InvalidArgumentError):
            session.register_layout(**spec)


def test_a_layout_shows_its_properties(daemon):
    parameters = [
        gradsync.Parameter("weight", [3, 4]),
        gradsync.Parameter("bias", (), gradsync.DataType.FLOAT64),
    ]
    assert parameters[0].shape == (3, 4)
    with gradsync.Session.join(options(daemon)) as session:
        layout = session.register_layout("model", parameters=parameters)
        assert (layout.name, layout.bucket_count, layout.parameter_count) == ("model", 2, 2)
        assert layout.fingerprint != 0 and layout.next_step == 1
        assert repr(layout) == "<gradsync.Layout 'model': 2 buckets, 2 parameters>"
        weight, bias = layout.gradient(0), layout.gradient(1)
        assert (weight.dtype, weight.count, weight.nbytes) == (gradsync.DataType.FLOAT32, 12, 48)
        assert (bias.dtype, bias.count, bias.nbytes) == (gradsync.DataType.FLOAT64, 1, 8)
        assert weight.bucket == 1 and bias.bucket == 0
        assert layout.bucket(1).address <= weight.address
        assert weight.address % 64 == 0 and layout.bucket(1).address % 128 == 0
        for wrong in (layout.gradient, layout.bucket):
            with pytest.raises(gradsync.InvalidArgumentError):
                wrong(2)


def test_the_last_bucket_has_a_cap_of_its_own(daemon):
    parameters = [gradsync.Parameter(name, (4,)) for name in "abc"]
    with gradsync.Session.join(options(daemon)) as session:
        whole = session.register_layout(parameters=parameters)
        assert whole.bucket_count == 1
        split = session.replace_layout(whole, parameters=parameters, last_bucket_cap_bytes=16)
        assert [split.gradient(i).bucket for i in range(3)] == [1, 0, 0]
        larger = session.register_layout("two", parameters=parameters, last_bucket_cap_bytes=47)
        assert [larger.gradient(i).bucket for i in range(3)] == [1, 1, 0]
        assert larger.fingerprint != split.fingerprint != whole.fingerprint


def leave_or_fail(directory):
    session = gradsync.Session.join()
    layout = session.register_layout(explicit_buckets=[gradsync.Bucket(1)])
    if session.rank == 1:
        with pytest.raises(ZeroDivisionError), session:
            layout.mark_ready(1, 0)
            raise ZeroDivisionError
        return None
    with pytest.raises(gradsync.AbortedError) as raised:
        layout.wait_step(1)
    error = raised.value
    return error.code, error.reason, error.rank, error.step, error.bucket, error.job


def test_an_exception_is_a_loss_to_the_others(daemon, tmp_path):
    fields, _ = run_ranks(leave_or_fail, 2, str(tmp_path))
    assert fields[:4] == ("ABORTED", gradsync.Reason.RANK_LOST, 1, 1)
    assert "@127.0.0.1:" in fields[5]


def wait_for_a_step():
    session = gradsync.Session.join()
    layout = session.register_layout(explicit_buckets=[gradsync.Bucket(1)])
    session.barrier()
    if session.rank == 1:
        os.kill(os.getpid(), 9)
    # The loss may be known before any of these calls.
    with pytest.raises(gradsync.AbortedError) as raised:
        layout.mark_ready(1, 0)
        layout.end_step(1)
        layout.wait_step(1)
    return raised.value


def test_a_killed_rank_is_named_with_every_field(daemon):
    (error,) = Ranks(wait_for_a_step, 2).results(ranks=[0])
    assert (error.code, error.reason) == ("ABORTED", gradsync.Reason.RANK_LOST)
    assert (error.rank, error.step) == (1, 1)
    assert error.bucket == 0 and error.channel is not None and error.job
    assert "rank 1" in error.message and str(error).startswith("ABORTED/RANK_LOST: ")


def test_the_daemons_end_is_an_error(own_daemon):
    with job(own_daemon, 2, [4]) as (_, layouts):
        own_daemon.kill()
        with pytest.raises(gradsync.UnavailableError) as raised:
            layouts[0].wait_step(1)
        assert raised.value.reason == gradsync.Reason.DAEMON_LOST


def test_a_session_knows_whether_an_error_has_ended_it(daemon):
    with job(daemon, 2) as (first, second):
        with pytest.raises(gradsync.DeadlineExceededError):
            first.barrier(0.01)
        assert not first.ended
        second.close()
        assert second.ended
        assert first.await_end(60) is not None
        with pytest.raises(gradsync.AbortedError):
            first.barrier()
        assert first.ended


def test_calls_after_leaving_and_closing_fail(daemon):
    session = gradsync.Session.join(options(daemon))
    layout = session.register_layout(explicit_buckets=[gradsync.Bucket(1)])
    session.leave()
    with pytest.raises(gradsync.FailedPreconditionError) as raised:
        layout.mark_ready(1, 0)
    assert raised.value.reason == gradsync.Reason.LEFT and not session.closed
    session.close()
    session.close()
    assert session.closed
    for call in (session.barrier, session.leave, session.statistics, session.leave_and_stay):
        with pytest.raises(gradsync.FailedPreconditionError) as raised:
            call()
        assert (raised.value.reason, raised.value.rank) == (gradsync.Reason.CLOSED, 0)
    assert session.rank == 0 and session.world_size == 1 and session.generation == 1


def test_calls_after_closing_a_layout_fail(daemon):
    with gradsync.Session.join(options(daemon)) as session:
        layout = session.register_layout(explicit_buckets=[gradsync.Bucket(1)])
        view = layout.bucket(0)
        layout.close()
        layout.close()
        for call in (
            lambda: layout.next_step,
            lambda: layout.bucket(0),
            lambda: layout.mark_ready(1, 0),
            lambda: layout.end_step(1),
            lambda: layout.finish_step(1),
            lambda: layout.abandon_step(1, "why"),
            lambda: layout.wait_bucket(1, 0),
            lambda: layout.wait_step(1),
            lambda: layout.wait_step(1, 0),
        ):
            with pytest.raises(gradsync.FailedPreconditionError, match="was closed"):
                call()
        assert layout.name == "default" and view.numpy()[0] == 0


def test_leaving_with_an_open_step_is_refused(daemon):
    with job(daemon, 2, [1]) as (sessions, layouts):
        layouts[0].mark_ready(1, 0)
        with pytest.raises(gradsync.FailedPreconditionError):
            sessions[0].leave()


def test_every_rank_learns_which_rank_left_last(daemon):
    with job(daemon, 2) as sessions:
        assert len(set(on_every_rank(2, lambda rank: sessions[rank].leave_and_stay(30)))) == 1
        on_every_rank(2, lambda rank: sessions[rank].barrier(30))
        on_every_rank(2, lambda rank: sessions[rank].__exit__(None, None, None))
        assert all(session.closed for session in sessions)


def test_ranks_that_do_not_leave_are_named(daemon):
    with job(daemon, 2) as sessions:
        with pytest.raises(gradsync.DeadlineExceededError) as raised:
            sessions[0].leave_and_stay(0.01)
        assert raised.value.reason == gradsync.Reason.WAIT_TIMEOUT
