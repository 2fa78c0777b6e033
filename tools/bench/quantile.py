"""Medians and tails, as gradsync-bench takes them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable


def quantile(samples: Iterable[float], q: float) -> float:
    """The smallest sample that at least the fraction `q` of all samples does not exceed.

    Args:
      samples: at least one.
      q: in (0, 1].
    """
    ordered = sorted(samples)
    return ordered[max(math.ceil(q * len(ordered)), 1) - 1]


def median(samples: Iterable[float]) -> float:
    """The middle sample, or the mean of the two in the middle."""
    return statistics.median(samples)
