"""Which process failed first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradsync.run.output import Speaker
from gradsync.run.process import Process

# A process that ends by an exception prints it at most so long before its end.
_TRACEBACK_AGE_S = 10.0


def failed_first(speakers: Mapping[Process, Speaker]) -> Sequence[Process]:
    """The ended processes that failed by themselves, first of all the one that failed first.

    When a rank fails, the daemon tells the others within milliseconds, and then they fail, too. But
    a rank that ends by an exception still needs half a second to end Python and PyTorch, so another
    one may be gone before. What it prints first is its traceback: that one counts.
    """
    times = {
        process: _failed_at(process, speaker)
        for process, speaker in speakers.items()
        if process.status not in (None, 0)
        and (not process.told_to_end or _has_raised(process, speaker))
    }
    return sorted(times, key=lambda process: times[process])


def _failed_at(process: Process, speaker: Speaker) -> float:
    if speaker.traceback_at is not None and _has_raised(process, speaker):
        return speaker.traceback_at
    return process.ended_at


def _has_raised(process: Process, speaker: Speaker) -> bool:
    killed = process.status is not None and process.status < 0 and not process.told_to_end
    return (
        not killed
        and speaker.traceback_at is not None
        and process.ended_at - speaker.traceback_at <= _TRACEBACK_AGE_S
    )
