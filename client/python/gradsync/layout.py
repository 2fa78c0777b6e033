"""A registered layout: the gradients' memory, and the sequence of its steps."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable, NoReturn, Optional

from gradsync import _duration, _handle, _interruptible, _structs, _text, errors, step_result
from gradsync._library import library, raise_error, take_error
from gradsync.data_type import DataType
from gradsync.step_result import StepResult
from gradsync.view import View

if TYPE_CHECKING:
    from gradsync.session import Session

# How long a wait on the main thread stays in the library before a helper thread takes it over, in
# nanoseconds. Most waits are over by then, and Ctrl-C waits no longer.
_DIRECT_NS = 200_000_000


class Layout:
    """An arena of buckets, and its steps; made by Session.register_layout().

    One step is: write the gradients, mark_ready() each bucket as soon as it is written,
    end_step(), wait_step(). Then every bucket holds the reduction, on every rank the same.
    finish_step() marks what is left, and ends the step.

    Thread-safe. Besides what each method lists, every method raises the session's end once it has
    ended: `AbortedError` (a rank was lost, or a newer generation took over), `UnavailableError`
    (the daemon is gone or drains), `FailedPreconditionError` (LEFT, CLOSED). In the child of a
    fork every call raises `FailedPreconditionError`, reason FORKED.
    """

    def __init__(self, session: Session, pointer: int, device: str = "") -> None:
        """Takes over what the library registered, on the GPU `device` if it is not ""."""
        handle = _handle.Handle.adopt(pointer, library.layout_destroy)
        # Closed, it is something that ctypes refuses, so that calls need not look first.
        self._handle: Any = handle
        # The session ends with the last reference to it; a layout is one.
        self._session = session
        self._name: str = library.layout_name(handle).decode()
        self._fingerprint: int = library.layout_fingerprint(handle)
        self._bucket_count: int = library.layout_bucket_count(handle)
        self._parameter_count: int = library.layout_parameter_count(handle)
        self._device = device
        mapping = ctypes.c_void_p()
        if error := library.layout_mapping(handle, mapping):
            raise_error(error)
        assert mapping.value is not None
        self._mapping = _handle.Handle.adopt(mapping.value, library.mapping_destroy)

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    @property
    def device(self) -> str:
        """UUID of the GPU that it lies on; "": host memory."""
        return self._device

    @property
    def fingerprint(self) -> int:
        """64 bits that are the same on every rank."""
        return self._fingerprint

    @property
    def bucket_count(self) -> int:
        """How many buckets it has."""
        return self._bucket_count

    @property
    def parameter_count(self) -> int:
        """How many parameters it has; 0 if it was made of explicit buckets."""
        return self._parameter_count

    @property
    def next_step(self) -> int:
        """The step to run now: one more than the last one that was decided; the first is 1.

        On a GPU, one more than the last one that this rank has ended.
        """
        try:
            step: int = library.next_step(self._handle)
        except ctypes.ArgumentError as error:
            self._refuse(error)
        return step

    def bucket(self, bucket: int) -> View:
        """Bucket `bucket`, from 0: `count` elements of one dtype, padding included.

        Raises:
          InvalidArgumentError: UNKNOWN_BUCKET.
        """
        return self._view(library.layout_bucket, bucket)

    def gradient(self, parameter: int) -> View:
        """The gradient of parameter `parameter`, from 0: as many elements as its shape has.

        Zero at first.

        Raises:
          InvalidArgumentError: there is no such parameter.
        """
        return self._view(library.layout_gradient, parameter)

    def _view(self, function: Callable[..., Any], index: int) -> View:
        struct = _structs.ViewStruct()
        try:
            error = function(self._handle, index, struct)
        except ctypes.ArgumentError as refused:
            self._refuse(refused)
        if error is not None:
            raise_error(error)
        return View(struct, self._mapping, self._device)

    def mark_ready(
        self, step: int, bucket: int, _mark: Callable[..., Optional[int]] = library.mark_ready
    ) -> None:
        """Says that every gradient of the bucket is written; never blocks.

        From here until the step is done the bucket belongs to the daemon, error or not.

        Raises:
          InvalidArgumentError: UNKNOWN_BUCKET.
          FailedPreconditionError: ALREADY_READY (a second time in this step), STALE_STEP (decided
            already), PROTOCOL_VIOLATION (ahead of next_step, or after end_step()).
          AbortedError: the step is void already; says who and why.
        """
        try:
            error = _mark(self._handle, step, bucket)
        except ctypes.ArgumentError as refused:
            self._refuse(refused)
        if error is not None:
            raise_error(error)

    def mark_unused(self, step: int, parameter: int) -> None:
        """Says that this rank did not use the parameter in this step.

        Called before its bucket is marked ready. Its gradient becomes zeros, and end_step() says
        that it is unused. If no rank used it, wait_step() puts back what the gradient held before,
        unless the next step's first mark_ready() came before that.

        Raises:
          InvalidArgumentError: UNKNOWN_PARAMETER.
          FailedPreconditionError: ALREADY_READY (its bucket was marked), STALE_STEP,
            PROTOCOL_VIOLATION.
          AbortedError: the step is void already; says who and why.
          UnimplementedError: the library has no such call.
        """
        self._call(library.mark_unused, step, parameter)

    def end_step(self, step: int, used: Optional[Sequence[bool]] = None) -> None:
        """Says that this rank has marked every bucket ready.

        Args:
          step: the step.
          used: for each parameter, whether this rank used it; None: all. What mark_unused() named
            is unused as well.

        Raises:
          FailedPreconditionError: names the first bucket that was not marked ready.
          InvalidArgumentError: `used` is not as long as the layout has parameters.
        """
        self._call(library.end_step, step, self._used_flags("end_step()", step, used))

    def finish_step(self, step: int, used: Optional[Sequence[bool]] = None) -> None:
        """mark_ready() of every bucket that was not, and end_step(), in one message.

        A message less for the last bucket, or for all of them.

        Args:
          step: the step.
          used: as of end_step().

        Raises:
          FailedPreconditionError: STALE_STEP, PROTOCOL_VIOLATION (ahead of next_step, or a second
            time).
          InvalidArgumentError: `used` is not as long as the layout has parameters; no bucket is
            marked.
          AbortedError: the step is void already; says who and why.
          UnimplementedError: the library has no such call.
        """
        self._call(library.finish_step, step, self._used_flags("finish_step()", step, used))

    def mark_ready_on_streams(self, step: int, bucket: int, streams: Sequence[int]) -> None:
        """On a GPU: says that the bucket is written once these streams get here.

        Does not wait for the GPU. The streams are joined on the first of them. Two steps may be
        under way: the one that is marked, and the one before it, ended and not decided.

        Args:
          step: the step.
          bucket: index of the bucket.
          streams: CUDA's handles (`torch.cuda.Stream.cuda_stream`); 0: the default stream.

        Raises:
          FailedPreconditionError: as mark_ready(); CAPTURING: a stream is being captured into a
            CUDA graph; PROTOCOL_VIOLATION also if two steps are under way.
          InvalidArgumentError: BAD_STREAM; or the layout is in host memory.
          AbortedError: the step is void already; says who and why.
          UnavailableError: GPU_FAULT.
          UnimplementedError: the library has no such call.
        """
        self._call(library.mark_ready_on_streams, step, bucket, _handles(streams), len(streams))

    def finish_step_on_streams(
        self, step: int, streams: Sequence[int], used: Optional[Sequence[bool]] = None
    ) -> None:
        """On a GPU: mark_ready_on_streams() of every bucket that was not, and end_step().

        The next step may begin before this one is decided; the one after that may not.

        Args:
          step: the step.
          streams: as of mark_ready_on_streams().
          used: as of end_step().

        Raises:
          FailedPreconditionError: as finish_step(); CAPTURING, as mark_ready_on_streams().
          InvalidArgumentError: as finish_step() and mark_ready_on_streams().
          AbortedError, UnavailableError, UnimplementedError: as mark_ready_on_streams().
        """
        flags = self._used_flags("finish_step_on_streams()", step, used)
        self._call(library.finish_step_on_streams, step, flags, _handles(streams), len(streams))

    def wait_on_stream(self, step: int, stream: int, bucket: Optional[int] = None) -> None:
        """On a GPU: what is enqueued on `stream` from now on runs when the reduction is there.

        Says nothing about the verdict: that is wait_step(), or device_verdict() for the GPU.

        Args:
          step: the step; its buckets were marked ready.
          stream: CUDA's handle.
          bucket: index of the bucket to wait for; None: all.

        Raises:
          AbortedError: the step is void.
          FailedPreconditionError: PROTOCOL_VIOLATION: not marked ready; CAPTURING; STALE_STEP.
          InvalidArgumentError, UnavailableError, UnimplementedError: as mark_ready_on_streams().
        """
        which = _EVERY_BUCKET if bucket is None else bucket
        self._call(library.wait_on_stream, step, which, stream)

    def device_verdict(self, step: int) -> Optional[View]:
        """On a GPU: a float32 there that is 0 if the step is complete and 1 if it is void.

        What optimizers take as `found_inf`. To be read on a stream behind wait_on_stream() of every
        bucket, and until the first bucket of `step` + 2 is marked ready. Before the verdict is
        there, and if it never comes, it is 1. Where it may be 0 on some rank, wait_step() calls the
        step void on none: it returns, or raises with the reason STEP_IN_DOUBT.

        Returns: a view of one element, whose `bucket` is the last one, with whose reduction it
          comes; None in host memory.

        Raises:
          FailedPreconditionError: CLOSED.
          UnimplementedError: the library has no such call.
        """
        try:
            address: Optional[int] = library.device_verdict(self._handle, step)
        except ctypes.ArgumentError as error:
            self._refuse(error)
        if address is None:
            return None
        struct = _structs.ViewStruct(address, 1, self._bucket_count - 1, DataType.FLOAT32)
        return View(struct, self._mapping, self._device)

    def _used_flags(self, call: str, step: int, used: Optional[Sequence[bool]]) -> Optional[bytes]:
        if used is None:
            return None
        flags = bytes(1 if flag else 0 for flag in used)
        if len(flags) != self._parameter_count:
            raise errors.InvalidArgumentError(
                f"layout '{self._name}': {call} says of {len(flags)} parameters whether "
                f"they are used; the layout has {self._parameter_count}",
                reason="MALFORMED",
                step=step,
            )
        return flags

    def abandon_step(self, step: int, reason: str) -> None:
        """Says that this rank cannot finish the step: void on every rank, who are told `reason`.

        Then wait for the step as usual.
        """
        self._call(library.abandon_step, step, _text.encode(reason.replace("\0", ""), "reason"))

    def wait_bucket(self, step: int, bucket: int, timeout: Optional[float] = None) -> None:
        """Waits until one bucket is reduced; provisional, only wait_step() commits.

        Args:
          step: the step.
          bucket: index of the bucket.
          timeout: seconds; None: for ever; 0: looks and returns at once.

        Raises:
          AbortedError: the step is void.
          DeadlineExceededError: WAIT_TIMEOUT; says who is missing what, changes nothing.
          FailedPreconditionError: STALE_STEP, decided long ago.
          UnavailableError: DAEMON_SILENT, the daemon is stopped or hangs; can be repeated.
        """
        handle = self._handle

        def wait(ns: int) -> Optional[int]:
            error: Optional[int] = library.wait_bucket(handle, step, bucket, ns)
            return error

        self._wait(wait, timeout)

    def wait_step(self, step: int, timeout: Optional[float] = None) -> StepResult:
        """Waits for the step's verdict, which is the same on every rank.

        Returns: every bucket holds the reduction.

        Args:
          step: the step.
          timeout: seconds; None: for ever; 0: looks and returns at once.

        Raises:
          AbortedError: void: a rank abandoned it (names the rank and its reason) or was lost. Zero
            the gradients and redo the step under next_step. STEP_IN_DOUBT: complete on some ranks,
            perhaps, and void on others; the session is about to end.
          DeadlineExceededError: STEP_TIMEOUT: void, the job's step_timeout ran out. WAIT_TIMEOUT:
            `timeout` ran out first; nothing has changed. Either says who is missing what.
          FailedPreconditionError: STALE_STEP, decided long ago.
          UnavailableError: DAEMON_SILENT, the daemon is stopped or hangs; can be repeated.
        """
        handle = self._handle
        struct = step_result.new_struct()

        def wait(ns: int) -> Optional[int]:
            error: Optional[int] = library.wait_step(handle, step, ns, struct)
            return error

        self._wait(wait, timeout)
        return step_result.result_of(struct)

    def close(self) -> None:
        """Gives the layout up. Its views stay valid; other calls of it fail from now on."""
        self._handle = _CLOSED

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            error = function(self._handle, *arguments)
        except ctypes.ArgumentError as refused:
            self._refuse(refused)
        if error is not None:
            raise_error(error)

    def _wait(self, wait: Callable[[int], Optional[int]], timeout: Optional[float]) -> None:
        ns = _duration.nanoseconds(timeout, "timeout", default=_duration.FOREVER)
        try:
            if ns <= _DIRECT_NS or not _interruptible.on_main_thread():
                error = wait(ns)
            else:
                error = self._wait_interruptibly(wait, ns)
        except ctypes.ArgumentError as refused:
            self._refuse(refused)
        if error is not None:
            raise_error(error)

    def _wait_interruptibly(self, wait: Callable[[int], Optional[int]], ns: int) -> Optional[int]:
        start = time.monotonic_ns()
        error = wait(_DIRECT_NS)
        if error is None:
            return None
        waited = take_error(error)
        if waited.reason != "WAIT_TIMEOUT":
            raise waited
        if ns != _duration.FOREVER:
            ns = max(0, ns - (time.monotonic_ns() - start))

        def go_on() -> None:
            # Not left for the caller to free, who may be gone by then.
            if error := wait(ns):
                raise_error(error)

        _interruptible.call(go_on)
        return None

    def _refuse(self, error: ctypes.ArgumentError) -> NoReturn:
        if self._handle is not _CLOSED:
            raise TypeError(f"layout '{self._name}': {error}") from None
        raise errors.FailedPreconditionError(
            f"layout '{self._name}' was closed",
            reason="CLOSED",
            job=self._session.options.job_id,
            rank=self._session.rank,
        ) from None

    def __repr__(self) -> str:
        """Name and size."""
        return (
            f"<gradsync.Layout {self._name!r}: {self._bucket_count} buckets, "
            f"{self._parameter_count} parameters>"
        )


def _handles(streams: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(streams))(*streams)


_CLOSED = object()
# GRADSYNC_EVERY_BUCKET.
_EVERY_BUCKET = ctypes.c_size_t(-1).value
