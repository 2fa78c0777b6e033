"""The verdicts of a wrapped module's steps, as far as this rank knows them."""

from __future__ import annotations

import torch

import gradsync
from gradsync.torch._buckets import Buckets
from gradsync.torch._device_verdicts import DeviceVerdicts, FollowedStep
from gradsync.torch._step import Step
from gradsync.torch.step_statistics import StepTimes

# Why abandon_step() refuses a step that this rank has ended: no verdict yet, or a complete step.
_STEP_HAS_ENDED = (gradsync.Reason.PROTOCOL_VIOLATION, gradsync.Reason.STALE_STEP)


def is_silence(error: BaseException) -> bool:
    """Whether the daemon did not answer in time: the verdict is still to come."""
    return isinstance(error, gradsync.Error) and error.reason == gradsync.Reason.DAEMON_SILENT


class Verdicts:
    """Waits for steps' verdicts on the host, or leaves them on the device.

    Used on the thread that trains, and on the one that runs a backward pass. No method touches
    gradients: where a step is void, the caller drops them.

    Attributes:
      last_result: of the last complete step that the host has seen; None before the first.
      times: of the complete steps that the host has seen.
    """

    def __init__(self, buckets: Buckets) -> None:
        """No step of this wrapper was decided yet; an earlier wrapper may have run some."""
        self.last_result: gradsync.StepResult | None = None
        self.times = StepTimes()
        self._buckets = buckets
        self._on_device = DeviceVerdicts(buckets.session, buckets.name)
        # The last step whose verdict this rank has seen, or has left on the device.
        # Not next_step - 1: another rank may have abandoned the first step already.
        self._decided = buckets.layout.first_step - 1
        # The step for which this rank stopped waiting before the verdict: Ctrl-C, or silence.
        self._interrupted: int | None = None

    @property
    def followed(self) -> FollowedStep | None:
        """The last step, if its verdict is on the device and the host has not looked at it."""
        return self._on_device.last

    @property
    def void(self) -> int:
        """How many steps' updates optimizers have left out on the device."""
        return self._on_device.void

    def settle(self, leave: int = 0) -> gradsync.Error | None:
        """Waits on the host for the verdicts on the device, except those of the last `leave` steps.

        Returns:
          Why the last of these steps is void; None if it is complete, or if there is none.

        Raises:
          gradsync.Error: the session has ended, or the daemon is silent.
          RuntimeError: GradScaler has counted a step that is void.
        """
        void: gradsync.Error | None = None
        while len(self._on_device) > leave:
            step, outcome = self._on_device.take(self._buckets.layout)
            if isinstance(outcome, gradsync.Error):
                void = outcome
            else:
                void = None
                self.last_result = outcome
                self.times.add(step.times)
        return void

    def settle_before(self, number: int) -> None:
        """Waits on the host for the verdicts on the device, except that of step `number` - 1.

        Raises: as settle().
        """
        # Two steps can be open: step `number`, and the one before it. If the verdict of the latter
        # is not on the device, the host knows it, or waits for it next, in missed(). Earlier
        # steps are decided before it. Take their verdicts now: the library keeps only the last two.
        last = self._on_device.last
        self.settle(leave=1 if last is not None and last.number == number - 1 else 0)

    def missed(self, number: int) -> tuple[int, gradsync.Error] | None:
        """Waits for the verdict of a step before step `number` that this rank has not seen.

        Returns:
          The last step that is decided now, and why the missed one is void; None if this rank has
          seen every verdict.

        Raises:
          gradsync.Error: the daemon is silent.
          RuntimeError: the missed step is complete on the other ranks.
        """
        layout = self._buckets.layout
        missed = number - 1 if self._interrupted is None else self._interrupted
        if missed <= self._decided:
            return None
        try:
            layout.wait_step(missed)
        except gradsync.Error as error:
            if is_silence(error):
                raise
            self._decided = max(missed, layout.next_step - 1)
            self._interrupted = None
            return self._decided, error
        raise RuntimeError(
            f"gradsync: step {missed} of '{self._buckets.name}' is complete on the other ranks, "
            "but this rank was interrupted while it waited, or heard nothing from the daemon, and "
            "has dropped its gradients: parameters may differ between the ranks. Wrap the module "
            "again on every rank"
        )

    def wait(self, step: Step) -> gradsync.StepResult:
        """Waits on the host for the verdict of `step`, and for those before it.

        Raises:
          gradsync.Error: the step is void, the session has ended, or the daemon is silent.
        """
        try:
            self.settle()
            result = self._buckets.wait(step.number)
        except BaseException as error:
            # The verdict will come, but this pass does not see it.
            if not isinstance(error, gradsync.Error) or is_silence(error):
                self._interrupted = step.number
            raise
        self._decided = step.number
        self.last_result = result
        return result

    def follow(self, step: Step) -> None:
        """Leaves the verdict of `step` on the device, where the current stream waits for it.

        Raises:
          gradsync.Error: the step is void already, or the session has ended.
        """
        self._add(step, self._buckets.follow(step.number))

    def follow_void(self, step: Step) -> None:
        """Tells optimizers on the device that `step` is void; this rank knows it already."""
        self._add(step, torch.ones((), device=self._buckets.slots[0].view.device))

    def _add(self, step: Step, verdict: torch.Tensor) -> None:
        self._on_device.add(FollowedStep(step.number, verdict, step.void, step.times()))
        self._decided = step.number

    def abandon(self, number: int, reason: str) -> gradsync.StepResult:
        """Abandons step `number` and waits until that is decided.

        Returns:
          The result of a step that is complete, because this rank had ended it.

        Raises:
          gradsync.Error: the step is void, as this call intends; or the session has ended.
        """
        self._decided = max(self._decided, number)  # however it is decided, this rank knows
        layout = self._buckets.layout
        if layout.next_step == number:
            try:
                layout.abandon_step(number, reason)
            except gradsync.FailedPreconditionError as error:
                # This rank has ended the step, and it may be decided since the comparison above.
                if error.reason not in _STEP_HAS_ENDED:
                    raise
        result = self._buckets.wait(number)
        self.last_result = result
        return result

    def see_all(self) -> None:
        """This rank knows the verdict of every step that is decided now."""
        self._decided = max(self._decided, self._buckets.layout.next_step - 1)
