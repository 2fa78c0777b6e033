"""The result of a complete step."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from typing import Any, Callable, Optional

from gradsync import _structs
from gradsync._library import library


@dataclasses.dataclass(frozen=True)
class BucketTimes:
    """The times of one bucket in a step, in nanoseconds of CLOCK_MONOTONIC on rank 0's node.

    Attributes:
      ready_ns: when each rank marked it ready; 0 for a rank that took no part.
      start_ns: when its reduction began.
      finish_ns: when its reduction ended.
    """

    ready_ns: tuple[int, ...]
    start_ns: int
    finish_ns: int


@dataclasses.dataclass(frozen=True)
class GradientStats:
    """Statistics of one bucket's reduced gradients, which its reduction gathers.

    Attributes:
      sum_of_squares: of all elements; NaN or infinite if an element is. Integers, minima and maxima
        are not measured: NaN. 0 for the bucket of the model's buffers.
      non_finite: number of elements that are NaN or infinite.
    """

    sum_of_squares: float
    non_finite: int


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The result of a complete step, the same on every rank.

    Attributes:
      step: the step's number.
      live_ranks: number of ranks that took part.
      divisor: what averages were divided by.
    """

    step: int
    live_ranks: int
    divisor: int
    # The library's own struct: `used`, `buckets` and `stats` are copied from it on first use.
    # None in an object that was unpickled, which has these copies already.
    _struct: Optional[_structs.StepResultStruct] = dataclasses.field(repr=False, compare=False)

    @functools.cached_property
    def used(self) -> Optional[tuple[bool, ...]]:
        """For each parameter, whether a rank used it; None: every rank used every parameter."""
        struct = self._library_struct
        if not struct.used:
            return None
        return tuple(map(bool, struct.used[: struct.used_count]))

    @functools.cached_property
    def buckets(self) -> tuple[BucketTimes, ...]:
        """Each bucket's times."""
        struct = self._library_struct
        return tuple(
            BucketTimes(tuple(times.ready_ns[: times.rank_count]), times.start_ns, times.finish_ns)
            for times in struct.buckets[: struct.bucket_count]
        )

    @functools.cached_property
    def stats(self) -> tuple[GradientStats, ...]:
        """The statistics of each bucket's gradients."""
        struct = self._library_struct
        return tuple(
            GradientStats(stats.sum_of_squares, stats.non_finite)
            for stats in struct.stats[: struct.stats_count]
        )

    @property
    def gradient_norm(self) -> float:
        """L2 norm of all reduced gradients of the step, the same on every rank.

        NaN if an element is NaN or `stats` is empty, else infinite if an element is. Gradients of
        parameters that no rank used are left out. The daemon computed it while it reduced the
        gradients, so it costs no pass over them. For several layouts take the root of the sum of
        their norms' squares.
        """
        if not self.stats:
            return math.nan
        return math.sqrt(sum(bucket.sum_of_squares for bucket in self.stats))

    def divided_by(self, divisor: int) -> StepResult:
        """This result with another divisor, for a caller that has rescaled the averages to it."""
        square = (self.divisor / divisor) ** 2
        result = dataclasses.replace(self, divisor=divisor)
        result.__dict__["stats"] = tuple(
            GradientStats(bucket.sum_of_squares * square, bucket.non_finite)
            for bucket in self.stats
        )
        return result

    @property
    def _library_struct(self) -> _structs.StepResultStruct:
        assert self._struct is not None  # pickling copies everything first
        return self._struct

    def __getstate__(self) -> dict[str, Any]:
        """Copies everything from the library's struct, for pickle."""
        return {
            "step": self.step,
            "live_ranks": self.live_ranks,
            "divisor": self.divisor,
            "used": self.used,
            "buckets": self.buckets,
            "stats": self.stats,
            "_struct": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores what __getstate__() returned."""
        self.__dict__.update(state)


class _OwnedStruct(_structs.StepResultStruct):
    """Owns what the library puts into it."""

    def __del__(self, _destroy: Callable[..., Any] = library.step_result_destroy) -> None:
        _destroy(self)


def new_struct() -> _structs.StepResultStruct:
    """An empty struct, which wait_step() fills."""
    return _OwnedStruct(ctypes.sizeof(_OwnedStruct))


def result_of(struct: _structs.StepResultStruct) -> StepResult:
    """The result in a struct that wait_step() has filled."""
    return StepResult(struct.step, struct.live_ranks, struct.divisor, struct)


def clip_coefficient(norm: float, max_norm: float) -> float:
    """The factor that scales gradients of norm `norm` to a norm of at most `max_norm`.

    As torch.nn.utils.clip_grad_norm_: min(1, max_norm / (norm + 1e-6)). It is NaN for a norm that
    is NaN, and 0 for an infinite norm. Neither makes gradients usable that are not finite.
    """
    coefficient = max_norm / (norm + 1e-6)
    return 1.0 if coefficient > 1.0 else coefficient
