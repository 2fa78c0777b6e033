"""The exceptions of gradsync.

Every exception is an `Error`. Its fields say what happened, for programs. Its message says what
happened and what to do, for people. Some are also Python's exception for the same thing: a
`DeadlineExceededError` is a `TimeoutError`.
"""

from __future__ import annotations

from typing import Any, Optional


class Error(RuntimeError):
    """Any error of gradsync.

    Attributes:
      code: the kind of error, by gRPC's name: "ABORTED".
      reason: the error itself, a value of `Reason` or one of a newer daemon; may be "".
      job: id of the job; "" if the error is about no job.
      rank: the rank that the error is about, for example the lost one; None if there is none.
      channel: number of the job's channel (each layout has one); None if there is none.
      step: the step; None if there is none.
      bucket: index of the bucket in its layout; None if there is none.
    """

    code: str = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        code: Optional[str] = None,
        reason: str = "",
        job: str = "",
        rank: Optional[int] = None,
        channel: Optional[int] = None,
        step: Optional[int] = None,
        bucket: Optional[int] = None,
    ) -> None:
        """If `code` is None, the error has the class's code."""
        super().__init__(message)
        self.code = type(self).code if code is None else code
        self.reason = reason
        self.job = job
        self.rank = rank
        self.channel = channel
        self.step = step
        self.bucket = bucket

    @property
    def message(self) -> str:
        """What happened, in words."""
        return str(self.args[0])

    def __str__(self) -> str:
        """Code, reason and message."""
        kind = f"{self.code}/{self.reason}" if self.reason else self.code
        return f"{kind}: {self.message}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles every field."""
        return _restore, (type(self), self.message, dict(vars(self)))


def _restore(kind: type[Error], message: str, fields: dict[str, Any]) -> Error:
    error = kind(message)
    vars(error).update(fields)
    return error


class InvalidArgumentError(Error, ValueError):
    """An argument, an option or an environment variable is malformed; the message names it."""

    code = "INVALID_ARGUMENT"


class DeadlineExceededError(Error, TimeoutError):
    """A time-out; the message names the late ranks.

    Reason WAIT_TIMEOUT: the step continues, and the wait can be repeated. Reason STEP_TIMEOUT: the
    step is void on every rank.
    """

    code = "DEADLINE_EXCEEDED"


class AbortedError(Error):
    """The step is void, or the job has ended: a rank was lost or abandoned the step."""

    code = "ABORTED"


class FailedPreconditionError(Error):
    """The call contradicts an earlier call, or what the other ranks did."""

    code = "FAILED_PRECONDITION"


class UnavailableError(Error, ConnectionError):
    """There is no daemon, or it was lost, drains or does not answer."""

    code = "UNAVAILABLE"


class AlreadyExistsError(Error):
    """Another process has the rank, and the job is forming or has on_rank_loss="hold"."""

    code = "ALREADY_EXISTS"


class PermissionDeniedError(Error, PermissionError):
    """The socket's permissions forbid it, or the token is missing or wrong."""

    code = "PERMISSION_DENIED"


class ResourceExhaustedError(Error):
    """A quota of the daemon, or memory, is used up."""

    code = "RESOURCE_EXHAUSTED"


class UnimplementedError(Error, NotImplementedError):
    """The daemon or the library does not have this, or was built without it."""

    code = "UNIMPLEMENTED"


class InternalError(Error):
    """A fault of gradsync itself; also every code that has no class of its own."""

    code = "INTERNAL"


_CLASSES = {
    kind.code: kind
    for kind in (
        InvalidArgumentError,
        DeadlineExceededError,
        AbortedError,
        FailedPreconditionError,
        UnavailableError,
        AlreadyExistsError,
        PermissionDeniedError,
        ResourceExhaustedError,
        UnimplementedError,
    )
}


def class_of(code: str) -> type[Error]:
    """The class for a code's name."""
    return _CLASSES.get(code, InternalError)
