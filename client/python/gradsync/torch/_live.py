"""The wrapped modules of this process that are in a job."""

from __future__ import annotations

import weakref
from typing import Sequence

import torch

import gradsync
from gradsync.torch import _last_exception, _session
from gradsync.torch._gradients import Slot
from gradsync.torch._synchronizer import Synchronizer

_live: weakref.WeakSet[Synchronizer] = weakref.WeakSet()


def all_live() -> list[Synchronizer]:
    """All of them, in no order."""
    return list(_live)


def add(synchronizer: Synchronizer) -> None:
    """Adds a module; it is removed when it is released or garbage-collected."""
    _live.add(synchronizer)


def claim(
    module: torch.nn.Module,
    slots: Sequence[Slot],
    session: gradsync.Session | None,
    name: str | None,
) -> weakref.ref[Synchronizer] | None:
    """Makes sure that no wrapper of another module has one of the parameters.

    A parameter in two wrappers would have its gradient in two places. Wrappers whose session has
    ended are released. A wrapper that is in the way is freed if only the traceback of a notebook's
    last exception holds it.

    A wrapper of the same module may have them: it makes way for the new one. So a notebook's cell
    that wraps a module can run again, although the old wrapper lives until the new one is built.
    Every rank does the same, in the same order.

    Args:
      module: to be wrapped.
      slots: its parameters.
      session: of the new wrapper; None: the process's own.
      name: of its layout; None: not chosen yet.

    Returns:
      The wrapper of `module` in that session, for replace(); None if there is none.

    Raises:
      TypeError: another wrapper has one of them; names the parameter and the wrapper.
      RuntimeError: as Synchronizer.make_way().
      gradsync.Error: the daemon is silent.
    """
    replaced = _make_way(module, session)
    taken = _taken(slots, replaced)
    if taken is not None or _has_name(name, session, replaced):
        _last_exception.free_its_objects()
        taken = _taken(slots, replaced)
    if taken is not None:
        raise TypeError(
            f"gradsync: parameter {taken} already; wrap one module that holds both, or delete the "
            "other wrapper first"
        )
    return replaced


def replace(old: Synchronizer) -> None:
    """A new wrapper has registered the module of `old`, which refuses to train from now on."""
    old.replace()
    _live.discard(old)


# Functions of their own: an exception's frame must not keep a reference to the other wrapper.


def _make_way(
    module: torch.nn.Module, session: gradsync.Session | None
) -> weakref.ref[Synchronizer] | None:
    for other in all_live():
        if other.module is not module or not _is_in(other, session):
            continue
        try:
            if not _session.has_ended(other.session):
                other.make_way()
        except gradsync.Error:
            if not _session.has_ended(other.session):
                raise
        return None if _session.has_ended(other.session) else weakref.ref(other)
    return None


def _is_in(other: Synchronizer, session: gradsync.Session | None) -> bool:
    """Whether `other` is in `session`; None: the process's own."""
    return _session.is_default(other.session) if session is None else other.session is session


def _has_name(
    name: str | None, session: gradsync.Session | None, replaced: weakref.ref[Synchronizer] | None
) -> bool:
    """Whether another wrapper in the session has that name."""
    return name is not None and any(
        other.name == name and _is_in(other, session)
        for other in all_live()
        if replaced is None or other is not replaced()
    )


def _taken(slots: Sequence[Slot], replaced: weakref.ref[Synchronizer] | None) -> str | None:
    mine = {id(slot.parameter): slot.name for slot in slots}
    for other in all_live():
        if replaced is not None and other is replaced():
            continue
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


_session.before_finishing(_settle)
