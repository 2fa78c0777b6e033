"""What a wrapper tells about itself under the names of PyTorch's DDP logging data."""

from __future__ import annotations

from typing import Any

import torch

from gradsync.torch._synchronizer import Synchronizer


def of_module(module: torch.nn.Module) -> dict[str, Any]:
    """The part that the module alone says."""
    has_sync_bn = any(isinstance(m, torch.nn.SyncBatchNorm) for m in module.modules())
    return {"module_name": type(module).__name__, "has_sync_bn": int(has_sync_bn)}


def of_steps(synchronizer: Synchronizer) -> dict[str, Any]:
    """The part that job, buckets and steps say. Times are in nanoseconds; averages are per step."""
    buckets = synchronizer.buckets
    slots = synchronizer.slots
    statistics = synchronizer.results.statistics()
    sizes = ", ".join(
        str(buckets.layout.bucket(index).nbytes) for index in range(statistics.buckets)
    )
    dtypes = dict.fromkeys(str(slot.parameter.dtype).replace("torch.", "") for slot in slots)
    data: dict[str, Any] = {
        "backend_name": "gradsync",
        "rank": synchronizer.session.rank,
        "world_size": synchronizer.session.world_size,
        "iteration": statistics.steps,
        "num_parameter_tensors": len(slots),
        "total_parameter_size_bytes": sum(
            slot.parameter.numel() * slot.parameter.element_size() for slot in slots
        ),
        "dtypes": ", ".join(dtypes),
        "bucket_sizes": sizes,
        "has_rebuilt_buckets": int(statistics.rebuilt),
    }
    if statistics.rebuilt:
        data["rebuilt_bucket_sizes"] = sizes
    if statistics.steps:
        data["num_buckets_reduced"] = statistics.buckets
        data["avg_backward_compute_time"] = int(1e9 * statistics.backward / statistics.steps)
    return data
