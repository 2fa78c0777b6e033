"""Memory that a group shares with the daemon, kept for all-reduces of the same size."""

from __future__ import annotations

import collections
import dataclasses
import time
from typing import Optional, Sequence

import torch

import gradsync
from gradsync.torch._gradients import DATA_TYPES, flat_tensor
from gradsync.torch.process_group._operations import StartedOperation

# Bytes of a bucket: the daemon reduces one while the trainer copies the next.
BUCKET_BYTES = 2 << 20
# Bytes of all slots of a group, and how many there are at most. A daemon allows 64 layouts.
CAPACITY_BYTES = 1 << 30
MOST_SLOTS = 48
# Sizes of which a group remembers that they came before.
_SEEN_KEYS = 1024


@dataclasses.dataclass(frozen=True)
class Key:
    """What all-reduces have in common that can use one slot."""

    count: int
    dtype: torch.dtype
    op: str

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.count * self.dtype.itemsize

    @property
    def slots(self) -> int:
        """How many all-reduces of this key can be under way at once."""
        return 4 if self.nbytes <= 256 << 10 else 2 if self.nbytes <= 4 << 20 else 1


class Slot:
    """A layout of one tensor, cut into buckets. Used by one all-reduce at a time.

    Not thread-safe: the group's lock guards it until it is made, and its user afterwards.
    """

    def __init__(self, key: Key, name: str) -> None:
        self.key = key
        self._name = name
        self._layout: Optional[gradsync.Layout] = None
        self._views: list[torch.Tensor] = []
        self._step = 0  # the last one
        self.user: Optional[StartedOperation] = None

    @property
    def free(self) -> bool:
        """Whether it is made, and its last all-reduce has ended."""
        return self._layout is not None and (self.user is None or self.user.ended)

    def make(self, session: gradsync.Session, timeout: float) -> None:
        """Registers the layout, unless that was done; waits until every rank does so."""
        if self._layout is not None:
            return
        layout = session.register_layout(
            self._name, explicit_buckets=_buckets(self.key), op=self.key.op, timeout=timeout
        )
        self._views = [
            flat_tensor(layout.bucket(index), torch.device("cpu"))
            for index in range(layout.bucket_count)
        ]
        self._layout = layout

    def start(self, flat: torch.Tensor, timeout: float) -> StartedOperation:
        """Copies `flat` in and tells the daemon; the slot is free. Waits for no other rank."""
        layout = self._layout
        assert layout is not None
        step = layout.next_step
        if step == self._step:
            # Every bucket of the last step is reduced: the daemon is about to decide it.
            layout.wait_step(step)
            step = layout.next_step
        self._step = step
        last = len(self._views) - 1
        for index, (view, part) in enumerate(zip(self._views, self._parts(flat))):
            view.copy_(part)
            if index < last:
                layout.mark_ready(step, index)
        layout.finish_step(step)

        def fetch(seconds: float) -> None:
            # Does not wait for the verdict: a bucket has every rank's data, or an error.
            deadline = time.monotonic() + seconds
            for index, (view, part) in enumerate(zip(self._views, self._parts(flat))):
                layout.wait_bucket(step, index, max(0.0, deadline - time.monotonic()))
                part.copy_(view)

        self.user = StartedOperation(fetch, timeout)
        return self.user

    def settle(self, timeout: float) -> bool:
        """Waits until the last step is decided. False: it is not within `timeout` seconds."""
        layout = self._layout
        if layout is not None and layout.next_step == self._step:
            try:
                layout.wait_step(self._step, timeout)
            except gradsync.Error:
                return False
        return True

    def _parts(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        if len(self._views) == 1:
            return [flat]
        return torch.split(flat, [view.numel() for view in self._views])


def _buckets(key: Key) -> list[gradsync.Bucket]:
    most = BUCKET_BYTES // key.dtype.itemsize
    number = -(-key.count // most)
    size, larger = divmod(key.count, number)
    return [
        gradsync.Bucket(size + (index < larger), DATA_TYPES[key.dtype]) for index in range(number)
    ]


class Slots:
    """A group's slots.

    Which one an all-reduce gets follows from the all-reduces before it alone. So every rank chooses
    the same, whatever has ended where. Externally synchronized.
    """

    def __init__(self) -> None:
        self._slots: dict[tuple[Key, int], Slot] = {}
        # How often each key came; the key that came least recently first.
        self._seen: collections.OrderedDict[Key, int] = collections.OrderedDict()
        self._bytes = 0

    def next(self, key: Key) -> Optional[Slot]:
        """The slot of the next all-reduce of `key`; None: it is the first one, or there is no room.

        Tensors of a size that comes once are not worth a layout.
        """
        number = self._seen.pop(key, 0)
        self._seen[key] = number + 1
        if len(self._seen) > _SEEN_KEYS:
            self._seen.popitem(last=False)
        if number == 0:
            return None
        place = key, number % key.slots
        slot = self._slots.get(place)
        if slot is None and self._has_room(key):
            slot = Slot(key, f"all_reduce{len(self._slots)}")
            self._slots[place] = slot
            self._bytes += key.nbytes
        return slot

    def settle(self, timeout: float) -> bool:
        """Slot.settle() of every slot."""
        return all(slot.settle(timeout) for slot in self._slots.values())

    def _has_room(self, key: Key) -> bool:
        return len(self._slots) < MOST_SLOTS and self._bytes + key.nbytes <= CAPACITY_BYTES
