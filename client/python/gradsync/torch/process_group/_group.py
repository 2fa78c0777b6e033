"""The process group of `init_process_group("gradsync")`."""

from __future__ import annotations

import datetime
from typing import Any, Optional, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

import gradsync
from gradsync.torch.process_group import _transfers
from gradsync.torch.process_group._descriptions import describe, describe_all_reduce
from gradsync.torch.process_group._forwarding import ForwardedCollectives
from gradsync.torch.process_group._inner_group import InnerGroup
from gradsync.torch.process_group._lane import Lane
from gradsync.torch.process_group._membership import Membership
from gradsync.torch.process_group._reductions import HostReductions, on_host, op_of
from gradsync.torch.process_group._slots import CAPACITY_BYTES
from gradsync.torch.process_group._transfers import Transfer
from gradsync.torch.process_group._works import ReductionWork

# From so many bytes of the whole tensor on, the daemon is faster than Gloo: docs/benchmarks.md
# has the figures. For a reduce-scatter of more than two ranks it always is.
LEAST_GATHERED_BYTES = 8 << 20
LEAST_SCATTERED_BYTES = 4 << 20

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


class ProcessGroup(ForwardedCollectives):
    """Reduces and gathers host tensors through the daemon; leaves the rest to an inner group.

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
        self._lane = Lane()
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
        description = describe_all_reduce(tensors, opts.reduceOp)
        ops = [op_of(opts.reduceOp, tensor.dtype) for tensor in tensors]
        if self._membership is None or None in ops or not all(map(on_host, tensors)):
            self._announce(description)
            return self._all_reduce_inside(name, tensors, opts)
        transfers = map(_transfers.all_reduce, tensors)
        return self._reduce(description, list(zip(transfers, ops)), tensors, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """PyTorch's reduce_scatter_tensor."""
        if opts is None:
            opts = dist.ReduceScatterOptions()
        op = op_of(opts.reduceOp, tensor.dtype)
        if self._membership is None or op is None or not self._scatters(output, tensor):
            work: dist.Work = super().reduce_scatter_single(output, tensor, opts)
            return work
        transfer = _transfers.reduce_scatter(output, tensor, self.rank())
        description = describe("reduce_scatter_single", (output, tensor, opts), {})
        return self._reduce(description, [(transfer, op)], [output], opts)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """PyTorch's all_gather_into_tensor."""
        if opts is None:
            opts = AllgatherOptions()
        one_node = self._membership is not None and self._membership.on_one_node
        if not one_node or not self._gathers(output, tensor):
            work: dist.Work = super().all_gather_single(output, tensor, opts)
            return work
        transfer = _transfers.all_gather(output, tensor, self.rank())
        description = describe("all_gather_single", (output, tensor, opts), {})
        return self._reduce(description, [(transfer, "sum")], [output], opts)

    _reduce_scatter_base = reduce_scatter_single
    _allgather_base = all_gather_single

    def _scatters(self, output: torch.Tensor, tensor: torch.Tensor) -> bool:
        """Whether the daemon takes this. If the tensors do not fit, Gloo takes it, and raises."""
        return (
            on_host(output)
            and on_host(tensor)
            and output.dtype == tensor.dtype
            and output.dim() > 0
            and tensor.shape == (output.shape[0] * self.size(), *output.shape[1:])
            and (self.size() > 2 or tensor.numel() * tensor.itemsize >= LEAST_SCATTERED_BYTES)
        )

    def _gathers(self, output: torch.Tensor, tensor: torch.Tensor) -> bool:
        """As _scatters()."""
        return (
            on_host(output)
            and on_host(tensor)
            and output.dtype == tensor.dtype
            and not tensor.is_complex()
            and tensor.dim() > 0
            and output.shape == (tensor.shape[0] * self.size(), *tensor.shape[1:])
            and LEAST_GATHERED_BYTES <= output.numel() * output.itemsize <= CAPACITY_BYTES
        )

    def _reduce(
        self,
        description: str,
        reductions: Sequence[tuple[Transfer, Any]],
        results: Sequence[torch.Tensor],
        opts: Any,
    ) -> dist.Work:
        """Reduces through the daemon; `results` are the caller's tensors."""
        assert self._membership is not None
        timeout = _seconds(opts.timeout, self._timeout)
        session = self._membership.session
        fail = self._membership.fail
        begin = self._reductions.begin
        try:
            operations = [
                begin(session, transfer, op, timeout, fail) for transfer, op in reductions
            ]
            # Last, as nobody waits for it.
            self._announce(description)
        except BaseException as error:  # Ctrl-C, too: a step may be open
            failure = fail(error)
            if failure is error or not isinstance(error, gradsync.Error):
                raise
            raise failure from error
        return ReductionWork(results, operations, self._lane)

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
