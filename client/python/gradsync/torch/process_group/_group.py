"""The process group of `init_process_group("gradsync")`."""

from __future__ import annotations

import datetime
from typing import Any, Optional, Sequence

import torch
import torch.distributed as dist

import gradsync
from gradsync.torch.process_group._descriptions import describe_all_reduce
from gradsync.torch.process_group._forwarding import ForwardedCollectives
from gradsync.torch.process_group._inner_group import InnerGroup
from gradsync.torch.process_group._lane import Lane
from gradsync.torch.process_group._membership import Membership
from gradsync.torch.process_group._reductions import HostReductions, op_of, takes
from gradsync.torch.process_group._works import ReductionWork

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


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
        self._lane = Lane(f"gradsync-{options.group_id}")
        self._reductions = HostReductions(self._lane)
        # One rank alone needs no daemon.
        self._membership: Optional[Membership] = None
        if options.group_size > 1:
            self._membership = Membership(options, inner, self._reductions.settle)
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
        return self._all_reduce("allreduce", tensors, opts)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> dist.Work:
        """PyTorch's all-reduce of several tensors."""
        if opts is None:
            opts = dist.AllreduceCoalescedOptions()
        return self._all_reduce("allreduce_coalesced", list(tensors), opts)

    def _all_reduce(self, name: str, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        op = op_of(opts.reduceOp)
        description = describe_all_reduce(tensors, opts.reduceOp)
        if self._membership is None or op is None or not all(map(takes, tensors)):
            self._announce(description)
            return self._all_reduce_inside(name, tensors, opts)
        timeout = _seconds(opts.timeout, self._timeout)
        session = self._membership.session
        fail = self._membership.fail
        begin = self._reductions.begin
        try:
            operations = [begin(session, tensor, op, timeout, fail) for tensor in tensors]
            # Last, as nobody waits for it.
            self._announce(description)
        except BaseException as error:  # Ctrl-C, too: a step may be open
            failure = fail(error)
            if failure is error or not isinstance(error, gradsync.Error):
                raise
            raise failure from error
        return ReductionWork(tensors, operations, self._lane)

    def _all_reduce_inside(self, name: str, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        if opts.reduceOp != dist.ReduceOp.AVG or not all(map(_is_host_integer, tensors)):
            work: dist.Work = self._forward(name, (tensors, opts), {})
            return work
        summed = type(opts)()
        summed.reduceOp = dist.ReduceOp.SUM
        summed.timeout = opts.timeout
        size = self.size()

        def average() -> None:
            for tensor in tensors:
                tensor.data.div_(size, rounding_mode="trunc")

        # Gloo has no average of integers; NCCL's is this one.
        work = self._forward(name, (tensors, summed), {}, then=average)
        return work

    def split_group(self, *_: Any, **__: Any) -> Any:
        """Refused."""
        raise _unimplemented("split_group()", "call torch.distributed.new_group()")

    def merge_remote_group(self, *_: Any, **__: Any) -> Any:
        """Refused."""
        raise _unimplemented("merge_remote_group()", "make a new group of all ranks")

    def shutdown(self) -> None:
        """Finishes the job: destroy_process_group() calls this."""
        if self._membership is not None:
            self._membership.leave()
        self._reductions.close()
        self._lane.close()

    def abort(self) -> None:
        """Ends the session, and with it the all-reduces that are under way."""
        if self._membership is not None:
            self._membership.close()


def _unimplemented(call: str, remedy: str) -> gradsync.UnimplementedError:
    return gradsync.UnimplementedError(
        f"the process group has no {call}; {remedy} instead", reason=gradsync.Reason.MALFORMED
    )


def _is_host_integer(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in _INTEGERS


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
