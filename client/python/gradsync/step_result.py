"""What a step came to."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from typing import Any, Callable, Optional

from gradsync import _structs, errors
from gradsync._library import library


@dataclasses.dataclass(frozen=True)
class BucketTimes:
    """When things happened to one bucket of a step, in nanoseconds of CLOCK_MONOTONIC.

    Attributes:
      ready_ns: when each rank marked it ready; 0 for a rank that took no part.
      start_ns: when its reduction began.
      finish_ns: when it was done.
    """

    ready_ns: tuple[int, ...]
    start_ns: int
    finish_ns: int


@dataclasses.dataclass(frozen=True)
class BucketNumbers:
    """By-products of one bucket's reduction.

    Attributes:
      sum_of_squares: of the bucket's reduced elements; NaN or infinite if one is.
      non_finite: how many of them are NaN or infinite.
    """

    sum_of_squares: float
    non_finite: int


@dataclasses.dataclass(frozen=True)
class StepResult:
    """A complete step, the same on every rank.

    Attributes:
      step: its number.
      live_ranks: how many ranks took part.
      divisor: what averages were divided by.
    """

    step: int
    live_ranks: int
    divisor: int
    # What the library handed out; `used`, `buckets` and `numbers` are copied when they are asked
    # for. None once it was pickled.
    _struct: Optional[_structs.StepResultStruct] = dataclasses.field(repr=False, compare=False)

    @functools.cached_property
    def used(self) -> Optional[tuple[bool, ...]]:
        """Per parameter, whether some rank used it; None: every rank used every one."""
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
    def numbers(self) -> tuple[BucketNumbers, ...]:
        """Each bucket's numbers; () if library or daemon do not give them."""
        struct = self._library_struct
        return tuple(
            BucketNumbers(numbers.sum_of_squares, numbers.non_finite)
            for numbers in struct.numbers[: struct.number_count]
        )

    @property
    def gradient_norm(self) -> float:
        """L2 norm of the step's result over all buckets, the same on every rank.

        NaN if an element is NaN, else infinite if one is infinite. Gradients of parameters that no
        rank used are left out. It costs no pass over the gradients: the daemon computed it while it
        reduced them. The norm over several layouts is
        the root of the sum of their norms' squares.

        Raises:
          UnimplementedError: library or daemon do not give it.
        """
        numbers = self.numbers
        if not numbers and self._bucket_count:
            raise errors.UnimplementedError(
                "the step has no gradient norm: libgradsync.so or gradsyncd are too old for it",
                step=self.step,
            )
        return math.sqrt(sum(bucket.sum_of_squares for bucket in numbers))

    @property
    def _library_struct(self) -> _structs.StepResultStruct:
        assert self._struct is not None  # pickling copies everything first
        return self._struct

    @property
    def _bucket_count(self) -> int:
        return len(self.buckets) if self._struct is None else int(self._struct.bucket_count)

    def __getstate__(self) -> dict[str, Any]:
        """Everything, for pickle."""
        return {
            "step": self.step,
            "live_ranks": self.live_ranks,
            "divisor": self.divisor,
            "used": self.used,
            "buckets": self.buckets,
            "numbers": self.numbers,
            "_struct": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """From pickle."""
        self.__dict__.update(state)


class _OwnedStruct(_structs.StepResultStruct):
    """Frees what the library put into it."""

    def __del__(self, _destroy: Callable[..., Any] = library.step_result_destroy) -> None:
        _destroy(self)


def new_struct() -> _structs.StepResultStruct:
    """An empty struct for wait_step()."""
    return _OwnedStruct(ctypes.sizeof(_OwnedStruct))


def result_of(struct: _structs.StepResultStruct) -> StepResult:
    """Takes over what wait_step() filled."""
    return StepResult(struct.step, struct.live_ranks, struct.divisor, struct)


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What to scale gradients by so that their norm is at most `max_norm`.

    The same as torch.nn.utils.clip_grad_norm_: min(1, max_norm / (norm + 1e-6)). NaN for a norm
    that is NaN, 0 for an infinite one: neither makes a usable gradient of one that is not finite.
    """
    coefficient = max_norm / (norm + 1e-6)
    return 1.0 if coefficient > 1.0 else coefficient
