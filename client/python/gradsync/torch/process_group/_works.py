"""What collectives return: PyTorch's Work and Future of an operation."""

from __future__ import annotations

import datetime
from typing import Any, Callable, Optional, Sequence

import torch

import gradsync
from gradsync.torch.process_group._kept_work import KeptWork
from gradsync.torch.process_group._lane import Lane
from gradsync.torch.process_group._operations import Operation


class ReductionWork(KeptWork):
    """The work of operations that go through the daemon.

    Args:
      tensors: the result.
      operations: what must finish before the result is there.
      lane: finishes them for those who hold the future.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], operations: Sequence[Operation], lane: Lane
    ) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._operations = operations
        self._lane = lane
        self._future: Optional[torch.futures.Future[Any]] = None

    def wait(self, timeout: Optional[datetime.timedelta] = None) -> bool:
        """Waits until the result is in the tensors.

        Raises:
          gradsync.Error: why there is no result.
          TimeoutError: `timeout` has passed. The work continues.
        """
        limit = timeout.total_seconds() if timeout else None
        for operation in self._operations:
            if not operation.finish(limit):
                raise gradsync.DeadlineExceededError(
                    f"the collective was not finished within {limit} s; it continues: wait again",
                    reason=gradsync.Reason.WAIT_TIMEOUT,
                )
        self._waited = True
        return True

    def synchronize(self) -> None:
        """As wait()."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether wait() would return, or raise, at once."""
        try:
            return all(operation.finish(0.0) for operation in self._operations)
        except gradsync.Error:
            return True

    def is_success(self) -> bool:
        """Whether the result is in the tensors."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Optional[BaseException]:
        """Why there is no result; None if it is there or the work is under way."""
        try:
            for operation in self._operations:
                operation.finish(0.0)
        except gradsync.Error as error:
            return error
        return None

    def result(self) -> list[torch.Tensor]:
        """The tensors."""
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensors.

        Its callbacks run on a thread of this package. A callback that is added after the future is
        complete runs at once.
        """
        if self._future is None:
            self._future, complete = _future_of(self._tensors, self.wait, self._lane)
            # After wait() the future is complete, because C++ code takes its value at once.
            complete() if self.is_completed() else self._lane.put(complete)
        return self._future


def _future_of(
    value: Any, wait: Callable[[], Any], lane: Lane
) -> tuple[torch.futures.Future[Any], Callable[[], None]]:
    """A future of `value`, and the call that completes it after wait() has returned.

    Where wait() raises, C++ code that waits for the future must get an exception, too. After
    `Future.set_exception` it would get a value that is no tensor. So the error is the value of a
    first future, and the one that is returned raises it.

    The call runs on the lane, or at once if wait() would not block.
    """
    first: torch.futures.Future[Any] = torch.futures.Future()

    def complete() -> None:
        result = value
        try:
            wait()
        except BaseException as error:
            result = _Failure(error)
        lane.step_aside()  # the callbacks are the trainer's
        first.set_result(result)

    return first.then(_value_of), complete


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def _value_of(future: torch.futures.Future[Any]) -> Any:
    value = future.value()
    if isinstance(value, _Failure):
        raise value.error
    return value
