"""One rank's membership in its job."""

from __future__ import annotations

import ctypes
import dataclasses
import types
from collections.abc import Sequence
from typing import Any, Callable, NoReturn, Optional

from gradsync import (
    _current_layouts,
    _duration,
    _handle,
    _interruptible,
    _notices,
    _state_source,
    _structs,
    _text,
    _unwinding,
    errors,
    layout_spec,
)
from gradsync._buffer import dtype_of, writable
from gradsync._library import library, raise_error, take_error
from gradsync.data_type import DataType
from gradsync.layout import Layout
from gradsync.layout_spec import Bucket, Parameter
from gradsync.options import SessionOptions
from gradsync.reason import Reason
from gradsync.state import CurrentLayout, StateImage, StateReader

# As the root of a broadcast: the lowest rank that has not left.
LOWEST_LIVE_RANK = 0xFFFFFFFF


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What a session has done so far.

    Attributes:
      steps_complete: number of complete steps.
      steps_void: number of void steps.
      buckets_marked: number of buckets marked, by mark_ready() or finish_step().
      bytes_reduced: bytes of this rank's buckets in complete steps.
      mark_ready_total: seconds spent inside mark_ready(), and inside finish_step() if it marks.
      exposed_total: seconds from each step's last mark to its verdict, summed.
    """

    steps_complete: int
    steps_void: int
    buckets_marked: int
    bytes_reduced: int
    mark_ready_total: float
    exposed_total: float


class Session:
    """One rank's live membership in a job; made by Session.join().

    A context manager. A `with` block that ends without an exception leaves the job. If it ends with
    an exception, the rank is lost to the other ranks, and they learn of it at once. With
    on_rank_loss="hold" the rank counts as lost when this process has ended. Then the others wait
    for its replacement.

    Without `with`, close() ends the session. So does the interpreter's exit, and the end of the
    last reference to the session or to one of its layouts. If leave() was not called before, the
    rank is lost in these cases too.

    Thread-safe. The job's operations (barrier(), broadcast(), all_reduce()) run one at a time, and
    every rank must call them in the same order. Ctrl-C interrupts every call. In the child of a
    fork every call raises `FailedPreconditionError`, reason FORKED, and the child's copy can go out
    of scope without effect.

    Once the session has ended, every method raises why: see `Layout`.
    """

    def __init__(self, pointer: int, options: SessionOptions) -> None:
        """Takes over a session that the library has joined."""
        self._handle = _handle.SessionHandle.adopt_session(
            pointer, library.session_destroy, options.job_id, options.rank
        )
        _notices.watch(self._handle)
        self._options = options
        self._left = False
        self._unwinding = _unwinding.Unwinding()
        self._rank: int = library.session_rank(self._handle)
        self._world_size: int = library.session_world_size(self._handle)
        self._generation: int = library.session_generation(self._handle)
        self._incarnation: int = library.session_incarnation(self._handle)
        self._is_replacement = bool(library.session_is_replacement(self._handle))

    @classmethod
    def join(cls, options: Optional[SessionOptions] = None, **fields: Any) -> Session:
        """Joins a job.

        Tries to connect until `connect_timeout` has passed. Does not wait for the other ranks.

        Args:
          options: None: SessionOptions.from_environment(**fields). A variable whose option is
            given is then not needed.
          **fields: fields of SessionOptions that win over `options`.

        Raises:
          InvalidArgumentError: an option is malformed; the message names it.
          UnavailableError: no daemon answered at the socket, or at `coordinator`, within
            `connect_timeout`; or the daemon drains.
          PermissionDeniedError: the socket's permissions forbid it, or the token is missing. With
            on_rank_loss="hold" also: the job that holds this rank has another token. Or the daemons
            of the nodes refuse each other.
          AlreadyExistsError: another process has the rank, and the job is still forming or has
            on_rank_loss="hold".
          FailedPreconditionError: world size or options differ from the other ranks'. LEFT: with
            on_rank_loss="hold", this rank has left the job. VERSION: library and daemon do not fit
            together. NODE_MISMATCH: two daemons are configured differently.
          UnimplementedError: the daemon does not have the loss policy.
          ResourceExhaustedError: a quota of the daemon, memory, or open files.
          AbortedError: another rank was lost, or began a new generation of the job, while this one
            joined. Join again.
        """
        if options is None:
            options = SessionOptions.from_environment(**fields)
        options = dataclasses.replace(options, **fields)
        struct = options._struct()

        def join() -> Session:
            pointer = ctypes.c_void_p()
            if error := library.session_join(struct, pointer):
                raise_error(error)
            assert pointer.value is not None
            return cls(pointer.value, options)

        unwinding = _unwinding.Unwinding()
        session = _interruptible.call(join)
        session._unwinding = unwinding  # of this thread
        return session

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
        """Number of the job's life, from 1. A new one begins when trainers join again."""
        return self._generation

    @property
    def is_replacement(self) -> bool:
        """Whether this session takes the place of a lost one (on_rank_loss="hold").

        It registers the layouts that the job has now. `Layout.next_step` of each is the first step
        that it takes part in, and the trainer begins with the state that its rank had before that
        step. It calls no barrier(), broadcast() or all_reduce() before it has ended the first step
        that becomes complete. The first call after that waits until the step is complete and every
        layout of the job is registered. Until a step is complete it registers no other layout.
        """
        return self._is_replacement

    @property
    def incarnation(self) -> int:
        """The daemon's number of this session."""
        return self._incarnation

    @property
    def options(self) -> SessionOptions:
        """A copy of the options with which this rank joined."""
        return dataclasses.replace(self._options)

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        closed: bool = self._handle.closed
        return closed

    @property
    def ended(self) -> bool:
        """Whether the session has ended: every later call raises, so join again.

        After an error that leaves it False, the session goes on, as after STEP_ABANDONED.
        """
        with self._handle.use() as usable:
            return not usable or bool(library.session_has_ended(self._handle))

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
        buffer_bytes: int = 0,
    ) -> Layout:
        """Registers parameters and maps their memory; returns when every rank has done the same.

        Give either `parameters` or `explicit_buckets`. List parameters in the order of the forward
        pass; the daemon cuts them into buckets from the last one to the first.

        Args:
          name: the layout's.
          parameters: names, shapes and dtypes, the same on every rank.
          explicit_buckets: sizes and dtypes, the same on every rank.
          bucket_cap_bytes: most bytes of a bucket; None: 25 MiB.
          first_bucket_cap_bytes: most bytes of the first bucket; None: 1 MiB.
          last_bucket_cap_bytes: most bytes of the bucket that is ready last, which holds the first
            parameter; None: no such cap. A trainer waits for that bucket's reduction, as no
            backward pass is left to hide it. If the bucket is larger, its last parameters become a
            bucket of their own: as many as fit, at least one.
          op: "average", "sum", "min" or "max". Integers have no average. They, "min" and "max" are
            for explicit_buckets in host memory.
          timeout: seconds to wait for the other ranks; None: 5 min.
          device: UUID of the GPU that holds the gradients (`cuda_device_uuid`); None: host memory.
            Either every rank names its own GPU, or none does.
          buffer_bytes: bytes of one more bucket for the model's buffers, see `Layout.buffers`; 0:
            none. Only in host memory.

        Raises:
          InvalidArgumentError: an argument is malformed; the message names it.
          FailedPreconditionError: LAYOUT_MISMATCH; names the first difference and both ranks.
            ALREADY_REGISTERED: this rank has a layout of that name that is not closed.
            RANKS_LEFT: some ranks wait in `leave_and_stay`, or a rank was lost and has not
            completed a step since. CUDA_NOT_BUILT: the daemon was built without CUDA. Other
            reasons say why the GPU cannot be used.
          DeadlineExceededError: names the ranks that did not come.
          ResourceExhaustedError: a quota, memory, or the GPU's memory. MPS_FULL. WORKERS_STARTING:
            too many of the user's workers are starting or ending on this node.
          UnavailableError: WORKER_LOST, WORKER_RESTARTING: the GPU's worker has failed.
          UnimplementedError: CUDA_UNAVAILABLE: the library was built without CUDA, or the daemon
            has no workers for GPUs. LOSS_POLICY: a layout on a GPU, with on_rank_loss="hold".
          Error: LAYOUT_REFUSED: another rank did not get its memory; has the code of that rank's
            error.
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
            buffer_bytes,
        )

        def register(handle: _handle.SessionHandle, out: ctypes.c_void_p) -> Optional[int]:
            error: Optional[int] = library.register_layout(handle, spec, out)
            return error

        return self._new_layout(register, device)

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
        buffer_bytes: int = 0,
    ) -> Layout:
        """Replaces `layout` by a new layout, between two of its steps.

        The new layout can have buckets, or an order of buckets, that were learned while training.
        Every rank calls this, normally with the old layout's name. The new layout has memory of its
        own and continues the old one's step numbers. Then calls of the old layout raise
        LAYOUT_REPLACED, and its views stay readable. If this call fails, the old layout is as
        before, on every rank.

        Args:
          layout: the old layout, of this session.
          name: this and the other arguments are those of register_layout().
          parameters: see there.
          explicit_buckets: see there.
          bucket_cap_bytes: see there.
          first_bucket_cap_bytes: see there.
          last_bucket_cap_bytes: see there.
          op: see there.
          timeout: see there.
          device: see there.
          buffer_bytes: see there.

        Raises:
          FailedPreconditionError: PROTOCOL_VIOLATION: a step is open, or the layout is being
            replaced already; LAYOUT_REPLACED: it was replaced before; LAYOUT_MISMATCH: the new
            layouts differ, or ranks replace different layouts; RANKS_LEFT: a rank has left for this
            epoch.
          InvalidArgumentError: as register_layout(); or `layout` is of another session.
          Error: every other error of register_layout().
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
            buffer_bytes,
        )
        old = layout._handle

        def replace(handle: _handle.SessionHandle, out: ctypes.c_void_p) -> Optional[int]:
            try:
                error: Optional[int] = library.replace_layout(handle, old, spec, out)
            except ctypes.ArgumentError as refused:
                layout._refuse(refused)
            return error

        return self._new_layout(replace, device)

    def serve_state(self, read: Optional[StateReader]) -> None:
        """With on_rank_loss="hold", state_source="survivor": says how to read the model's state.

        Call it once, before this rank's first step. When another rank is lost, a thread of the
        library calls `read`, while this rank waits for the step that the replacement joins. The
        thread hashes the items. It also copies them, if this rank is the source.

        The state must not change from the first mark of a step (mark_ready(), end_step() or
        finish_step()) until wait_step() has returned or raised the verdict, nor while leave() or
        finish() waits. A wait returns only when the reading has stopped, also after a time-out or
        Ctrl-C. This takes at most 100 ms. If `read` itself is running, the wait also waits for its
        return, 10 s at most.

        Args:
          read: returns the items (name, memory) of the state that all ranks share, with the same
            names in the same order on every rank. The memory is a contiguous buffer, or a
            StateMemory. If it raises in the source, another rank becomes the source. A rank in
            which it raises is not compared. None: this rank serves no more.

        Raises:
          ResourceExhaustedError: no thread can start.
        """
        self._call(lambda handle: _state_source.serve(handle, read))

    def current_layouts(self) -> list[CurrentLayout]:
        """In a replacement: the job's layouts as they are now, which it must register. Else []."""
        with self._handle.use() as usable:
            if not usable:
                self._refuse()
            return _current_layouts.read(self._handle)

    def fetch_state(self, timeout: Optional[float] = None) -> StateImage:
        """In a replacement: gets the state of the model from a survivor.

        Call it after every layout of current_layouts() is registered. Then load the state and call
        confirm_state().

        Args:
          timeout: seconds until confirm_state() returns; None: no limit. If other ranks wait for
            this one for longer than hold_timeout, the job ends.

        Raises:
          UnavailableError: STATE_UNAVAILABLE: every rank that has the state refused or was silent.
            DAEMON_SILENT: the daemon is stopped or hangs; call again.
          DeadlineExceededError: STATE_UNAVAILABLE: no rank gave it in time.
          FailedPreconditionError: PROTOCOL_VIOLATION: this session is no replacement, or it has
            the state already. STATE_REFUSED: what arrived is malformed; the session ends.
          ResourceExhaustedError: MEMORY. If it is too little for the state, the session ends.
        """
        ns = _duration.nanoseconds(timeout, "timeout", default=_duration.FOREVER)

        def fetch(handle: _handle.SessionHandle) -> StateImage:
            pointer = ctypes.c_void_p()
            if error := library.fetch_state(handle, ns, pointer):
                raise_error(error)
            assert pointer.value is not None
            return _image_of(_handle.Handle.adopt(pointer.value, library.state_image_destroy))

        image: StateImage = self._call(fetch)
        return image

    def confirm_state(self, timeout: Optional[float] = None) -> None:
        """In a replacement: waits until its loaded state is compared with the survivors'.

        Reads the state by the function of serve_state(). When this returns, the steps may begin.

        Args:
          timeout: seconds; None: no limit.

        Raises:
          AbortedError: STATE_INTERRUPTED: the step became void, or a rank that took part in the
            transfer was lost or refused; call fetch_state() again.
          FailedPreconditionError: RANKS_DIVERGED: what this rank has loaded differs from what the
            others have; names the first item. STATE_REFUSED: `read` raised. Both end the session,
            and the others wait for another replacement. PROTOCOL_VIOLATION: call serve_state() and
            fetch_state() first.
          DeadlineExceededError: WAIT_TIMEOUT: call it again. STATE_UNAVAILABLE: the time-out of
            fetch_state() has passed, or this call came more than 2 min (plus 1 s per 100 MB) after
            fetch_state() had returned; call fetch_state() again.
          UnavailableError: DAEMON_SILENT: the daemon is stopped or hangs; call again.
        """
        ns = _duration.nanoseconds(timeout, "timeout", default=_duration.FOREVER)
        self._operate(library.confirm_state, ns)

    def check_in_sync(self, read: StateReader, timeout: Optional[float] = None) -> None:
        """Checks that every rank has the same state; every rank calls it, between two steps.

        An operation of the job, as barrier(). Works with every on_rank_loss. With "hold" a rank
        that is lost meanwhile ends the job.

        Args:
          read: as for serve_state(); called once, in this thread.
          timeout: seconds; None: 30 min.

        Raises:
          FailedPreconditionError: RANKS_DIVERGED, on every rank: names the ranks and the first
            item that differs. OPERATION_MISMATCH, PROTOCOL_VIOLATION: as barrier().
          DeadlineExceededError, UnavailableError: as barrier().
          InvalidArgumentError: names the item that is malformed.
        """
        ns = _duration.nanoseconds(timeout, "timeout", default=_duration.OPERATION)
        items = _state_source.Items(list(read()))

        def check(handle: _handle.SessionHandle, items: _state_source.Items = items) -> None:
            try:
                if error := library.check_in_sync(handle, items.array, items.count, ns):
                    raise_error(error)
            finally:
                items.release()

        self._call(check)

    def barrier(self, timeout: Optional[float] = None) -> None:
        """Waits until every rank has called it.

        Args:
          timeout: seconds; None: 30 min.

        Raises:
          FailedPreconditionError: OPERATION_MISMATCH: the ranks disagree about which operation is
            next; names both ranks and both operations. PROTOCOL_VIOLATION: this session is a
            replacement without a complete step.
          DeadlineExceededError: names the ranks that did not come; every rank gets this error.
            WAIT_TIMEOUT: the daemon does not answer. Or this operation has not begun, because one
            of another thread still runs; the message says so.
          UnavailableError: DAEMON_SILENT: the daemon is stopped or hangs. This session takes no
            more operations.
        """
        ns = _duration.nanoseconds(timeout, "timeout", default=_duration.OPERATION)
        self._operate(library.barrier, ns)

    def broadcast(self, buffer: Any, root: int, timeout: Optional[float] = None) -> None:
        """Copies the root's buffer into every other rank's.

        Args:
          buffer: a NumPy array, a bytearray, a View's buffer or the like: writable and contiguous,
            of any shape and dtype, with the same number of bytes on every rank.
          root: a rank, or LOWEST_LIVE_RANK.
          timeout: seconds; None: 30 min.

        Raises:
          InvalidArgumentError: there is no such root, or the buffer is read-only or not
            contiguous.
          FailedPreconditionError: as barrier(). PROTOCOL_VIOLATION: also if the root has left.
          DeadlineExceededError, UnavailableError: as barrier().
        """
        memory = writable(buffer)
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

        The memory must exist until the call has ended. After Ctrl-C this method raises before that,
        so it keeps `owner` alive for as long as necessary.
        """
        if not 0 <= root < 2**32:
            raise errors.InvalidArgumentError(
                f"root is {root}; give a rank, from 0, or LOWEST_LIVE_RANK", reason=Reason.MALFORMED
            )
        ns = _duration.nanoseconds(timeout, "timeout", default=_duration.OPERATION)
        self._operate(library.broadcast, address, nbytes, root, ns, owner=owner)

    def all_reduce(
        self,
        buffer: Any,
        dtype: Optional[DataType] = None,
        op: str = "average",
        timeout: Optional[float] = None,
    ) -> None:
        """Reduces a small tensor in place: each node's ranks in order, then the nodes.

        Args:
          buffer: writable and contiguous, of any shape, with the same number of elements on every
            rank. It must fit into the daemon's staging memory (32 MiB).
          dtype: None: the buffer's own, which must be a type of DataType.
          op: "average", "sum", "min" or "max". Integers have no average: give another one.
          timeout: seconds; None: 30 min.

        Raises:
          InvalidArgumentError: the buffer is read-only, not contiguous or too large, gradsync does
            not reduce its dtype, or `op` is unknown or the average of integers.
          FailedPreconditionError, DeadlineExceededError, UnavailableError: as barrier().
        """
        if dtype is None:
            dtype = dtype_of(buffer)
        memory = writable(buffer)
        count, rest = divmod(ctypes.sizeof(memory), DataType(dtype).item_size)
        if rest:
            raise errors.InvalidArgumentError(
                f"the buffer has {ctypes.sizeof(memory)} bytes, which is not a whole number of "
                f"{DataType(dtype).name.lower()} elements",
                reason=Reason.MALFORMED,
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

    def begin_collective(self, description: str) -> None:
        """Says that this rank begins its next collective, in whatever way the ranks carry it out.

        Never blocks. If ranks say different things in the same place, the job ends for all, with
        `FailedPreconditionError`, reason OPERATION_MISMATCH. It names two ranks and what they said.
        With on_rank_loss="hold" every call ends the job for all, with `UnimplementedError`, reason
        LOSS_POLICY.

        Args:
          description: kind and arguments, the same on every rank; 1 to 256 bytes.

        Raises:
          InvalidArgumentError: the description is empty or too long.
        """
        text = _text.encode(description, "description")
        with self._handle.use() as usable:
            if not usable:
                self._refuse()
            if error := library.begin_collective(self._handle, text):
                raise_error(error)

    def query_collectives(self, waited: float) -> None:
        """Asks which ranks have begun fewer collectives than this one.

        It is for a rank that waits for a collective that does not go through the daemon. Never
        blocks. The logger "gradsync" names the ranks that are late while this process waits.

        Args:
          waited: for how long it has waited, in seconds.

        Raises:
          gradsync.Error: the session has ended.
        """
        ns = _duration.nanoseconds(waited, "waited", default=0)
        with self._handle.use() as usable:
            if not usable:
                self._refuse()
            if error := library.query_collectives(self._handle, ns):
                raise_error(error)

    def await_end(self, timeout: Optional[float] = None) -> Optional[errors.Error]:
        """Waits for the session's end, which another rank or the daemon may bring.

        Args:
          timeout: seconds; None: no limit; 0: does not wait.

        Returns:
          Why the session has ended; None: it has not ended within `timeout`.
        """
        ns = _duration.nanoseconds(timeout, "timeout", default=_duration.FOREVER)

        def wait(handle: _handle.SessionHandle) -> Optional[errors.Error]:
            error = library.session_await_end(handle, ns)
            return take_error(error) if error else None

        end: Optional[errors.Error] = self._call(wait)
        return end

    def leave(self) -> None:
        """Ends this rank's part in the job; the other ranks go on.

        With on_rank_loss="hold" it waits until every rank has left or finished, or the job has
        ended. Until then a rank may be lost before it has saved its work, and its replacement needs
        the others. It does not wait if a lost rank could not be replaced: not every rank has
        joined, the job has no layout now, or one of its layouts had no complete step. A layout that
        replaced another counts as new. The daemon checks this whenever a rank leaves, stays or
        finishes. If it finds such a reason then, it also ends the waits of the ranks that left
        before.

        With on_rank_loss="hold" every step has every rank in it. If another rank begins one after
        this call, the job ends for all.

        Raises:
          FailedPreconditionError: a step of this rank is open. PROTOCOL_VIOLATION: with
            on_rank_loss="hold", an exception is being handled, for example in a `finally` block:
            then the rank's work is not done.
          AbortedError: RANK_FINISHED: with on_rank_loss="hold", another rank has begun a step or a
            layout.
          DeadlineExceededError: WAIT_TIMEOUT: the daemon does not answer.
        """
        self._check_may_leave("leave()")
        self._operate(library.session_leave)
        self._left = True

    def finish(self) -> None:
        """Ends this rank's part in the job because its process exits with status 0.

        The other ranks may finish or leave, too. If one of them begins another step, operation or
        layout, or a collective that this rank has not begun, the job ends for all: AbortedError,
        reason RANK_FINISHED. With on_rank_loss="hold" it waits as leave() does.

        Raises:
          FailedPreconditionError, AbortedError, DeadlineExceededError: as leave().
        """
        self._check_may_leave("finish()")
        self._operate(library.session_finish)
        self._left = True

    def leave_and_stay(self, timeout: Optional[float] = None) -> int:
        """Says that this rank has no more data in this epoch, and waits until every rank says so.

        Until then the other ranks' steps and operations continue without this rank, and every other
        call of this rank fails with reason LEFT. No rank can register or replace a layout (reason
        RANKS_LEFT). When every rank has called this or leave(), those that called this take part
        again, and each layout continues with its `next_step`.

        Args:
          timeout: seconds; None: 30 min. After a DeadlineExceededError it can be called again.

        Returns:
          The rank that called this last. Its parameters have seen the most steps: broadcast them.

        Raises:
          FailedPreconditionError: a step of this rank is open.
          DeadlineExceededError: some ranks still have data, or an operation of another thread of
            this rank still runs.
          UnavailableError: DAEMON_SILENT: the daemon is stopped or hangs; call again.
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
        """Ends the session. Without leave() before it, this rank is lost to the other ranks.

        Views of its layouts stay valid. If another thread is inside an operation of this session,
        the session ends when that operation returns.
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
        """Leaves the job unless there was an exception, and closes the session."""
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

    def _check_may_leave(self, call: str) -> None:
        """Raises: FailedPreconditionError: as leave(), because of an exception; names `call`."""
        error = self._unwinding.error() if self._options.on_rank_loss == "hold" else None
        if error is None:
            return
        try:
            raise errors.FailedPreconditionError(
                f"rank {self._rank}: {call} was called while {type(error).__name__} is handled, so "
                "this rank's work is not done. With on_rank_loss='hold' let the exception end the "
                "process: then another one takes its place. If the work is done, call "
                f"{call} after the try statement",
                reason=Reason.PROTOCOL_VIOLATION,
                job=self._options.job_id,
                rank=self._rank,
            )
        finally:
            del error  # it refers to this frame, which would keep the error alive

    def _new_layout(
        self,
        create: Callable[[_handle.SessionHandle, ctypes.c_void_p], Optional[int]],
        device: Optional[str],
    ) -> Layout:
        """The layout that create(handle, out) puts into `out`; it returns an error or None."""

        def call(handle: _handle.SessionHandle) -> Layout:
            _handle.destroy_garbage()  # else the GPU may have no room for the layout
            pointer = ctypes.c_void_p()
            if error := create(handle, pointer):
                raise_error(error)
            assert pointer.value is not None
            return Layout(handle, pointer.value, device or "")

        layout: Layout = self._call(call)
        return layout

    def _operate(self, function: Callable[..., Any], *arguments: Any, owner: object = None) -> None:
        def operate(handle: _handle.SessionHandle, owner: object = owner) -> None:
            if error := function(handle, *arguments):
                raise_error(error)

        self._call(operate)

    def _call(self, body: Callable[[_handle.SessionHandle], Any]) -> Any:
        """body(handle), interruptibly."""
        handle = self._handle
        call = _state_source.Call(handle)

        def make() -> Any:
            with handle.use() as usable:
                if not usable:
                    self._refuse()
                call.begin()
                return body(handle)

        try:
            return _interruptible.call(make)
        except errors.Error:
            raise  # the call has returned
        except BaseException:
            # After Ctrl-C a helper is still inside of the call, which may read the state.
            _state_source.pause(handle)
            raise

    def _refuse(self) -> NoReturn:
        raise self._handle.closed_error(f"rank {self._rank}: the session")


def _image_of(handle: _handle.Handle) -> StateImage:
    items: dict[str, memoryview] = {}
    struct = _structs.StateItemStruct()
    for index in range(library.state_image_count(handle)):
        if error := library.state_image_item(handle, index, struct):
            raise_error(error)
        array: Any = (ctypes.c_ubyte * struct.bytes).from_address(struct.data or 0)
        array.gradsync_image = handle  # the views hold the array, and it holds the memory
        items[struct.name.decode()] = memoryview(array).cast("B")
    return StateImage(library.state_image_source(handle), items)
