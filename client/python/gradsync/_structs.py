"""The structs of gradsync.h."""

from __future__ import annotations

import ctypes


class SessionOptionsStruct(ctypes.Structure):
    """gradsync_session_options_t."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("storage", ctypes.c_void_p),
        ("socket", ctypes.c_char_p),
        ("job_id", ctypes.c_char_p),
        ("token", ctypes.c_char_p),
        ("rank", ctypes.c_uint32),
        ("world_size", ctypes.c_uint32),
        ("on_rank_loss", ctypes.c_int32),
        ("divisor", ctypes.c_int32),
        ("step_timeout", ctypes.c_int64),
        ("connect_timeout", ctypes.c_int64),
        ("coordinator", ctypes.c_char_p),
        ("nccl_max_ctas", ctypes.c_uint32),
        ("nccl_algorithm", ctypes.c_int32),
        ("nccl_protocol", ctypes.c_int32),
        ("nccl_wire_type", ctypes.c_int32),
        ("rank_given", ctypes.c_int32),
        ("state_source", ctypes.c_int32),
        ("hold_timeout", ctypes.c_int64),
    )


class ParameterStruct(ctypes.Structure):
    """gradsync_parameter_t."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_uint64)),
        ("dimensions", ctypes.c_size_t),
        ("data_type", ctypes.c_int32),
    )


class ExplicitBucketStruct(ctypes.Structure):
    """gradsync_explicit_bucket_t."""

    _fields_ = (("count", ctypes.c_uint64), ("data_type", ctypes.c_int32))


class LayoutSpecStruct(ctypes.Structure):
    """gradsync_layout_spec_t."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("parameters", ctypes.POINTER(ParameterStruct)),
        ("parameter_count", ctypes.c_size_t),
        ("explicit_buckets", ctypes.POINTER(ExplicitBucketStruct)),
        ("explicit_bucket_count", ctypes.c_size_t),
        ("bucket_cap_bytes", ctypes.c_uint64),
        ("first_bucket_cap_bytes", ctypes.c_uint64),
        ("op", ctypes.c_int32),
        ("timeout", ctypes.c_int64),
        ("last_bucket_cap_bytes", ctypes.c_uint64),
        ("device", ctypes.c_char_p),
        ("buffer_bytes", ctypes.c_uint64),
    )


class ViewStruct(ctypes.Structure):
    """gradsync_view_t."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("bucket", ctypes.c_uint32),
        ("data_type", ctypes.c_int32),
    )


class BucketTimesStruct(ctypes.Structure):
    """gradsync_bucket_times_t."""

    _fields_ = (
        ("ready_ns", ctypes.POINTER(ctypes.c_uint64)),
        ("rank_count", ctypes.c_size_t),
        ("start_ns", ctypes.c_uint64),
        ("finish_ns", ctypes.c_uint64),
    )


class GradientStatsStruct(ctypes.Structure):
    """gradsync_gradient_stats_t."""

    _fields_ = (("sum_of_squares", ctypes.c_double), ("non_finite", ctypes.c_uint64))


class StepResultStruct(ctypes.Structure):
    """gradsync_step_result_t."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("storage", ctypes.c_void_p),
        ("step", ctypes.c_uint64),
        ("live_ranks", ctypes.c_uint32),
        ("divisor", ctypes.c_uint32),
        ("used", ctypes.POINTER(ctypes.c_uint8)),
        ("used_count", ctypes.c_size_t),
        ("buckets", ctypes.POINTER(BucketTimesStruct)),
        ("bucket_count", ctypes.c_size_t),
        ("stats", ctypes.POINTER(GradientStatsStruct)),
        ("stats_count", ctypes.c_size_t),
    )


class StatisticsStruct(ctypes.Structure):
    """gradsync_statistics_t."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("steps_complete", ctypes.c_uint64),
        ("steps_void", ctypes.c_uint64),
        ("buckets_marked", ctypes.c_uint64),
        ("bytes_reduced", ctypes.c_uint64),
        ("mark_ready_total", ctypes.c_int64),
        ("exposed_total", ctypes.c_int64),
    )


class StateItemStruct(ctypes.Structure):
    """gradsync_state_item_t."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
    )


READ_STATE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.POINTER(StateItemStruct)),
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(ctypes.c_char),
)
STATE_DONE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class StateReaderStruct(ctypes.Structure):
    """gradsync_state_reader_t."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("user", ctypes.c_void_p),
        ("read", READ_STATE),
        ("done", STATE_DONE),
    )
