"""Optimizers that read their own attributes `grad_scale` and `found_inf` in a step.

Such a step divides gradients by `grad_scale`, and leaves out its update if `found_inf` is not 0.
PyTorch's optimizers do so if they were built with `fused=True`. GradScaler sets both attributes,
for one step at a time.
"""

from __future__ import annotations

import inspect

import torch


def refusal(optimizer: torch.optim.Optimizer) -> str | None:
    """Says why `optimizer` does not take the two attributes; None if it does."""
    # GradScaler's own rules, for PyTorch's optimizers and others.
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return "takes no `found_inf`"
    if "grad_scaler" in inspect.signature(optimizer.step).parameters:
        return "takes no `found_inf` but a GradScaler"
    # A group that was added or loaded with other options.
    if not all(group.get("fused", True) for group in optimizer.param_groups):
        return "has a parameter group with fused=False, which takes no `found_inf`"
    return None
