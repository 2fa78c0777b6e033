"""The state that every rank has alike: parameters, optimizer, scheduler, scaler and more."""

from __future__ import annotations

from typing import Any, Mapping

import torch

import gradsync


class SharedState:
    """Reads the state on a survivor, and loads it into a replacement.

    Not thread-safe: read() runs on another thread while the thread that trains waits.

    Args:
      module: bare, not the wrapper.
      optimizer: of its parameters.
      scheduler: None: there is none.
      scaler: a `GradScaler`; None: there is none.
      extra: further objects with state_dict() and load_state_dict(), by name.

    Attributes:
      optimizer: as given.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        scaler: Any,
        extra: Mapping[str, Any],
    ) -> None:
        self.optimizer = optimizer
        self._module = module
        self._stateful = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        self._stateful = {k: v for k, v in self._stateful.items() if v is not None}
        self._stateful.update({f"extra.{name}": value for name, value in extra.items()})

    def parameters(self) -> dict[str, torch.Tensor]:
        """The parameters by name."""
        return dict(self._module.named_parameters())

    def options(self) -> dict[str, Any]:
        """All but the parameters and the optimizer's state of each parameter."""
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        others = {k: value for k, value in self._stateful.items() if k != "optimizer"}
        return {"optimizer": groups, **{k: value.state_dict() for k, value in others.items()}}

    def read(self) -> dict[str, Any]:
        """The state, with the tensors themselves."""
        read = {name: part.state_dict() for name, part in self._stateful.items()}
        return {"parameters": self.parameters(), **read}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes what read() has returned on another rank.

        Raises:
          FailedPreconditionError: STATE_REFUSED: this rank has other parts; names one.
        """
        mine = self.parameters()
        theirs = state["parameters"]
        check_same("parameter", mine.keys(), theirs.keys())
        check_same("part", self._stateful.keys(), state.keys() - {"parameters"})
        with torch.no_grad():
            for name, parameter in mine.items():
                parameter.copy_(theirs[name])
        for name, part in self._stateful.items():
            part.load_state_dict(state[name])


def check_same(what: str, mine: Any, theirs: Any) -> None:
    """Raises: FailedPreconditionError: STATE_REFUSED: the names differ; names one that does."""
    for name in sorted(mine ^ theirs):
        where = "survivors have no" if name in mine else "this rank has no"
        raise gradsync.FailedPreconditionError(
            f"gradsync: {where} {what} '{name}' in the state of the model. Start the replacement "
            "with the same script as the other ranks",
            reason=gradsync.Reason.STATE_REFUSED,
        )
