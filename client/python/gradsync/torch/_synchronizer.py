"""The backward passes of one wrapped module: from autograd's hooks to the buckets' hand-off."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from typing import Any, ContextManager, Sequence

import torch

import gradsync
from gradsync import _interruptible
from gradsync.torch import _autograd, _endings, _hold, _outputs
from gradsync.torch._buckets import Buckets
from gradsync.torch._buffer_bucket import BufferBucket
from gradsync.torch._first_steps import FirstSteps
from gradsync.torch._forwards import Forwards
from gradsync.torch._gradients import Slot
from gradsync.torch._history import OptimizerCheck
from gradsync.torch._module_hooks import BeginHook, GradientHook, Steps, remove
from gradsync.torch._outcomes import Outcomes
from gradsync.torch._parameter_hooks import ParameterHooks
from gradsync.torch._positions import Positions
from gradsync.torch._results import Results
from gradsync.torch._state import ModuleState
from gradsync.torch._step import Step

_orders = itertools.count()

# The synchronizers of each session.
_siblings: weakref.WeakKeyDictionary[gradsync.Session, weakref.WeakSet[Synchronizer]] = (
    weakref.WeakKeyDictionary()
)

# Those of jobs that replace lost ranks.
_held: weakref.WeakSet[Synchronizer] = weakref.WeakSet()


class Synchronizer:
    """Hands over gradients of a wrapped module as a backward pass makes them, as one step.

    Owned by its wrapper: autograd's hooks refer to it weakly. Used on the thread that trains, and
    on the one that runs a backward pass.

    Args:
      state: the module's.
      buckets: its parameters' layout; none of its steps has begun yet.
      broadcast_buffers: whether each step ends with the buffers of the lowest live rank everywhere.
      static_graph: the first step counts how often each gradient comes.
      device_verdict: whether to leave the verdict to optimizers where the host need not know it.
      trained_before: whether some rank has trained the module before it was wrapped.
      positions: of the steps, where lost ranks are replaced; else None.
      buffer_bucket: of the layout, for the buffers; None: the layout has none.

    Attributes:
      buckets, device_verdict, positions: as given.
      module: that is wrapped.
      replaced: whether another wrapper has the module now.
      first_steps: what they have taught.
      outcomes: of the steps.
      results: of the steps, for users.
    """

    def __init__(
        self,
        state: ModuleState,
        buckets: Buckets,
        *,
        broadcast_buffers: bool,
        static_graph: bool,
        device_verdict: bool,
        trained_before: bool,
        positions: Positions | None = None,
        buffer_bucket: BufferBucket | None = None,
    ) -> None:
        self.buckets = buckets
        self.positions = positions
        self.device_verdict = device_verdict
        self.module = state.module
        self.replaced = False
        self._state = state
        self._order = next(_orders)
        self._forwards = Forwards()
        self._thread = threading.get_ident()  # that ran the last forward pass
        self._first_step = buckets.layout.first_step
        self._optimizer_check = (
            OptimizerCheck(buckets.session, buckets.slots) if trained_before else None
        )
        self._parameters = frozenset(id(slot.parameter) for slot in buckets.slots)
        steps: weakref.ref[Steps] = weakref.ref(self)
        for slot in buckets.slots:
            parameter: Any = slot.parameter  # the next call has no types
            slot.handle = parameter.register_post_accumulate_grad_hook(GradientHook(steps, slot))
        self._begin = BeginHook(steps)
        self._parameter_hooks = ParameterHooks(buckets.slots, steps)
        self.first_steps = FirstSteps(state, buckets, static_graph)
        self.outcomes = Outcomes(
            state,
            buckets,
            self.first_steps,
            self._parameter_hooks,
            broadcast_buffers=broadcast_buffers,
            device_verdict=device_verdict,
            positions=positions,
            buffer_bucket=buffer_bucket,
        )
        self.results = Results(buckets, self.outcomes)
        _siblings.setdefault(self.session, weakref.WeakSet()).add(self)
        if positions is not None:
            _held.add(self)
        # The module may be wrapped again.
        weakref.finalize(self, remove, [slot.handle for slot in buckets.slots]).atexit = False

    @property
    def session(self) -> gradsync.Session:
        """The session in which it synchronizes."""
        return self.buckets.session

    @property
    def name(self) -> str:
        """Name of the layout."""
        return self.buckets.name

    @property
    def slots(self) -> Sequence[Slot]:
        """The parameters."""
        return self.buckets.slots

    def buffers(self) -> dict[str, torch.Tensor]:
        """The module's buffers that all ranks have, by name."""
        return self._state.buffers()

    def release(self) -> None:
        """Removes its hooks: another wrapper takes the parameters."""
        remove([slot.handle for slot in self.slots])
        self._parameter_hooks.give_back()

    def make_way(self) -> None:
        """Ends the last step, so that another wrapper can have the module.

        Raises:
          RuntimeError: a backward pass runs; or GradScaler has counted a step that is void.
          gradsync.Error: the session has ended, or the daemon is silent.
        """
        if _autograd.backward_id() is not None:
            raise RuntimeError(
                f"gradsync: the module of '{self.name}' cannot be wrapped again in a backward "
                "pass; wrap it before or after"
            )
        self.outcomes.abandon_stale("its module is wrapped again")
        self.outcomes.drop_if_void()  # optimizers will not see the verdict

    def replace(self) -> None:
        """Another wrapper has the module now: this one refuses to train."""
        self.results.drop_scale()
        self.release()
        self.replaced = True

    def check_not_replaced(self) -> None:
        """Raises: RuntimeError: another wrapper has the module now."""
        if self.replaced:
            raise RuntimeError(
                f"gradsync: wrapper '{self.name}' is out of use, because its module was wrapped "
                "again; use the new wrapper, and run its forward pass before the backward pass"
            )

    def trains(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `optimizer` updates one of the parameters."""
        mine = self._parameters
        return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])

    def finish_inputs(self) -> None:
        """This rank has no more data for now.

        Raises:
          gradsync.Error: the session has ended, or the daemon is silent.
        """
        self.outcomes.abandon_stale("its backward pass did not finish")
        self.outcomes.settle()

    def expect_static_graph(self) -> None:
        """Every step will use the same parameters equally often; the first one counts.

        Raises:
          RuntimeError: there was a step.
        """
        if self.outcomes.step is not None or self.buckets.layout.next_step != self._first_step:
            raise RuntimeError(
                f"gradsync: the graph of '{self.name}' cannot become static after its first step; "
                "pass static_graph=True when you wrap the module"
            )
        self.first_steps.counts_known = False

    # ---- Around a forward pass

    @property
    def last_forward_synchronizes(self) -> bool:
        """Whether a backward pass through the last forward pass is a step; True before any."""
        return self._forwards.last_synchronizes

    def before_forward(self) -> None:
        """A forward pass with gradients begins.

        Raises:
          RuntimeError: the last backward pass raised an exception, and its step is complete.
          gradsync.Error: as Positions.before_forward().
        """
        if _autograd.backward_id() is None:  # else a checkpoint repeats its forward pass
            self._thread = threading.get_ident()
            if not self.buckets.runs_on_caller:
                _interruptible.watch_ctrl_c()
        complete = self.outcomes.abandon_stale("its backward pass did not finish")
        self.outcomes.raise_if_complete(complete)
        if self.positions is not None:
            self.positions.before_forward(self.module.training)

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` is about to update parameters; drops gradients that are partly averaged.

        A backward pass may run in another thread. The update matters to it only if `optimizer`
        updates the same parameters.

        Raises:
          ValueError: the module was trained before it was wrapped, and the state of `optimizer`
            differs between the ranks.
        """
        if self.outcomes.step is not None:
            if self._thread == threading.get_ident() or self.trains(optimizer):
                self.outcomes.abandon_stale("its backward pass did not finish")
        if self._optimizer_check is not None:
            self._optimizer_check.check(optimizer)

    def after_forward(self, output: Any, synchronize: bool) -> None:
        """A forward pass gave `output`; a backward pass through it is a step if `synchronize`."""
        self._forwards.add(synchronize, _outputs.tensors(output), self._begin)

    # ---- In a backward pass

    @property
    def averages_later(self) -> bool:
        """Whether a gradient that comes now is to be averaged."""
        return self.outcomes.step is not None

    def begin_step(self) -> None:
        """A backward pass whose gradients are to be averaged is at an output of the module."""
        self.check_not_replaced()
        backward = _autograd.backward_id()
        step = self.outcomes.step
        if step is not None:
            if step.backward == backward:
                return
            self.outcomes.raise_if_complete(
                self.outcomes.abandon(step, "another backward pass began before it had finished")
            )
        if torch.is_grad_enabled():
            raise RuntimeError(
                "gradsync: backward(create_graph=True) makes gradients that have a graph of their "
                "own, and averages have none; use torch.autograd.grad(..., create_graph=True), "
                "add what you make of it to the loss, and call backward() without create_graph"
            )
        self._check_thread()
        self._check_alone(backward)
        if self.positions is not None:
            self.positions.before_step()
        self._parameter_hooks.look()
        self.results.drop_scale()
        _interruptible.begin_pass(backward)
        with self._for_main_thread():
            self.outcomes.begin_step(backward)
            _autograd.at_end_of_backward(self._end_backward)

    def _for_main_thread(self) -> ContextManager[None]:
        """A context in which Ctrl-C ends waits of the thread that runs a backward pass.

        The context then ends early and raises nothing. `backward()` returns, and Python raises
        KeyboardInterrupt on the main thread.
        """
        for_main = self._thread == threading.main_thread().ident
        if self.buckets.runs_on_caller or not for_main:
            return contextlib.nullcontext()
        return _interruptible.for_main_thread()

    def _finish(self, step: Step) -> None:
        """Every module's part of the pass has ended: waits for the verdict of `step`."""
        with self._for_main_thread():
            self.outcomes.finish(step)

    def _check_thread(self) -> None:
        """Raises: RuntimeError: another module of the session trains in another thread now."""
        for other in list(_siblings[self.session]):
            if other.outcomes.step is not None and other._thread != self._thread:
                raise RuntimeError(
                    f"gradsync: modules '{self.name}' and '{other.name}' train in two threads at "
                    "once, but in one session, whose ranks must run their steps in one order; "
                    "train them in one thread, or wrap each with session= of its own: "
                    "gradsync.Session.join() with another job_id"
                )

    def _check_alone(self, backward: int | None) -> None:
        """Raises: UnimplementedError: LOSS_POLICY: another module takes a step in this pass."""
        for other in list(_held):
            step = other.outcomes.step
            if other is self or self.positions is None or step is None:
                continue
            if step.backward == backward:
                raise _hold.refusal(
                    self.session,
                    f"modules '{other.name}' and '{self.name}' cannot train in one backward pass, "
                    "because a replacement could not redo the step of one without the other's",
                    "wrap one module that holds both",
                )

    def on_gradient(self, slot: Slot) -> None:
        """Autograd has added to the gradient of `slot`."""
        if slot.parameter.grad is None:  # autograd gave none: the parameter is unused
            return
        step = self.outcomes.step
        if step is None:
            if not self._forwards.unseen_begins(_autograd.backward_id(), slot.name):
                slot.accumulated = True
                return
            self.begin_step()
            step = self.outcomes.step
            if step is None:  # Ctrl-C
                return
            step.seen = False
        slot.firings += 1
        if slot.firings > slot.expected and self.first_steps.counts_known:
            self.outcomes.fail(
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
                self.outcomes.fail(step, error)
        if slot.firings == slot.expected and self.first_steps.counts_known:
            self._arrived(step, slot)

    def _arrived(self, step: Step, slot: Slot) -> None:
        """The last gradient of `slot` in this pass is written."""
        self.buckets.arrived(slot.bucket)
        if step.arrive(slot) and step.void is None:
            self._before_mark(step)
            try:
                self.buckets.mark_ready(step.number, slot.bucket)
            except gradsync.Error as error:
                if not self.outcomes.leaves_out(step, error):
                    raise

    def _before_mark(self, step: Step) -> None:
        """Gradients are about to be handed over.

        Raises:
          gradsync.Error: the state of the model has changed since the step's position.
        """
        if step.marked or self.positions is None:
            return
        step.marked = True
        error = self.positions.before_first_mark()
        try:
            if error is not None:
                self.outcomes.fail(step, error)
        finally:
            del error  # it refers to this frame, which would keep the error alive

    def _end_backward(self) -> None:
        """The pass has ended: ends the step, which hands over the buckets that are left."""
        step = self.outcomes.step
        if step is None:
            return
        self._check_is_whole(step)
        step.end(self.slots)
        if step.void is None:
            self._before_mark(step)
            self.outcomes.write_buffers(step)
            try:
                self.buckets.finish_step(step.number, step.used_flags(len(self.slots)))
            except gradsync.Error as error:
                if not self.outcomes.leaves_out(step, error):
                    raise
        _endings.add(self._order, lambda: self._finish(step))

    def _check_is_whole(self, step: Step) -> None:
        """Raises: RuntimeError: only a backward pass within the step's backward pass has ended.

        A reentrant checkpoint runs such a pass. It begins a step if it makes the first gradient,
        and no output of the module was seen before.
        """
        if step.seen or not _autograd.within_another_backward():
            return
        self.outcomes.fail(
            step,
            RuntimeError(
                "gradsync: the first gradient came from a reentrant checkpoint, before the "
                "backward pass reached an output of the wrapped module, so it is not known where "
                "the pass ends; pass use_reentrant=False to torch.utils.checkpoint, or let "
                "forward() return its tensors in tuples, lists, dictionaries or data classes"
            ),
        )
