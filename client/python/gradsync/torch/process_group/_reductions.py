"""All-reduces of host tensors through the daemon."""

from __future__ import annotations

import threading
from typing import Optional

import torch
import torch.distributed as dist

import gradsync
from gradsync.torch._gradients import DATA_TYPES
from gradsync.torch.process_group._lane import Lane
from gradsync.torch.process_group._operations import Fail, Operation, QueuedOperation
from gradsync.torch.process_group._slots import Key, Slot, Slots

# A tensor without a slot travels in pieces of this many bytes through the staging memory.
_PIECE_BYTES = 8 << 20
# Seconds that the daemon may take to decide a step whose buckets are all reduced, and that the lane
# may take to go idle.
_DECISION_S = 5.0
_OPS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "average"}


def op_of(reduce_op: object) -> Optional[str]:
    """The daemon's name of `reduce_op`; None if the daemon does not have it."""
    for known, name in _OPS.items():
        if reduce_op == known:
            return name
    return None


def takes(tensor: torch.Tensor) -> bool:
    """Whether the daemon can reduce the tensor."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.dtype in DATA_TYPES
        and tensor.numel() > 0
    )


class HostReductions:
    """The all-reduces of one group.

    Every rank begins the same ones, in the same order. begin() never waits for another rank: what
    would have to wait is left to the lane, which keeps the order. Thread-safe.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._lock = threading.Lock()
        self._slots = Slots()

    def begin(
        self, session: gradsync.Session, tensor: torch.Tensor, op: str, timeout: float, fail: Fail
    ) -> Operation:
        """Begins the all-reduce of a tensor that takes() accepts; the result replaces it.

        Args:
          session: the group's.
          tensor: of any strides. Untouched until the operation has ended.
          op: "sum" or "average".
          timeout: seconds to wait for the other ranks.
          fail: gets the operation's error.
        """
        # Neither autograd nor its version counters know of collectives, as with Gloo.
        tensor = tensor.data
        flat = tensor.view(-1) if tensor.is_contiguous() else tensor.contiguous().view(-1)
        with self._lock:
            slot = self._slots.next(Key(flat.numel(), flat.dtype, op))
            in_place = tensor.is_contiguous()
            if slot is not None and slot.free and in_place and not self._lane.busy:
                return slot.start(flat, timeout, fail)

            def body() -> None:
                if slot is None or not _reduce_in_slot(session, slot, flat, timeout, fail):
                    _reduce_in_pieces(session, flat, op, timeout)
                if not in_place:
                    tensor.copy_(flat.view(tensor.shape))

            operation = QueuedOperation(body, fail)
            self._lane.put(operation.run)
            return operation

    def settle(self) -> bool:
        """Whether nothing of this rank is under way, so that it can leave the job."""
        with self._lock:
            return self._lane.settle(_DECISION_S) and self._slots.settle(_DECISION_S)

    def close(self) -> None:
        """Gives the memory back; the session has ended."""
        with self._lock:
            self._slots = Slots()


def _reduce_in_pieces(
    session: gradsync.Session, flat: torch.Tensor, op: str, timeout: float
) -> None:
    for piece in torch.split(flat, _PIECE_BYTES // flat.element_size()):
        session.all_reduce_address(
            piece.data_ptr(), piece.numel(), DATA_TYPES[flat.dtype], op, timeout, owner=piece
        )


def _reduce_in_slot(
    session: gradsync.Session, slot: Slot, flat: torch.Tensor, timeout: float, fail: Fail
) -> bool:
    """False: the daemon has no memory for the slot."""
    if slot.user is not None:
        slot.user.finish(None)
    if not slot.make(session, timeout):
        return False
    slot.start(flat, timeout, fail).finish(None)
    return True
