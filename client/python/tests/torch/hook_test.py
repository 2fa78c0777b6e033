"""gradsync.torch.allreduce_hook, in PyTorch's own wrapper: one line in an unmodified program."""

import copy
import weakref

import torch
from models import SMALL_BUCKETS, Branching, Mlp, Transformer
from torch import nn
from trial import HOOK, close, local_gradients, squares, trial
from trial_ranks import trials_test


def hooked(t, module, state=None, **options):
    import gradsync.torch

    model = t.pytorch(module, **options)
    model.register_comm_hook(state, gradsync.torch.allreduce_hook)
    return model


@trial(HOOK)
def one_line(t):
    """Without a state: the process's own session, which joins by torchrun's environment."""
    import gradsync.torch

    models = [hooked(t, Mlp(), bucket_cap_mb=0.002) for _ in range(2)]
    try:
        for step in range(4):
            for index, model in enumerate(models):
                t.train(model, squares(t, 10 * index + step), f"of model {index} in step {step}")
        assert gradsync.torch.default_session().statistics().steps_complete >= 8
    finally:
        gradsync.torch.default_session().leave()
        gradsync.torch.default_session().close()


@trial(HOOK)
def a_hook_without_a_state_begins_anew_after_the_end_of_its_session(t):
    """The memory of the old session is freed, also that of a module which is not trained again."""
    import gradsync.torch
    from gradsync.torch import comm_hook

    modules, old = [Mlp(), Mlp()], []
    for life in range(2):
        for module in modules[life:]:
            model = hooked(t, module, bucket_cap_mb=0.002)
            for step in range(3):
                t.train(model, squares(t, step), f"of life {life} in step {step}")
            old.append(weakref.ref(comm_hook._latest[0]._layout._mapping))
            del model
        session = gradsync.torch.default_session()
        assert session.statistics().steps_complete >= 2
        session.leave()
        session.close()
    assert [mapping() is None for mapping in old] == [True, True, False]


@trial(HOOK)
def parity_with_the_default(t):
    """The same bits for two ranks: halving is exact."""
    plain, model = t.pytorch(Mlp()), None
    model = t.wrap(copy.deepcopy(plain.module), **SMALL_BUCKETS)
    for step in range(4):
        for each in (plain, model):
            each.zero_grad(set_to_none=True)
            squares(t, step)(each).backward()
        for one, other in zip(plain.parameters(), model.parameters()):
            assert torch.equal(one.grad, other.grad), f"step {step}"


def _options_trial(make, loss, **options):
    def trained(t):
        module = make()
        model = t.wrap(module, **SMALL_BUCKETS, **options)
        for step in range(4):
            t.train(model, lambda m, s=step: loss(t, m, s), f"in step {step}")

    return trained


def _plain_loss(t, module, step):
    return squares(t, step)(module)


def _branch_loss(t, module, step):
    return module(t.randn(4, 6, seed=step), (t.rank + step) % 2 == 0).pow(2).mean()


def _token_loss(t, module, step):
    tokens = torch.randint(Transformer.TOKENS, (4, 5), generator=t.rng(step))
    return module(tokens).pow(2).mean()


static_graph = trial(HOOK)(_options_trial(Mlp, _plain_loss, static_graph=True))
without_bucket_views = trial(HOOK)(_options_trial(Mlp, _plain_loss))
finding_unused = trial(HOOK)(_options_trial(Branching, _branch_loss, find_unused_parameters=True))
tied_weights = trial(HOOK)(_options_trial(Transformer, _token_loss))


@trial(HOOK)
def gradients_that_are_no_views(t):
    import gradsync.torch

    t.process_group()
    model = nn.parallel.DistributedDataParallel(Mlp(), bucket_cap_mb=0.002)
    state = gradsync.torch.HookState(t.session(), name="mine", timeout=20.0)
    model.register_comm_hook(state, gradsync.torch.allreduce_hook)
    for step in range(4):
        t.train(model, squares(t, step), f"in step {step}")


@trial(HOOK)
def a_future_is_passed_on(t):
    """Another hook can process its result, as PyTorch's wrappers of hooks do."""
    import gradsync.torch

    state = gradsync.torch.HookState(t.session())

    def doubled(state, bucket):
        future = gradsync.torch.allreduce_hook(state, bucket)
        return future.then(lambda f: 2 * f.value())

    model = t.pytorch(Mlp(), bucket_cap_mb=0.002)
    model.register_comm_hook(state, doubled)
    for step in range(4):
        model.zero_grad(set_to_none=True)
        local = [2 * g for g in local_gradients(model.module, squares(t, step))]
        squares(t, step)(model).backward()
        t.synchronized(model, local, f"in step {step}")


@trial(HOOK)
def one_state_for_two_modules_is_refused(t):
    import gradsync.torch

    state = gradsync.torch.HookState(t.session())
    one, other = hooked(t, Mlp(), state), hooked(t, Mlp(6, 40, 3), state)
    with t.raises(RuntimeError, ValueError):
        for step in range(3):
            (squares(t, step)(one) + squares(t, step)(other)).backward()
            for model, data in ((one, step), (other, step)):
                local = local_gradients(model.module, squares(t, data))
                model.zero_grad(set_to_none=True)
                squares(t, data)(model).backward()
                t.synchronized(model, local)
        raise RuntimeError("right in any case")


@trial(HOOK)
def a_second_hook_is_refused(t):
    import gradsync.torch

    model = hooked(t, Mlp(), gradsync.torch.HookState(t.session()))
    with t.raises(RuntimeError, match="once"):
        model.register_comm_hook(None, gradsync.torch.allreduce_hook)


@trial(HOOK)
def complex_parameters(t):
    """PyTorch's wrapper passes them to hooks as pairs of real numbers."""

    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))

        def forward(self, factor):
            return torch.view_as_real(self.weight * factor).sum()

    model = t.wrap(Complex())
    for step in range(3):
        model.zero_grad(set_to_none=True)
        model(float(t.rank + step)).backward()
        mean = step + (t.world_size - 1) / 2
        close(torch.view_as_real(model.module.weight.grad), torch.full((3, 2), mean))


@trial(HOOK)
def two_dtypes(t):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6).double()

        def forward(self, x):
            return self.second(torch.tanh(self.first(x)).double())

    model = t.wrap(Two(), **SMALL_BUCKETS)
    for step in range(4):
        t.train(model, squares(t, step), f"in step {step}")


@trial(HOOK)
def accumulation(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        local = local_gradients(model.module, squares(t, step), squares(t, step + 10))
        with model.no_sync():
            squares(t, step)(model).backward()
        squares(t, step + 10)(model).backward()
        t.synchronized(model, local, f"in step {step}")


@trial(HOOK)
def a_state_cannot_be_copied_or_pickled(t):
    import pickle

    import gradsync.torch

    state = gradsync.torch.HookState(t.session())
    for carry in (pickle.dumps, copy.copy, copy.deepcopy):
        with t.raises(TypeError, match="process"):
            carry(state)
    model = hooked(t, nn.Linear(6, 3), state)
    squares(t)(model).backward()
    close(model.module.bias.grad, t.mean(local_gradients(model.module, squares(t))[1]))


test = trials_test(__name__)
