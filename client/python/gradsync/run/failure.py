"""Which process failed first, and which one has not failed at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradsync.reason import Reason
from gradsync.run.output import Speaker
from gradsync.run.process import Process

# A process that ends by an exception prints it at most so long before its end.
_TRACEBACK_AGE_S = 10.0
# In the daemon's error for the ranks that have not failed themselves.
_LEARNED = Reason.RANK_LOST


def failed_first(speakers: Mapping[Process, Speaker]) -> Sequence[Process]:
    """The ended processes that failed by themselves, the earliest failure first.

    When a rank fails, the daemon tells the others within milliseconds, and then they fail, too. A
    rank that ends by an exception still needs half a second to end Python and PyTorch, so another
    one may end before. So a rank that has only learned of a loss comes after the others, and
    the time of an exception is that of its traceback.
    """
    failed = [process for process in speakers if _failed_by_itself(process, speakers[process])]
    return sorted(failed, key=lambda process: _order(process, speakers[process]))


def was_killed(process: Process) -> bool:
    """Whether a signal ended the process that is not the launcher's."""
    return process.status is not None and process.status < 0 and not process.told_to_end


def found_its_work_done(rank: int, process: Process, speaker: Speaker) -> bool:
    """Whether a process ended because its rank had left the job before: it could not join.

    As after it was killed in `leave()` or after it, with on_rank_loss="hold".
    """
    refusal = f"rank {rank} of job "  # the daemon's words
    return bool(process.status and process.status > 0) and any(
        Reason.LEFT in line and refusal in line and " has left the job" in line
        for line in speaker.last_lines
    )


def _failed_by_itself(process: Process, speaker: Speaker) -> bool:
    if process.status is None or process.status == 0:
        return False
    return not process.told_to_end or _has_raised(process, speaker)


def _order(process: Process, speaker: Speaker) -> tuple[bool, float, bool]:
    learned = any(_LEARNED in line for line in speaker.last_lines)
    killed = was_killed(process)
    raised_at = speaker.traceback_at if _has_raised(process, speaker) else None
    # Ends that the launcher notices together have one time. Then a killed process comes first.
    return (
        learned and not killed,
        process.ended_at if raised_at is None else raised_at,
        not killed,
    )


def _has_raised(process: Process, speaker: Speaker) -> bool:
    return (
        not was_killed(process)
        and speaker.traceback_at is not None
        and process.ended_at - speaker.traceback_at <= _TRACEBACK_AGE_S
    )
