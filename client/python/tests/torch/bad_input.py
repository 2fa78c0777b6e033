"""What tests of bad input share: a pass that fails, and what must be right afterwards."""

import time

import torch
from models import Mlp
from trial import squares

# Seconds after which a step is void if a rank never ends it. Steps that are right take less, on a
# busy machine, too.
SHORT = {"step_timeout": 3.0}
# Seconds by which a busy machine can be late.
SLACK = 10.0


def steps_are_right(t, model, seed=50):
    """Steps are right again: the error has left nothing behind."""
    for step in range(2):
        t.train(model, squares(t, seed + step), f"afterwards, in step {step}")


def no_gradient_is_left(model):
    assert all(p.grad is None for p in model.parameters())


class Trap(torch.autograd.Function):
    """The identity; its backward pass calls an action."""

    @staticmethod
    def forward(ctx, x, action):
        ctx.action = action
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.action()
        return gradient, None


class Trapped(Mlp):
    """Calls `action` between the backward passes of the second and the first layer."""

    def __init__(self):
        super().__init__()
        self.action = lambda: None

    def forward(self, x):
        x = Trap.apply(torch.tanh(self.first(x)), lambda: self.action())
        return self.third(torch.tanh(self.second(x)))


def told_to_fail():
    raise ValueError("told to fail")


def voided(t, model, loss, match):
    """Runs a backward pass that another rank voids; returns the error and its time."""
    with t.raises(RuntimeError, match=match) as caught:
        loss.backward()
    came = time.monotonic()
    no_gradient_is_left(model)
    return caught[0], came
