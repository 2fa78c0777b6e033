"""The steps of one wrapped module, from autograd's hooks to the verdict."""

from __future__ import annotations

import itertools
import time
import weakref
from typing import Any, Sequence

import torch

import gradsync
from gradsync.torch import _endings, _hooks, _live, _outputs, _session
from gradsync.torch._buckets import Buckets
from gradsync.torch._clipping import Clipping
from gradsync.torch._device_verdicts import DeviceVerdicts, FollowedStep
from gradsync.torch._gradients import Slot
from gradsync.torch._hand_off import StreamHandOff
from gradsync.torch._state import ModuleState
from gradsync.torch.step_statistics import StepStatistics, StepTimes

_orders = itertools.count()


class _Step:
    """One synchronized backward pass under way."""

    __slots__ = ("backward", "began", "first_bucket", "number", "order", "void", "waiting")

    def __init__(
        self,
        number: int,
        backward: int | None,
        waiting: list[int],
        void: gradsync.Error | None,
    ) -> None:
        self.number = number
        self.void = void  # why, if it is known already and only the optimizer needs to know
        self.backward = backward
        self.waiting = waiting  # per bucket, gradients that have not come
        self.order: list[Slot] = []  # as the gradients came
        self.began = time.perf_counter()
        self.first_bucket = 0.0


class Synchronizer:
    """Hands over the gradients of a wrapped module as a backward pass makes them.

    Owned by its wrapper: autograd's hooks refer to it weakly. Used on the thread that trains, and
    on the one that runs a backward pass.

    Args:
      state: the module's.
      buckets: its parameters' layout; nothing was said of a step yet.
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
        self._hand_off = buckets.hand_off
        self._broadcast_buffers = broadcast_buffers
        self.device_verdict = device_verdict
        self._counts_known = not static_graph
        self._order = next(_orders)
        self._forwards = _hooks.Forwards()
        self._step: _Step | None = None
        self._interrupted: int | None = None  # the step that Ctrl-C kept from its verdict
        # The last step whose verdict this rank has seen, or has left on the device.
        self._decided = 0
        self._verdicts = DeviceVerdicts(buckets.session, buckets.name)
        self._last_step: gradsync.StepResult | None = None
        self._times = StepTimes()
        self._clipping = Clipping()
        self._parameters = frozenset(id(slot.parameter) for slot in buckets.slots)
        synchronizer = weakref.ref(self)
        for slot in buckets.slots:
            hook = _GradientHook(synchronizer, slot)
            slot.handle = _hooks.on_accumulated(slot.parameter, slot.node, hook)
        self._begin = _BeginHook(synchronizer)
        _live.add(self)
        # The module may be wrapped again.
        weakref.finalize(self, _remove, [slot.handle for slot in buckets.slots]).atexit = False

    @property
    def session(self) -> gradsync.Session:
        """In which it synchronizes."""
        return self._buckets.session

    @property
    def name(self) -> str:
        """Of the layout."""
        return self._buckets.name

    @property
    def slots(self) -> Sequence[Slot]:
        """The parameters."""
        return self._buckets.slots

    @property
    def last_step(self) -> gradsync.StepResult | None:
        """The last committed step; None before the first."""
        self.settle()
        return self._last_step

    def statistics(self) -> StepStatistics:
        """Counters since the module was wrapped."""
        times = self._times
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
            raise error
        if self._last_step is None:
            raise RuntimeError(
                "gradsync: there is no gradient norm before the first synchronized step"
            )
        return self._last_step.gradient_norm

    def clip(self, max_norm: float, optimizer: torch.optim.Optimizer | None) -> float:
        """As DistributedDataParallel.clip_grad_norm_()."""
        norm = self.gradient_norm
        self._clipping.scale(self.slots, gradsync.clip_coefficient(norm, max_norm), optimizer)
        return norm

    def release(self) -> None:
        """Lets go of the parameters: the session is over, and another wrapper takes them."""
        _remove([slot.handle for slot in self.slots])

    # ---- Around a forward pass

    def before_forward(self) -> None:
        """A forward pass with gradients begins."""
        self.abandon_stale("its backward pass did not finish")

    def after_forward(self, output: Any, synchronize: bool) -> None:
        """A forward pass gave `output`; a backward pass through it is a step if `synchronize`."""
        self._forwards.add(synchronize, _outputs.tensors(output), self._begin)

    # ---- Verdicts that are on the device

    @property
    def followed(self) -> FollowedStep | None:
        """The last step, if its verdict is on the device and was not looked at on the host."""
        return self._verdicts.last

    def trains(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `optimizer` updates one of the parameters."""
        mine = self._parameters
        return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])

    def settle(self, leave: int = 0) -> gradsync.Error | None:
        """Waits on the host for verdicts that are on the device, but for those of `leave` steps.

        Returns:
          Why the last of these steps is void; None if it is complete.

        Raises:
          gradsync.Error: the session has ended, or the daemon is silent.
          RuntimeError: GradScaler has counted a step that is void.
        """
        void: gradsync.Error | None = None
        while len(self._verdicts) > leave:
            try:
                step, outcome = self._verdicts.take(self._buckets.layout)
            except RuntimeError as error:
                if not isinstance(error, gradsync.Error) or error.reason != "DAEMON_SILENT":
                    self._clear()
                raise
            if isinstance(outcome, gradsync.Error):
                void = outcome
            else:
                void = None
                self._last_step = outcome
                self._times.add(*step.times)
        return void

    def drop_if_void(self) -> gradsync.Error | None:
        """settle(), and drops the gradients if the last of these steps is void; returns why."""
        error = self.settle()
        if error is not None:
            self._drop(error)
        return error

    # ---- In a backward pass

    def begin_step(self) -> None:
        """A backward pass whose gradients are to be averaged is at an output of the module."""
        backward = _hooks.backward_id()
        step = self._step
        if step is not None:
            if step.backward == backward:
                return
            self._abandon(step, "another backward pass began before it had finished")
        self._clipping.forget()
        number, void = self._catch_up()
        for slot in self.slots:
            slot.firings = 0
        self._hand_off.begin()
        self._step = _Step(number, backward, list(self._buckets.sizes), void)
        _hooks.at_end_of_backward(self._end_backward)

    @property
    def _on_device(self) -> bool:
        """Whether only optimizers need a step's verdict: its buckets are what they will be."""
        return self.device_verdict and self._buckets.rebuilt and self._counts_known

    def _catch_up(self) -> tuple[int, gradsync.Error | None]:
        """Returns the step to run now; or one that this rank came too late to, and why it is void.

        Raises the verdict of a step that was decided without this rank, or that was interrupted
        while it waited, if optimizers are not to tell.
        """
        layout = self._buckets.layout
        number = layout.next_step
        # Two steps may be under way. What is decided after the followed ones decides them too, and
        # only the last two verdicts are kept.
        last = self._verdicts.last
        self.settle(leave=1 if last is not None and last.number == number - 1 else 0)
        missed = number - 1 if self._interrupted is None else self._interrupted
        if missed <= self._decided:
            return number, None
        try:
            layout.wait_step(missed)
        except gradsync.Error as error:
            if error.reason == "DAEMON_SILENT":
                raise
            self._decided = max(missed, layout.next_step - 1)
            self._interrupted = None
            if self._on_device and _session.voids_step(error):
                return self._decided, error
            self._drop(error)
            raise
        raise RuntimeError(
            f"gradsync: step {missed} of '{self.name}' is complete on the other ranks, but this "
            "rank was interrupted while it waited, or heard nothing from the daemon, and has "
            "dropped its gradients: parameters may differ between the ranks. Wrap the module again "
            "on every rank"
        )

    def on_gradient(self, slot: Slot) -> None:
        """Autograd has added to the gradient of `slot`."""
        if slot.parameter.grad is None:  # a node on the way gave none: not used
            return
        if self._step is None:
            if not self._forwards.unseen_begins(_hooks.backward_id(), slot.name):
                slot.accumulated = True
                return
            self.begin_step()
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
        if waiting == 0 and step.void is None:
            if step.first_bucket == 0.0:
                step.first_bucket = time.perf_counter()
            try:
                self._hand_off.mark_ready(self._buckets.layout, step.number, bucket)
            except gradsync.Error as error:
                self._refused(step, error)

    def _refused(self, step: _Step, error: gradsync.Error) -> None:
        """The daemon, or the library, takes no more of `step`: raises why, or lets the pass go on
        without a step if only optimizers need to know."""
        if self._on_device and _session.voids_step(error):
            step.void = error
            return
        self._drop(error)
        raise error

    def _end_backward(self) -> None:
        """The pass is over: ends the step, which hands over the buckets that are left."""
        step = self._step
        if step is None:
            return
        ended = time.perf_counter()
        unused: list[tuple[Slot, torch.Tensor | None]] = []
        with torch.no_grad():
            if len(step.order) < len(self.slots) and step.void is None:
                arrived = set(map(id, step.order))
                for slot in self.slots:
                    if id(slot) not in arrived:
                        self._contribute(slot, unused)
                        step.order.append(slot)
            used = None
            if unused:
                flags = [True] * len(self.slots)
                for slot, _ in unused:
                    flags[slot.index] = False
                used = flags
        if step.void is None:
            try:
                self._hand_off.finish_step(self._buckets.layout, step.number, used)
            except gradsync.Error as error:
                self._refused(step, error)
        _endings.add(self._order, lambda: self._finish(step, unused, ended))

    def _contribute(self, slot: Slot, unused: list[tuple[Slot, torch.Tensor | None]]) -> None:
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
        """Waits for the verdict, on the host unless only the device needs it."""
        if self._step is not step:
            return
        # To leave alone what nobody used, the host must know.
        if self._on_device and (not unused or step.void is not None):
            self._follow(step, ended)
            return
        try:
            self.settle()
            result = self._hand_off.wait(self._buckets.layout, step.number)
        except BaseException as error:
            if isinstance(error, gradsync.Error) and error.reason != "DAEMON_SILENT":
                self._drop(error)
            else:  # Ctrl-C, too: the verdict will come, but this pass does not see it
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
        for slot in self.slots:
            slot.accumulated = False
        if not self._counts_known:
            for slot in self.slots:
                slot.expected = max(1, slot.firings)
            self._counts_known = True
            order = None
        else:
            order = step.order
        self._step = None
        self._last_step = result
        # Here all ranks are: whoever comes not is lost, or as late as it may be in a step.
        if self._broadcast_buffers:
            self._state.broadcast_buffers()
        self._times.add(step.began, step.first_bucket, ended, time.perf_counter())
        if order is not None and not self._buckets.rebuilt:
            if result.live_ranks == self.session.world_size:
                self._rebuild(order)

    def _follow(self, step: _Step, ended: float) -> None:
        """What comes next on the current stream waits for averages and verdict; the host goes on.

        There is no buffer to broadcast, which would wait.
        """
        assert isinstance(self._hand_off, StreamHandOff)
        if step.void is None:
            try:
                verdict = self._hand_off.follow(self._buckets.layout, step.number)
            except gradsync.Error as error:
                self._refused(step, error)
        if step.void is not None:
            verdict = torch.ones((), device=self.slots[0].view.device)
        for slot in self.slots:
            slot.accumulated = False
        times = step.began, step.first_bucket, ended, time.perf_counter()
        self._verdicts.add(FollowedStep(step.number, verdict, step.void, times))
        self._decided = step.number
        self._step = None

    def _rebuild(self, observed: Sequence[Slot]) -> None:
        """Cuts buckets anew, in the order of gradients that the lowest live rank observed."""
        indices = torch.tensor([slot.index for slot in observed], dtype=torch.int32)
        self._state.broadcast([indices], gradsync.LOWEST_LIVE_RANK, "the bucket order")
        self._buckets.rebuild(indices.tolist())

    # ---- When a pass fails

    def abandon_stale(self, why: str) -> None:
        """Abandons a step whose backward pass has died, if there is one and none runs."""
        if self._step is not None and not _hooks.in_backward():
            self._abandon(self._step, why)

    def _fail(self, step: _Step, error: Exception) -> None:
        """Abandons the step because of this rank's own error, and raises it."""
        self._abandon(step, str(error))
        raise error

    def _abandon(self, step: _Step, reason: str) -> None:
        self._decided = max(self._decided, step.number)  # however it is decided, this rank knows
        layout = self._buckets.layout
        try:
            if layout.next_step == step.number:
                layout.abandon_step(step.number, reason)
                layout.wait_step(step.number)
        except gradsync.Error as error:
            self._drop(error)
            if _session.is_over(self.session):
                raise
        self._clear()

    def _drop(self, error: gradsync.Error) -> None:
        _session.note(self.session, error)
        if self._step is not None:
            self._decided = max(self._decided, self._buckets.layout.next_step - 1)
        self._clear()

    def _clear(self) -> None:
        """Forgets the step and the gradients: partly averaged, they must reach no optimizer."""
        self._step = None
        for slot in self.slots:
            slot.parameter.grad = None
            slot.accumulated = False

    # ---- When ranks come together again

    def come_back(self, last: int) -> None:
        """Every rank is through with its data: takes the state of rank `last`."""
        self._state.broadcast_all(last, "the final state")
        self._decided = self._buckets.layout.next_step - 1


class _GradientHook:
    """What autograd holds of a synchronizer at a parameter: no reference that keeps it."""

    __slots__ = ("slot", "synchronizer")

    def __init__(self, synchronizer: weakref.ref[Synchronizer], slot: Slot) -> None:
        self.synchronizer = synchronizer
        self.slot = slot

    def __call__(self) -> None:
        synchronizer = self.synchronizer()
        if synchronizer is not None:
            synchronizer.on_gradient(self.slot)


class _BeginHook:
    """Begins a step, if the synchronizer is still there and the pass adds to gradients."""

    __slots__ = ("synchronizer",)

    def __init__(self, synchronizer: weakref.ref[Synchronizer]) -> None:
        self.synchronizer = synchronizer

    def __call__(self, output_node: Any, synchronize: bool) -> bool:
        """Returns whether the pass adds to gradients."""
        synchronizer = self.synchronizer()
        if synchronizer is None:
            return False
        nodes = (slot.node for slot in reversed(synchronizer.slots))
        if not _hooks.reaches_gradients(output_node, nodes):
            return False
        if synchronize:
            synchronizer.begin_step()
        return True


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
