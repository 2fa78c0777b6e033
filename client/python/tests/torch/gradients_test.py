"""What `.grad` holds after a backward pass: averages, in place, for every kind of parameter."""

import contextlib
import copy

import torch
import torch.nn.functional as F
from models import SMALL_BUCKETS, Cnn, Mlp, Transformer
from torch import nn
from trial import WRAPPER, close, local_gradients, parameters_of, squares, trial
from trial_ranks import trials_test


@trial()
def gradients_are_averages(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        loss = squares(t, step)
        t.backward(model, loss, f"in step {step}")


@trial()
def training_matches_one_process_with_the_whole_batch(t):
    whole = Mlp()
    model = t.wrap(copy.deepcopy(whole), **SMALL_BUCKETS)
    for step in range(4):
        inputs, targets = torch.randn(4 * t.world_size, 6), torch.randn(4 * t.world_size, 3)
        mine = slice(4 * t.rank, 4 * t.rank + 4)
        F.mse_loss(whole(inputs), targets).backward()
        F.mse_loss(model(inputs[mine]), targets[mine]).backward()
        for one, other in zip(whole.parameters(), model.parameters()):
            close(other.grad, one.grad, f"step {step}")
            for parameter in (one, other):
                with torch.no_grad():
                    parameter -= 0.1 * parameter.grad
                parameter.grad = None
    t.same_bits(model.parameters())


@trial(world_size=3)
def three_ranks_average(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    t.backward(model, squares(t))


@trial()
def views_stay_in_place(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    # PyTorch's wrapper and ours can cut buckets anew after the first step.
    squares(t, 0)(model).backward()
    squares(t, 1)(model).backward()
    places = [p.grad.data_ptr() for p in model.parameters()]
    for step in range(2, 5):
        model.zero_grad(set_to_none=False)
        t.backward(model, squares(t, step))
        assert [p.grad.data_ptr() for p in model.parameters()] == places


def _keeps_nothing(model):
    model.zero_grad(set_to_none=True)


def _keeps_zeros(model):
    model.zero_grad(set_to_none=False)


def _keeps_zeros_elsewhere(model):
    for p in model.parameters():
        p.grad = torch.zeros_like(p)


def _keeps_half_nothing(model):
    for index, p in enumerate(model.parameters()):
        if index % 2:
            p.grad = None
        else:
            p.grad.zero_()


def _keeps_detached_zeros(model):
    for p in model.parameters():
        p.grad = p.grad.detach().clone().zero_()


def _zeroing_trial(zero):
    def zeroed(t):
        model = t.wrap(Mlp(), **SMALL_BUCKETS)
        for step in range(4):
            t.backward(model, squares(t, step), f"in step {step}")
            zero(model)

    return zeroed


zero_grad_to_none = trial()(_zeroing_trial(_keeps_nothing))
zero_grad_to_zeros = trial()(_zeroing_trial(_keeps_zeros))
zeros_in_new_tensors = trial()(_zeroing_trial(_keeps_zeros_elsewhere))
zeros_in_clones = trial()(_zeroing_trial(_keeps_detached_zeros))
zero_grad_in_two_ways_at_once = trial()(_zeroing_trial(_keeps_half_nothing))


def _accumulation_trial(pattern):
    """`pattern`: S a synchronized pass, L a local one, Z zero_grad to zeros, N to None."""

    def accumulated(t):
        model = t.wrap(Mlp(), **SMALL_BUCKETS)
        expected = [torch.zeros_like(p) for p in model.parameters()]
        for index, what in enumerate(pattern):
            if what in "ZN":
                model.zero_grad(set_to_none=what == "N")
                expected = [torch.zeros_like(e) for e in expected]
                continue
            loss = squares(t, index)
            mine = local_gradients(model.module, loss)
            with model.no_sync() if what == "L" else contextlib.nullcontext():
                loss(model).backward()
            expected = [e + g for e, g in zip(expected, mine)]
            if what == "S":
                expected = t.means(expected)
            for parameter, gradient in zip(model.parameters(), expected):
                close(parameter.grad, gradient, f"pass {index} of {pattern}")
            equal = t.gather([p.grad for p in model.parameters()])
            same = all(torch.equal(a, b) for a, b in zip(*equal[:2]))
            assert same == (what == "S"), f"pass {index} of {pattern}: same on all ranks: {same}"

    return accumulated


accumulate_once = trial()(_accumulation_trial("LSNLS"))
accumulate_twice = trial()(_accumulation_trial("LLSNLLS"))
accumulate_after_a_step = trial()(_accumulation_trial("SNLSZLS"))
accumulate_over_steps = trial()(_accumulation_trial("SSS"))
accumulate_over_steps_and_local_passes = trial()(_accumulation_trial("SLSLLS"))
accumulate_and_throw_away = trial()(_accumulation_trial("LNLZSNS"))
accumulate_into_zeros = trial()(_accumulation_trial("SZLLSZS"))


@trial()
def evaluation_inside_no_sync_leaves_nothing(t):
    model = t.wrap(Mlp())
    with torch.no_grad(), model.no_sync():
        model(t.randn(2, 6))
    assert all(p.grad is None for p in model.parameters())
    t.backward(model, squares(t))


@trial()
def a_gradient_of_the_user_is_added_to(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1.0 + t.rank)
    local = [g + 1 + t.rank for g in local_gradients(model.module, squares(t))]
    squares(t)(model).backward()
    t.synchronized(model, local)


# PyTorch's wrapper warns, and leaves gradients of the gradients that are not averaged.
@trial(WRAPPER)
def create_graph_is_refused(t):
    """An average has no graph. The error names the other way: torch.autograd.grad."""
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    with t.raises(RuntimeError, match=("create_graph", "torch.autograd.grad")):
        squares(t, 0)(model).backward(create_graph=True)
    assert all(p.grad is None for p in model.parameters())

    def penalized(module):
        loss = squares(t, 1)(module)
        parameters = list(module.parameters())
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        return loss + sum(g.pow(2).sum() for g in gradients)

    t.backward(model, penalized)


class Mixed(nn.Module):
    """Each layer has a dtype."""

    def __init__(self, *dtypes):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6).to(dtype) for dtype in dtypes)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float()


def _dtype_trial(*dtypes):
    def trained(t):
        model = t.wrap(Mixed(*dtypes), **SMALL_BUCKETS)
        for step in range(3):
            t.train(model, squares(t, step), f"in step {step}")
            for parameter in model.parameters():
                assert parameter.grad.dtype == parameter.dtype

    return trained


float32_and_float64 = trial()(_dtype_trial(torch.float32, torch.float64, torch.float32))
bfloat16_alone = trial()(_dtype_trial(torch.bfloat16))
bfloat16_and_float32 = trial()(_dtype_trial(torch.bfloat16, torch.float32, torch.bfloat16))
float16_and_float32 = trial()(_dtype_trial(torch.float16, torch.float32))


@trial()
def gradients_have_the_memory_format_of_channels_last(t):
    model = t.wrap(Cnn(), **SMALL_BUCKETS)
    for step in range(3):
        model.zero_grad(set_to_none=step != 1)
        inputs = t.randn(4, 3, 8, 8, seed=step)
        t.backward(model, lambda m, x=inputs: m(x).pow(2).mean())
        weight = model.module.first.weight
        assert weight.grad.is_contiguous(memory_format=torch.channels_last)


@trial()
def a_parameter_that_is_a_transposed_view(t):
    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 6).t())
            self.bias = nn.Parameter(torch.randn(10)[::2])

        def forward(self, x):
            return x @ self.weight + self.bias

    model = t.wrap(Transposed())
    for step in range(3):
        t.train(model, squares(t, step))


@trial()
def a_gradient_that_is_an_expanded_scalar(t):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, factor):
            return self.weight.sum() * factor

    model = t.wrap(Sum())
    for step in range(3):
        model.zero_grad(set_to_none=step != 1)
        model(float(t.rank + step)).backward()
        expected = step + (t.world_size - 1) / 2
        close(model.module.weight.grad, torch.full((3, 4), expected))


@trial()
def scalars_and_empty_parameters(t):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.empty = nn.Linear(6, 0)
            self.linear = nn.Linear(6, 2)

        def forward(self, x):
            return torch.cat([self.linear(x) * self.scale, self.empty(x)], 1)

    model = t.wrap(Odd(), **SMALL_BUCKETS)
    for step in range(3):
        t.train(model, squares(t, step))


@trial()
def tied_weights_get_one_gradient(t):
    model = t.wrap(Transformer(), **SMALL_BUCKETS)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        tokens = torch.randint(Transformer.TOKENS, (4, 5), generator=t.rng(step))
        t.backward(model, lambda m, x=tokens: m(x).pow(2).mean())
        assert model.module.head.weight is model.module.embedding.weight


@trial()
def frozen_parameters_are_left_alone(t):
    module = Mlp()
    module.first.requires_grad_(False)
    model = t.wrap(module, **SMALL_BUCKETS)
    t.backward(model, squares(t))
    assert module.first.weight.grad is None and module.first.bias.grad is None


@trial()
def hooks_of_the_user_run_before_the_average(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: 3 * gradient)
    local = [3 * g for g in local_gradients(model.module, squares(t))]
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        squares(t)(model).backward()
        t.synchronized(model, local)


@trial()
def hooks_of_modules_run(t):
    def transformed(module):
        module.second.register_forward_pre_hook(lambda _, inputs: F.relu(inputs[0]))
        module.second.register_forward_hook(lambda _, __, output: F.gelu(output))
        module.second.register_full_backward_hook(lambda _, gradients, __: (gradients[0] * 2,))
        return module

    torch.manual_seed(5)
    one = transformed(Mlp())
    torch.manual_seed(5)
    model = t.wrap(transformed(Mlp()))
    squares(t)(one).backward()
    squares(t)(model).backward()
    t.synchronized(model, [p.grad for p in one.parameters()])


@trial()
def hooks_of_the_wrapper_run(t):
    calls = []
    model = t.wrap(Mlp())
    model.register_forward_pre_hook(lambda *_: calls.append("before"))
    model.register_forward_hook(lambda *_: calls.append("after"))
    t.backward(model, squares(t))
    assert calls == ["before", "after"], calls


@trial()
def a_large_parameter_beside_small_ones(t):
    # More than a bucket's cap, and an odd size.
    model = t.wrap(
        nn.Sequential(nn.Linear(6, 1031), nn.Tanh(), nn.Linear(1031, 3)), **SMALL_BUCKETS
    )
    for step in range(3):
        t.train(model, squares(t, step))


def _bucket_size_trial(megabytes):
    def trained(t):
        model = t.wrap(Mlp(), bucket_cap_mb=megabytes)
        for step in range(3):
            t.train(model, squares(t, step))

    return trained


a_bucket_per_parameter = trial()(_bucket_size_trial(0.000001))
one_bucket = trial()(_bucket_size_trial(25))


@trial(WRAPPER)
def a_small_first_bucket(t):
    model = t.wrap(Mlp(), bucket_cap_mb=25, first_bucket_cap_mb=0.0001)
    for step in range(3):
        t.train(model, squares(t, step))


@trial()
def use_in_another_order_than_defined(t):
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))

        def forward(self, x):
            for layer in reversed(self.layers):
                x = torch.tanh(layer(x))
            return x

    # The first step teaches the order of use; the second already has other buckets.
    model = t.wrap(Backwards(), bucket_cap_mb=0.0002)
    for step in range(4):
        model.zero_grad(set_to_none=step != 2)
        t.backward(model, squares(t, step), f"in step {step}")


@trial()
def another_thread_runs_backward(t):
    import threading

    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        local = local_gradients(model.module, squares(t, step))
        loss = squares(t, step)(model)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        t.synchronized(model, local, f"in step {step}")


@trial()
def an_infinite_gradient_of_one_rank_reaches_all(t):
    model = t.wrap(Mlp())
    (squares(t)(model) * (float("inf") if t.rank == 0 else 1.0)).backward()
    for parameter in parameters_of(model):
        assert not torch.isfinite(parameter.grad).any()


test = trials_test(__name__)
