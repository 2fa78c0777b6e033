"""What gradsync's calls raise.

Every exception is an `Error` and says in fields what it is about, for programs; its message says it
for people, and names what to do about it. Where Python has an exception for the same thing, the
class is that one too: a `DeadlineExceededError` is a `TimeoutError`.
"""

from __future__ import annotations

from typing import Any, Optional


class Error(RuntimeError):
    """Any error of gradsync.

    Attributes:
      code: gRPC's name of the kind of error: "ABORTED".
      reason: which error it is: "RANK_LOST", "STEP_TIMEOUT", ...; may be "".
      job: id of the job; "" if the error is about none.
      rank: the rank that the error is about, as the one that was lost; else None.
      channel: number of the job's channel, one for each layout; else None.
      step: the step; else None.
      bucket: index of the bucket in its layout; else None.
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
        """With the class's code, and those fields that are known."""
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
    """Time ran out; the message says who is missing what.

    With reason "WAIT_TIMEOUT" nothing has changed and the wait can be repeated; with "STEP_TIMEOUT"
    the step is void on every rank.
    """

    code = "DEADLINE_EXCEEDED"


class AbortedError(Error):
    """The step is void, or the job has ended: a rank was lost or abandoned the step."""

    code = "ABORTED"


class FailedPreconditionError(Error):
    """The call does not fit what happened before it, or what the other ranks did."""

    code = "FAILED_PRECONDITION"


class UnavailableError(Error, ConnectionError):
    """The daemon is not there, is gone, drains or does not answer."""

    code = "UNAVAILABLE"


class AlreadyExistsError(Error):
    """The rank is held by another process while the job is still forming."""

    code = "ALREADY_EXISTS"


class PermissionDeniedError(Error, PermissionError):
    """The socket's permissions, or a token that is missing or wrong."""

    code = "PERMISSION_DENIED"


class ResourceExhaustedError(Error):
    """A quota of the daemon, or memory."""

    code = "RESOURCE_EXHAUSTED"


class UnimplementedError(Error, NotImplementedError):
    """The daemon, or the loaded library, does not have this."""

    code = "UNIMPLEMENTED"


class InternalError(Error):
    """A fault of gradsync itself, and every code that has no class of its own."""

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
