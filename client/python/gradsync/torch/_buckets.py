"""The layout of one wrapped module: the buckets that its gradients are cut into."""

from __future__ import annotations

import dataclasses
from typing import Any, Sequence

import torch

import gradsync
from gradsync.torch import _session
from gradsync.torch._gradients import Slot, layout_parameters
from gradsync.torch._hand_off import HostHandOff, StreamHandOff

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class BucketCaps:
    """Most bytes of the bucket that is ready first, of the last one, and of each other one."""

    each: int
    first: int
    last: int

    @classmethod
    def of_mib(cls, each: float | None, first: float, last: float) -> BucketCaps:
        """Caps in MiB; `each` None is 25."""
        return cls(int((25 if each is None else each) * MIB), int(first * MIB), int(last * MIB))


class Buckets:
    """Registers `slots` as a layout, hands its buckets to the daemon, and can cut them anew.

    Used on the thread that trains, and in its backward passes.

    Attributes:
      layout: the present one.
      slots: the parameters, in the layout's order.
      sizes: how many gradients each bucket has.
      rebuilt: whether the buckets follow an order in which gradients were observed to come.
      runs_on_caller: whether the caller of backward() runs the pass, its hooks and its end.
    """

    def __init__(
        self,
        session: gradsync.Session,
        name: str,
        slots: Sequence[Slot],
        caps: BucketCaps,
        hand_off: HostHandOff | StreamHandOff,
        timeout: float | None,
        replaced: Buckets | None = None,
        *,
        buffer_bytes: int = 0,
    ) -> None:
        """Registers; `timeout` is in seconds.

        Args:
          replaced: buckets of another wrapper of the module, in this session. Their layout is
            replaced, which frees the daemon's memory. None, or gradients on another device:
            nothing is replaced.
          buffer_bytes: of the module's buffers, which get a bucket of their own; 0: no such bucket.

        Raises:
          gradsync.Error: as Session.register_layout() and Session.replace_layout().
        """
        self.session = session
        self.name = name
        self.layout: gradsync.Layout
        self.rebuilt = False
        self._caps = caps
        self._hand_off = hand_off
        self.runs_on_caller = hand_off.runs_on_caller
        self._timeout = timeout
        self._buffer_bytes = buffer_bytes
        options = self._options(slots)
        with _session.noting(session):
            if replaced is not None and replaced.layout.device == options.get("device", ""):
                self.layout = session.replace_layout(replaced.layout, name, **options)
            else:
                self.layout = session.register_layout(name, **options)
        self._place(slots)

    def rebuild(self, order: Sequence[int]) -> None:
        """Cuts buckets anew, for gradients that come in the order `order`.

        Args:
          order: of indices into `slots`, the same on every rank.

        Raises:
          gradsync.Error: as Session.replace_layout().
        """
        # Buckets are cut from the last parameter to the first.
        slots = [self.slots[i] for i in reversed(order)]
        if slots != self.slots:
            try:
                with _session.noting(self.session):
                    self.layout = self.session.replace_layout(
                        self.layout, self.name, **self._options(slots)
                    )
            except gradsync.FailedPreconditionError as error:
                if error.reason != gradsync.Reason.RANKS_LEFT:
                    raise
                return  # a rank has no more data; a later step tries again
            self._place(slots)
        self.rebuilt = True

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets."""
        return sum(self.layout.bucket(i).nbytes for i in range(self.layout.bucket_count))

    def begin_step(self) -> None:
        """A step begins."""
        self._hand_off.begin()

    def arrived(self, bucket: int) -> None:
        """A gradient of the bucket was written."""
        self._hand_off.arrived(bucket)

    def mark_ready(self, step: int, bucket: int) -> None:
        """Hands the bucket over: all of its gradients were written."""
        self._hand_off.mark_ready(self.layout, step, bucket)

    def finish_step(self, step: int, used: Sequence[bool] | None) -> None:
        """Hands over the buckets that are left; `used` as of Layout.finish_step()."""
        self._hand_off.finish_step(self.layout, step, used)

    def wait(self, step: int) -> gradsync.StepResult:
        """Waits for the verdict on the host; what follows sees the averages."""
        return self._hand_off.wait(self.layout, step)

    def follow(self, step: int) -> torch.Tensor:
        """On a GPU: as StreamHandOff.follow()."""
        assert isinstance(self._hand_off, StreamHandOff)
        return self._hand_off.follow(self.layout, step)

    def _options(self, slots: Sequence[Slot]) -> dict[str, Any]:
        return {
            "parameters": layout_parameters(slots),
            "bucket_cap_bytes": self._caps.each,
            "first_bucket_cap_bytes": self._caps.first,
            "last_bucket_cap_bytes": self._caps.last,
            "timeout": self._timeout,
            "buffer_bytes": self._buffer_bytes,
            **self._hand_off.layout_options,
        }

    def _place(self, slots: Sequence[Slot]) -> None:
        """Moves the gradients of `slots`, in this order, into the layout."""
        self.slots = list(slots)
        self.sizes = [0] * self.layout.bucket_count
        for index, slot in enumerate(self.slots):
            slot.place(self.layout, index)
            self.sizes[slot.bucket] += 1
