"""Modules that change after wrapping, and gradients of another dtype, are refused by name."""

import contextlib

import torch
from bad_input import SHORT, no_gradient_is_left, steps_are_right
from models import SMALL_BUCKETS, Mlp
from torch import nn
from trial import WRAPPER, squares, trial
from trial_ranks import trials_test


def _changed_trial(change, *words, on_ranks=(0, 1)):
    def refused(t):
        model = t.wrap(Mlp(), session=t.session(**SHORT), **SMALL_BUCKETS)
        steps_are_right(t, model)
        if t.rank in on_ranks:
            change(model.module)
            with t.raises(RuntimeError, match=words):
                squares(t)(model)
            with torch.no_grad(), contextlib.suppress(RuntimeError):
                squares(t)(model)  # evaluation may go on
        else:
            with t.raises(RuntimeError, match="rank 1"):
                squares(t)(model).backward()
            no_gradient_is_left(model)
        t.meet()

    return refused


def _assign(module):
    module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}, assign=True)


def _replace(module):
    module.second = nn.Linear(24, 24)


def _replace_parameter(module):
    module.second.weight = nn.Parameter(torch.ones(24, 24))


def _add(module):
    module.extra = nn.Parameter(torch.ones(2))


def _delete(module):
    del module.second.bias
    module.second.register_parameter("bias", None)


def _thaw(module):
    module.first.weight.requires_grad_(False)
    module.first.weight = nn.Parameter(module.first.weight.data)


assigned = trial(WRAPPER)(_changed_trial(_assign, "first.weight"))
converted = trial(WRAPPER)(
    _changed_trial(lambda module: module.double(), "first.weight", "float64")
)
a_layer_replaced = trial(WRAPPER)(_changed_trial(_replace, "second.weight"))
a_parameter_replaced = trial(WRAPPER)(_changed_trial(_replace_parameter, "second.weight"))
a_parameter_added = trial(WRAPPER)(_changed_trial(_add))
a_parameter_deleted = trial(WRAPPER)(_changed_trial(_delete, "second.bias"))
a_parameter_frozen_and_replaced = trial(WRAPPER)(_changed_trial(_thaw, "first.weight"))
converted_on_one_rank = trial(WRAPPER)(
    _changed_trial(lambda module: module.double(), "first.weight", on_ranks=(1,))
)


@trial(WRAPPER)
def thawed_after_wrapping(t):
    module = Mlp()
    module.first.requires_grad_(False)
    model = t.wrap(module)
    squares(t)(model).backward()
    module.first.requires_grad_(True)
    with t.raises(RuntimeError, match="first.weight"):
        squares(t)(model)


@trial(WRAPPER)
def converted_between_forward_and_backward(t):
    model = t.wrap(Mlp(), session=t.session(**SHORT))
    loss = squares(t)(model)
    with torch.no_grad():
        model.module.third.bias.data = model.module.third.bias.data.double()
    with t.raises(RuntimeError):
        loss.backward()


class Widened(torch.autograd.Function):
    """A product whose weight gets a gradient of float64."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, (gradient.t() @ x).double()


@trial(WRAPPER)
def a_gradient_of_another_dtype(t):
    class Wide(Mlp):
        def forward(self, x):
            return Widened.apply(super().forward(x), self.wide)

    module = Wide()
    module.wide = nn.Parameter(torch.randn(3, 3))
    model = t.wrap(module, session=t.session(**SHORT))
    module.wide.grad_dtype = None  # any
    with t.raises(RuntimeError, match=("wide", "float64")):
        squares(t)(model).backward()
    no_gradient_is_left(model)


test = trials_test(__name__)
