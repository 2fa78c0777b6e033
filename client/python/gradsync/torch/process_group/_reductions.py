"""Collectives of host tensors through the daemon: each is a reduction."""

from __future__ import annotations

import threading
from typing import Optional

import torch
import torch.distributed as dist

import gradsync
from gradsync.torch._gradients import REDUCED_TYPES
from gradsync.torch.process_group._lane import Lane
from gradsync.torch.process_group._operations import Fail, Operation, QueuedOperation
from gradsync.torch.process_group._slots import Key, Slot, Slots
from gradsync.torch.process_group._transfers import Transfer

# A tensor without a slot travels in pieces of this many bytes through the staging memory.
_PIECE_BYTES = 8 << 20
# Seconds that the daemon may take to decide a step whose buckets are all reduced, and that the lane
# may take to go idle.
_DECISION_S = 5.0
_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "average",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
}


def op_of(reduce_op: object, dtype: torch.dtype) -> Optional[str]:
    """The daemon's name of `reduce_op`; None if the daemon does not have it for `dtype`."""
    if dtype not in REDUCED_TYPES:
        return None
    for known, name in _OPS.items():
        if reduce_op == known:
            return None if name == "average" and not dtype.is_floating_point else name
    return None


def on_host(tensor: torch.Tensor) -> bool:
    """Whether it is a tensor of the host that has elements, and memory for each."""
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.numel() > 0


class HostReductions:
    """The reductions of one group.

    Every rank begins the same ones, in the same order. begin() never waits for another rank: what
    would have to wait is left to the lane, which keeps the order. Thread-safe.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._lock = threading.Lock()
        self._slots = Slots()

    def begin(
        self, session: gradsync.Session, transfer: Transfer, op: str, timeout: float, fail: Fail
    ) -> Operation:
        """Begins a reduction.

        Args:
          session: the group's.
          transfer: its tensors are untouched until the operation has ended.
          op: of op_of().
          timeout: seconds to wait for the other ranks.
          fail: gets the operation's error.
        """
        with self._lock:
            slot = self._slots.next(Key(transfer.count, transfer.source.dtype, op))
            direct = transfer.strided is None and not self._lane.busy
            if slot is not None and slot.free and direct:
                return slot.start(transfer, timeout, fail)

            def body() -> None:
                if slot is None or not _reduce_in_slot(session, slot, transfer, timeout, fail):
                    _reduce_in_pieces(session, transfer, op, timeout)
                transfer.finish()

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
    session: gradsync.Session, transfer: Transfer, op: str, timeout: float
) -> None:
    flat = transfer.source
    if not transfer.in_place:
        flat = torch.empty(transfer.count, dtype=flat.dtype)
        transfer.fill(flat, 0)
    for piece in torch.split(flat, _PIECE_BYTES // flat.element_size()):
        session.all_reduce_address(
            piece.data_ptr(), piece.numel(), REDUCED_TYPES[flat.dtype], op, timeout, owner=piece
        )
    if not transfer.in_place:
        transfer.drain(flat, 0)


def _reduce_in_slot(
    session: gradsync.Session, slot: Slot, transfer: Transfer, timeout: float, fail: Fail
) -> bool:
    """False: the daemon has no memory for the slot."""
    if slot.user is not None:
        slot.user.finish(None)
    if not slot.make(session, timeout):
        return False
    slot.start(transfer, timeout, fail).finish(None)
    return True
