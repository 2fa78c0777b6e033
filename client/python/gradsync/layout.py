"""A registered layout: the gradients' memory, and the sequence of its steps."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any, Callable, NoReturn, Optional

from gradsync import (
    _duration,
    _handle,
    _interruptible,
    _state_source,
    _structs,
    _text,
    errors,
    step_result,
)
from gradsync._library import library, raise_error, take_error
from gradsync.data_type import DataType
from gradsync.reason import Reason
from gradsync.step_result import StepResult
from gradsync.view import View

# Nanoseconds that an interruptible wait spends in the library before a helper thread takes over.
# Most waits end before that. Ctrl-C takes effect after this time at the latest.
_DIRECT_NS = 200_000_000


class Layout:
    """The memory of a layout's gradients, and its steps; made by Session.register_layout().

    One step: write the gradients, call mark_ready() for each bucket as soon as it is written, then
    end_step() and wait_step(). Now every bucket holds the reduction, the same on every rank.
    finish_step() marks all buckets that are left and ends the step.

    Thread-safe. Once the session has ended, every method raises why: `AbortedError` (a rank was
    lost, or a newer generation took over), `UnavailableError` (the daemon is lost or drains),
    `FailedPreconditionError` (LEFT, CLOSED). In the child of a fork every call raises
    `FailedPreconditionError`, reason FORKED. Each method lists only its other errors. If a step
    is void because of STEP_TIMEOUT or LAYOUT_RELEASED, the calls for it raise that error of
    wait_step() instead of `AbortedError`.
    """

    def __init__(self, session: _handle.SessionHandle, pointer: int, device: str = "") -> None:
        """Takes over a layout that the library registered.

        Args:
          session: keeps the session open as long as the layout lives.
          pointer: the library's layout.
          device: UUID of its GPU; "" for host memory.
        """
        adopt = _handle.Handle.adopt_on_gpu if device else _handle.Handle.adopt
        handle = adopt(pointer, library.layout_destroy)
        # After close() this is an object that ctypes refuses, so calls need no check of their own.
        self._handle: Any = handle
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
        self._mapping = adopt(mapping.value, library.mapping_destroy)

    @property
    def name(self) -> str:
        """Name of the layout."""
        return self._name

    @property
    def device(self) -> str:
        """UUID of the GPU that holds the gradients; "" for host memory."""
        return self._device

    @property
    def fingerprint(self) -> int:
        """A hash of the layout, the same on every rank."""
        return self._fingerprint

    @property
    def bucket_count(self) -> int:
        """Number of buckets."""
        return self._bucket_count

    @property
    def parameter_count(self) -> int:
        """Number of parameters; 0 for a layout of explicit buckets."""
        return self._parameter_count

    @property
    def first_step(self) -> int:
        """The first step of this rank when the layout became ready.

        1, or more if it replaces another layout or the session replaces a lost one. Another rank
        may have abandoned it by now; then next_step is larger.
        """
        try:
            step: int = library.first_step(self._handle)
        except ctypes.ArgumentError as error:
            self._refuse(error)
        return step

    @property
    def next_step(self) -> int:
        """The step to run now, from 1: the one after the last step that was decided.

        On a GPU: the one after the last step that this rank has ended.
        """
        try:
            step: int = library.next_step(self._handle)
        except ctypes.ArgumentError as error:
            self._refuse(error)
        return step

    @property
    def buffers(self) -> Optional[View]:
        """The memory for the model's buffers; None if the layout was registered without.

        It is the last bucket, of UINT8; mark it as every other bucket. Rank 0 writes its buffers,
        every other rank zeros: a complete step brings rank 0's bytes to every rank.
        """
        view = self._view(library.layout_buffers)
        return view if view.count > 0 else None

    def set_position(self, epoch: int, batch: int) -> None:
        """Says where this rank is in its data, for the next step that it begins.

        If ranks give different positions in one step, the rank that gave its position last loses
        its session: `FailedPreconditionError`, reason POSITION_MISMATCH, which names both.

        Args:
          epoch: from 0.
          batch: from 0, in the epoch.

        Raises:
          InvalidArgumentError: one of them is negative.
        """
        if not (0 <= epoch < 2**64 and 0 <= batch < 2**64):
            raise errors.InvalidArgumentError(
                f"layout '{self._name}': the position is epoch {epoch}, batch {batch}; give "
                "numbers from 0",
                reason=Reason.MALFORMED,
            )
        try:
            library.set_position(self._handle, epoch, batch)
        except ctypes.ArgumentError as refused:
            self._refuse(refused)

    def bucket(self, bucket: int) -> View:
        """Bucket `bucket`, from 0: elements of one dtype, with the padding between gradients.

        Raises:
          InvalidArgumentError: UNKNOWN_BUCKET.
        """
        return self._view(library.layout_bucket, bucket)

    def gradient(self, parameter: int) -> View:
        """The gradient of parameter `parameter`, from 0: as many elements as its shape has.

        All elements are 0 at first.

        Raises:
          InvalidArgumentError: there is no such parameter.
        """
        return self._view(library.layout_gradient, parameter)

    def _view(self, function: Callable[..., Any], *index: int) -> View:
        struct = _structs.ViewStruct()
        try:
            error = function(self._handle, *index, struct)
        except ctypes.ArgumentError as refused:
            self._refuse(refused)
        if error is not None:
            raise_error(error)
        return View(struct, self._mapping, self._device)

    def mark_ready(
        self, step: int, bucket: int, _mark: Callable[..., Optional[int]] = library.mark_ready
    ) -> None:
        """Says that every gradient of the bucket is written; never blocks.

        From now until the bucket is done it belongs to the daemon, also if the step becomes void.
        With on_rank_loss="hold" it is then read-only until the verdict: see wait_bucket().

        Raises:
          InvalidArgumentError: UNKNOWN_BUCKET; or the layout is on a GPU.
          FailedPreconditionError: ALREADY_READY: the bucket was marked in this step; STALE_STEP:
            the step was decided; PROTOCOL_VIOLATION: the step is beyond next_step, or end_step()
            was called.
          AbortedError: the step is void; says which rank voided it and why.
        """
        try:
            error = _mark(self._handle, step, bucket)
        except ctypes.ArgumentError as refused:
            self._refuse(refused)
        if error is not None:
            raise_error(error)

    def mark_unused(self, step: int, parameter: int) -> None:
        """Says that this rank did not use the parameter in this step.

        Call it before the parameter's bucket is marked ready. The gradient becomes zeros, and
        end_step() reports the parameter as unused. If no rank used it, wait_step() restores what
        the gradient held before, unless the next step's first mark_ready() came before wait_step().
        On a GPU it restores nothing.

        Raises:
          InvalidArgumentError: UNKNOWN_PARAMETER.
          FailedPreconditionError: ALREADY_READY: its bucket was marked; STALE_STEP and
            PROTOCOL_VIOLATION: as mark_ready().
          AbortedError: the step is void; says which rank voided it and why.
        """
        self._call(library.mark_unused, step, parameter)

    def end_step(self, step: int, used: Optional[Sequence[bool]] = None) -> None:
        """Says that this rank has marked every bucket ready.

        Args:
          step: the step.
          used: for each parameter, whether this rank used it; None: it used all. Parameters that
            mark_unused() named are unused in any case.

        Raises:
          FailedPreconditionError: STALE_STEP: the step was decided; PROTOCOL_VIOLATION: the step is
            beyond next_step, or was ended before, or a bucket was not marked ready: names the
            first.
          InvalidArgumentError: `used` does not have one element for each parameter.
          AbortedError: the step is void; says which rank voided it and why.
        """
        self._call(library.end_step, step, self._used_flags("end_step()", step, used))

    def finish_step(self, step: int, used: Optional[Sequence[bool]] = None) -> None:
        """Marks every bucket that is left as ready and ends the step, in one message.

        This saves the messages of mark_ready() for these buckets. If the call fails, it marks none.

        Args:
          step: the step.
          used: as for end_step().

        Raises:
          FailedPreconditionError: STALE_STEP: the step was decided; PROTOCOL_VIOLATION: the step is
            beyond next_step, or was ended before.
          InvalidArgumentError: `used` does not have one element for each parameter; or the layout
            is on a GPU.
          AbortedError: the step is void; says which rank voided it and why.
        """
        self._call(library.finish_step, step, self._used_flags("finish_step()", step, used))

    def mark_ready_on_streams(self, step: int, bucket: int, streams: Sequence[int]) -> None:
        """On a GPU: says that the bucket is written when these streams reach this point.

        Does not wait for the GPU. The first stream waits for the others. Two steps can be open: the
        one whose buckets are marked, and the one before it, which is ended and not yet decided.

        Args:
          step: the step.
          bucket: index of the bucket.
          streams: CUDA's handles (`torch.cuda.Stream.cuda_stream`) of live streams of the layout's
            GPU; 0: the default stream. To use a destroyed stream is undefined, as in CUDA: the
            process may crash.

        Raises:
          FailedPreconditionError: as mark_ready(). CAPTURING: a stream is being captured into a
            CUDA graph. PROTOCOL_VIOLATION: also when two earlier steps are open.
          InvalidArgumentError: UNKNOWN_BUCKET; BAD_STREAM: the driver has refused a stream; or
            `streams` is empty, or the layout is in host memory.
          AbortedError: the step is void; says which rank voided it and why.
          UnavailableError: GPU_FAULT.
        """
        self._call(library.mark_ready_on_streams, step, bucket, _handles(streams), len(streams))

    def finish_step_on_streams(
        self, step: int, streams: Sequence[int], used: Optional[Sequence[bool]] = None
    ) -> None:
        """On a GPU: mark_ready_on_streams() for every bucket that is left, and end_step().

        The next step can begin before this one is decided. The step after the next cannot.

        Args:
          step: the step.
          streams: as for mark_ready_on_streams().
          used: as for end_step().

        Raises:
          FailedPreconditionError: as finish_step(); CAPTURING, as mark_ready_on_streams().
          InvalidArgumentError: `used` does not have one element for each parameter; or as
            mark_ready_on_streams().
          AbortedError, UnavailableError: as mark_ready_on_streams().
        """
        flags = self._used_flags("finish_step_on_streams()", step, used)
        self._call(library.finish_step_on_streams, step, flags, _handles(streams), len(streams))

    def wait_on_stream(self, step: int, stream: int, bucket: Optional[int] = None) -> None:
        """On a GPU: work that is enqueued on `stream` from now on runs after the reduction.

        This says nothing about the verdict. For that, see wait_step() and device_verdict().

        Args:
          step: the step; its buckets were marked ready.
          stream: CUDA's handle.
          bucket: index of the bucket to wait for; None: all.

        Raises:
          AbortedError: the step is void.
          FailedPreconditionError: PROTOCOL_VIOLATION: a bucket was not marked ready; CAPTURING;
            STALE_STEP.
          InvalidArgumentError, UnavailableError: as mark_ready_on_streams().
        """
        which = _EVERY_BUCKET if bucket is None else bucket
        self._call(library.wait_on_stream, step, which, stream)

    def device_verdict(self, step: int) -> Optional[View]:
        """On a GPU: a float32 in its memory, 0 if the step is complete and 1 if it is void.

        Optimizers take it as `found_inf`. Read it on a stream, after wait_on_stream() for every
        bucket and before the first bucket of `step` + 2 is marked ready. It is 1 until the verdict
        arrives, and stays 1 if none arrives. If it may be 0 on some rank, wait_step() returns or
        raises STEP_IN_DOUBT on every rank; it never says that the step is void.

        Returns:
          A view of one element; None in host memory. The view's `bucket` is the last one: the
          verdict arrives with that bucket's reduction.

        Raises:
          FailedPreconditionError: CLOSED.
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
                f"layout '{self._name}': {call} got {len(flags)} flags in `used`; give one for "
                f"each of the layout's {self._parameter_count} parameters",
                reason=Reason.MALFORMED,
                step=step,
            )
        return flags

    def abandon_step(self, step: int, reason: str) -> None:
        """Says that this rank cannot finish the step: it is void on every rank, for `reason`.

        Then wait for the step as usual.

        Raises:
          FailedPreconditionError: STALE_STEP: the step is complete; PROTOCOL_VIOLATION: as
            finish_step().
        """
        self._call(library.abandon_step, step, _text.encode(reason.replace("\0", ""), "reason"))

    def wait_bucket(self, step: int, bucket: int, timeout: Optional[float] = None) -> None:
        """Waits until one bucket is reduced. The step can still become void: see wait_step().

        With on_rank_loss="hold" the bucket is read-only until wait_step() has returned the verdict.
        If another rank is lost, its replacement gets the average from this memory. If the daemon
        finds that the average has changed, the job ends for all with reason PROTOCOL_VIOLATION,
        which names this rank. It cannot find changes of integers, minima and maxima: there the
        replacement gets wrong values.

        Args:
          step: the step.
          bucket: index of the bucket.
          timeout: seconds; None: no limit; 0: does not wait.

        Raises:
          InvalidArgumentError: UNKNOWN_BUCKET.
          AbortedError: the step is void.
          DeadlineExceededError: WAIT_TIMEOUT: names the late ranks. The step continues.
          FailedPreconditionError: STALE_STEP: the step was decided too long ago. The last verdict
            is kept, on a GPU the last two. PROTOCOL_VIOLATION: the step is beyond next_step.
          UnavailableError: DAEMON_SILENT: the daemon is stopped or hangs; call again.
        """
        handle = self._handle

        def wait(ns: int) -> Optional[int]:
            error: Optional[int] = library.wait_bucket(handle, step, bucket, ns)
            return error

        self._wait(wait, timeout)

    def wait_step(self, step: int, timeout: Optional[float] = None) -> StepResult:
        """Waits for the step's verdict, which is the same on every rank.

        Returns the result of a complete step: every bucket holds the reduction.

        Args:
          step: the step.
          timeout: seconds; None: no limit; 0: does not wait.

        Raises:
          AbortedError: the step is void, because a rank was lost or abandoned it; names the rank
            and its reason. Zero the gradients and redo the step as next_step. STEP_IN_DOUBT: this
            rank cannot learn the verdict, which other ranks may know. The session ends.
          DeadlineExceededError: STEP_TIMEOUT: the step is void, as the job's step_timeout has
            passed. WAIT_TIMEOUT: `timeout` has passed, and the step continues. Both name the late
            ranks.
          FailedPreconditionError: LAYOUT_RELEASED: the step is void, because another rank has
            released the layout; names it. STALE_STEP, PROTOCOL_VIOLATION: as wait_bucket().
          UnavailableError: DAEMON_SILENT: the daemon is stopped or hangs; call again.
            STEP_IN_DOUBT: as above, because the daemon was lost.
        """
        handle = self._handle
        struct = step_result.new_struct()

        def wait(ns: int) -> Optional[int]:
            error: Optional[int] = library.wait_step(handle, step, ns, struct)
            return error

        self._wait(wait, timeout)
        return step_result.result_of(struct)

    def close(self) -> None:
        """Releases the layout: its name is free, and the daemon frees its memory.

        Waits for no other rank. On a GPU it waits for the GPU's streams.

        The end of the last reference to the layout releases it, too. Views stay valid; every other
        call of it fails from now on. A step that is open is abandoned. Close a layout on every rank
        or on none: a step that needs a rank which has closed it is void after 5 s, LAYOUT_RELEASED.
        """
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
            if ns <= _DIRECT_NS or not _interruptible.is_interruptible():
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
        if waited.reason != Reason.WAIT_TIMEOUT:
            try:
                raise waited
            finally:
                del waited  # it refers to this frame, which would keep the error alive
        if ns != _duration.FOREVER:
            ns = max(0, ns - (time.monotonic_ns() - start))

        call = _state_source.Call(self._session)

        def go_on() -> None:
            call.begin()
            # Frees the error here: after Ctrl-C no other code does.
            if error := wait(ns):
                raise_error(error)

        try:
            _interruptible.call(go_on)
        except errors.Error:
            raise  # the wait has returned
        except BaseException:
            # After Ctrl-C a helper is still inside of the wait, which may read the state.
            if self._session.state_server is not None:
                _state_source.pause(self._session)
            raise
        return None

    def _refuse(self, error: ctypes.ArgumentError) -> NoReturn:
        if self._handle is not _CLOSED:
            raise TypeError(f"layout '{self._name}': {error}") from None
        raise self._session.closed_error(f"layout '{self._name}'") from None

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
