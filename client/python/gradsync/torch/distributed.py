"""A module whose gradients the daemon averages over the ranks while its backward pass runs."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
import weakref
from typing import Any, Callable, Iterator, Mapping, Sequence

import torch

import gradsync
from gradsync.torch import _checks, _clipping, _hooks, _session, _state
from gradsync.torch._gradients import Slot, layout_parameters
from gradsync.torch._hand_off import hand_off_of

_MIB = 1 << 20
# Seconds; as the daemon waits for a layout.
_WRAP_TIMEOUT = 300.0

_orders = itertools.count()
# Wrapped modules that are in a job.
_live: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


@dataclasses.dataclass(frozen=True)
class StepStatistics:
    """What a wrapped module's synchronized steps were like.

    Times are sums over the steps, in seconds.

    Attributes:
      steps: synchronized backward passes that were committed.
      buckets: of the layout.
      bytes: of gradients per step and rank.
      backward: from the first gradient of an output to the last gradient of a parameter.
      until_first_bucket: the part of `backward` before the first bucket was ready. Near all of it:
        nothing overlaps, as when the whole module is one torch.compile graph (compile its blocks
        separately).
      exposed: from the end of backward to the commit, which nothing hides.
      rebuilt: whether the buckets follow the order in which gradients were observed to be ready.
    """

    steps: int
    buckets: int
    bytes: int
    backward: float
    until_first_bucket: float
    exposed: float
    rebuilt: bool


class _Step:
    """One synchronized backward pass under way."""

    __slots__ = ("backward", "began", "first_bucket", "number", "order", "waiting")

    def __init__(self, number: int, backward: int | None, waiting: list[int]) -> None:
        self.number = number
        self.backward = backward
        self.waiting = waiting  # per bucket, gradients that have not come
        self.order: list[Slot] = []  # as the gradients came
        self.began = time.perf_counter()
        self.first_bucket = 0.0


class DistributedDataParallel(torch.nn.Module):
    """Wraps a module so that each backward pass leaves the average of all ranks' gradients.

    Like `torch.nn.parallel.DistributedDataParallel`, with the daemon in the place of a process
    group:

        -from torch.nn.parallel import DistributedDataParallel
        +from gradsync.torch import DistributedDataParallel
        -torch.distributed.init_process_group("gloo")
         model = DistributedDataParallel(model)

    Gradients lie in memory that is shared with the daemon; `parameter.grad` is a view of it.
    Whenever the last gradient of a bucket is there, the daemon starts to average that bucket, and
    `backward()` returns when all are averaged, on every rank alike. A forward pass under
    `no_sync()` only accumulates. A backward pass through a forward outside of it is one step: every
    rank must run as many, of each wrapped module in the same order.

    A parameter that got no gradient on this rank counts as zero; if it got none on any rank, its
    `grad` is left alone. The first step may change the buckets: to the order in which gradients
    become ready.

    Not thread-safe; use it on the thread that trains. `copy.deepcopy` and pickle give a wrapper of
    a copy of the module that is in no job: it computes, and refuses to synchronize.

    Args:
      module: with parameters of float32, float64, float16 or bfloat16, on the host or all on one
        GPU. Parameters that do not require a gradient now stay out. Names in
        `module._ddp_params_and_buffers_to_ignore` do too.
      device_ids, output_device, dim, process_group: PyTorch's; None, None, 0 and None.
      broadcast_buffers: whether each step ends with the buffers of the lowest live rank on every
        rank.
      init_sync: whether to begin with a check that all ranks have the same module, and rank 0's
        parameters and buffers on all of them.
      bucket_cap_mb: MiB of a bucket, at most; 25 if None. A larger parameter has a bucket of its
        own.
      find_unused_parameters: PyTorch's; unused parameters are always found, when the backward pass
        ends.
      gradient_as_bucket_view: PyTorch's; always on.
      static_graph: promises that every step uses the same parameters equally often. A parameter
        that is used in several reentrant checkpoints needs it; the first step does not overlap
        then.
      session: the job to synchronize in; None: the process's own, which it joins by torchrun's
        environment.
      name: of the layout in status and statistics; None: `ddp0`, `ddp1`, ... in the order of
        wrapping.
      first_bucket_cap_mb: MiB of the bucket that is ready first.
      last_bucket_cap_mb: MiB of the one that is ready last: nothing hides its reduction.
      timeout: seconds to wait for the other ranks to wrap the module; None: 5 minutes.

    Raises:
      ValueError: an argument has no meaning here, or the modules differ (on every rank; says
        where).
      TypeError: a parameter or submodule cannot be synchronized (says why and what to do).
      gradsync.Error: the daemon is not there, another rank was lost or did not come, a quota.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        *,
        session: gradsync.Session | None = None,
        name: str | None = None,
        first_bucket_cap_mb: float = 1,
        last_bucket_cap_mb: float = 4,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        _hooks.keep_from_compiling(DistributedDataParallel, "forward")
        _checks.check_arguments(
            device_ids,
            output_device,
            dim,
            process_group,
            bucket_cap_mb=bucket_cap_mb,
            first_bucket_cap_mb=first_bucket_cap_mb,
            last_bucket_cap_mb=last_bucket_cap_mb,
        )
        _checks.check_module(
            module, (DistributedDataParallel, torch.nn.parallel.DistributedDataParallel)
        )
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = True
        self.static_graph = static_graph
        self._ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._cap_bytes = int((25 if bucket_cap_mb is None else bucket_cap_mb) * _MIB)
        self._first_cap_bytes = int(first_bucket_cap_mb * _MIB)
        self._last_cap_bytes = int(last_bucket_cap_mb * _MIB)
        self._timeout = timeout
        self._synchronize = True
        self._forwards = _hooks.Forwards()
        self._step: _Step | None = None
        self._interrupted: int | None = None  # the step that Ctrl-C kept from its verdict
        self._decided = 0  # the last step whose verdict this rank has seen
        self._last_step: gradsync.StepResult | None = None
        self._counts_known = not static_graph
        self._totals = [0, 0.0, 0.0, 0.0]  # steps, backward, until first bucket, exposed
        self._rebuilt = False
        self._scale_of: (
            tuple[weakref.ref[torch.optim.Optimizer], _clipping.NextStepScale] | None
        ) = None

        self._order = next(_orders)
        self._slots = [
            Slot(parameter_name, parameter, _hooks.accumulate_node(parameter))
            for parameter_name, parameter in module.named_parameters()
            if parameter.requires_grad and parameter_name not in self._ignored
        ]
        self._hand_off = hand_off_of(self._slots[0].parameter.device)
        self._seen = _checks.Identity(module)
        self._claim()
        self._session = _session.default_session() if session is None else session
        self._step_timeout = self._session.options.step_timeout
        self._name = name if name is not None else _session.unique_name(self._session, "ddp")
        with self._noting():
            if init_sync:
                self._synchronize_state()
            self._layout = self._session.register_layout(
                self._name, **self._layout_options(self._slots)
            )
        self._place(self._slots)
        wrapper = weakref.ref(self)
        for slot in self._slots:
            slot.handle = _hooks.on_accumulated(slot.parameter, slot.node, _Hook(wrapper, slot))
        self._begin = _BeginHook(wrapper)
        _live.add(self)
        # The module may be wrapped again.
        weakref.finalize(self, _remove, [slot.handle for slot in self._slots]).atexit = False

    # ---- What a trainer calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass.

        Raises:
          RuntimeError: a parameter was replaced, converted, added, or began to require a gradient
            since the module was wrapped; or this is a copy of a wrapper, and gradients are enabled.
          gradsync.Error: the session has ended, or another rank's buckets could not be agreed with.
        """
        synchronize = self._synchronize and torch.is_grad_enabled()
        if synchronize and self._session is None:
            raise RuntimeError(
                "gradsync: this is a copy of a wrapped module, and in no job; wrap its .module to "
                "train it"
            )
        if torch.is_grad_enabled() and self._session is not None:
            self._before_forward()
        output = self.module(*args, **kwargs)
        if torch.is_grad_enabled() and self._session is not None:
            self._forwards.add(synchronize, _tensors(output), self._begin)
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """In this context forward passes only accumulate; the next one outside synchronizes."""
        before = self._synchronize
        self._synchronize = False
        try:
            yield
        finally:
            self._synchronize = before

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool | None = None,
        enable: bool = True,
        timeout: float | None = None,
    ) -> Iterator[None]:
        """For ranks with different numbers of steps: nobody waits for one that has no more.

        At its end, the context waits until every rank has come to it, and gives all of them the
        parameters and buffers of the rank that came last. Then all take part again. For several
        wrapped modules use `gradsync.torch.join`.

        Args:
          divide_by_initial_world_size: whether averages divide by the world size also when ranks
            have come to their end; must be the session's `divisor`. None: as the session does.
          enable: False makes the context do nothing.
          timeout: seconds that a rank waits at the context's end for the others, which have data
            still; None: 30 min.

        Raises:
          ValueError: `divide_by_initial_world_size` is not what the session was joined with.
          gradsync.DeadlineExceededError: names the ranks that did not come to the end.
          gradsync.Error: a rank was lost.
        """
        with join([self], divide_by_initial_world_size, enable, timeout):
            yield

    def leave(self) -> None:
        """Ends this rank's part in the job: the others go on without it, and the process may exit.

        Ends the session, with all modules that are wrapped in it. Use `join` to come back.

        Raises:
          gradsync.FailedPreconditionError: a step is open.
        """
        self._require_session()
        self._abandon_stale("this rank leaves")
        self._session.leave()
        _session.end(self._session)

    @property
    def last_step(self) -> gradsync.StepResult | None:
        """The last committed step; None before the first."""
        return self._last_step

    @property
    def gradient_norm(self) -> float:
        """L2 norm of the averaged gradients as the last step left them.

        The daemon computed it while it averaged: no pass over the gradients. NaN or infinite if a
          gradient is.
        """
        if self._last_step is None:
            raise RuntimeError(
                "gradsync: there is no gradient norm before the first synchronized step"
            )
        return self._last_step.gradient_norm

    def clip_grad_norm_(
        self, max_norm: float, optimizer: torch.optim.Optimizer | None = None
    ) -> float:
        """Scales the averaged gradients of the last step down so that their L2 norm is at most
        `max_norm`.

        The norm needs no pass over the gradients, and nor does a step that need not be clipped.
        Scaling is one multiplication per bucket, in place; a fused optimizer does it while it reads
        the gradients. Call it once between `backward()` and `optimizer.step()`, with gradients that
        nothing else has changed since. With GradScaler call `scaler.unscale_(optimizer)` first,
        and this with `max_norm * scaler.get_scale()` and no optimizer.

        Args:
          max_norm: of all gradients together.
          optimizer: if it was built with `fused=True` and has these parameters and no others, it
            is told the scale for its next step, and the gradients are left alone.

        Returns:
          The norm before.
        """
        norm = self.gradient_norm
        coefficient = gradsync.clip_coefficient(norm, max_norm)
        self._forget_scale()
        if coefficient == 1.0:
            return norm
        parameters = [slot.parameter for slot in self._slots]
        if optimizer is not None and _clipping.takes_scale(optimizer, parameters, coefficient):
            if self._scale_of is None or self._scale_of[0]() is not optimizer:
                self._scale_of = weakref.ref(optimizer), _clipping.NextStepScale(optimizer)
            self._scale_of[1].set(coefficient)
            return norm
        with torch.no_grad():
            gradients = [slot.view for slot in self._slots if slot.parameter.grad is slot.view]
            if gradients:
                torch._foreach_mul_(gradients, coefficient)
        return norm

    def _forget_scale(self) -> None:
        """An optimizer's step that was left out shall not scale a later one."""
        if self._scale_of is not None:
            self._scale_of[1].clear()

    def statistics(self) -> StepStatistics:
        """Counters since the module was wrapped."""
        self._require_session()
        steps, backward, first, exposed = self._totals
        layout = self._layout
        return StepStatistics(
            steps=int(steps),
            buckets=layout.bucket_count,
            bytes=sum(layout.bucket(i).nbytes for i in range(layout.bucket_count)),
            backward=backward,
            until_first_bucket=first,
            exposed=exposed,
            rebuilt=self._rebuilt,
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's own: no prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loads the wrapped module's, with or without the `module.` of PyTorch's wrapper."""
        prefix = "module."
        own = self.module.state_dict().keys()
        if (
            state_dict
            and all(key.startswith(prefix) for key in state_dict)
            and not any(key.startswith(prefix) for key in own)
        ):
            state_dict = {key[len(prefix) :]: value for key, value in state_dict.items()}
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # As a part of another module: its state_dict() has no "module." either.
        inner = f"{prefix}module."
        if not any(key.startswith(inner) for key in state_dict):
            for key in [key for key in state_dict if key.startswith(prefix)]:
                state_dict[inner + key[len(prefix) :]] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for key in ("_layout", "_begin", "_seen", "_forwards", "_hand_off"):
            state.pop(key, None)
        state.update(_session=None, _step=None, _last_step=None, _slots=[], _scale_of=None)
        return state

    # ---- Joining

    def _claim(self) -> None:
        """Makes sure that no other wrapper, unless its session is over, has one of the parameters:
        their gradients would lie in two places.

        Raises:
          TypeError: names the parameter and the other wrapper.
        """
        taken = self._taken()
        if taken is not None:
            raise TypeError(
                f"gradsync: parameter {taken} already; wrap one module that holds both, or delete "
                "the other wrapper first"
            )

    def _taken(self) -> str | None:
        # No reference to the other wrapper may stay in an exception's frames.
        mine = {id(slot.parameter): slot.name for slot in self._slots}
        for other in list(_live):
            shared = [mine[id(s.parameter)] for s in other._slots if id(s.parameter) in mine]
            if shared and not _session.is_over(other._session):
                return f"'{shared[0]}' belongs to wrapped module '{other._name}'"
            if shared:
                other._release()
        return None

    def _release(self) -> None:
        """Lets go of the parameters: the session is over, and another wrapper takes them."""
        for slot in self._slots:
            slot.handle.remove()
        _live.discard(self)

    def _require_session(self) -> None:
        if self._session is None:
            raise RuntimeError(
                "gradsync: this is a copy of a wrapped module, and in no job; wrap its .module"
            )

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except gradsync.Error as error:
            _session.note(self._session, error)
            raise

    def _broadcast(
        self,
        tensors: Sequence[torch.Tensor],
        root: int,
        what: str,
        timeout: float | None = None,
    ) -> None:
        if timeout is None:
            timeout = self._step_timeout
        with self._noting():
            _state.broadcast_tensors(
                self._session, tensors, root, f"{what} of '{self._name}'", timeout
            )

    def _state(self) -> list[tuple[str, str, torch.Tensor]]:
        """(kind, name, tensor) of all that ranks must have in common."""
        state = [("parameter", name, p.detach()) for name, p in self.module.named_parameters()]
        state += [("buffer", name, b) for name, b in self.module.named_buffers()]
        return [entry for entry in state if entry[1] not in self._ignored]

    def _synchronize_state(self) -> None:
        state = self._state()
        trainable = {slot.name for slot in self._slots}
        lines = [
            f"the name '{self._name}'",
            f"bucket_cap_mb={self._cap_bytes / _MIB:g}",
            f"first_bucket_cap_mb={self._first_cap_bytes / _MIB:g}",
            f"last_bucket_cap_mb={self._last_cap_bytes / _MIB:g}",
            f"broadcast_buffers={self.broadcast_buffers}",
            f"static_graph={self.static_graph}",
        ]
        lines += [
            _state.describe(kind, name, tensor)
            + (", frozen" if kind == "parameter" and name not in trainable else "")
            for kind, name, tensor in state
        ]
        timeout = _WRAP_TIMEOUT if self._timeout is None else self._timeout
        _state.verify(self._session, lines, timeout)
        self._broadcast([tensor for _, _, tensor in state], 0, "the state", timeout)

    def _layout_options(self, slots: Sequence[Slot]) -> dict[str, Any]:
        return {
            "parameters": layout_parameters(slots),
            "bucket_cap_bytes": self._cap_bytes,
            "first_bucket_cap_bytes": self._first_cap_bytes,
            "last_bucket_cap_bytes": self._last_cap_bytes,
            "timeout": self._timeout,
            **self._hand_off.layout_options,
        }

    def _place(self, slots: Sequence[Slot]) -> None:
        """Takes `slots`, in this order, for the parameters of the layout."""
        self._slots = list(slots)
        waiting = [0] * self._layout.bucket_count
        for index, slot in enumerate(self._slots):
            slot.place(self._layout, index)
            waiting[slot.bucket] += 1
        self._gradients_of_bucket = waiting

    # ---- Before a forward pass

    def _before_forward(self) -> None:
        if self._step is not None and not _hooks.in_backward():
            self._abandon_stale("its backward pass did not finish")
        self._seen.check()

    # ---- In a backward pass

    def _begin_step(self) -> None:
        backward = _hooks.backward_id()
        step = self._step
        if step is not None:
            if step.backward == backward:
                return
            self._abandon_stale("another backward pass began before it had finished")
        if self._session is None:
            return
        self._forget_scale()
        self._catch_up()
        for slot in self._slots:
            slot.firings = 0
        self._hand_off.begin()
        self._step = _Step(self._layout.next_step, backward, list(self._gradients_of_bucket))
        _hooks.at_end_of_backward(self._end_backward)

    def _catch_up(self) -> None:
        """Raises the verdict of a step that was decided without this rank: it came too late to it,
        or was interrupted while it waited."""
        missed = self._layout.next_step - 1
        if self._interrupted is not None:
            missed = self._interrupted
        if missed <= self._decided:
            return
        try:
            self._layout.wait_step(missed)
        except gradsync.Error as error:
            self._decided = max(missed, self._layout.next_step - 1)
            self._interrupted = None
            self._drop(error)
            raise
        raise RuntimeError(
            f"gradsync: step {missed} of '{self._name}' is complete on the other ranks, but this "
            "rank was interrupted while it waited, and has dropped its gradients: parameters may "
            "differ between the ranks. Wrap the module again on every rank"
        )

    def _on_gradient(self, slot: Slot) -> None:
        """Autograd has added to the gradient of `slot`."""
        if slot.parameter.grad is None:  # a node on the way gave none: not used
            return
        if self._step is None:
            if not self._forwards.unseen_begins(_hooks.backward_id(), slot.name):
                slot.accumulated = True
                return
            self._begin_step()
        step = self._step
        assert step is not None
        slot.firings += 1
        if slot.firings > slot.expected and self._counts_known:
            self._fail(
                step,
                RuntimeError(
                    f"gradsync: parameter '{slot.name}' got a second gradient in one backward "
                    "pass, after the first was handed over; a parameter that several reentrant "
                    "checkpoints share needs use_reentrant=False or static_graph=True"
                ),
            )
        if slot.parameter.grad is not slot.view:
            try:
                slot.bring_home()
            except RuntimeError as error:
                self._fail(step, error)
        if slot.firings == slot.expected and self._counts_known:
            self._arrived(step, slot)

    def _arrived(self, step: _Step, slot: Slot) -> None:
        step.order.append(slot)
        bucket = slot.bucket
        waiting = step.waiting[bucket] - 1
        step.waiting[bucket] = waiting
        self._hand_off.arrived(bucket)
        if waiting == 0:
            if step.first_bucket == 0.0:
                step.first_bucket = time.perf_counter()
            try:
                self._hand_off.mark_ready(self._layout, step.number, bucket)
            except gradsync.Error as error:
                self._drop(error)
                raise

    def _end_backward(self) -> None:
        """The pass is over: ends the step, which hands over the buckets that are left."""
        step = self._step
        if step is None:
            return
        ended = time.perf_counter()
        unused: list[tuple[Slot, torch.Tensor | None]] = []
        with torch.no_grad():
            if len(step.order) < len(self._slots):
                arrived = set(map(id, step.order))
                for slot in self._slots:
                    if id(slot) not in arrived:
                        self._settle(slot, unused)
                        step.order.append(slot)
            used = None
            if unused:
                flags = [True] * len(self._slots)
                for slot, _ in unused:
                    flags[slot.index] = False
                used = flags
        try:
            self._hand_off.finish_step(self._layout, step.number, used)
        except gradsync.Error as error:
            self._drop(error)
            raise
        # After every other module's end, and in the order of wrapping: ranks that waited for
        # different modules would wait for ever.
        _endings.append((self._order, lambda: self._finish(step, unused, ended)))
        _hooks.at_end_of_backward(_finish_all)

    def _settle(self, slot: Slot, unused: list[tuple[Slot, torch.Tensor | None]]) -> None:
        """Makes the view of a parameter that this pass gave no gradient (or, with static_graph,
        whose gradients were only counted) hold what this rank contributes."""
        gradient = slot.parameter.grad
        if gradient is None:
            slot.view.zero_()
            unused.append((slot, None))
            return
        if gradient is not slot.view:
            slot.bring_home()
        if slot.firings == 0 and not slot.accumulated:
            # Left from an earlier step. If nobody used the parameter, it shall stay, to the bit.
            unused.append((slot, slot.view.clone()))

    def _finish(
        self, step: _Step, unused: list[tuple[Slot, torch.Tensor | None]], ended: float
    ) -> None:
        """Waits for the verdict."""
        if self._step is not step:
            return
        try:
            result = self._hand_off.wait(self._layout, step.number)
        except gradsync.Error as error:
            self._drop(error)
            raise
        except BaseException:  # Ctrl-C: the verdict will come, but this pass does not see it
            self._interrupted = step.number
            self._clear()
            raise
        self._decided = step.number
        for slot, before in unused:
            if result.used is not None and not result.used[slot.index]:
                if before is not None:
                    slot.view.copy_(before)
            else:
                slot.parameter.grad = slot.view
        for slot in self._slots:
            slot.accumulated = False
        if not self._counts_known:
            for slot in self._slots:
                slot.expected = max(1, slot.firings)
            self._counts_known = True
            order = None
        else:
            order = step.order
        self._step = None
        self._last_step = result
        # Here all ranks are: whoever comes not is lost, or as late as it may be in a step.
        if self.broadcast_buffers:
            self._broadcast_buffers()
        committed = time.perf_counter()
        totals = self._totals
        totals[0] += 1
        totals[1] += ended - step.began
        totals[2] += (step.first_bucket or ended) - step.began
        totals[3] += committed - ended
        if order is not None and not self._rebuilt:
            if result.live_ranks == self._session.world_size:
                self._rebuild(order)

    def _broadcast_buffers(self) -> None:
        buffers = [b for name, b in self.module.named_buffers() if name not in self._ignored]
        if buffers:
            self._broadcast(buffers, gradsync.LOWEST_LIVE_RANK, "the buffers")

    def _rebuild(self, observed: Sequence[Slot]) -> None:
        """Cuts buckets anew, in the order of gradients that the lowest live rank observed."""
        indices = torch.tensor([slot.index for slot in observed], dtype=torch.int32)
        self._broadcast([indices], gradsync.LOWEST_LIVE_RANK, "the bucket order")
        # The rule goes through parameters from the last to the first.
        order = [self._slots[i] for i in reversed(indices.tolist())]
        if order != self._slots:
            try:
                with self._noting():
                    self._layout = self._session.replace_layout(
                        self._layout, self._name, **self._layout_options(order)
                    )
            except gradsync.FailedPreconditionError as error:
                if error.reason != "RANKS_LEFT":
                    raise
                return  # a rank is done with its data; a later step tries again
            self._place(order)
        self._rebuilt = True

    # ---- When a pass fails

    def _fail(self, step: _Step, error: Exception) -> None:
        """Abandons the step because of this rank's own error, and raises it."""
        self._abandon(step, str(error))
        raise error

    def _abandon_stale(self, why: str) -> None:
        """Abandons a step whose backward pass has died, if there is one."""
        if self._step is not None:
            self._abandon(self._step, why)

    def _abandon(self, step: _Step, reason: str) -> None:
        self._decided = max(self._decided, step.number)  # however it is decided, this rank knows
        try:
            if self._layout.next_step == step.number:
                self._layout.abandon_step(step.number, reason)
                self._layout.wait_step(step.number)
        except gradsync.Error as error:
            self._drop(error)
            if _session.is_over(self._session):
                raise
        self._clear()

    def _drop(self, error: gradsync.Error) -> None:
        _session.note(self._session, error)
        if self._step is not None:
            self._decided = max(self._decided, self._layout.next_step - 1)
        self._clear()

    def _clear(self) -> None:
        """Forgets the step and the gradients: partly averaged, they must reach no optimizer."""
        self._step = None
        for slot in self._slots:
            slot.parameter.grad = None
            slot.accumulated = False


@contextlib.contextmanager
def join(
    modules: Sequence[DistributedDataParallel],
    divide_by_initial_world_size: bool | None = None,
    enable: bool = True,
    timeout: float | None = None,
) -> Iterator[None]:
    """`DistributedDataParallel.join` for several wrapped modules of one session.

    Args:
      modules: all that are trained in the context, in the same order on every rank.
      divide_by_initial_world_size: see there.
      enable: see there.
      timeout: see there.

    Raises:
      ValueError: no modules, several sessions, or a divisor that is not the session's.
      gradsync.Error: as there.
    """
    if not enable:
        yield
        return
    if not modules:
        raise ValueError("gradsync: join() of no module")
    for module in modules:
        module._require_session()
    session = modules[0]._session
    if any(module._session is not session for module in modules):
        raise ValueError("gradsync: join() of modules of several sessions")
    by_world = session.options.divisor == "world"
    if divide_by_initial_world_size not in (None, by_world):
        raise ValueError(
            "gradsync: this session divides by "
            f"{'the world size' if by_world else 'the live ranks'}; join it with "
            f"gradsync.torch.init(divisor='{'live_ranks' if by_world else 'world'}') on every "
            "rank, before the first module is wrapped"
        )
    yield
    for module in modules:
        module._abandon_stale("its backward pass did not finish")
    with modules[0]._noting():
        last = session.leave_and_stay(timeout)
        for module in modules:
            module._broadcast([tensor for _, _, tensor in module._state()], last, "the final state")
            module._decided = module._layout.next_step - 1


# Of the modules whose part of a backward pass is over, by the order in which they were wrapped.
_endings: list[tuple[int, Callable[[], None]]] = []


def _finish_all() -> None:
    """Waits for the verdict of every module that had a part in the pass."""
    endings = sorted(_endings, key=lambda ending: ending[0])
    _endings.clear()
    first: BaseException | None = None
    for _, finish in endings:
        try:
            finish()
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


def _before_optimizer_step(*_: Any) -> None:
    """Drops gradients that a backward pass left half averaged when it died."""
    for module in list(_live):
        if module._step is not None and not _hooks.in_backward():
            module._abandon_stale("its backward pass did not finish")


_hooks.before_optimizer_steps(_before_optimizer_step)


class _Hook:
    """What autograd holds of a wrapper at a parameter: no reference that keeps the wrapper."""

    __slots__ = ("slot", "wrapper")

    def __init__(self, wrapper: weakref.ref[DistributedDataParallel], slot: Slot) -> None:
        self.wrapper = wrapper
        self.slot = slot

    def __call__(self) -> None:
        wrapper = self.wrapper()
        if wrapper is not None:
            wrapper._on_gradient(self.slot)


class _BeginHook:
    """Begins a step of a wrapper, if it is still there and the pass adds to gradients."""

    __slots__ = ("wrapper",)

    def __init__(self, wrapper: weakref.ref[DistributedDataParallel]) -> None:
        self.wrapper = wrapper

    def __call__(self, output_node: Any, synchronize: bool) -> bool:
        """Returns whether the pass adds to gradients."""
        wrapper = self.wrapper()
        if wrapper is None:
            return False
        nodes = (slot.node for slot in reversed(wrapper._slots))
        if not _hooks.reaches_gradients(output_node, nodes):
            return False
        if synchronize:
            wrapper._begin_step()
        return True


def _tensors(output: Any) -> Iterator[Any]:
    """The tensors in nested sequences, mappings and data classes."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple, set, frozenset)):
        for value in output:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from _tensors(getattr(output, field.name, None))
