"""The process group of `init_process_group("gradsync")`."""

from __future__ import annotations

import datetime
from typing import Any, Sequence

import torch
import torch.distributed as dist

from gradsync.torch.process_group._forwarding import ForwardedCollectives
from gradsync.torch.process_group._inner_group import InnerGroup
from gradsync.torch.process_group._lane import Lane
from gradsync.torch.process_group._membership import Membership
from gradsync.torch.process_group._reductions import HostReductions, op_of, takes
from gradsync.torch.process_group._works import ReductionWork


class ProcessGroup(ForwardedCollectives):
    """All-reduces host tensors through the daemon, and leaves the rest to an inner group.

    A group is a job of its own; this rank has a session in it. As with every group of PyTorch, all
    ranks call the same collectives in the same order.

    Thread-safe, but only the order of the calls says which collectives of the ranks belong
    together.
    """

    def __init__(self, options: Any, inner: InnerGroup) -> None:
        """Args: options: PyTorch's `_DistributedBackendOptions`. All ranks call this.

        Raises:
          gradsync.Error: no daemon answered, or it refused the job.
        """
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self._inner = inner
        self._timeout: datetime.timedelta = options.timeout
        # One rank alone needs no daemon.
        self._membership = Membership(options, inner) if options.group_size > 1 else None
        self._lane = Lane(f"gradsync-{options.group_id}")
        self._reductions = HostReductions(self._membership, self._lane)
        if self._membership is not None and not options.global_ranks_in_group:
            # PyTorch's default group, which has no list of ranks: say now if there is no daemon.
            self._membership.session  # noqa: B018

    def getBackendName(self) -> str:  # noqa: N802  # PyTorch's name
        """PyTorch's name for this kind of group."""
        return "gradsync"

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """PyTorch's all-reduce, of one tensor or of a list of one."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        opts = _all_reduce_options(opts, timeout)
        return self._all_reduce(tensors, opts, self._inner.group.allreduce)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> dist.Work:
        """PyTorch's all-reduce of several tensors."""
        if opts is None:
            opts = dist.AllreduceCoalescedOptions()
        return self._all_reduce(list(tensors), opts, self._inner.group.allreduce_coalesced)

    def _all_reduce(self, tensors: list[torch.Tensor], opts: Any, forward: Any) -> dist.Work:
        op = op_of(opts.reduceOp)
        if self._membership is None or op is None or not all(map(takes, tensors)):
            work: dist.Work = self._forward(forward, (tensors, opts), {})
            return work
        timeout = _seconds(opts.timeout, self._timeout)
        operations = [self._reductions.begin(tensor, op, timeout) for tensor in tensors]
        return ReductionWork(tensors, operations, self._lane)

    def shutdown(self) -> None:
        """Leaves the job: destroy_process_group() calls this."""
        if self._membership is not None:
            self._membership.leave()
        self._lane.close()

    def abort(self) -> None:
        """Ends the session, and with it the all-reduces that are under way."""
        if self._membership is not None:
            self._membership.close()


def _all_reduce_options(opts: Any, timeout: Any) -> Any:
    if isinstance(opts, dist.AllreduceOptions):
        return opts
    made = dist.AllreduceOptions()
    if opts is not None:
        made.reduceOp = opts
    if timeout is not None:
        made.timeout = timeout
    return made


def _seconds(timeout: datetime.timedelta, default: datetime.timedelta) -> float:
    """PyTorch gives a negative time for "the group's"."""
    given = timeout.total_seconds()
    return given if given > 0 else default.total_seconds()
