"""Hooks of users on parameters: an optimizer in the backward pass updates with averages."""

import torch
from models import SMALL_BUCKETS, Mlp
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from trial import WRAPPER, close, local_gradients, trial
from trial_ranks import trials_test

RATE = 0.1


def loss_of(data):
    return lambda module: module(data).pow(2).mean()


def updates_with_averages(t, model, steps=3):
    """Each backward pass subtracts RATE times the averages."""
    for step in range(steps):
        before = [p.detach().clone() for p in model.parameters()]
        loss = loss_of(t.randn(4, 6, seed=step))
        means = t.means(local_gradients(model.module, loss))
        loss(model).backward()
        for index, (p, old, mean) in enumerate(zip(model.parameters(), before, means)):
            close(p, old - RATE * mean, f"parameter {index} in step {step}")
            assert p.grad is None, f"parameter {index} in step {step}"
        t.same_bits(list(model.parameters()), f"parameters in step {step}")


def update_in_backward(model):
    optimizers = {p: torch.optim.SGD([p], lr=RATE) for p in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    return [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]


@trial(WRAPPER)
def hooks_before_wrapping(t):
    module = Mlp()
    update_in_backward(module)
    updates_with_averages(t, t.wrap(module, **SMALL_BUCKETS))


@trial(WRAPPER)
def hooks_after_wrapping(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    update_in_backward(model)
    updates_with_averages(t, model)


@trial(WRAPPER)
def hooks_that_come_and_go(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    for _ in range(2):
        handles = update_in_backward(model)
        updates_with_averages(t, model)
        for handle in handles:
            handle.remove()
        data = t.randn(4, 6)
        t.backward(model, loss_of(data))
        model.zero_grad(set_to_none=True)


@trial(WRAPPER)
def pytorchs_optimizer_in_backward(t):
    module = Mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": RATE})
    updates_with_averages(t, t.wrap(module, **SMALL_BUCKETS))


@trial(WRAPPER)
def a_loss_that_the_wrapper_does_not_see(t):
    """The first gradient begins the step. The hook of its parameter waits for the average, too."""

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 2)
            update_in_backward(self)

        def forward(self, data):
            self.loss = self.layer(data).pow(2).mean()

    model = t.wrap(Hidden())
    for step in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        data = t.randn(4, 6, seed=step)
        means = t.means(local_gradients(model.module.layer, loss_of(data)))
        model(data)
        model.module.loss.backward()
        for p, old, mean in zip(model.parameters(), before, means):
            close(p, old - RATE * mean, f"step {step}")


@trial(WRAPPER)
def a_hook_sees_local_gradients_under_no_sync(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    seen = []
    first = next(model.parameters())
    first.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    loss = loss_of(t.randn(4, 6))
    local = local_gradients(model.module, loss)
    with model.no_sync():
        loss(model).backward()
    assert torch.equal(seen[-1], local[0])
    model.zero_grad(set_to_none=True)
    loss(model).backward()
    assert len(seen) == 2
    assert torch.equal(seen[-1], first.grad)


@trial(WRAPPER)
def a_parameter_that_no_rank_used(t):
    """Its hook is not called; that of a parameter that another rank used is."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.sometimes, self.never = (nn.Linear(6, 6) for _ in range(3))

        def forward(self, data, both):
            data = self.always(data)
            return self.sometimes(data) if both else data

    model = t.wrap(Branches(), **SMALL_BUCKETS)
    called = []
    for name, p in model.module.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, n=name: called.append(n))
    model(t.randn(4, 6), t.rank == 0).sum().backward()
    assert sorted({name.split(".")[0] for name in called}) == ["always", "sometimes"]


test = trials_test(__name__)
