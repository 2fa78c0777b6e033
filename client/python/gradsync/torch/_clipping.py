"""Scaling gradients without a pass over them."""

from __future__ import annotations

from typing import Any

import torch


def takes_scale(optimizer: torch.optim.Optimizer) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
        group.get("fused") for group in optimizer.param_groups
    )


def scale_next_step(optimizer: torch.optim.Optimizer, coefficient: float) -> None:
    """Makes a fused optimizer multiply gradients by `coefficient` as it reads them, once.

    It divides by `grad_scale`, as it would for GradScaler.
    """
    scaled: Any = optimizer
    scaled.grad_scale = torch.tensor(1.0 / coefficient)
    scaled.found_inf = torch.zeros(())

    def forget(*_: Any) -> None:
        del scaled.grad_scale, scaled.found_inf
        handle.remove()

    handle = optimizer.register_step_post_hook(forget)
