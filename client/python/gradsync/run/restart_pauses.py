"""How long ranks that fail wait before they are started again."""

from __future__ import annotations

# Before a rank's second restart; twice as long before each further one.
_FIRST_S = 1.0
_LONGEST_S = 30.0


class RestartPauses:
    """The pauses of each rank. They grow while the rank fails soon after its start.

    A rank that has run for longer than the longest pause has run well. It is restarted at once, and
    its pauses grow anew. So a rank that always fails at once is started 6 times within the first
    15 s, again 16 s later, and from then on once in 30 s.

    Args:
      ranks: how many there are.
    """

    def __init__(self, ranks: int) -> None:
        self._next = [0.0] * ranks

    def after(self, rank: int, started_at: float, ended_at: float) -> float:
        """The pause in seconds before the next start of a rank that has failed.

        Args:
          rank: from 0.
          started_at: when it was started last, in seconds of any clock.
          ended_at: when it ended, by the same clock.
        """
        pause = 0.0 if ended_at - started_at > _LONGEST_S else self._next[rank]
        self._next[rank] = min(max(_FIRST_S, 2 * pause), _LONGEST_S)
        return pause
