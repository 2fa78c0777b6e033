"""The layout of one wrapped module: its gradients, and the buckets that they are cut into."""

from __future__ import annotations

import dataclasses
from typing import Any, Sequence

import gradsync
from gradsync.torch import _session
from gradsync.torch._gradients import Slot, layout_parameters
from gradsync.torch._hand_off import HostHandOff, StreamHandOff

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class BucketCaps:
    """Most bytes of a bucket, of the one that is ready first, and of the one that is last."""

    each: int
    first: int
    last: int

    @classmethod
    def of_mib(cls, each: float | None, first: float, last: float) -> BucketCaps:
        """From MiB; None is 25."""
        return cls(int((25 if each is None else each) * MIB), int(first * MIB), int(last * MIB))


class Buckets:
    """Registers `slots` as a layout, and replaces it by one with buckets in another order.

    Used on the thread that trains, and in its backward passes.

    Attributes:
      layout: the present one.
      slots: the parameters, in the layout's order.
      sizes: per bucket, how many gradients lie in it.
      rebuilt: whether their order was observed.
      hand_off: how they are handed to the daemon.
    """

    def __init__(
        self,
        session: gradsync.Session,
        name: str,
        slots: Sequence[Slot],
        caps: BucketCaps,
        hand_off: HostHandOff | StreamHandOff,
        timeout: float | None,
    ) -> None:
        """Registers; `timeout` is in seconds.

        Raises:
          gradsync.Error: as Session.register_layout().
        """
        self.session = session
        self.name = name
        self.rebuilt = False
        self._caps = caps
        self.hand_off = hand_off
        self._timeout = timeout
        with _session.noting(session):
            self.layout = session.register_layout(name, **self._options(slots))
        self._place(slots)

    def rebuild(self, order: Sequence[int]) -> None:
        """Cuts buckets anew, for gradients that become ready in the order `order`.

        Args:
          order: of indices into `slots`, the same on every rank.

        Raises:
          gradsync.Error: as Session.replace_layout().
        """
        # The rule goes through parameters from the last to the first.
        slots = [self.slots[i] for i in reversed(order)]
        if slots != self.slots:
            try:
                with _session.noting(self.session):
                    self.layout = self.session.replace_layout(
                        self.layout, self.name, **self._options(slots)
                    )
            except gradsync.FailedPreconditionError as error:
                if error.reason != "RANKS_LEFT":
                    raise
                return  # a rank is done with its data; a later step tries again
            self._place(slots)
        self.rebuilt = True

    @property
    def nbytes(self) -> int:
        """Of all buckets."""
        return sum(self.layout.bucket(i).nbytes for i in range(self.layout.bucket_count))

    def _options(self, slots: Sequence[Slot]) -> dict[str, Any]:
        return {
            "parameters": layout_parameters(slots),
            "bucket_cap_bytes": self._caps.each,
            "first_bucket_cap_bytes": self._caps.first,
            "last_bucket_cap_bytes": self._caps.last,
            "timeout": self._timeout,
            **self.hand_off.layout_options,
        }

    def _place(self, slots: Sequence[Slot]) -> None:
        """Takes `slots`, in this order, for the parameters of the layout."""
        self.slots = list(slots)
        self.sizes = [0] * self.layout.bucket_count
        for index, slot in enumerate(self.slots):
            slot.place(self.layout, index)
            self.sizes[slot.bucket] += 1
