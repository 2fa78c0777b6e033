"""Parameters that a rank, or every rank, does not use in a step."""

import torch
from models import SMALL_BUCKETS, Branching, Mlp
from torch import nn
from trial import HOOK, PYTORCH, WRAPPER, close, local_gradients, trial
from trial_ranks import trials_test

FIND = {"find_unused_parameters": True}


class Tasks(nn.Module):
    """Has one parameter for each task; `used` names the tasks of this pass."""

    def __init__(self, tasks=3):
        super().__init__()
        self.tasks = nn.ParameterList(nn.Parameter(torch.ones(2, 2)) for _ in range(tasks))

    def forward(self, x, used):
        return sum(self.tasks[task] * (x + task) for task in used)


@trial()
def used_by_one_rank_only(t):
    model = t.wrap(Tasks(), **FIND)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        model(8.0, [t.rank]).sum().backward()
        first, second, unused = model.module.tasks
        # A rank that has no gradient counts as zero.
        close(first.grad, torch.full((2, 2), 8.0 / t.world_size))
        close(second.grad, torch.full((2, 2), 9.0 / t.world_size))
        assert unused.grad is None, "no rank used it: untouched"


# PyTorch's wrapper fails an assertion of its own when such a gradient is not its view.
@trial(WRAPPER)
def the_gradient_of_an_unused_parameter_is_untouched(t):
    model = t.wrap(Tasks(), **FIND)
    kept = torch.full((2, 2), 5.0 + t.rank)
    for step in range(4):
        for task in model.module.tasks:
            task.grad = None
        model.module.tasks[2].grad = kept.clone()
        model(1.0, [0, 1]).sum().backward()
        assert torch.equal(model.module.tasks[2].grad, kept), f"step {step}"
        close(model.module.tasks[0].grad, torch.ones(2, 2))


@trial()
def one_rank_uses_everything(t):
    model = t.wrap(Tasks(2), **FIND)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        model(8.0, [0, 1] if t.rank == 0 else [1]).sum().backward()
        close(model.module.tasks[0].grad, torch.full((2, 2), 8.0 / t.world_size))
        close(model.module.tasks[1].grad, torch.full((2, 2), 9.0))


@trial(world_size=3)
def each_of_three_ranks_uses_another(t):
    model = t.wrap(Tasks(4), **FIND, **SMALL_BUCKETS)
    for step in range(4):
        model.zero_grad(set_to_none=True)
        model(1.0, [(t.rank + step) % 3]).sum().backward()
        for task in range(3):
            close(model.module.tasks[task].grad, torch.full((2, 2), (1.0 + task) / 3))
        assert model.module.tasks[3].grad is None


@trial()
def use_changes_from_step_to_step(t):
    model = t.wrap(Branching(), **FIND, **SMALL_BUCKETS)
    for step in range(6):
        model.zero_grad(set_to_none=True)
        use_branch = [True, False, t.rank == 0, t.rank == 1, False, True][step]
        data = t.randn(4, 6, seed=step)
        local = local_gradients(model.module, lambda m, d=data, u=use_branch: m(d, u).pow(2).mean())
        model(data, use_branch).pow(2).mean().backward()
        if any(t.gather(use_branch)):
            t.synchronized(model, local, f"in step {step}")
        else:
            assert model.module.branch.weight.grad is None, f"step {step}"
            close(model.module.head.weight.grad, t.mean(local[-2]))


@trial(WRAPPER)
def unused_parameters_need_no_option(t):
    """PyTorch's wrapper raises an error in the next forward pass; ours needs no option."""
    model = t.wrap(Branching(), **SMALL_BUCKETS)
    for step in range(4):
        model.zero_grad(set_to_none=True)
        use_branch = step % 2 == t.rank
        data = t.randn(4, 6, seed=step)
        local = local_gradients(model.module, lambda m, d=data, u=use_branch: m(d, u).pow(2).mean())
        model(data, use_branch).pow(2).mean().backward()
        t.synchronized(model, local, f"in step {step}")


@trial(HOOK, PYTORCH)
def pytorch_names_what_was_unused(t):
    model = t.wrap(Branching(), **SMALL_BUCKETS)
    data = t.randn(4, 6)
    with t.raises(RuntimeError, match="find_unused_parameters"):
        for _ in range(2):
            model(data, False).sum().backward()


@trial()
def unused_while_accumulating(t):
    """A parameter counts as used if any micro-batch of the step used it."""
    model = t.wrap(Tasks(4), **FIND)
    for step in range(2):
        model.zero_grad(set_to_none=True)
        with model.no_sync():
            model(1.0, [0] if t.rank == 0 else [2]).sum().backward()
        model(1.0, [1] if t.rank == 0 else [3]).sum().backward()
        for index, task in enumerate(model.module.tasks):
            assert task.grad is not None, (step, index)
            close(task.grad, torch.full((2, 2), (1.0 + index) / t.world_size), f"{step} {index}")
        t.same_bits([task.grad for task in model.module.tasks])


@trial()
def outputs_that_the_loss_does_not_use(t):
    class Two(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.kind = kind
            self.a = nn.Linear(6, 6, bias=False)
            self.b = nn.Linear(6, 6, bias=False)

        def forward(self, x):
            a, b = self.a(x), self.b(x)
            return {"predictions": (a, b)} if self.kind is dict else (a, b)

    for kind in (tuple, dict):
        module = Two(kind)
        model = t.wrap(module, **FIND)

        def outputs(m, data, kind=kind):
            return m(data)["predictions"] if kind is dict else m(data)

        outputs(model, t.randn(4, 6))[1].sum().backward()
        assert module.a.weight.grad is None, "outside of the loss: untouched"
        for step in range(5):
            if step < 2:
                model.zero_grad(set_to_none=True)
            data = t.randn(4, 6, seed=step)
            before = None if module.a.weight.grad is None else module.a.weight.grad.clone()
            a, b = outputs(model, data)
            ((a * b).sum() if step < 2 else b.sum()).backward()
            if step >= 2:
                assert torch.equal(module.a.weight.grad, before), f"step {step}"
        t.same_bits([p.grad for p in model.parameters()])


@trial()
def outputs_that_need_no_gradient(t):
    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = Mlp()

        def forward(self, x):
            y = self.mlp(x)
            return y.detach(), y, None, 3

    for options in ({}, FIND, {"static_graph": True}):
        model = t.wrap(Detached(), **options)
        for step in range(3):
            model.zero_grad(set_to_none=True)
            data = t.randn(4, 6, seed=step)
            local = local_gradients(model.module, lambda m, d=data: m(d)[1].pow(2).mean())
            detached, y, none, three = model(data)
            assert not detached.requires_grad and none is None and three == 3
            y.pow(2).mean().backward()
            t.synchronized(model, local, f"in step {step} of {options}")


@trial()
def outputs_may_be_the_next_inputs(t):
    """Tensors that one forward pass gives to the next must have no history."""

    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = Mlp()

        def forward(self, x, state):
            if state is None:
                state = {"tensor": torch.randn(1, 3)}
            return self.mlp(x), state["tensor"], state

    for options in ({}, FIND, {"static_graph": True}):
        model = t.wrap(Stateful(), broadcast_buffers=False, **options)
        state = None
        for step in range(3):
            model.zero_grad(set_to_none=True)
            y, tensor, state = model(t.randn(4, 6, seed=step), state)
            assert tensor.grad_fn is None and state["tensor"].grad_fn is None
            y.mean().backward()
        t.same_bits([p.grad for p in model.parameters()])


@trial()
def unused_names_of_one_parameter(t):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(6, 5, bias=False)
            self.bias = nn.Parameter(torch.zeros(5))
            self.unused.bias = self.bias
            self.used = nn.Linear(6, 5)

        def forward(self, x):
            return self.used(x).sum()

    for options in (FIND, {**FIND, "static_graph": True}):
        model = t.wrap(Shared(), **options)
        for step in range(3):
            loss = model(t.randn(4, 6, seed=step))
            loss /= 10  # in place, on the wrapper's output
            loss.backward()
        assert model.module.bias.grad is None
        t.same_bits([model.module.used.weight.grad])


@trial()
def frozen_and_unused_at_once(t):
    module = Branching()
    module.trunk.requires_grad_(False)
    model = t.wrap(module, **FIND)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        model(t.randn(4, 6, seed=step), t.rank == 0).pow(2).mean().backward()
        assert module.trunk.weight.grad is None
        t.same_bits([module.branch.weight.grad, module.head.weight.grad])


@trial()
def a_gradient_that_autograd_leaves_undefined(t):
    module = Mlp()
    model = t.wrap(module, **FIND)
    torch._C._functions.UndefinedGrad()(model(t.randn(4, 6)).sum()).backward()
    assert all(p.grad is None for p in module.parameters()), "undefined everywhere: untouched"


@trial()
def a_static_graph_with_unused_parameters(t):
    model = t.wrap(Branching(), static_graph=True, **SMALL_BUCKETS)
    for step in range(4):
        model.zero_grad(set_to_none=True)
        data = t.randn(4, 6, seed=step)
        model(data, False).pow(2).mean().backward()
        assert model.module.branch.weight.grad is None
        t.same_bits([model.module.trunk.weight.grad, model.module.head.weight.grad])


@trial()
def a_static_graph_that_differs_between_ranks(t):
    model = t.wrap(Branching(), static_graph=True, **SMALL_BUCKETS)
    for step in range(4):
        model.zero_grad(set_to_none=True)
        data, use = t.randn(4, 6, seed=step), t.rank == 0
        local = local_gradients(model.module, lambda m, d=data: m(d, t.rank == 0).pow(2).mean())
        model(data, use).pow(2).mean().backward()
        t.synchronized(model, local, f"in step {step}")


# PyTorch's wrapper raises an error in this step or the next.
@trial(WRAPPER)
def a_static_graph_that_changes_after_all(t):
    for first in (True, False):
        model = t.wrap(Branching(), static_graph=True, **SMALL_BUCKETS)
        for step in range(4):
            model.zero_grad(set_to_none=True)
            use, data = first == (step % 2 == 0), t.randn(4, 6, seed=step)
            local = local_gradients(model.module, lambda m, d=data, u=use: m(d, u).pow(2).mean())
            model(data, use).pow(2).mean().backward()
            if use:
                t.synchronized(model, local, f"in step {step}")
            else:
                assert model.module.branch.weight.grad is None, f"step {step}"
                t.same_bits([model.module.trunk.weight.grad])


@trial(WRAPPER)
def the_step_says_which_parameters_were_used(t):
    model = t.wrap(Tasks(3), **FIND)
    model(1.0, [t.rank]).sum().backward()
    assert list(model.last_step.used) == [True, True, False], model.last_step.used
    model.zero_grad(set_to_none=True)
    model(1.0, [0, 1, 2]).sum().backward()
    assert all(model.last_step.used or [True]), model.last_step.used


@trial(WRAPPER)
def freezing_after_wrapping(t):
    module = Mlp()
    model = t.wrap(module, **SMALL_BUCKETS)
    model(t.randn(4, 6)).sum().backward()
    model.zero_grad(set_to_none=True)
    module.first.requires_grad_(False)
    for step in range(3):
        t.train(model, lambda m, s=step: m(t.randn(4, 6, seed=s)).pow(2).mean(), f"in step {step}")
        assert module.first.weight.grad is None


test = trials_test(__name__)
