"""The arguments with which a module is wrapped, checked and put together."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch

import gradsync
from gradsync.torch._buckets import MIB, BucketCaps

# Seconds; the daemon waits for a layout just as long.
_WRAP_TIMEOUT = 300.0


@dataclasses.dataclass(frozen=True)
class Options:
    """How a module is synchronized; the same on every rank.

    Attributes:
      caps: of the buckets.
      sync_buffers: whether each step ends with the buffers of the lowest live rank everywhere.
      init_sync: whether wrapping checks that the modules agree, and gives all ranks one state.
      init_sync_buffers: whether that state has the buffers.
      static_graph: whether every step uses the same parameters equally often.
      device_verdict: whether to leave the verdict to optimizers where the host need not know it.
      timeout: seconds for the other ranks to wrap the module; None: 300, as in the daemon.
    """

    caps: BucketCaps
    sync_buffers: bool
    init_sync: bool
    init_sync_buffers: bool
    static_graph: bool
    device_verdict: bool
    timeout: float | None

    @property
    def wrap_timeout(self) -> float:
        """Seconds for one operation of the ranks while they wrap the module."""
        return _WRAP_TIMEOUT if self.timeout is None else self.timeout

    def lines(self) -> list[str]:
        """A line for each option, to compare between the ranks."""
        return [
            f"bucket_cap_mb={self.caps.each / MIB:g}",
            f"first_bucket_cap_mb={self.caps.first / MIB:g}",
            f"last_bucket_cap_mb={self.caps.last / MIB:g}",
            f"broadcast_buffers={self.sync_buffers}",
            f"buffers of the start broadcast={self.init_sync_buffers}",
            f"static_graph={self.static_graph}",
            f"device_verdict={self.device_verdict}",
        ]


def sync_buffers(
    broadcast_buffers: bool | None, forward_sync_buffers: bool | None
) -> tuple[bool, bool]:
    """Whether steps, and the start, give all ranks the same buffers: as PyTorch's wrapper does."""
    if forward_sync_buffers is None:
        both = broadcast_buffers is None or broadcast_buffers
        return both, both
    if broadcast_buffers is not None:
        warnings.warn(
            "gradsync: broadcast_buffers has no effect beside forward_sync_buffers",
            FutureWarning,
            stacklevel=3,
        )
    return forward_sync_buffers, True


def check_caps(**caps_mb: float | None) -> None:
    """Raises: ValueError: a cap is not positive."""
    for name, cap in caps_mb.items():
        if cap is not None and cap <= 0:
            raise ValueError(f"gradsync: {name} must be positive, not {cap}")


# What PyTorch's wrapper can do and this one cannot, and what to do instead.
_REFUSED = {
    "device_mesh": "gradients are averaged over all ranks of a job; for the ranks of a mesh pass "
    "session=gradsync.Session.join(...) of a job that has these ranks, and wrap the module before "
    "you shard it",
    "mixed_precision": "use torch.autocast, or convert the module before you wrap it",
    "delay_all_reduce_named_params": "every gradient is averaged as soon as it comes; name the "
    "parameters that stay out in module._ddp_params_and_buffers_to_ignore, and average them "
    "yourself",
    "param_to_hook_all_reduce": "it belongs to delay_all_reduce_named_params, which must be None, "
    "too",
    "bucket_cap_mb_list": "give bucket_cap_mb, first_bucket_cap_mb and last_bucket_cap_mb",
}


def check_refused(**arguments: Any) -> None:
    """Raises: ValueError: an argument was given that only PyTorch's wrapper supports."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"gradsync: {name} must be None: {_REFUSED[name]}")


def check_process_group(group: Any) -> None:
    """Raises: ValueError: `group` is neither None nor PyTorch's default group."""
    if group is not None and group is not torch.distributed.group.WORLD:
        raise ValueError(
            "gradsync: process_group must be None or the default group, as gradients are averaged "
            "over all ranks of a job; for other ranks pass session=gradsync.Session.join(...) of a "
            "job that has these ranks"
        )


def check_same_ranks(group: Any, session: gradsync.Session) -> None:
    """Raises: ValueError: this rank or the world size differ between `group` and the job."""
    if group is None:
        return
    if group.size() != session.world_size:
        raise ValueError(
            f"gradsync: process_group has {group.size()} ranks, but the job has "
            f"{session.world_size}; pass session= for a job of the same ranks"
        )
    if group.rank() != session.rank:
        raise ValueError(
            f"gradsync: this process is rank {group.rank()} of process_group, but rank "
            f"{session.rank} of the job; give it the same rank in both"
        )
