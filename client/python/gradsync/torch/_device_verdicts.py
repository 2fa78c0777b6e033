"""Verdicts that stay on the device, where optimizers read them."""

from __future__ import annotations

import collections
import dataclasses
import logging

import torch

import gradsync
from gradsync.torch import _session
from gradsync.torch.step_statistics import StepTimes

_log = logging.getLogger("gradsync")


@dataclasses.dataclass
class FollowedStep:
    """A step whose averages and verdict the GPU's streams wait for, and the host does not.

    Attributes:
      number: the step's.
      verdict: a tensor as StreamHandOff.follow() returns.
      void: why the step is void; None if it is not known to be.
      times: how long it took, until the host continued.
      scaled: whether GradScaler has counted it as an optimizer's step.
    """

    number: int
    verdict: torch.Tensor
    void: gradsync.Error | None
    times: StepTimes
    scaled: bool = False


class DeviceVerdicts:
    """Up to two steps of one wrapped module. The host has not read their verdicts yet.

    Used on the thread that trains, and on the one that runs a backward pass.

    Attributes:
      void: number of void steps among those that the host has read.
    """

    def __init__(self, session: gradsync.Session, name: str) -> None:
        """No step yet; `name` is the layout's, for messages."""
        self.void = 0
        self._session = session
        self._name = name
        self._steps: collections.deque[FollowedStep] = collections.deque()  # by number

    def __len__(self) -> int:
        """Number of steps."""
        return len(self._steps)

    @property
    def last(self) -> FollowedStep | None:
        """The last step; None if there is none."""
        return self._steps[-1] if self._steps else None

    def add(self, step: FollowedStep) -> None:
        """Adds a step, which comes after the others."""
        self._steps.append(step)

    def take(
        self, layout: gradsync.Layout
    ) -> tuple[FollowedStep, gradsync.StepResult | gradsync.Error]:
        """Removes the first step, once the host knows its verdict.

        Returns: the step, and its result or why it is void.

        Raises:
          gradsync.Error: the session has ended; or the daemon is silent: then the step stays.
          RuntimeError: GradScaler has counted a step that is void.
        """
        step = self._steps[0]
        outcome: gradsync.StepResult | gradsync.Error
        try:
            outcome = layout.wait_step(step.number) if step.void is None else step.void
        except gradsync.Error as error:
            if error.reason == gradsync.Reason.DAEMON_SILENT:
                raise
            outcome = error
        self._steps.popleft()
        try:
            if isinstance(outcome, gradsync.Error):
                self._leave_out(step, outcome)
            return step, outcome
        finally:
            del outcome  # an error refers to this frame, which would keep it alive

    def _leave_out(self, step: FollowedStep, error: gradsync.Error) -> None:
        """Reports that optimizers have left out `step` on the device because of `error`."""
        _session.note(self._session, error)
        if _session.has_ended(self._session):
            self._steps.clear()
            try:
                raise error
            finally:
                del error  # it refers to this frame, which would keep the error alive
        if step.scaled:
            raise RuntimeError(
                f"gradsync: step {step.number} of '{self._name}' is void. GradScaler has counted "
                "it on this rank but not on the rank that failed, so their scales differ. Continue "
                "from a checkpoint on every rank, or train without device_verdict"
            ) from error
        self.void += 1
        _log.warning("step %d of '%s' is left out: %s", step.number, self._name, error)
