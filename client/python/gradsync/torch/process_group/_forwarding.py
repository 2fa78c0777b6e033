"""The collectives that a group leaves to its inner group."""

from __future__ import annotations

from typing import Any, Callable

import torch.distributed as dist

from gradsync.torch.process_group._inner_group import InnerGroup


def _forwarded(name: str) -> Callable[..., Any]:
    def collective(self: ForwardedCollectives, *arguments: Any, **options: Any) -> Any:
        return self._forward(getattr(self._inner.group, name), arguments, options)

    collective.__name__ = name
    collective.__doc__ = f"PyTorch's `{name}`, by the inner group."
    return collective


class ForwardedCollectives(dist.ProcessGroup):
    """Overrides every collective of PyTorch's group.

    None may be inherited. C++ calls an inherited one with the GIL held, and the threads of the
    inner group would wait for the GIL for ever.
    """

    _inner: InnerGroup

    _allgather_base = _forwarded("_allgather_base")
    _reduce_scatter_base = _forwarded("_reduce_scatter_base")
    all_gather_single = _forwarded("all_gather_single")
    all_gather_single_coalesced = _forwarded("all_gather_single_coalesced")
    all_to_all_single = _forwarded("all_to_all_single")
    allgather = _forwarded("allgather")
    allgather_coalesced = _forwarded("allgather_coalesced")
    allgather_into_tensor_coalesced = _forwarded("allgather_into_tensor_coalesced")
    alltoall = _forwarded("alltoall")
    alltoall_base = _forwarded("alltoall_base")
    barrier = _forwarded("barrier")
    broadcast = _forwarded("broadcast")
    gather = _forwarded("gather")
    monitored_barrier = _forwarded("monitored_barrier")
    recv = _forwarded("recv")
    recv_anysource = _forwarded("recv_anysource")
    reduce = _forwarded("reduce")
    reduce_scatter = _forwarded("reduce_scatter")
    reduce_scatter_single = _forwarded("reduce_scatter_single")
    reduce_scatter_single_coalesced = _forwarded("reduce_scatter_single_coalesced")
    reduce_scatter_tensor_coalesced = _forwarded("reduce_scatter_tensor_coalesced")
    scatter = _forwarded("scatter")
    send = _forwarded("send")

    def _forward(
        self, call: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        return call(*arguments, **options)
