"""Which passes are steps: with several forward or backward passes, no_sync, errors, threads."""

import contextlib
import copy

import torch
from models import SMALL_BUCKETS, Mlp
from torch import nn
from trial import HOOK, WRAPPER, close, local_gradients, parameters_of, squares, trial
from trial_ranks import trials_test


def local_of(t, model, *seeds):
    return local_gradients(model.module, *[squares(t, seed) for seed in seeds])


@trial()
def forwards_without_backward(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    for step in range(4):
        squares(t, step)(model)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        local = local_of(t, model, step)
        squares(t, step)(model)
        squares(t, step)(model).backward()
        t.synchronized(model, local, f"in step {step}")


@trial()
def a_forward_without_backward_on_one_rank_only(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    for step in range(3):
        if t.rank == 1:
            squares(t, step + 10)(model)
        t.train(model, squares(t, step), f"in step {step}")


@trial()
def two_forwards_and_one_backward(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        local = local_of(t, model, step, step + 20)
        (squares(t, step)(model) + squares(t, step + 20)(model)).backward()
        t.synchronized(model, local, f"in step {step}")


@trial()
def two_forwards_in_a_static_graph(t):
    model = t.wrap(Mlp(), static_graph=True)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        local = local_of(t, model, step, step + 20)
        (squares(t, step)(model) + squares(t, step + 20)(model)).backward()
        t.synchronized(model, local, f"in step {step}")


# PyTorch's wrapper silently lets the ranks diverge here.
@trial(WRAPPER)
def two_forwards_then_two_backwards(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        first, second = squares(t, step)(model), squares(t, step + 20)(model)
        local = local_of(t, model, step)
        first.backward()
        t.synchronized(model, local, f"first backward of step {step}")
        local = local_of(t, model, step, step + 20)
        second.backward()
        t.synchronized(model, local, f"second backward of step {step}")


@trial(WRAPPER)
def two_forwards_then_two_backwards_in_the_other_order(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    first, second = squares(t, 1)(model), squares(t, 2)(model)
    local = local_of(t, model, 2)
    second.backward()
    t.synchronized(model, local)
    local = local_of(t, model, 1, 2)
    first.backward()
    t.synchronized(model, local)


@trial(WRAPPER)
def backward_twice_through_a_retained_graph(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    for step in range(2):
        model.zero_grad(set_to_none=True)
        loss = squares(t, step)(model)
        local = local_of(t, model, step)
        loss.backward(retain_graph=True)
        t.synchronized(model, local)
        loss.backward()
        t.synchronized(model, [2 * g for g in local])


@trial()
def the_forward_pass_decides_whether_to_synchronize(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    squares(t, 9)(model).backward()
    model.zero_grad(set_to_none=True)

    # Forward inside, backward outside: local.
    mine = local_of(t, model, 1)
    with model.no_sync():
        loss = squares(t, 1)(model)
    loss.backward()
    for parameter, gradient in zip(model.parameters(), mine):
        close(parameter.grad, gradient)

    # Forward outside, backward inside: synchronized, with what was accumulated.
    local = local_of(t, model, 1, 2)
    loss = squares(t, 2)(model)
    with model.no_sync():
        loss.backward()
    t.synchronized(model, local)


@trial()
def no_sync_nests_and_survives_an_exception(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    with model.no_sync():
        with model.no_sync():
            squares(t, 1)(model).backward()
        squares(t, 2)(model).backward()
    with contextlib.suppress(KeyError), model.no_sync():
        raise KeyError
    local = local_of(t, model, 1, 2, 3)
    squares(t, 3)(model).backward()
    t.synchronized(model, local)


@trial()
def the_wrapped_module_called_by_itself_stays_local(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    for step in range(3):
        t.train(model, squares(t, step))
        model.zero_grad(set_to_none=True)
        local = local_of(t, model, step + 20)
        squares(t, step + 20)(model.module).backward()
        for parameter, gradient in zip(model.parameters(), local):
            close(parameter.grad, gradient)


@trial()
def one_rank_evaluates_alone(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    for step in range(3):
        t.train(model, squares(t, step))
        if t.rank == 0:
            model.eval()
            with torch.no_grad():
                close(model(torch.ones(2, 6)), model.module(torch.ones(2, 6)))
            model.train()


@trial(WRAPPER)
def gradients_asked_for_by_autograd_grad_are_no_step(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        loss = squares(t, step)(model)
        if t.rank == step % t.world_size:
            torch.autograd.grad(loss, list(model.parameters()))
        else:
            del loss
        t.backward(model, squares(t, step), f"in step {step}")


@trial(WRAPPER)
def a_gradient_penalty_by_autograd_grad(t):
    """Wasserstein critics: the loss holds the gradient with respect to the input."""
    model = t.wrap(Mlp(), **SMALL_BUCKETS)

    def penalty(module, step):
        inputs = t.randn(4, 6, seed=step).requires_grad_()
        scores = module(inputs).sum()
        (gradient,) = torch.autograd.grad(scores, inputs, create_graph=True)
        return (gradient.norm(2, dim=1) - 1).pow(2).mean()

    for step in range(3):
        model.zero_grad(set_to_none=True)
        local = local_gradients(model.module, lambda m, s=step: penalty(m, s))
        penalty(model, step).backward()
        # The slope does not depend on the last bias: no rank used it.
        assert model.module.third.bias.grad is None
        model.module.third.bias.grad = torch.zeros(3)
        t.synchronized(model, local, f"in step {step}")


@trial()
def backward_with_inputs_of_interest(t):
    """`backward(inputs=...)` for all parameters is a step like any other."""
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        local = local_of(t, model, step)
        squares(t, step)(model).backward(inputs=list(model.parameters()))
        t.synchronized(model, local)


class Sometimes(torch.autograd.Function):
    """The identity; its backward pass raises while `fails` is set."""

    fails = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Sometimes.fails:
            raise ValueError("told to fail")
        return gradient


class Failing(Mlp):
    def forward(self, x):
        return self.third(Sometimes.apply(self.second(torch.tanh(self.first(x)))))


@trial()
def an_exception_in_forward_of_every_rank(t):
    class Raises(Mlp):
        fails = True

        def forward(self, x):
            result = super().forward(x)
            if self.fails:
                raise ValueError("told to fail")
            return result

    module = Raises()
    model = t.wrap(module, **SMALL_BUCKETS)
    for step in range(3):
        module.fails = True
        with t.raises(ValueError, match="told to fail"):
            squares(t, step)(model)
        module.fails = False
        t.train(model, squares(t, step), f"in step {step}")


@trial(WRAPPER)
def an_exception_in_backward_of_every_rank(t):
    import gradsync

    model = t.wrap(Failing(), **SMALL_BUCKETS)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        Sometimes.fails = True
        try:
            # AbortedError if the other rank has abandoned the step before.
            with t.raises(ValueError, gradsync.AbortedError):
                squares(t, step)(model).backward()
        finally:
            Sometimes.fails = False
        # Each rank abandons its own partly ready step. These can be different steps: then the
        # faster rank's pass is void, and its error says to redo it.
        for _ in range(4):
            model.zero_grad(set_to_none=True)
            local = local_gradients(model.module, squares(t, step))
            try:
                squares(t, step)(model).backward()
                break
            except gradsync.AbortedError as error:
                assert error.reason == gradsync.Reason.STEP_ABANDONED, error
                assert all(p.grad is None for p in model.parameters())
        t.synchronized(model, local, f"in step {step}")


def _changing_trial(is_twice):
    """Runs a layer twice where `is_twice(step, rank)`."""

    class Changing(Mlp):
        def forward(self, x, twice):
            x = torch.tanh(self.first(x))
            x = torch.tanh(self.second(x))
            return self.third(torch.tanh(self.second(x)) if twice else x)

    def trained(t):
        model = t.wrap(Changing(), **SMALL_BUCKETS)
        for step in range(5):
            data, twice = t.randn(4, 6, seed=step), is_twice(step, t.rank)
            t.train(model, lambda m, d=data, w=twice: m(d, w).pow(2).mean(), f"in step {step}")

    return trained


control_flow_that_changes_from_step_to_step = trial()(
    _changing_trial(lambda step, rank: step % 2 == 1)
)
control_flow_that_differs_between_ranks = trial()(
    _changing_trial(lambda step, rank: (step + rank) % 2 == 1)
)


@trial()
def several_wrapped_modules(t):
    one, other = t.wrap(Mlp(), **SMALL_BUCKETS), t.wrap(Mlp(), **SMALL_BUCKETS)
    for step in range(4):
        first, second = (one, other) if step % 2 else (other, one)
        for model in (first, second):
            model.zero_grad(set_to_none=True)
        locals_ = local_of(t, first, step), local_of(t, second, step + 20)
        squares(t, step)(first).backward()
        squares(t, step + 20)(second).backward()
        t.synchronized(first, locals_[0], f"in step {step}")
        t.synchronized(second, locals_[1], f"in step {step}")


@trial()
def one_backward_through_two_wrapped_modules(t):
    encoder, decoder = t.wrap(Mlp(6, 8, 6), **SMALL_BUCKETS), t.wrap(Mlp(), **SMALL_BUCKETS)
    both = nn.Sequential(encoder, decoder)
    for step in range(4):
        both.zero_grad(set_to_none=True)
        plain = nn.Sequential(copy.deepcopy(encoder.module), copy.deepcopy(decoder.module))
        local = local_gradients(plain, squares(t, step))
        decoder(encoder(t.randn(4, 6, seed=step))).pow(2).mean().backward()
        t.synchronized(both, local, f"in step {step}")


@trial()
def one_of_two_wrapped_modules_accumulates(t):
    encoder, decoder = t.wrap(Mlp(6, 8, 6), **SMALL_BUCKETS), t.wrap(Mlp(), **SMALL_BUCKETS)
    plain = nn.Sequential(encoder.module, decoder.module)
    local = local_gradients(plain, squares(t))
    data = t.randn(4, 6)
    with encoder.no_sync():
        middle = encoder(data)
    decoder(middle).pow(2).mean().backward()
    for parameter, gradient in zip(encoder.parameters(), local):
        close(parameter.grad, gradient)
    t.synchronized(decoder, local[len(list(encoder.parameters())) :])


@trial()
def many_wrapped_modules_in_a_row(t):
    for index in range(6):
        model = t.wrap(Mlp(), **SMALL_BUCKETS)
        t.backward(model, squares(t, index))


@trial()
def an_optimizer_steps_after_each_backward(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    before = [p.detach().clone() for p in parameters_of(model)]
    for step in range(6):
        optimizer.zero_grad(set_to_none=True)
        squares(t, step)(model).backward()
        optimizer.step()
        t.same_bits(model.parameters(), f"parameters after step {step}")
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters()))


# Not on Gloo: a thread of PyTorch's Gloo group notes the end of an all-reduce in the profile's
# memory after the backward pass has ended, and sometimes after that memory was freed.
@trial(WRAPPER, HOOK)
def a_profiler_sees_the_step(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        local = local_of(t, model, step)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            squares(t, step)(model).backward()
        t.synchronized(model, local)
        assert any("AccumulateGrad" in event.key for event in profile.key_averages())


@trial()
def hooks_outlive_a_dropped_wrapper_of_the_same_module(t):
    module = Mlp()
    model = t.wrap(module, **SMALL_BUCKETS)
    squares(t)(model).backward()
    del model
    import gc

    gc.collect()
    again = t.wrap(module, **SMALL_BUCKETS)
    for step in range(3):
        t.train(again, squares(t, step), f"in step {step}")


@trial(WRAPPER)
def a_forward_pass_without_a_backward_pass_is_no_step(t):
    """One rank runs another forward pass between a no_sync() forward pass and its backward."""
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        local = local_gradients(model.module, squares(t, step), squares(t, step + 10))
        with model.no_sync():
            loss = squares(t, step)(model)
        if t.rank == 0:
            squares(t, 99)(model)
        loss.backward()
        assert model.last_step is None or model.last_step.step == step
        squares(t, step + 10)(model).backward()
        t.synchronized(model, local, f"in step {step}")
        assert model.last_step.step == step + 1


class Hiding(Mlp):
    """Keeps its output, and returns nothing."""

    def forward(self, x):
        self.value = super().forward(x)


@trial(WRAPPER)
def hidden_outputs_of_both_kinds_are_refused(t):
    """A gradient from a pass that reached no output can belong to a step or to none."""
    model = t.wrap(Hiding(), session=t.session(), **SMALL_BUCKETS)
    model(t.randn(4, 6))
    outside = model.module.value.sum()
    with model.no_sync():
        model(t.randn(4, 6))
    inside = model.module.value.sum()
    with t.raises(RuntimeError, match=("no_sync", "parameter", "tuples")):
        (inside + outside).backward()


@trial(WRAPPER)
def data_loaders_fork(t):
    """Workers are forks of the trainer, with its wrapper and session."""
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    data = [t.randn(6, seed=index) for index in range(12)]
    loader = torch.utils.data.DataLoader(
        data, batch_size=4, num_workers=1, multiprocessing_context="fork"
    )
    for batch in loader:
        t.train(model, lambda m, b=batch: m(b).pow(2).mean())


test = trials_test(__name__)
