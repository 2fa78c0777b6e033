"""The figures of `gradsync-bench handoff`: what a trainer pays to hand a bucket over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contest import Score
from quantile import quantile
from units import format_byte_size

BUCKETS = (0, 64 << 10, 256 << 10, 1 << 20, 25 << 20)
# A bucket on a GPU has at least one element.
GPU_BUCKETS = (8, 64 << 10, 1 << 20, 25 << 20)

# The key in the JSON, and the two lines above the column.
COLUMNS = (
    ("mark_ready_us_p50", "MarkReady", "p50 (us)"),
    ("mark_ready_us_p99", "MarkReady", "p99 (us)"),
    ("ready_to_done_us_p50", "to done", "p50 (us)"),
    ("ready_to_done_us_p99", "to done", "p99 (us)"),
    ("to_daemon_us_p50", "of these:", "to daemon"),
    ("queue_us_p50", "", "queue"),
    ("reduce_us_p50", "", "reduce"),
    ("to_trainer_us_p50", "", "to trainer"),
)
GPU_COLUMNS = (
    ("mark_ready_us_p50", "MarkReady", "p50 (us)"),
    ("enqueued_us_p50", "enqueued", "p50 (us)"),
    ("enqueued_us_p99", "enqueued", "p99 (us)"),
    ("in_process_us_p50", "in process", "p50 (us)"),
    ("added_us_p50", "added", "p50 (us)"),
    ("host_synchronizations", "syncs", ""),
    ("ready_to_done_us_p50", "to done", "p50 (us)"),
    ("in_process_done_us_p50", "in process", "p50 (us)"),
    ("worker_cpu_us", "workers", "cpu (us)"),
)
# The parts of ready_to_done, and the times at which each begins and ends.
_STAGES = (
    ("to_daemon_us_p50", "call_ns", "ready_ns"),
    ("queue_us_p50", "ready_ns", "start_ns"),
    ("reduce_us_p50", "start_ns", "finish_ns"),
    ("to_trainer_us_p50", "finish_ns", "return_ns"),
)


def figures(scores: Mapping[str, Score]) -> dict[str, Any]:
    """The figures of a size, as --json writes them."""
    turns = scores["gradsync"].turns
    mark_us = [time for turn in turns for time in turn.until("marked_ns")]
    done_us = scores["gradsync"].times_us
    row: dict[str, Any] = {
        "mark_ready_us_p50": quantile(mark_us, 0.5),
        "mark_ready_us_p99": quantile(mark_us, 0.99),
        "ready_to_done_us_p50": quantile(done_us, 0.5),
        "ready_to_done_us_p99": quantile(done_us, 0.99),
    }
    for key, begin, end in _STAGES:
        row[key] = quantile(((turn.last[end] - turn.last[begin]) / 1e3 for turn in turns), 0.5)
    if "nccl" in scores:
        others = scores["nccl"].turns
        ours_us = [time for turn in turns for time in turn.until("enqueued_ns")]
        theirs_us = [time for turn in others for time in turn.until("enqueued_ns")]
        added_us = [ours - theirs for ours, theirs in zip(ours_us, theirs_us)]
        row["enqueued_us_p50"] = quantile(ours_us, 0.5)
        row["enqueued_us_p99"] = quantile(ours_us, 0.99)
        row["in_process_us_p50"] = quantile(theirs_us, 0.5)
        row["added_us_p50"] = quantile(added_us, 0.5)
        row["in_process_done_us_p50"] = quantile(scores["nccl"].times_us, 0.5)
        row["worker_cpu_us"] = sum(turn.worker_ns for turn in turns) / 1e3 / len(turns)
        row["host_synchronizations"] = sum(
            rank["host_synchronizations"] for turn in turns for rank in turn.ranks
        )
    return row


def table_head(on_gpus: bool) -> str:
    """Names and units of the columns."""
    columns = GPU_COLUMNS if on_gpus else COLUMNS
    return "\n".join(
        f"{first:>8} " + " ".join(f"{column[line]:>10}" for column in columns)
        for first, line in (("bucket", 1), ("size", 2))
    )


def table_row(nbytes: int, row: Mapping[str, Any], on_gpus: bool) -> str:
    """The figures of a size as a line of the table."""
    values = [row[key] for key, _, _ in (GPU_COLUMNS if on_gpus else COLUMNS)]
    texts = [str(value) if isinstance(value, int) else f"{value:.1f}" for value in values]
    return f"{format_byte_size(nbytes):>8} " + " ".join(f"{text:>10}" for text in texts)
