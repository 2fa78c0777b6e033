"""Steps: what they compute, what they refuse, and their results."""

import math
import pickle

import gradsync
import numpy
import pytest
from threads import finish_step, job, on_every_rank

FLOATS = list(gradsync.DataType)[:4]


@pytest.mark.parametrize(
    "dtype, op, expected",
    [(dtype, "average", 1.5) for dtype in FLOATS]
    + [
        (dtype, op, expected)
        for dtype in gradsync.DataType
        for op, expected in [("sum", 3), ("min", 1), ("max", 2)]
    ],
)
def test_every_dtype_is_reduced(daemon, dtype, op, expected):
    spec = {"explicit_buckets": [gradsync.Bucket(100, dtype)], "op": op}
    with job(daemon, 2, **spec) as (_, layouts):
        for layout, value in zip(layouts, [1, 2]):
            bucket = layout.bucket(0).numpy()
            bucket[:] = to_dtype(value, dtype)
            assert len(bucket) == layout.bucket(0).count >= 100
        result = finish_step(layouts, 1)
        for layout in layouts:
            assert (layout.bucket(0).numpy() == to_dtype(expected, dtype)).all()
        # Integers, minimum and maximum are not measured.
        measured = dtype in FLOATS and op in ("average", "sum")
        assert math.isnan(result.gradient_norm) != measured


@pytest.mark.parametrize(
    "spec, message",
    [
        (
            {"explicit_buckets": [gradsync.Bucket(1, gradsync.DataType.INT32)]},
            "explicit bucket 0, average of int32: integers have no average",
        ),
        (
            {"parameters": [gradsync.Parameter("w", (2,))], "op": "max"},
            r"parameter 0 \('w'\), max of float32: .* are for explicit_buckets",
        ),
        (
            {"explicit_buckets": [gradsync.Bucket(1)], "op": "min", "device": "GPU-0123"},
            "min of float32: .* in host memory, not on a GPU",
        ),
    ],
)
def test_reductions_that_gradsync_does_not_have_are_refused(daemon, spec, message):
    with job(daemon, 1) as (session,):
        with pytest.raises(gradsync.InvalidArgumentError, match=message):
            session.register_layout(**spec)
        session.barrier()


def to_dtype(value, dtype):
    """`value` as an element of View.numpy(): bfloat16 is the upper half of float32."""
    if dtype != gradsync.DataType.BFLOAT16:
        return value
    return numpy.float32(value).view(numpy.uint32) >> 16


def test_steps_count_from_one_and_have_results(daemon):
    with job(daemon, 2, [10, 20]) as (_, layouts):
        for step in (1, 2, 3):
            assert layouts[0].next_step == step
            result = finish_step(layouts, step)
            assert (result.step, result.live_ranks, result.divisor) == (step, 2, 2)
            assert result.used is None and len(result.buckets) == 2
            for times in result.buckets:
                assert len(times.ready_ns) == 2
                assert 0 < max(times.ready_ns) <= times.start_ns <= times.finish_ns


def test_a_result_can_be_pickled(daemon):
    with job(daemon, 1, [10]) as (_, layouts):
        result = finish_step(layouts, 1)
    copy = pickle.loads(pickle.dumps(result))
    assert copy == result and copy.buckets == result.buckets and copy.stats == result.stats
    assert pickle.loads(pickle.dumps(copy)).buckets == result.buckets


def test_a_result_has_the_norm_of_the_gradients(daemon):
    with job(daemon, 2, [2, 1]) as (_, layouts):
        for layout in layouts:
            layout.bucket(0).numpy()[:2] = (3, 0)
            layout.bucket(1).numpy()[0] = 4
        result = finish_step(layouts, 1)
        assert [stats.sum_of_squares for stats in result.stats] == [9, 16]
        assert [stats.non_finite for stats in result.stats] == [0, 0]
        assert result.gradient_norm == 5
        layouts[0].bucket(0).numpy()[0] = numpy.inf
        result = finish_step(layouts, 2)
        assert result.gradient_norm == math.inf
        assert [stats.non_finite for stats in result.stats] == [1, 0]
        layouts[1].bucket(1).numpy()[0] = numpy.nan
        assert math.isnan(finish_step(layouts, 3).gradient_norm)


def test_the_clip_coefficient_scales_only_large_norms():
    assert gradsync.clip_coefficient(0.5, 1.0) == 1.0
    assert gradsync.clip_coefficient(4.0, 1.0) == pytest.approx(0.25, rel=1e-6)
    assert gradsync.clip_coefficient(0.0, 1.0) == 1.0
    assert gradsync.clip_coefficient(math.inf, 1.0) == 0
    assert math.isnan(gradsync.clip_coefficient(math.nan, 1.0))


def test_parameters_that_no_rank_used_are_known_to_all(daemon):
    parameters = [gradsync.Parameter(name, (2,)) for name in "abc"]
    with job(daemon, 2, parameters=parameters) as (_, layouts):
        used = [[True, False, False], numpy.array([False, False, True])]
        for layout, flags in zip(layouts, used):
            for bucket in range(layout.bucket_count):
                layout.mark_ready(1, bucket)
            layout.end_step(1, flags)
        assert [layout.wait_step(1, 30).used for layout in layouts] == [(True, False, True)] * 2
        for layout in layouts:
            layout.mark_ready(2, 0)
            with pytest.raises(gradsync.InvalidArgumentError, match="2 flags .* 3 parameters"):
                layout.end_step(2, [True, False])


def test_finish_step_marks_the_rest_and_ends_the_step(daemon):
    parameters = [gradsync.Parameter(name, (2,)) for name in "abc"]
    caps = {"bucket_cap_bytes": 8, "first_bucket_cap_bytes": 8}
    with job(daemon, 2, parameters=parameters, **caps) as (sessions, layouts):
        for rank, layout in enumerate(layouts):
            for parameter in range(3):
                layout.gradient(parameter).numpy()[:] = parameter + 2 * rank
        with pytest.raises(gradsync.InvalidArgumentError, match=r"finish_step\(\) got 2 flags"):
            layouts[0].finish_step(1, [True, False])
        assert sessions[0].statistics().buckets_marked == 0
        layouts[0].mark_ready(1, 1)
        layouts[0].finish_step(1, [True, False, False])
        with pytest.raises(gradsync.FailedPreconditionError) as refused:
            layouts[0].finish_step(1)
        assert refused.value.reason == gradsync.Reason.PROTOCOL_VIOLATION
        layouts[1].finish_step(1, [False, True, False])
        for session, layout in zip(sessions, layouts):
            assert layout.wait_step(1, 30).used == (True, True, False)
            assert [layout.gradient(i).numpy()[0] for i in range(3)] == [1, 2, 3]
            layout.finish_step(2)
            assert session.statistics().buckets_marked == 6
        assert [layout.wait_step(2, 30).used for layout in layouts] == [None, None]


def test_an_unused_parameter_is_marked(daemon):
    parameters = [gradsync.Parameter(name, (2,)) for name in "ab"]
    with job(daemon, 2, parameters=parameters) as (_, layouts):
        for layout in layouts:
            layout.gradient(0).numpy()[:] = 6
            layout.gradient(1).numpy()[:] = 8
            layout.mark_unused(1, 1)
        layouts[1].mark_unused(1, 0)
        with pytest.raises(gradsync.InvalidArgumentError) as raised:
            layouts[0].mark_unused(1, 2)
        assert raised.value.reason == gradsync.Reason.UNKNOWN_PARAMETER
        assert finish_step(layouts, 1).used == (True, False)
        for layout in layouts:
            assert layout.gradient(0).numpy().tolist() == [3, 3]
            assert layout.gradient(1).numpy().tolist() == [8, 8]


def test_layouts_are_replaced(daemon):
    with job(daemon, 2, [4]) as (sessions, layouts):
        layouts[0].bucket(0).numpy()[:] = 4
        finish_step(layouts, 1)

        def replace(rank):
            return sessions[rank].replace_layout(
                layouts[rank], explicit_buckets=[gradsync.Bucket(2), gradsync.Bucket(3)]
            )

        replaced = on_every_rank(2, replace)
        assert [layout.bucket_count for layout in replaced] == [2, 2]
        assert finish_step(replaced, 2).step == 2
        with pytest.raises(gradsync.FailedPreconditionError) as raised:
            layouts[0].mark_ready(2, 0)
        assert raised.value.reason == gradsync.Reason.LAYOUT_REPLACED
        assert layouts[0].bucket(0).numpy()[0] == 2
        layouts[0].close()
        with pytest.raises(gradsync.FailedPreconditionError, match="was closed"):
            sessions[0].replace_layout(layouts[0], explicit_buckets=[gradsync.Bucket(2)])


def test_errors_have_fields(daemon):
    with job(daemon, 2, [1, 1, 1]) as (sessions, layouts):
        layout = layouts[1]
        layout.mark_ready(1, 2)
        with pytest.raises(gradsync.FailedPreconditionError) as raised:
            layout.mark_ready(1, 2)
        error = raised.value
        assert (error.code, error.reason) == ("FAILED_PRECONDITION", gradsync.Reason.ALREADY_READY)
        assert (error.job, error.rank) == (sessions[1].options.job_id, 1)
        assert (error.step, error.bucket) == (1, 2) and error.channel >= 0
        with pytest.raises(gradsync.InvalidArgumentError) as raised:
            layout.mark_ready(1, 3)
        assert (raised.value.reason, raised.value.bucket) == (gradsync.Reason.UNKNOWN_BUCKET, 3)
        with pytest.raises(gradsync.FailedPreconditionError) as raised:
            layout.end_step(1)
        assert (raised.value.reason, raised.value.bucket) == (gradsync.Reason.PROTOCOL_VIOLATION, 0)
        with pytest.raises(gradsync.FailedPreconditionError) as raised:
            layout.mark_ready(7, 0)
        assert (raised.value.reason, raised.value.step) == (gradsync.Reason.PROTOCOL_VIOLATION, 7)


def test_arguments_of_another_type_are_refused(daemon):
    with job(daemon, 1, [1]) as (_, layouts):
        for call in (
            lambda: layouts[0].mark_ready("1", 0),
            lambda: layouts[0].mark_ready(1, None),
            lambda: layouts[0].wait_step(1.5),
            lambda: layouts[0].wait_bucket(1, "0"),
        ):
            with pytest.raises(TypeError, match="layout 'default'"):
                call()


def test_an_abandoned_step_is_void_for_all(daemon):
    with job(daemon, 2, [1]) as (_, layouts):
        layouts[1].abandon_step(1, "the loss is not a number")
        for layout in layouts:
            with pytest.raises(gradsync.AbortedError, match="the loss is not a number") as raised:
                layout.wait_step(1, 30)
            assert (raised.value.reason, raised.value.rank) == (gradsync.Reason.STEP_ABANDONED, 1)
        finish_step(layouts, 2)


@pytest.mark.parametrize("timeout", [0, 0.01])
def test_a_wait_times_out_and_changes_nothing(daemon, timeout):
    with job(daemon, 2, [1]) as (_, layouts):
        layouts[0].mark_ready(1, 0)
        for wait in (layouts[0].wait_step, lambda step, t: layouts[0].wait_bucket(step, 0, t)):
            with pytest.raises(gradsync.DeadlineExceededError) as raised:
                wait(1, timeout)
            assert (raised.value.reason, raised.value.step) == (gradsync.Reason.WAIT_TIMEOUT, 1)
            assert isinstance(raised.value, TimeoutError)
        layouts[1].mark_ready(1, 0)
        layouts[0].wait_bucket(1, 0, 30)
        for layout in layouts:
            layout.end_step(1)
        assert layouts[0].wait_step(1, 30).step == 1


def test_a_helpers_wait_times_out_and_names_the_missing_rank(daemon):
    with job(daemon, 2, [1]) as (_, layouts):
        layouts[0].mark_ready(1, 0)
        # On a busy machine the daemon's answer needs longer than the first wait.
        for timeout in (0.3, 3, 30):
            with pytest.raises(gradsync.DeadlineExceededError) as raised:
                layouts[0].wait_step(1, timeout)
            assert raised.value.reason == gradsync.Reason.WAIT_TIMEOUT
            if "rank 1" in str(raised.value):
                return
        pytest.fail(str(raised.value))


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_malformed_timeout_is_refused(daemon, timeout):
    with job(daemon, 1, [1]) as (_, layouts):
        with pytest.raises(gradsync.InvalidArgumentError, match="timeout"):
            layouts[0].wait_step(1, timeout)
