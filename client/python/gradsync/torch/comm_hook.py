"""A communication hook: PyTorch's DistributedDataParallel averages through the daemon."""

from __future__ import annotations

import weakref
from typing import Any

import torch

import gradsync
from gradsync.torch import _hold, _session
from gradsync.torch._gradients import DATA_TYPES, flat_tensor
from gradsync.torch._hand_off import HostHandOff, StreamHandOff, hand_off_of


class HookState:
    """The state of `allreduce_hook` for one wrapped module: the buckets that its DDP makes.

    In each backward pass DDP shows its buckets one by one, in order. It changes them after the
    first pass. In a pass whose buckets are new, the state collects them, registers a layout of
    their sizes (the same on all ranks), and averages all of them at the end, without overlap. In a
    later pass it hands over each bucket as it comes. After a pass that has raised the end of its
    session, or after `close()`, it begins anew: in the session that was given, or in the process's
    own, which joins again.

    Used on the thread that runs the backward pass.

    Args:
      session: the job; None: the process's own (`gradsync.torch.default_session`).
      name: of the layout in status and statistics; None: `hook0`, `hook1`, ...
      timeout: seconds to wait for the other ranks to show the same buckets; None: 5 minutes.
    """

    def __init__(
        self,
        session: gradsync.Session | None = None,
        name: str | None = None,
        timeout: float | None = None,
    ) -> None:
        self._given = session, name
        self._timeout = timeout
        self._step = 0
        self._learning = False
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Has no layout, no pass, and no session but a given one."""
        # The buckets that DDP has shown in the running pass, and the futures that it got for them.
        self._shown: list[torch.Tensor] = []
        self._promised: list[torch.futures.Future[torch.Tensor]] = []
        self._session, self._name = self._given
        self._layout: gradsync.Layout | None = None
        self._hand_off: HostHandOff | StreamHandOff = HostHandOff()
        self._sizes: list[tuple[int, torch.dtype]] = []
        self._views: list[torch.Tensor] = []

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "gradsync: the state of a hook belongs to its process and cannot be copied or pickled; "
            "make a new HookState"
        )

    def average(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Hands over one bucket; see `allreduce_hook`."""
        try:
            return self._average(bucket)
        except gradsync.Error:
            if self._session is not None and self._session.ended:
                _session.end(self._session)
            raise

    def _average(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            self._begin_pass()
        if bucket.index() != len(self._shown):
            raise RuntimeError(
                f"gradsync: DDP showed bucket {bucket.index()} after {len(self._shown)} others; "
                "use one HookState for each wrapped module"
            )
        self._shown.append(bucket.buffer())
        if not self._learning and not self._known(bucket):
            self._begin_learning()
        if not self._learning:
            self._hand_over(bucket.index())
        device = bucket.buffer().device
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=None if device.type == "cpu" else [device]
        )
        self._promised.append(future)
        if bucket.is_last():
            if self._learning:
                self._learn()
            self._finish()
            # Now DDP waits for the futures, and copies the averages out of the views.
            for promised, view in zip(self._promised, self._views):
                promised.set_result(view)
        return future

    def knows_end(self) -> bool:
        """Whether the session has ended, and the process knows it.

        Otherwise a pass must raise the end first: the trainer may have to load a checkpoint.
        """
        return self._session is not None and _session.has_ended(self._session)

    def drop_ended(self) -> None:
        """Frees the layout of such a session. The next pass begins anew."""
        if self.knows_end():
            self._begin_anew()

    def _hand_over(self, index: int) -> None:
        assert self._layout is not None
        self._views[index].copy_(self._shown[index])
        self._hand_off.arrived(index)
        self._hand_off.mark_ready(self._layout, self._step, index)

    def _begin_pass(self) -> None:
        self.drop_ended()
        if self._shown and self._layout is not None and not self._learning:
            # The last pass failed before its last bucket.
            self._abandon("its backward pass did not finish")
        self._shown = []
        self._promised = []
        self._learning = self._layout is None
        self._hand_off.begin()
        if self._layout is not None:
            self._step = self._layout.next_step

    def _known(self, bucket: Any) -> bool:
        index: int = bucket.index()
        buffer: torch.Tensor = bucket.buffer()
        if index >= len(self._sizes) or bucket.is_last() != (index == len(self._sizes) - 1):
            return False
        count, dtype = self._sizes[index]
        return count == buffer.numel() and dtype is buffer.dtype

    def _begin_learning(self) -> None:
        """The buckets are new, on every rank: this pass collects them."""
        if len(self._shown) > 1:
            self._abandon("DDP changed its buckets")
        self._learning = True

    def _learn(self) -> None:
        session = _session.default_session() if self._session is None else self._session
        if _hold.is_held(session):
            raise _hold.refusal(
                session,
                "PyTorch's own wrapper does not work, because a replacement would have other "
                "buckets than it",
                "use gradsync.torch.DistributedDataParallel",
            )
        self._session = session
        buckets = []
        for buffer in self._shown:
            if buffer.dtype not in DATA_TYPES or buffer.device.type not in ("cpu", "cuda"):
                raise TypeError(
                    f"gradsync: a bucket is {buffer.dtype} on {buffer.device}; gradsync averages "
                    "float32, float64, float16 and bfloat16, in host memory or on a CUDA device"
                )
            buckets.append(gradsync.Bucket(buffer.numel(), DATA_TYPES[buffer.dtype]))
        if self._name is None:
            self._name = _session.unique_name(session, "hook")
        self._hand_off = hand_off_of(self._shown[0].device)
        options: dict[str, Any] = {
            "explicit_buckets": buckets,
            "timeout": self._timeout,
            **self._hand_off.layout_options,
        }
        try:
            if self._layout is None:
                self._layout = session.register_layout(self._name, **options)
            else:
                self._layout = session.replace_layout(self._layout, self._name, **options)
        except gradsync.Error as error:
            _session.note(session, error)
            raise
        self._sizes = [(buffer.numel(), buffer.dtype) for buffer in self._shown]
        device = self._shown[0].device
        self._views = [flat_tensor(self._layout.bucket(i), device) for i in range(len(buckets))]
        # Not next_step: if another rank has abandoned this step already, this pass gets the error.
        self._step = self._layout.first_step
        for index in range(len(buckets)):
            self._hand_over(index)

    def _finish(self) -> None:
        assert self._layout is not None and self._session is not None
        self._shown = []
        try:
            self._layout.end_step(self._step)
            self._hand_off.wait(self._layout, self._step)
        except gradsync.Error as error:
            _session.note(self._session, error)
            raise

    def _abandon(self, reason: str) -> None:
        assert self._layout is not None and self._session is not None
        try:
            self._layout.abandon_step(self._step, reason)
            self._layout.wait_step(self._step)
        except gradsync.Error as error:
            _session.note(self._session, error)
            if _session.has_ended(self._session):
                raise


# States of modules whose hook was registered without a state, by the identity of their parameters.
_states: dict[int, tuple[weakref.ref[torch.Tensor], HookState]] = {}


def _state_of(bucket: Any) -> HookState:
    parameters = bucket.parameters()
    entry = _states.get(id(parameters[0]))
    if entry is not None and entry[0]() is parameters[0]:
        if bucket.index() == 0 and entry[1].knows_end():
            _drop_ended()
        return entry[1]
    # The first pass. Its first bucket makes the state. With find_unused_parameters DDP has more
    # buckets in this pass; they come before any other module's.
    if bucket.index() == 0:
        for key in [key for key, (parameter, _) in _states.items() if parameter() is None]:
            del _states[key]
        _drop_ended()
        state = HookState()
    else:
        state = _latest[0]
    _latest[:] = [state]
    for parameter in parameters:
        _states[id(parameter)] = (weakref.ref(parameter), state)
    return state


def _drop_ended() -> None:
    for state in {state for _, state in _states.values()}:
        state.drop_ended()


_latest: list[HookState] = []


def allreduce_hook(state: HookState | None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Averages the buckets of PyTorch's DistributedDataParallel through the daemon.

        model = torch.nn.parallel.DistributedDataParallel(module)
        model.register_comm_hook(None, gradsync.torch.allreduce_hook)

    Each bucket is copied once, into memory that is shared with the daemon, and DDP copies the
    average out of it. The call for the last bucket returns when all buckets are averaged. In the
    first one or two backward passes the hook learns the buckets, and nothing overlaps. DDP uses its
    process group for everything else: buffers and unused parameters.

    Args:
      state: None, or a `HookState` with a session or name of your choice, one for each module.
      bucket: a `torch.distributed.GradBucket` of float32, float64, float16 or bfloat16, on the
        host or a GPU.

    Returns:
      A future of the average, in memory shared with the daemon: valid until the next backward pass.

    Raises:
      TypeError: a bucket has another dtype or device.
      gradsync.Error: the step is void, or the session has ended; raised by `backward()`. DDP cannot
        continue then: wrap the module again.
    """
    return (_state_of(bucket) if state is None else state).average(bucket)


# DDP compares the annotations with types of its own. Here they are strings, so it gets none.
allreduce_hook.__annotations__ = {}
