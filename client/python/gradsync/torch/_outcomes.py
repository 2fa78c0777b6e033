"""What becomes of a wrapped module's steps: committed if complete, dropped if void."""

from __future__ import annotations

import contextlib
from typing import Iterator, NoReturn

import gradsync
from gradsync.torch import _autograd, _endings, _session
from gradsync.torch._buckets import Buckets
from gradsync.torch._buffer_bucket import BufferBucket
from gradsync.torch._device_verdicts import FollowedStep
from gradsync.torch._divisor import divide_by
from gradsync.torch._first_steps import FirstSteps
from gradsync.torch._parameter_hooks import ParameterHooks
from gradsync.torch._positions import Positions
from gradsync.torch._state import ModuleState
from gradsync.torch._step import Step
from gradsync.torch._verdicts import Verdicts, is_silence


class Outcomes:
    """Begins each step and ends it by its verdict. No partly averaged gradient outlives its step.

    Owned by the synchronizer, to which it does not refer. Used on the thread that trains, and on
    the one that runs a backward pass.

    Args:
      state: the module's.
      buckets: its parameters' layout; none of its steps has begun yet.
      first_steps: what they teach.
      hooks: the users', which run on averages.
      broadcast_buffers: see below.
      device_verdict: whether to leave the verdict to optimizers where the host need not know it.
      positions: of the steps, where lost ranks are replaced; else None.
      buffer_bucket: of the layout, for the buffers; None: they are broadcast.

    Attributes:
      step: the one that runs; None if there is none.
      by_world: True: averages divide by the world size. False: by the ranks that take part. None:
        as the session does.
      broadcast_buffers: whether each step ends with the buffers of the lowest live rank everywhere.
      verdicts: of the steps.
    """

    def __init__(
        self,
        state: ModuleState,
        buckets: Buckets,
        first_steps: FirstSteps,
        hooks: ParameterHooks,
        *,
        broadcast_buffers: bool,
        device_verdict: bool,
        positions: Positions | None = None,
        buffer_bucket: BufferBucket | None = None,
    ) -> None:
        self.step: Step | None = None
        self.by_world: bool | None = None
        self.verdicts = Verdicts(buckets)
        self._state = state
        self._buckets = buckets
        self._first_steps = first_steps
        self._hooks = hooks
        self.broadcast_buffers = broadcast_buffers
        self._device_verdict = device_verdict
        self._positions = positions
        self._buffer_bucket = buffer_bucket

    # ---- Verdicts that are on the device

    @property
    def followed(self) -> FollowedStep | None:
        """The last step, if its verdict is on the device and the host has not looked at it."""
        return self.verdicts.followed

    def settle(self) -> gradsync.Error | None:
        """Waits on the host for the verdicts that are on the device; see Verdicts.settle()."""
        with self._clearing():
            return self.verdicts.settle()

    def drop_if_void(self) -> gradsync.Error | None:
        """settle(), and drops the gradients if the last of these steps is void; returns why."""
        error = self.settle()
        if error is not None:
            self._drop(error)
        return error

    # ---- A step

    def begin_step(self, backward: int | None) -> None:
        """Begins the next step, in the backward pass of this number.

        Raises: the verdict of a step that was decided without this rank, or while this rank had
          stopped waiting, unless only optimizers need it.
        """
        number, void = self._next_step()
        for slot in self._buckets.slots:
            slot.firings = 0
        self._buckets.begin_step()
        self.step = Step(number, backward, self._buckets.sizes, void)

    def _next_step(self) -> tuple[int, gradsync.Error | None]:
        """The step to run now, and None; or a step that this rank has missed, and why it is void.

        Raises: as begin_step().
        """
        number = self._buckets.layout.next_step
        with self._clearing():
            self.verdicts.settle_before(number)
        missed = self.verdicts.missed(number)
        if missed is None:
            return number, None
        decided, error = missed
        try:
            if self._only_optimizers_need_verdicts and _session.voids_step(error):
                return decided, error
            self._drop(error)
            raise error
        finally:
            del missed, error  # it refers to this frame, which would keep the error alive

    @property
    def _only_optimizers_need_verdicts(self) -> bool:
        """Whether steps' verdicts may stay on the device."""
        return self._device_verdict and self._first_steps.over

    def leaves_out(self, step: Step, error: gradsync.Error) -> bool:
        """Records that daemon or library refuse the rest of `step`; says whether the pass goes on.

        It goes on if only optimizers need to know. Otherwise the caller raises `error`. This method
        does not: its frame refers to the error, and must not be in the error's traceback.
        """
        if self._only_optimizers_need_verdicts and _session.voids_step(error):
            step.leave_out(error)
            return True
        self._drop(error)
        return False

    def finish(self, step: Step) -> None:
        """Waits for the verdict; on the host unless only optimizers need it."""
        if self.step is not step:
            return
        # The host must know the verdict to leave alone the gradients that no rank used, to run
        # users' hooks, and to divide otherwise than the daemon.
        known_to_host = step.unused or self._hooks.present or self.by_world is not None
        if self._only_optimizers_need_verdicts and (not known_to_host or step.void is not None):
            self._follow(step)
            return
        try:
            result = self.verdicts.wait(step)
        except BaseException as error:
            if isinstance(error, gradsync.Error) and not is_silence(error):
                self._drop(error)
            else:
                self._clear()
            raise
        self._commit(step, result)

    def _commit(self, step: Step, result: gradsync.StepResult) -> None:
        """The step is complete: its gradients are averages."""
        if self.by_world is not None:
            world_size = self._buckets.session.world_size
            divisor = world_size if self.by_world else result.live_ranks
            result = divide_by(divisor, result, self._buckets.slots)
            self.verdicts.last_result = result
        step.commit(result)
        for slot in self._buckets.slots:
            slot.accumulated = False
        observed = self._first_steps.learn(step)
        self.step = None
        self._take_buffers(result.live_ranks)
        if self._positions is not None:
            self._positions.step_is_complete()
        self.verdicts.times.add(step.times())
        self._hooks.run(result.used)
        self._first_steps.rebuild(observed, result.live_ranks)

    def write_buffers(self, step: Step) -> None:
        """The pass has ended: puts the buffers into their bucket, if they have one.

        Raises:
          RuntimeError: the module has other buffers than when it was wrapped.
        """
        if self._buffer_bucket is None:
            return
        try:
            self._buffer_bucket.write(
                self._buckets.layout,
                self._buckets.session.rank,
                list(self._state.buffers().values()),
            )
        except RuntimeError as error:
            self.fail(step, error)

    def _take_buffers(self, live_ranks: int) -> None:
        """The step is complete: gives all ranks the buffers of the lowest live rank."""
        if self._buffer_bucket is not None and live_ranks == self._buckets.session.world_size:
            self._buffer_bucket.take(self._buckets.layout)
        elif self.broadcast_buffers:
            # It waits for no rank that computes: every rank has ended this step.
            self._state.broadcast_buffers()

    def broadcast_buffers_now(self) -> None:
        """Gives all ranks the buffers of the lowest live rank; every rank must call it."""
        self._state.broadcast_buffers()

    def _follow(self, step: Step) -> None:
        """Makes later work on the current stream wait for averages and verdict, but not the host.

        The module has no buffers to broadcast: a broadcast would make the host wait.
        """
        if step.void is None:
            try:
                self.verdicts.follow(step)
            except gradsync.Error as error:
                if not self.leaves_out(step, error):
                    raise
        if step.void is not None:
            self.verdicts.follow_void(step)
        for slot in self._buckets.slots:
            slot.accumulated = False
        self.step = None

    # ---- When a pass fails

    def abandon_stale(self, why: str) -> int | None:
        """Abandons a step whose backward pass has failed: there is a step, but no pass runs.

        Returns: as abandon().
        """
        if self.step is None or _autograd.backward_id() is not None:
            return None
        return self.abandon(self.step, why)

    def fail(self, step: Step, error: Exception) -> NoReturn:
        """Abandons the step because of this rank's own error, and raises it."""
        try:
            self.abandon(step, str(error))
            raise error
        finally:
            del error  # it refers to this frame, which would keep the error alive

    def abandon(self, step: Step, reason: str) -> int | None:
        """Abandons the step, and drops its gradients.

        If this rank has ended the step before its backward pass failed, the step may be complete.
        Then its gradients are averages, and stay.

        Returns:
          The step's number if it is complete; None if it is void.
        """
        _endings.forget(step.backward)
        try:
            result = self.verdicts.abandon(step.number, reason)
        except gradsync.Error as error:
            self._drop(error)
            if _session.has_ended(self._buckets.session):
                raise
            return None
        self._commit(step, result)
        return step.number

    def raise_if_complete(self, number: int | None) -> None:
        """Raises: RuntimeError: abandon() returned `number`, not None."""
        if number is not None:
            raise RuntimeError(
                f"gradsync: the backward pass of step {number} of '{self._buckets.name}' raised an "
                "exception after it had handed over its gradients, and the step is complete on "
                "every rank. The gradients are averages: call optimizer.step() as the other ranks "
                "do, then go on"
            )

    def _drop(self, error: gradsync.Error) -> None:
        """Drops step and gradients because of `error`, which may be the session's end."""
        _session.note(self._buckets.session, error)
        if self.step is not None:
            self.verdicts.see_all()
        self._clear()

    @contextlib.contextmanager
    def _clearing(self) -> Iterator[None]:
        """Drops step and gradients when an error leaves the context, unless it is silence."""
        try:
            yield
        except RuntimeError as error:
            if not is_silence(error):
                self._clear()
            raise

    def _clear(self) -> None:
        """Forgets the step and the gradients: partly averaged, they must reach no optimizer."""
        self.step = None
        for slot in self._buckets.slots:
            slot.parameter.grad = None
            slot.accumulated = False
        if self._positions is not None:
            self._positions.take_back()

    # ---- At the end of uneven inputs

    def come_back(self, last: int) -> None:
        """No rank has data any more: takes the state of rank `last`."""
        self._state.broadcast_all(last, "the final state", self.broadcast_buffers)
        if self._positions is not None:
            self._positions.step_is_complete()
        self.verdicts.see_all()
