"""The wrapped modules of this process that are in a job."""

from __future__ import annotations

import weakref
from typing import Sequence

import gradsync
from gradsync.torch import _session
from gradsync.torch._gradients import Slot
from gradsync.torch._synchronizer import Synchronizer

_live: weakref.WeakSet[Synchronizer] = weakref.WeakSet()


def all_live() -> list[Synchronizer]:
    """All of them, in no order."""
    return list(_live)


def add(synchronizer: Synchronizer) -> None:
    """Adds a module; it is removed when it is released or garbage-collected."""
    _live.add(synchronizer)


def claim(slots: Sequence[Slot]) -> None:
    """Makes sure that no other wrapper has one of the parameters; releases ended wrappers.

    A parameter in two wrappers would have its gradient in two places.

    Raises:
      TypeError: another wrapper has one of them; names the parameter and the wrapper.
    """
    taken = _taken(slots)
    if taken is not None:
        raise TypeError(
            f"gradsync: parameter {taken} already; wrap one module that holds both, or delete the "
            "other wrapper first"
        )


def _taken(slots: Sequence[Slot]) -> str | None:
    # A function of its own: an exception's frame must not keep a reference to the other wrapper.
    mine = {id(slot.parameter): slot.name for slot in slots}
    for other in all_live():
        shared = [mine[id(s.parameter)] for s in other.slots if id(s.parameter) in mine]
        if shared and not _session.has_ended(other.session):
            return f"'{shared[0]}' belongs to wrapped module '{other.name}'"
        if shared:
            # Its session has ended.
            other.release()
            _live.discard(other)
    return None


def _settle(session: gradsync.Session) -> None:
    for synchronizer in all_live():
        if synchronizer.session is session:
            synchronizer.outcomes.settle()


_session.before_leaving(_settle)
