"""The end of a backward pass that went through several wrapped modules."""

from __future__ import annotations

from typing import Callable

from gradsync.torch import _autograd

# (order of wrapping, finish) of the modules of each pass that is ending, by the pass's number.
# A pass uses its own entry only, on the thread that runs it.
_endings: dict[int | None, list[tuple[int, Callable[[], None]]]] = {}


def add(order: int, finish: Callable[[], None]) -> None:
    """Calls `finish` after all modules have ended their part, in the order of wrapping.

    If two ranks waited for different modules first, both would wait for ever.

    Args:
      order: the module's number among all that were wrapped, the same on every rank.
      finish: waits for the module's verdict.
    """
    _endings.setdefault(_autograd.backward_id(), []).append((order, finish))
    _autograd.at_end_of_backward(_finish_all)


def forget(backward: int | None) -> None:
    """Backward pass `backward` has failed: nothing is finished at its end."""
    _endings.pop(backward, None)


def _finish_all() -> None:
    """Waits for every module's verdict; raises the first error afterwards."""
    endings = _endings.pop(_autograd.backward_id(), [])
    errors: list[BaseException] = []
    try:
        for _, finish in sorted(endings, key=lambda ending: ending[0]):
            try:
                finish()
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors[0]
    finally:
        # The exception refers to this frame: without these, the modules would live in a cycle.
        endings.clear()
        errors.clear()
        finish = None  # type: ignore[assignment]
