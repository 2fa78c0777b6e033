"""One rank's membership in its job."""

from __future__ import annotations

import ctypes
import dataclasses
import types
from collections.abc import Sequence
from typing import Any, Callable, Optional

from gradsync import _duration, _handle, _interruptible, _structs, errors, layout_spec
from gradsync._library import library, raise_error
from gradsync.data_type import DataType
from gradsync.layout import Layout
from gradsync.layout_spec import Bucket, Parameter
from gradsync.options import SessionOptions

# As the root of a broadcast: the lowest rank that has not left.
LOWEST_LIVE_RANK = 0xFFFFFFFF

_FORMATS = {"f": DataType.FLOAT32, "d": DataType.FLOAT64, "e": DataType.FLOAT16}


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What a session has done so far.

    Attributes:
      steps_complete: complete steps.
      steps_void: void steps.
      buckets_marked: calls of mark_ready().
      bytes_reduced: bytes of this rank's buckets, complete steps only.
      mark_ready_total: seconds spent inside mark_ready().
      exposed_total: seconds from each step's last mark_ready() to its verdict.
    """

    steps_complete: int
    steps_void: int
    buckets_marked: int
    bytes_reduced: int
    mark_ready_total: float
    exposed_total: float


class Session:
    """One rank's live membership in a job; made by Session.join().

    A context manager: leaves the job on a clean exit; on an exception it is a loss to the other
    ranks, who learn of it at once. Otherwise close() ends it, or the last reference to it (its
    layouts hold one), or the interpreter's exit; without leave() before, that is a loss too.

    Thread-safe; the job's operations (barrier(), broadcast(), all_reduce()) run one at a time, in
    the same order on every rank. After a fork the child's calls raise `FailedPreconditionError`,
    reason FORKED, and its copy may go out of scope without effect. Ctrl-C interrupts every call.

    Every method raises the session's end once it has ended: see `Layout`.
    """

    def __init__(self, pointer: int, options: SessionOptions) -> None:
        """Takes over what the library joined."""
        self._handle = _handle.SessionHandle.adopt(pointer, library.session_destroy)
        self._options = options
        self._left = False
        self._rank: int = library.session_rank(self._handle)
        self._world_size: int = library.session_world_size(self._handle)
        self._generation: int = library.session_generation(self._handle)
        self._incarnation: int = library.session_incarnation(self._handle)

    @classmethod
    def join(cls, options: Optional[SessionOptions] = None) -> Session:
        """Joins a job.

        Connects, retrying until `connect_timeout`, and returns without waiting for the other ranks.

        Args:
          options: None: SessionOptions.from_environment().

        Raises:
          InvalidArgumentError: an option is malformed; the message names it.
          UnavailableError: no daemon at the socket within `connect_timeout`.
          PermissionDeniedError: the socket's permissions, or a missing token.
          AlreadyExistsError: the rank is held while the job is still forming.
          FailedPreconditionError: world size or options differ from the other ranks'.
          UnimplementedError: a loss policy that the daemon does not have.
          ResourceExhaustedError: a quota.
        """
        if options is None:
            options = SessionOptions.from_environment()
        options = dataclasses.replace(options)
        struct = options._struct()

        def join() -> Session:
            pointer = ctypes.c_void_p()
            if error := library.session_join(struct, pointer):
                raise_error(error)
            assert pointer.value is not None
            return cls(pointer.value, options)

        return _interruptible.call(join)

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many ranks the job has."""
        return self._world_size

    @property
    def generation(self) -> int:
        """How often the job's ranks have joined anew, from 1."""
        return self._generation

    @property
    def incarnation(self) -> int:
        """The daemon's number of this session."""
        return self._incarnation

    @property
    def options(self) -> SessionOptions:
        """What it was joined with; a copy."""
        return dataclasses.replace(self._options)

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        closed: bool = self._handle.closed
        return closed

    def register_layout(
        self,
        name: str = "default",
        *,
        parameters: Sequence[Parameter] = (),
        explicit_buckets: Sequence[Bucket] = (),
        bucket_cap_bytes: Optional[int] = None,
        first_bucket_cap_bytes: Optional[int] = None,
        last_bucket_cap_bytes: Optional[int] = None,
        op: str = "average",
        timeout: Optional[float] = None,
        device: Optional[str] = None,
    ) -> Layout:
        """Registers parameters and maps their memory; returns when every rank has done the same.

        Either `parameters`, in the order of the forward pass, which are cut into buckets from the
        last one to the first, or `explicit_buckets`.

        Args:
          name: the layout's.
          parameters: names, shapes and dtypes, the same on every rank.
          explicit_buckets: sizes and dtypes, the same on every rank.
          bucket_cap_bytes: most bytes of a bucket; None: 25 MiB.
          first_bucket_cap_bytes: most bytes of the first one; None: 1 MiB.
          last_bucket_cap_bytes: most bytes of the one that is ready last, that of the first
            parameter; None: no such cap. What is reduced last is waited for, as no backward pass
            is left to hide it: if that bucket is larger, as many of its last parameters as fit, at
            least one, become a bucket of their own. An old library or daemon does not split.
          op: "average" or "sum".
          timeout: seconds to wait for the other ranks; None: 5 min.
          device: UUID of the GPU on which the gradients lie (`cuda_device_uuid`); every rank names
            one, its own, or none does. None: host memory.

        Raises:
          InvalidArgumentError: malformed.
          FailedPreconditionError: LAYOUT_MISMATCH; names the first difference and both ranks.
          DeadlineExceededError: names the ranks that did not come.
          ResourceExhaustedError: a quota, or the GPU's memory.
          UnimplementedError: CUDA_UNAVAILABLE, library or daemon have no CUDA.
        """
        spec = layout_spec.spec_struct(
            name,
            parameters,
            explicit_buckets,
            bucket_cap_bytes,
            first_bucket_cap_bytes,
            last_bucket_cap_bytes,
            op,
            timeout,
            device,
        )

        def register(handle: _handle.SessionHandle) -> Layout:
            pointer = ctypes.c_void_p()
            if error := library.register_layout(handle, spec, pointer):
                raise_error(error)
            assert pointer.value is not None
            return Layout(self, pointer.value, device or "")

        layout: Layout = self._call(register)
        return layout

    def replace_layout(
        self,
        layout: Layout,
        name: str = "default",
        *,
        parameters: Sequence[Parameter] = (),
        explicit_buckets: Sequence[Bucket] = (),
        bucket_cap_bytes: Optional[int] = None,
        first_bucket_cap_bytes: Optional[int] = None,
        last_bucket_cap_bytes: Optional[int] = None,
        op: str = "average",
        timeout: Optional[float] = None,
        device: Optional[str] = None,
    ) -> Layout:
        """Registers a layout in the place of `layout`, between two of its steps.

        For buckets in another order, or other ones, that were learned while training. Called by
        every rank, normally with the old one's name. The new layout has memory of its own, and goes
        on with the old one's step numbers. Then calls of the old one raise LAYOUT_REPLACED, and its
        views stay readable; if this fails, the old one is as before, on every rank.

        Args:
          layout: the old one, of this session.
          name: this and the others as of register_layout().
          parameters: see there.
          explicit_buckets: see there.
          bucket_cap_bytes: see there.
          first_bucket_cap_bytes: see there.
          last_bucket_cap_bytes: see there.
          op: see there.
          timeout: see there.
          device: see there.

        Raises:
          FailedPreconditionError: PROTOCOL_VIOLATION: a step is open, or it is being replaced
            already; LAYOUT_REPLACED; LAYOUT_MISMATCH, also if ranks replace different layouts.
          UnimplementedError: library or daemon do not have it.
          InvalidArgumentError, DeadlineExceededError, ResourceExhaustedError: as register_layout().
        """
        spec = layout_spec.spec_struct(
            name,
            parameters,
            explicit_buckets,
            bucket_cap_bytes,
            first_bucket_cap_bytes,
            last_bucket_cap_bytes,
            op,
            timeout,
            device,
        )
        old = layout._handle

        def replace(handle: _handle.SessionHandle) -> Layout:
            pointer = ctypes.c_void_p()
            try:
                error = library.replace_layout(handle, old, spec, pointer)
            except ctypes.ArgumentError as refused:
                layout._refuse(refused)
            if error:
                raise_error(error)
            assert pointer.value is not None
            return Layout(self, pointer.value, device or "")

        replaced: Layout = self._call(replace)
        return replaced

    def barrier(self, timeout: Optional[float] = None) -> None:
        """Waits until every rank has called it.

        Args:
          timeout: seconds; None: 30 min.

        Raises:
          FailedPreconditionError: OPERATION_MISMATCH: the ranks disagree about which operation is
            next; names both ranks and both operations.
          DeadlineExceededError: names the ranks that did not come; it failed on every rank.
          UnavailableError: DAEMON_SILENT, the daemon is stopped or hangs.
        """
        ns = _duration.nanoseconds(timeout, "timeout", default=_duration.OPERATION)
        self._operate(library.barrier, ns)

    def broadcast(self, buffer: Any, root: int, timeout: Optional[float] = None) -> None:
        """Copies the root's buffer into every other rank's.

        Args:
          buffer: writable and contiguous, of any shape and dtype, of the same number of bytes on
            every rank: a NumPy array, a bytearray, a View's buffer.
          root: a rank, or LOWEST_LIVE_RANK.
          timeout: seconds; None: 30 min.

        Raises:
          InvalidArgumentError: no such root, or a buffer that is read-only or not contiguous.
          FailedPreconditionError, DeadlineExceededError, UnavailableError: as barrier().
        """
        memory = _writable(buffer)
        self.broadcast_address(
            ctypes.addressof(memory), ctypes.sizeof(memory), root, timeout, owner=memory
        )

    def broadcast_address(
        self,
        address: int,
        nbytes: int,
        root: int,
        timeout: Optional[float] = None,
        *,
        owner: object = None,
    ) -> None:
        """As broadcast(), with `nbytes` bytes at `address`.

        The memory must be there until the call is over. After Ctrl-C that is later than when this
        method raises: `owner` is kept alive until then.
        """
        if not 0 <= root < 2**32:
            raise errors.InvalidArgumentError(f"root is {root}", reason="MALFORMED")
        ns = _duration.nanoseconds(timeout, "timeout", default=_duration.OPERATION)
        self._operate(library.broadcast, address, nbytes, root, ns, owner=owner)

    def all_reduce(
        self,
        buffer: Any,
        dtype: Optional[DataType] = None,
        op: str = "average",
        timeout: Optional[float] = None,
    ) -> None:
        """Reduces a small tensor in place, in rank order.

        Args:
          buffer: writable and contiguous, of any shape, with as many elements on every rank; it
            must fit the daemon's staging memory (32 MiB).
          dtype: None: the buffer's own, of float32, float64 and float16.
          op: "average" or "sum".
          timeout: seconds; None: 30 min.

        Raises:
          InvalidArgumentError: the buffer is read-only, not contiguous or too large, or its dtype
            is not known.
          FailedPreconditionError, DeadlineExceededError, UnavailableError: as barrier().
        """
        if dtype is None:
            dtype = _dtype_of(buffer)
        memory = _writable(buffer)
        count, rest = divmod(ctypes.sizeof(memory), DataType(dtype).item_size)
        if rest:
            raise errors.InvalidArgumentError(
                f"{ctypes.sizeof(memory)} bytes are no array of {DataType(dtype).name.lower()}",
                reason="MALFORMED",
            )
        self.all_reduce_address(ctypes.addressof(memory), count, dtype, op, timeout, owner=memory)

    def all_reduce_address(
        self,
        address: int,
        count: int,
        dtype: DataType,
        op: str = "average",
        timeout: Optional[float] = None,
        *,
        owner: object = None,
    ) -> None:
        """As all_reduce(), with `count` elements at `address`.

        The memory is kept as in broadcast_address().
        """
        ns = _duration.nanoseconds(timeout, "timeout", default=_duration.OPERATION)
        number = layout_spec.op_number(op)
        self._operate(library.all_reduce, address, count, dtype, number, ns, owner=owner)

    def leave(self) -> None:
        """Ends this rank's part in the job; the other ranks go on.

        Raises:
          FailedPreconditionError: a step of this rank is open.
        """
        self._operate(library.session_leave)
        self._left = True

    def leave_and_stay(self, timeout: Optional[float] = None) -> int:
        """This rank has no more data in this epoch.

        Steps and operations of the other ranks go on without it, and every call of it fails with
        reason LEFT, until every rank has left; blocks until then. Then all that stayed take part
        again: layouts go on with their `next_step`. Layouts can neither be registered nor replaced
        meanwhile (reason RANKS_LEFT).

        Args:
          timeout: seconds; None: 30 min. After a DeadlineExceededError it can be called again.

        Returns: the rank that left last of those that stayed, whose state is the one to broadcast.

        Raises:
          FailedPreconditionError: a step of this rank is open.
          DeadlineExceededError: not every rank has left.
          UnavailableError: DAEMON_SILENT, the daemon is stopped or hangs; can be repeated.
        """
        ns = _duration.nanoseconds(timeout, "timeout", default=_duration.OPERATION)
        last = ctypes.c_uint32()
        self._operate(library.session_leave_and_stay, ns, last)
        return last.value

    def statistics(self) -> Statistics:
        """What this session has done so far."""
        struct = _structs.StatisticsStruct(ctypes.sizeof(_structs.StatisticsStruct))
        with self._handle.use() as usable:
            if not usable:
                self._refuse()
            library.session_statistics(self._handle, struct)
        return Statistics(
            steps_complete=struct.steps_complete,
            steps_void=struct.steps_void,
            buckets_marked=struct.buckets_marked,
            bytes_reduced=struct.bytes_reduced,
            mark_ready_total=struct.mark_ready_total / 1e9,
            exposed_total=struct.exposed_total / 1e9,
        )

    def close(self) -> None:
        """Ends the session. Without leave() before it, the other ranks lose this one.

        Views of its layouts stay valid. If another thread is inside an operation of this session,
        the session ends when that returns.
        """
        self._handle.close()

    def __enter__(self) -> Session:
        """The session."""
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[types.TracebackType],
    ) -> None:
        """Leaves the job, unless there was an exception; then closes."""
        try:
            if kind is None and not self._left and not self.closed:
                self.leave()
        finally:
            self.close()

    def __repr__(self) -> str:
        """Job and rank."""
        state = ", closed" if self.closed else ""
        return (
            f"<gradsync.Session {self._options.job_id!r}: rank {self._rank} of "
            f"{self._world_size}{state}>"
        )

    def _operate(self, function: Callable[..., Any], *arguments: Any, owner: object = None) -> None:
        def operate(handle: _handle.SessionHandle, owner: object = owner) -> None:
            if error := function(handle, *arguments):
                raise_error(error)

        self._call(operate)

    def _call(self, body: Callable[[_handle.SessionHandle], Any]) -> Any:
        """body(handle), interruptibly."""
        handle = self._handle

        def call() -> Any:
            with handle.use() as usable:
                if not usable:
                    self._refuse()
                return body(handle)

        return _interruptible.call(call)

    def _refuse(self) -> None:
        raise errors.FailedPreconditionError(
            f"rank {self._rank}: the session was closed",
            reason="CLOSED",
            job=self._options.job_id,
            rank=self._rank,
        )


def _writable(buffer: Any) -> ctypes.Array[ctypes.c_char]:
    """The buffer's memory; keeps the buffer."""
    try:
        return (ctypes.c_char * memoryview(buffer).nbytes).from_buffer(buffer)
    except (TypeError, ValueError, BufferError) as error:
        raise errors.InvalidArgumentError(
            f"a buffer must be writable, contiguous memory: {error}", reason="MALFORMED"
        ) from error


def _dtype_of(buffer: Any) -> DataType:
    try:
        text = memoryview(buffer).format
    except (TypeError, ValueError, BufferError) as error:
        raise errors.InvalidArgumentError(
            f"this is no buffer: {error}", reason="MALFORMED"
        ) from error
    dtype = _FORMATS.get(text.lstrip("<=@"))
    if dtype is None:
        raise errors.InvalidArgumentError(
            f"gradsync does not reduce elements of format '{text}'; give the dtype if they are of "
            "one that it does",
            reason="MALFORMED",
        )
    return dtype
