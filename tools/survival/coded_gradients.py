"""Gradients that are whole numbers: an average tells exactly whose contributions it holds."""

from __future__ import annotations

from typing import Optional

import torch

# A rank's contribution is a digit of the sum in this base: how often it is in there, 0 to 4 times.
_BASE = 5
# Elements and steps differ, so that a contribution of another step is seen.
_FACTORS = 7
# Shares of a contribution that the passes of one accumulation add; each is exact in float32.
_SHARES = {1: (1.0,), 2: (0.25, 0.75)}
# Less than the smallest share.
_ROUNDING = 0.1


class CodedGradients:
    """A parameter beside the model, with known gradients.

    Args:
      count: of its elements.
      ranks: of the job.
      rank: this process's.
      accumulate: passes of one step, 1 or 2.
    """

    def __init__(self, count: int, ranks: int, rank: int, accumulate: int) -> None:
        self._elements = torch.arange(count, dtype=torch.float32)
        self._ranks = ranks
        self._mine = float(_BASE**rank)
        self._shares = _SHARES[accumulate]
        self._once = sum(_BASE**each for each in range(ranks))

    def loss(self, parameter: torch.Tensor, step: int, turn: int) -> torch.Tensor:
        """A term of the loss whose gradient is this rank's contribution.

        Args:
          parameter: the one beside the model.
          step: any number that all ranks give in one step.
          turn: number of the pass in its step, from 0.
        """
        return (parameter * (self._factors(step) * (self._mine * self._shares[turn]))).sum()

    def wrong(self, average: torch.Tensor, step: int) -> Optional[str]:
        """What is wrong with the average of a step, in words; None: it has each rank once."""
        factors = self._factors(step).double()
        # Whole numbers, but for the rounding of one division.
        totals = average.double() * self._ranks
        bad = ((totals - factors * self._once).abs() > _ROUNDING).nonzero()
        if not len(bad):
            return None
        place = int(bad[0])
        total = float(totals[place]) / float(factors[place])
        text = f"{len(bad)} of {len(average)} averages are wrong; element {place} is"
        if abs(total - round(total)) > _ROUNDING or not 0 <= round(total) < _BASE**self._ranks:
            return f"{text} {float(average[place])!r}, not a sum of contributions of this step"
        counts = [round(total) // _BASE**rank % _BASE for rank in range(self._ranks)]
        counted = ", ".join(f"rank {rank} {count} times" for rank, count in enumerate(counts))
        return f"{text} a sum of {counted}"

    def _factors(self, step: int) -> torch.Tensor:
        """1 to 7, another one for each element and step."""
        return torch.remainder(self._elements + step, _FACTORS) + 1
