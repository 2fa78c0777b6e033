"""The steps of one wrapped module, from autograd's hooks to the verdict."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from typing import Any, Iterator, NoReturn, Sequence

import torch

import gradsync
from gradsync.torch import _autograd, _endings, _outputs, _session
from gradsync.torch._buckets import Buckets
from gradsync.torch._clipping import Clipping
from gradsync.torch._device_verdicts import FollowedStep
from gradsync.torch._forwards import Forwards
from gradsync.torch._gradients import Slot
from gradsync.torch._module_hooks import BeginHook, GradientHook, Steps, remove
from gradsync.torch._parameter_hooks import ParameterHooks
from gradsync.torch._state import ModuleState
from gradsync.torch._step import Step
from gradsync.torch._verdicts import Verdicts, is_silence
from gradsync.torch.step_statistics import StepStatistics

_orders = itertools.count()

# The synchronizers of each session.
_siblings: weakref.WeakKeyDictionary[gradsync.Session, weakref.WeakSet[Synchronizer]] = (
    weakref.WeakKeyDictionary()
)


class Synchronizer:
    """Runs the steps of a wrapped module: hands over gradients as a backward pass makes them.

    Owned by its wrapper: autograd's hooks refer to it weakly. Used on the thread that trains, and
    on the one that runs a backward pass.

    Args:
      state: the module's.
      buckets: its parameters' layout; none of its steps has begun yet.
      broadcast_buffers: whether each step ends with the buffers of the lowest live rank everywhere.
      static_graph: the first step counts how often each gradient comes.
      device_verdict: whether to leave the verdict to optimizers where the host need not know it.
    """

    def __init__(
        self,
        state: ModuleState,
        buckets: Buckets,
        *,
        broadcast_buffers: bool,
        static_graph: bool,
        device_verdict: bool,
    ) -> None:
        self._state = state
        self._buckets = buckets
        self._broadcast_buffers = broadcast_buffers
        self.device_verdict = device_verdict
        self._counts_known = not static_graph
        self._order = next(_orders)
        self._forwards = Forwards()
        self._step: Step | None = None  # the one that runs
        self._thread = threading.get_ident()  # that ran the last forward pass
        self._verdicts = Verdicts(buckets)
        self._clipping = Clipping()
        self._parameters = frozenset(id(slot.parameter) for slot in buckets.slots)
        steps: weakref.ref[Steps] = weakref.ref(self)
        for slot in buckets.slots:
            parameter: Any = slot.parameter  # the next call has no types
            slot.handle = parameter.register_post_accumulate_grad_hook(GradientHook(steps, slot))
        self._begin = BeginHook(steps)
        self._parameter_hooks = ParameterHooks(buckets.slots, steps)
        _siblings.setdefault(self.session, weakref.WeakSet()).add(self)
        # The module may be wrapped again.
        weakref.finalize(self, remove, [slot.handle for slot in buckets.slots]).atexit = False

    @property
    def session(self) -> gradsync.Session:
        """The session in which it synchronizes."""
        return self._buckets.session

    @property
    def name(self) -> str:
        """Name of the layout."""
        return self._buckets.name

    @property
    def slots(self) -> Sequence[Slot]:
        """The parameters."""
        return self._buckets.slots

    @property
    def last_step(self) -> gradsync.StepResult | None:
        """The last complete step; None before the first."""
        self.settle()
        return self._verdicts.last_result

    def statistics(self) -> StepStatistics:
        """Counters since the module was wrapped."""
        times = self._verdicts.times
        return StepStatistics(
            steps=times.steps,
            buckets=self._buckets.layout.bucket_count,
            bytes=self._buckets.nbytes,
            backward=times.backward,
            until_first_bucket=times.until_first_bucket,
            exposed=times.exposed,
            rebuilt=self._buckets.rebuilt,
            void=self._verdicts.void,
        )

    @property
    def gradient_norm(self) -> float:
        """L2 norm of the averaged gradients as the last step left them."""
        error = self.drop_if_void()
        if error is not None:
            try:
                raise error
            finally:
                del error  # it refers to this frame, which would keep the error alive
        result = self._verdicts.last_result
        if result is None:
            raise RuntimeError(
                "gradsync: there is no gradient norm before the first synchronized step"
            )
        return result.gradient_norm

    def clip(self, max_norm: float, optimizer: torch.optim.Optimizer | None) -> float:
        """As DistributedDataParallel.clip_grad_norm_()."""
        norm = self.gradient_norm
        self._clipping.scale(self.slots, gradsync.clip_coefficient(norm, max_norm), optimizer)
        return norm

    def release(self) -> None:
        """Removes its hooks: the session has ended, and another wrapper takes the parameters."""
        remove([slot.handle for slot in self.slots])
        self._parameter_hooks.give_back()

    # ---- Around a forward pass

    def before_forward(self) -> None:
        """A forward pass with gradients begins.

        Raises:
          RuntimeError: the last backward pass raised an exception, and its step is complete.
        """
        if _autograd.backward_id() is None:  # else a checkpoint repeats its forward pass
            self._thread = threading.get_ident()
        self._raise_if_complete(self.abandon_stale("its backward pass did not finish"))

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` is about to update parameters; drops gradients that are partly averaged.

        A backward pass may run in another thread. The update matters to it only if `optimizer`
        updates the same parameters.
        """
        if self._step is None:
            return
        if self._thread == threading.get_ident() or self.trains(optimizer):
            self.abandon_stale("its backward pass did not finish")

    def after_forward(self, output: Any, synchronize: bool) -> None:
        """A forward pass gave `output`; a backward pass through it is a step if `synchronize`."""
        self._forwards.add(synchronize, _outputs.tensors(output), self._begin)

    # ---- Verdicts that are on the device

    @property
    def followed(self) -> FollowedStep | None:
        """The last step, if its verdict is on the device and the host has not looked at it."""
        return self._verdicts.followed

    def trains(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `optimizer` updates one of the parameters."""
        mine = self._parameters
        return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])

    def settle(self) -> gradsync.Error | None:
        """Waits on the host for the verdicts that are on the device; see Verdicts.settle()."""
        with self._clearing():
            return self._verdicts.settle()

    def drop_if_void(self) -> gradsync.Error | None:
        """settle(), and drops the gradients if the last of these steps is void; returns why."""
        error = self.settle()
        if error is not None:
            self._drop(error)
        return error

    # ---- In a backward pass

    @property
    def averages_later(self) -> bool:
        """Whether a gradient that comes now is to be averaged."""
        return self._step is not None

    def begin_step(self) -> None:
        """A backward pass whose gradients are to be averaged is at an output of the module."""
        backward = _autograd.backward_id()
        step = self._step
        if step is not None:
            if step.backward == backward:
                return
            self._raise_if_complete(
                self._abandon(step, "another backward pass began before it had finished")
            )
        if torch.is_grad_enabled():
            raise RuntimeError(
                "gradsync: backward(create_graph=True) makes gradients that have a graph of their "
                "own, and averages have none; use torch.autograd.grad(..., create_graph=True), "
                "add what you make of it to the loss, and call backward() without create_graph"
            )
        self._check_thread()
        self._parameter_hooks.look()
        self._clipping.forget()
        number, void = self._next_step()
        for slot in self.slots:
            slot.firings = 0
        self._buckets.begin_step()
        self._step = Step(number, backward, self._buckets.sizes, void)
        _autograd.at_end_of_backward(self._end_backward)

    def _check_thread(self) -> None:
        """Raises: RuntimeError: another module of the session trains in another thread now."""
        for other in list(_siblings[self.session]):
            if other._step is not None and other._thread != self._thread:
                raise RuntimeError(
                    f"gradsync: modules '{self.name}' and '{other.name}' train in two threads at "
                    "once, but in one session, whose ranks must run their steps in one order; "
                    "train them in one thread, or wrap each with session= of its own: "
                    "gradsync.Session.join() with another job_id"
                )

    @property
    def _only_optimizers_need_verdicts(self) -> bool:
        """Whether steps' verdicts may stay on the device: buckets and counts are final."""
        return self.device_verdict and self._buckets.rebuilt and self._counts_known

    def _next_step(self) -> tuple[int, gradsync.Error | None]:
        """The step to run now, and None; or a step that this rank has missed, and why it is void.

        Raises: the verdict of a step that was decided without this rank, or while this rank had
          stopped waiting, unless only optimizers need it.
        """
        number = self._buckets.layout.next_step
        with self._clearing():
            self._verdicts.settle_before(number)
        missed = self._verdicts.missed(number)
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

    def on_gradient(self, slot: Slot) -> None:
        """Autograd has added to the gradient of `slot`."""
        if slot.parameter.grad is None:  # autograd gave none: the parameter is unused
            return
        if self._step is None:
            if not self._forwards.unseen_begins(_autograd.backward_id(), slot.name):
                slot.accumulated = True
                return
            self.begin_step()
            assert self._step is not None
            self._step.seen = False
        step = self._step
        assert step is not None
        slot.firings += 1
        if slot.firings > slot.expected and self._counts_known:
            self._fail(
                step,
                RuntimeError(
                    f"gradsync: parameter '{slot.name}' got a second gradient in one backward "
                    "pass, after the first was handed over; for a parameter that several "
                    "reentrant checkpoints share, pass use_reentrant=False or static_graph=True"
                ),
            )
        if slot.parameter.grad is not slot.view:
            try:
                slot.bring_home()
            except RuntimeError as error:
                self._fail(step, error)
        if slot.firings == slot.expected and self._counts_known:
            self._arrived(step, slot)

    def _arrived(self, step: Step, slot: Slot) -> None:
        """The last gradient of `slot` in this pass is written."""
        self._buckets.arrived(slot.bucket)
        if step.arrive(slot) and step.void is None:
            try:
                self._buckets.mark_ready(step.number, slot.bucket)
            except gradsync.Error as error:
                if not self._leaves_out(step, error):
                    raise

    def _leaves_out(self, step: Step, error: gradsync.Error) -> bool:
        """Daemon or library take no more of `step`. Says whether the pass goes on.

        It does if only optimizers need to know. Else the caller raises `error`: this frame, which
        refers to it, must not get into its traceback.
        """
        if self._only_optimizers_need_verdicts and _session.voids_step(error):
            step.leave_out(error)
            return True
        self._drop(error)
        return False

    def _end_backward(self) -> None:
        """The pass has ended: ends the step, which hands over the buckets that are left."""
        step = self._step
        if step is None:
            return
        self._check_is_whole(step)
        step.end(self.slots)
        if step.void is None:
            try:
                self._buckets.finish_step(step.number, step.used_flags(len(self.slots)))
            except gradsync.Error as error:
                if not self._leaves_out(step, error):
                    raise
        _endings.add(self._order, lambda: self._finish(step))

    def _check_is_whole(self, step: Step) -> None:
        """Raises: RuntimeError: only a backward pass within the step's backward pass has ended.

        A reentrant checkpoint runs such a pass. It begins a step if it makes the first gradient,
        and no output of the module was seen before.
        """
        if step.seen or not _autograd.within_another_backward():
            return
        if self._counts_known and all(slot.firings for slot in self.slots):
            return
        self._fail(
            step,
            RuntimeError(
                "gradsync: the first gradient came from a reentrant checkpoint, before the "
                "backward pass reached an output of the wrapped module, so it is not known where "
                "the pass ends; pass use_reentrant=False to torch.utils.checkpoint, or let "
                "forward() return its tensors in tuples, lists, dictionaries or data classes"
            ),
        )

    def _finish(self, step: Step) -> None:
        """Waits for the verdict; on the host unless only optimizers need it."""
        if self._step is not step:
            return
        # The host must know the verdict to leave alone the gradients that no rank used, and to run
        # users' hooks.
        known_to_host = step.unused or self._parameter_hooks.present
        if self._only_optimizers_need_verdicts and (not known_to_host or step.void is not None):
            self._follow(step)
            return
        try:
            result = self._verdicts.wait(step)
        except BaseException as error:
            if isinstance(error, gradsync.Error) and not is_silence(error):
                self._drop(error)
            else:
                self._clear()
            raise
        self._commit(step, result)

    def _commit(self, step: Step, result: gradsync.StepResult) -> None:
        """The step is complete: its gradients are averages."""
        step.commit(result)
        for slot in self.slots:
            slot.accumulated = False
        observed = step.order if self._counts_known else None
        if not self._counts_known:
            for slot in self.slots:
                slot.expected = max(1, slot.firings)
            self._counts_known = True
        self._step = None
        # A broadcast here waits for no rank that computes: every rank has ended this step.
        if self._broadcast_buffers:
            self._state.broadcast_buffers()
        self._verdicts.times.add(step.times())
        self._parameter_hooks.run(result.used)
        if observed is not None and not self._buckets.rebuilt:
            if result.live_ranks == self.session.world_size:
                self._rebuild(observed)

    def _follow(self, step: Step) -> None:
        """Makes later work on the current stream wait for averages and verdict, but not the host.

        The module has no buffers to broadcast: a broadcast would make the host wait.
        """
        if step.void is None:
            try:
                self._verdicts.follow(step)
            except gradsync.Error as error:
                if not self._leaves_out(step, error):
                    raise
        if step.void is not None:
            self._verdicts.follow_void(step)
        for slot in self.slots:
            slot.accumulated = False
        self._step = None

    def _rebuild(self, observed: Sequence[Slot]) -> None:
        """Cuts buckets anew, in the order of gradients that the lowest live rank observed."""
        indices = torch.tensor([slot.index for slot in observed], dtype=torch.int32)
        self._state.broadcast([indices], gradsync.LOWEST_LIVE_RANK, "the bucket order")
        self._buckets.rebuild(indices.tolist())

    # ---- When a pass fails

    def abandon_stale(self, why: str) -> int | None:
        """Abandons a step whose backward pass has failed: there is a step, but no pass runs.

        Returns: as _abandon().
        """
        if self._step is None or _autograd.backward_id() is not None:
            return None
        return self._abandon(self._step, why)

    def _fail(self, step: Step, error: Exception) -> NoReturn:
        """Abandons the step because of this rank's own error, and raises it."""
        try:
            self._abandon(step, str(error))
            raise error
        finally:
            del error  # it refers to this frame, which would keep the error alive

    def _abandon(self, step: Step, reason: str) -> int | None:
        """Abandons the step, and drops its gradients.

        If this rank has ended the step before its backward pass failed, the step may be complete.
        Then its gradients are averages, and stay.

        Returns:
          The step's number if it is complete; None if it is void.
        """
        _endings.forget(step.backward)
        try:
            result = self._verdicts.abandon(step.number, reason)
        except gradsync.Error as error:
            self._drop(error)
            if _session.has_ended(self.session):
                raise
            return None
        self._commit(step, result)
        return step.number

    def _raise_if_complete(self, number: int | None) -> None:
        if number is not None:
            raise RuntimeError(
                f"gradsync: the backward pass of step {number} of '{self.name}' raised an "
                "exception after it had handed over its gradients, and the step is complete on "
                "every rank. The gradients are averages: call optimizer.step() as the other ranks "
                "do, then go on"
            )

    def _drop(self, error: gradsync.Error) -> None:
        """Drops step and gradients because of `error`, which may be the session's end."""
        _session.note(self.session, error)
        if self._step is not None:
            self._verdicts.see_all()
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
        self._step = None
        for slot in self.slots:
            slot.parameter.grad = None
            slot.accumulated = False

    # ---- At the end of uneven inputs

    def come_back(self, last: int) -> None:
        """No rank has data any more: takes the state of rank `last`."""
        self._state.broadcast_all(last, "the final state")
        self._verdicts.see_all()
