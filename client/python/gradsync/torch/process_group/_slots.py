"""Memory that a group shares with the daemon, kept for all-reduces of the same size."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from typing import Optional, Sequence

import torch

import gradsync
from gradsync.torch._gradients import REDUCED_TYPES, flat_tensor
from gradsync.torch.process_group._operations import Fail, StartedOperation
from gradsync.torch.process_group._transfers import Transfer

# Bytes of a bucket: the daemon reduces one while the trainer copies the next.
BUCKET_BYTES = 2 << 20
# Bytes of all slots of a group, and how many there are at most. A daemon allows 64 layouts.
CAPACITY_BYTES = 1 << 30
MOST_SLOTS = 48
# A slot makes way for another size after so many all-reduces of other sizes. More than a training
# step has, so that sizes that come in every step do not push each other out.
IDLE_USES = 512
# The daemon's time-out begins with the first rank's step, and its verdict names the late ranks. A
# trainer waits so many seconds longer.
_VERDICT_S = 5.0
# Seconds to wait for the session's own error after the error of one of its layouts.
_END_S = 5.0
# How many sizes a group remembers as having come before.
_SEEN_KEYS = 1024


@dataclasses.dataclass(frozen=True)
class Key:
    """What the all-reduces that can use the same slot have in common."""

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

    def __init__(self, key: Key, name: str, replaced: Sequence[Slot] = ()) -> None:
        """Args: replaced: slots whose memory it takes; they are released before it is made."""
        self.key = key
        self.last_use = 0
        self._name = name
        self._replaced = list(replaced)
        self._refused = False
        self._session: Optional[gradsync.Session] = None
        self._layout: Optional[gradsync.Layout] = None
        self._views: list[tuple[int, torch.Tensor]] = []  # with the place of the first element
        self._step = 0  # the last one
        self.user: Optional[StartedOperation] = None

    @property
    def free(self) -> bool:
        """Whether it is made, and its last all-reduce has ended."""
        return self._layout is not None and (self.user is None or self.user.ended)

    def make(self, session: gradsync.Session, timeout: float) -> bool:
        """Registers the layout, unless that was done; waits until every rank does so.

        Returns:
          False if a quota of the daemon forbids it: then on every rank, and for good.

        Raises:
          gradsync.Error: also MEMORY, which the other ranks do not get: they have the slot.
        """
        if self._layout is not None or self._refused:
            return not self._refused
        for slot in self._replaced:
            slot.release(timeout)
        self._replaced.clear()
        try:
            layout = session.register_layout(
                self._name, explicit_buckets=_buckets(self.key), op=self.key.op, timeout=timeout
            )
        except gradsync.ResourceExhaustedError as error:
            if error.reason not in (gradsync.Reason.QUOTA, gradsync.Reason.LAYOUT_REFUSED):
                raise
            self._refused = True
            return False
        begin = 0
        for index in range(layout.bucket_count):
            view = flat_tensor(layout.bucket(index), torch.device("cpu"))
            self._views.append((begin, view))
            begin += view.numel()
        self._session, self._layout = session, layout
        return True

    def start(self, transfer: Transfer, timeout: float, fail: Fail) -> StartedOperation:
        """Fills the memory and tells the daemon; the slot must be free. Waits for no other rank.

        After an error a step may be open: end the session.
        """
        layout = self._layout
        assert layout is not None
        if layout.next_step == self._step:
            # Every bucket of the last step is reduced: the daemon is about to decide it.
            layout.wait_step(self._step, timeout)
        # The same number on every rank. The daemon refuses it if the step is void already.
        self._step = step = self._step + 1
        last = len(self._views) - 1
        try:
            for index, (begin, view) in enumerate(self._views):
                transfer.fill(view, begin)
                if index < last:
                    layout.mark_ready(step, index)
            layout.finish_step(step)
        except gradsync.Error as error:
            if error.reason == gradsync.Reason.STALE_STEP:
                layout.wait_step(step, 0.0)  # raises why the step is void
            self._raise_end(error)
            raise

        def fetch(seconds: float) -> None:
            # Does not wait for the verdict: a bucket has every rank's data, or an error.
            deadline = time.monotonic() + seconds
            try:
                for index, (begin, view) in enumerate(self._views):
                    # Also for those of which this rank wants nothing: see start().
                    layout.wait_bucket(step, index, max(0.0, deadline - time.monotonic()))
                    transfer.drain(view, begin)
            except gradsync.Error as error:
                self._raise_end(error)
                raise

        self.user = StartedOperation(fetch, timeout + _VERDICT_S, fail)
        return self.user

    def release(self, timeout: float) -> None:
        """Gives the memory back. Waits for the last all-reduce, which other ranks may delay."""
        if self.user is not None:
            with contextlib.suppress(gradsync.Error):  # its own user gets it
                self.user.finish(None)
        self.settle(timeout)
        if self._layout is not None:
            self._layout.close()
        self._session, self._layout, self._views, self.user = None, None, [], None

    def settle(self, timeout: float) -> bool:
        """Waits until the last step is decided. False: it is not within `timeout` seconds."""
        layout = self._layout
        if layout is not None and layout.next_step == self._step:
            try:
                layout.wait_step(self._step, timeout)
            except gradsync.Error:
                return False
        return True

    def _raise_end(self, error: gradsync.Error) -> None:
        """A step in doubt means nothing to an all-reduce: raises why the session has ended."""
        if error.reason == gradsync.Reason.STEP_IN_DOUBT and self._session is not None:
            end = self._session.await_end(_END_S)
            if end is not None:
                raise end from error


def _buckets(key: Key) -> list[gradsync.Bucket]:
    most = BUCKET_BYTES // key.dtype.itemsize
    number = -(-key.count // most)
    size, larger = divmod(key.count, number)
    return [
        gradsync.Bucket(size + (index < larger), REDUCED_TYPES[key.dtype])
        for index in range(number)
    ]


class Slots:
    """A group's slots.

    Which slot an all-reduce gets depends only on the all-reduces before it. So every rank chooses
    the same slot, although all-reduces may end earlier on one rank than on another. Externally
    synchronized.
    """

    def __init__(self) -> None:
        # The slot that was used least recently first.
        self._slots: collections.OrderedDict[tuple[Key, int], Slot] = collections.OrderedDict()
        self._made = 0
        self._uses = 0
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
        self._uses += 1
        if place not in self._slots:
            replaced = self._make_room(key)
            if replaced is None:
                return None
            self._slots[place] = Slot(key, f"all_reduce{self._made}", replaced)
            self._made += 1
            self._bytes += key.nbytes
        slot = self._slots[place]
        slot.last_use = self._uses
        self._slots.move_to_end(place)
        return slot

    def settle(self, timeout: float) -> bool:
        """Slot.settle() of every slot."""
        return all(slot.settle(timeout) for slot in self._slots.values())

    def _make_room(self, key: Key) -> Optional[list[Slot]]:
        """The slots that a new one replaces; None: the slots in use leave no room."""
        chosen: list[tuple[Key, int]] = []
        freed = 0
        for place, slot in self._slots.items():
            if self._has_room(key, len(chosen), freed):
                break
            if self._uses - slot.last_use < IDLE_USES:
                return None
            chosen.append(place)
            freed += place[0].nbytes
        if not self._has_room(key, len(chosen), freed):
            return None
        self._bytes -= freed
        return [self._slots.pop(place) for place in chosen]

    def _has_room(self, key: Key, fewer: int, freed: int) -> bool:
        return (
            len(self._slots) - fewer < MOST_SLOTS
            and self._bytes - freed + key.nbytes <= CAPACITY_BYTES
        )
