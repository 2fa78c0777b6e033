"""Steps whose verdicts are on the device, where optimizers read them."""

from __future__ import annotations

import collections
import dataclasses
import logging

import torch

import gradsync
from gradsync.torch import _session

_log = logging.getLogger("gradsync")


@dataclasses.dataclass
class FollowedStep:
    """A step whose averages and verdict streams wait for, and the host does not.

    Attributes:
      number: the step's.
      verdict: as of StreamHandOff.follow().
      void: why it is void; None if that is not known.
      times: as StepTimes.add() wants them.
      scaled: whether GradScaler made an optimizer's step of it.
    """

    number: int
    verdict: torch.Tensor
    void: gradsync.Error | None
    times: tuple[float, float, float, float]
    scaled: bool = False


class DeviceVerdicts:
    """Those of one wrapped module that were not looked at on the host; two at most.

    Used on the thread that trains, and on the one that runs a backward pass.

    Attributes:
      void: how many of those that were looked at were void.
    """

    def __init__(self, session: gradsync.Session, name: str) -> None:
        """None yet, of the layout `name`."""
        self.void = 0
        self._session = session
        self._name = name
        self._steps: collections.deque[FollowedStep] = collections.deque()  # by number

    def __len__(self) -> int:
        """How many."""
        return len(self._steps)

    @property
    def last(self) -> FollowedStep | None:
        """The last one, None if there is none."""
        return self._steps[-1] if self._steps else None

    def add(self, step: FollowedStep) -> None:
        """`step` follows on the others."""
        self._steps.append(step)

    def take(
        self, layout: gradsync.Layout
    ) -> tuple[FollowedStep, gradsync.StepResult | gradsync.Error]:
        """Waits on the host for the first one's verdict: its result, or why it is void.

        Raises:
          gradsync.Error: the session has ended, or the daemon is silent (then it stays).
          RuntimeError: GradScaler has counted a step that is void.
        """
        step = self._steps[0]
        outcome: gradsync.StepResult | gradsync.Error
        try:
            outcome = layout.wait_step(step.number) if step.void is None else step.void
        except gradsync.Error as error:
            if error.reason == "DAEMON_SILENT":
                raise
            outcome = error
        self._steps.popleft()
        if isinstance(outcome, gradsync.Error):
            self._leave_out(step, outcome)
        return step, outcome

    def _leave_out(self, step: FollowedStep, error: gradsync.Error) -> None:
        """The optimizer has left out `step`, on the device, because of `error`."""
        _session.note(self._session, error)
        if _session.is_over(self._session):
            self._steps.clear()
            raise error
        if step.scaled:
            raise RuntimeError(
                f"gradsync: step {step.number} of '{self._name}' is void, and GradScaler has "
                "counted it on this rank, but not on the one that failed: their scales differ. Go "
                "on from a checkpoint on every rank, or without device_verdict"
            ) from error
        self.void += 1
        _log.warning("step %d of '%s' is left out: %s", step.number, self._name, error)
