"""Where a rank is in its data, and the buffers and gradients that it had there."""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple, Sequence

import torch

import gradsync
from gradsync.torch import _hold
from gradsync.torch._extra_states import ExtraStates
from gradsync.torch._frozen_state import FrozenState
from gradsync.torch._gradients import Slot


class Position(NamedTuple):
    """A place in the data: the batch with which a step begins.

    Attributes:
      epoch: from 0.
      batch: of the epoch, from 0.
    """

    epoch: int
    batch: int


class Positions:
    """The positions of one wrapped module's steps, where lost ranks are replaced.

    A replacement begins at the position of a running step. It needs what the survivors had there
    and have no more: buffers and extra states, which the forward pass changes, and gradients from
    before the step. These are kept here. In each step, in this order: `begin before_forward+
    before_step before_first_mark`.

    Used on the thread that trains and in its backward passes; state() on another thread, while
    these wait.

    Args:
      session: of the module.
      slots: its parameters.
      buffers: returns its synchronized buffers by name.
      extra: its extra states.

    Attributes:
      current: the last position; None before the first.
    """

    def __init__(
        self,
        session: gradsync.Session,
        slots: Sequence[Slot],
        buffers: Callable[[], Mapping[str, torch.Tensor]],
        extra: ExtraStates,
    ) -> None:
        self.current: Position | None = None
        self._session = session
        self._slots = slots
        self._read_buffers = buffers
        self._extra = extra
        self._frozen: FrozenState | None = None
        self._open = False  # True: the step of the current position has not begun
        self._buffers: dict[str, torch.Tensor] = {}
        self._extra_states: dict[str, Any] = {}
        self._gradients: dict[str, torch.Tensor] | None = None
        self._complete = True  # the step of the current position; before the first, too
        # In a replacement, before its first position: whether the survivors' training has ended.
        self._restored: bool | None = None

    def attach(self, frozen: FrozenState) -> None:
        """A Training gives the positions from now on; `frozen` must not change in a step.

        Raises:
          UnimplementedError: LOSS_POLICY: there is one already.
        """
        if self._frozen is not None:
            raise _hold.refusal(
                self._session, "a module has one Training, and this one has one already", "use it"
            )
        self._frozen = frozen

    def begin(self, position: Position) -> None:
        """The next step begins here; no forward pass of it has run.

        Raises:
          TypeError: a part of the state cannot travel to a replacement; names it.
        """
        assert self._frozen is not None
        self.take_back()
        self._frozen.record()
        self._buffers = {name: b.detach().clone() for name, b in self._read_buffers().items()}
        self._extra_states = self._extra.copy()
        self._gradients = None
        self.current = position
        self._restored = None
        self._open = True
        self._complete = False

    def before_forward(self, trains: bool) -> None:
        """A forward pass with gradients begins, of a module that trains or evaluates.

        Raises:
          UnimplementedError: LOSS_POLICY: there is no Training.
          FailedPreconditionError: PROTOCOL_VIOLATION: no position was given, or gradients of an
            earlier step would go into this one.
        """
        if self._frozen is None:
            raise _hold.refusal(
                self._session,
                "a gradsync.torch.Training must know the whole state, and there is none",
                "make a Training(model, optimizer, ...) before the first forward pass",
            )
        if not self._open:
            if trains:
                raise self._no_position()
            return
        if self._gradients is None:
            self._gradients = self._copy_gradients()

    def before_step(self) -> None:
        """The backward pass begins whose gradients are averaged.

        Raises:
          FailedPreconditionError: PROTOCOL_VIOLATION: no position was given for it.
        """
        if not self._open or self._gradients is None:
            raise self._no_position()
        self._open = False

    def before_first_mark(self) -> gradsync.FailedPreconditionError | None:
        """The first gradients are about to be handed over.

        Returns:
          Why they must not be: PROTOCOL_VIOLATION, names what has changed since begin(); or None.
        """
        assert self._frozen is not None
        changed = self._frozen.changed()
        if changed is None:
            return None
        return self._violation(
            f"'{changed}' has changed between position() and the first gradient of the step",
            "change optimizer, scheduler and parameters after backward()",
        )

    def step_is_complete(self) -> None:
        """Keeps what the forward passes since begin() have changed."""
        self._complete = True

    def take_back(self) -> None:
        """Gives buffers and extra states the values that they had at begin(), if the step is void.

        Each rank's forward passes have changed them in another way. A complete step gives all ranks
        the same buffers; a void one, or one that this rank has not begun, does not.
        """
        if self._complete:
            return
        self._complete = not self._open
        present = self._read_buffers()
        with torch.no_grad():
            for name, buffer in self._buffers.items():
                # The caller refuses a module that has other buffers than before.
                if name in present and present[name].shape == buffer.shape:
                    present[name].copy_(buffer)
        self._extra.load(self._extra_states)
        self._extra_states = self._extra.copy()  # the module may change what it has loaded

    def state(self, running: bool) -> dict[str, Any]:
        """What a replacement begins with, besides the shared state.

        Args:
          running: whether the step of the current position runs; else it has ended.
        """
        done = not running if self._restored is None else self._restored
        buffers: Mapping[str, torch.Tensor] = self._buffers
        extra = self._extra_states
        gradients: Mapping[str, torch.Tensor] = self._gradients or {}
        if not running and self._complete:
            buffers, extra = self._read_buffers(), self._extra.read()
        if self._restored is not None:
            # Read again, so that the digests tell whether it was loaded well.
            gradients = self._present_gradients()
        elif done:
            gradients = {}
        return {
            "position": None if self.current is None else list(self.current),
            "done": done,
            "buffers": dict(buffers),
            "extra": extra,
            "gradients": dict(gradients),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """In a replacement: takes what state() has returned on a survivor.

        Raises:
          FailedPreconditionError: STATE_REFUSED: the module has other extra states.
        """
        position = state["position"]
        self.current = None if position is None else Position(*position)
        self._restored = bool(state["done"])
        with torch.no_grad():
            for name, buffer in self._read_buffers().items():
                buffer.copy_(state["buffers"][name])
        self._extra.load(state["extra"])
        for slot in self._slots:
            slot.parameter.grad = state["gradients"].get(slot.name)

    @property
    def is_over(self) -> bool:
        """In a replacement, before its first position: whether the survivors had ended training."""
        return bool(self._restored)

    def _present_gradients(self) -> dict[str, torch.Tensor]:
        return {s.name: s.parameter.grad for s in self._slots if s.parameter.grad is not None}

    def _copy_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients that are there before the step. Normally there are none."""
        for slot in self._slots:
            if slot.accumulated and slot.parameter.grad is not None:
                raise self._violation(
                    f"parameter '{slot.name}' has a gradient of a pass under no_sync() that no "
                    "step has averaged, and only this rank has it",
                    "end each accumulation outside of no_sync(), or call zero_grad()",
                )
        return {n: gradient.detach().clone() for n, gradient in self._present_gradients().items()}

    def _no_position(self) -> gradsync.FailedPreconditionError:
        return self._violation(
            "no position was given for this step",
            "iterate by training.batches(loader), or call training.position(epoch, batch) before "
            "the first forward pass of each step",
        )

    def _violation(self, what: str, instead: str) -> gradsync.FailedPreconditionError:
        return gradsync.FailedPreconditionError(
            f"rank {self._session.rank}: with on_rank_loss='hold' {what}; {instead}",
            reason=gradsync.Reason.PROTOCOL_VIOLATION,
        )
