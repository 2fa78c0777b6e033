"""What averages are divided by while ranks have different numbers of steps."""

from __future__ import annotations

from typing import Sequence

import torch

import gradsync
from gradsync.torch._gradients import Slot


def divide_by(
    divisor: int, result: gradsync.StepResult, slots: Sequence[Slot]
) -> gradsync.StepResult:
    """Scales a step's averages as if the daemon had divided by `divisor`; returns such a result.

    Only steps that a rank has not taken part in need it: in all others both divisors are the same.
    """
    if divisor == result.divisor:
        return result
    with torch.no_grad():
        torch._foreach_mul_([slot.view for slot in slots], result.divisor / divisor)
    return result.divided_by(divisor)
