"""The collectives that a group leaves to its inner group."""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch.distributed as dist

from gradsync.torch.process_group._contiguous import ContiguousArguments
from gradsync.torch.process_group._descriptions import describe
from gradsync.torch.process_group._forwarded_work import ForwardedWork
from gradsync.torch.process_group._inner_group import InnerGroup
from gradsync.torch.process_group._membership import Membership


def _forwarded(name: str) -> Callable[..., Any]:
    def collective(self: ForwardedCollectives, *arguments: Any, **options: Any) -> Any:
        try:
            self._announce(describe(name, arguments, options))
            return self._forward(name, arguments, options)
        except KeyboardInterrupt as error:
            # The other ranks may wait in this collective.
            if self._membership is not None:
                self._membership.fail(error)
            raise

    collective.__name__ = name
    collective.__doc__ = f"PyTorch's `{name}`, by the inner group."
    return collective


def _between_two(name: str) -> Callable[..., Any]:
    def message(self: ForwardedCollectives, *arguments: Any, **options: Any) -> Any:
        return self._forward(name, arguments, options, collective=False)

    message.__name__ = name
    message.__doc__ = f"PyTorch's `{name}`, by the inner group."
    return message


class ForwardedCollectives(dist.ProcessGroup):
    """Overrides every collective of PyTorch's group.

    None may be inherited. C++ calls an inherited one with the GIL held, and the threads of the
    inner group would wait for the GIL for ever.
    """

    _inner: InnerGroup
    _membership: Optional[Membership]

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
    reduce = _forwarded("reduce")
    reduce_scatter = _forwarded("reduce_scatter")
    reduce_scatter_single = _forwarded("reduce_scatter_single")
    reduce_scatter_single_coalesced = _forwarded("reduce_scatter_single_coalesced")
    reduce_scatter_tensor_coalesced = _forwarded("reduce_scatter_tensor_coalesced")
    scatter = _forwarded("scatter")

    # Two ranks call these; the others do not.
    recv = _between_two("recv")
    recv_anysource = _between_two("recv_anysource")
    send = _between_two("send")

    def _announce(self, description: str) -> None:
        """Tells the daemon which collective begins.

        Raises:
          gradsync.Error: the session has ended.
        """
        if self._membership is not None:
            self._membership.session.begin_collective(description)

    def _forward(
        self,
        name: str,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        *,
        collective: bool = True,
        then: Optional[Callable[[], None]] = None,
    ) -> Any:
        """Calls the inner group.

        Args:
          name: of the method.
          arguments: for it.
          options: for it.
          collective: whether the session's end ends the wait for it, too.
          then: what is left to do when its result is there.
        """
        contiguous = ContiguousArguments(arguments, options)
        call = getattr(self._inner.group, name)
        try:
            work = call(*contiguous.arguments, **contiguous.options)
        except RuntimeError as error:
            if self._membership is not None:
                self._membership.raise_end(error)
            raise
        if work is None or self._membership is None and then is None and not contiguous.any:
            return work
        return ForwardedWork(work, contiguous, self._membership, collective, then)
