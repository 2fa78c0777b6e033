"""The wrapped modules of this process that are in a job, and whose parameters they have."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Sequence

from gradsync.torch import _session
from gradsync.torch._gradients import Slot

if TYPE_CHECKING:
    import gradsync
    from gradsync.torch._synchronizer import Synchronizer

_live: weakref.WeakSet[Synchronizer] = weakref.WeakSet()


def all_live() -> list[Synchronizer]:
    """All of them, in no order."""
    return list(_live)


def add(synchronizer: Synchronizer) -> None:
    """One more, until it is released or gone."""
    _live.add(synchronizer)


def claim(slots: Sequence[Slot]) -> None:
    """Makes sure that no other wrapper, unless its session is over, has one of the parameters.

    Their gradients would lie in two places.

    Raises:
      TypeError: names the parameter and the other wrapper.
    """
    taken = _taken(slots)
    if taken is not None:
        raise TypeError(
            f"gradsync: parameter {taken} already; wrap one module that holds both, or delete the "
            "other wrapper first"
        )


def _taken(slots: Sequence[Slot]) -> str | None:
    # No reference to the other wrapper may stay in an exception's frames.
    mine = {id(slot.parameter): slot.name for slot in slots}
    for other in all_live():
        shared = [mine[id(s.parameter)] for s in other.slots if id(s.parameter) in mine]
        if shared and not _session.is_over(other.session):
            return f"'{shared[0]}' belongs to wrapped module '{other.name}'"
        if shared:
            # The session is over: this wrapper takes them.
            other.release()
            _live.discard(other)
    return None


def _settle(session: gradsync.Session) -> None:
    for synchronizer in all_live():
        if synchronizer.session is session:
            synchronizer.settle()


_session.before_leaving(_settle)
