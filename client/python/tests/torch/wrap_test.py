"""Wrapping modules: which are accepted or refused, and what a wrapper is."""

import torch
from models import SMALL_BUCKETS, Mlp
from torch import nn
from trial import WRAPPER, local_gradients, squares, trial
from trial_ranks import trials_test


def refuses(t, module, *words, types=(TypeError, ValueError, RuntimeError), **options):
    with t.raises(*types, match=words):
        t.wrap(module, **options)


@trial()
def modules_without_anything_to_train(t):
    refuses(t, nn.Module())
    refuses(t, nn.ReLU())
    frozen = Mlp()
    frozen.requires_grad_(False)
    refuses(t, frozen)


@trial(WRAPPER)
def parameters_of_kinds_that_are_not_synchronized(t):
    class One(nn.Module):
        def __init__(self, parameter):
            super().__init__()
            self.fine = nn.Linear(2, 2)
            self.odd = parameter

    refuses(t, One(nn.Parameter(torch.ones(2, dtype=torch.complex64))), "odd", "complex")
    refuses(t, nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2, sparse=True)), "1", "sparse")
    refuses(t, nn.Sequential(nn.EmbeddingBag(3, 2, sparse=True)), "sparse")
    refuses(t, One(nn.Parameter(torch.ones(2, device="meta"))), "odd", "meta")
    refuses(t, nn.Sequential(nn.LazyLinear(3)), "weight", "initialized")
    # A frozen one of any kind is not synchronized in steps.
    model = t.wrap(One(nn.Parameter(torch.arange(3), requires_grad=False)))
    model.module.fine(torch.ones(1, 2)).sum().backward()


@trial(WRAPPER)
def a_dtensor(t):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    t.process_group()
    module = nn.Sequential(nn.Linear(4, 4))
    distribute_module(module, init_device_mesh("cpu", (t.world_size,)))
    refuses(t, module, "0.weight", "DTensor")


@trial(WRAPPER)
def synchronized_batch_normalization_without_a_process_group(t):
    assert not torch.distributed.is_initialized()
    refuses(t, nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)), "1", "SyncBatchNorm")


@trial(WRAPPER)
def sparse_gradients_of_a_function_are_named(t):
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, 3))

        def forward(self, index):
            return nn.functional.embedding(index, self.table, sparse=True)

    model = t.wrap(Functional())
    with t.raises(RuntimeError, match=("table", "sparse")):
        model(torch.tensor([1, 2])).sum().backward()


@trial(WRAPPER)
def arguments(t):
    import gradsync.torch

    wrap = gradsync.torch.DistributedDataParallel
    session = t.session()
    for wrong, word in (
        ({"device_ids": [0]}, "device_ids"),
        ({"output_device": 0}, "output_device"),
        ({"process_group": object()}, "process_group"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb"),
        ({"bucket_cap_mb": -1}, "bucket_cap_mb"),
        ({"first_bucket_cap_mb": 0}, "first_bucket_cap_mb"),
    ):
        with t.raises(ValueError, match=word):
            wrap(Mlp(), session=session, **wrong)
    with t.raises(TypeError, match="nonsense"):
        wrap(Mlp(), session=session, nonsense=1)
    model = wrap(
        Mlp(),
        device_ids=None,
        output_device=None,
        process_group=None,
        bucket_cap_mb=None,
        gradient_as_bucket_view=False,
        find_unused_parameters=True,
        session=session,
        name="mine",
    )
    t.backward(model, squares(t))


@trial()
def wrapped_twice(t):
    """A wrapper inside a wrapper would average averages."""
    model = t.wrap(Mlp())
    if t.ours:
        refuses(t, model, "wrapped")
        refuses(t, nn.Sequential(nn.Linear(6, 6), model), "wrapped")


@trial()
def attributes_and_modes(t):
    model = t.wrap(Mlp())
    assert isinstance(model.module, Mlp)
    assert [n for n, _ in model.named_parameters()] == [
        f"module.{n}" for n, _ in model.module.named_parameters()
    ]
    assert model.training and model.module.training
    assert not model.eval().module.first.training
    assert model.train().module.first.training
    assert not hasattr(model, "first")


@trial()
def names_that_are_ignored(t):
    """`_ddp_params_and_buffers_to_ignore`, as PyTorch's wrapper reads it."""

    class Partly(nn.Module):
        def __init__(self, rank):
            super().__init__()
            self.shared = nn.Linear(6, 3)
            self.own = nn.Linear(3 + rank, 3)  # of another shape on each rank
            self.register_buffer("own_buffer", torch.zeros(2 + rank))

        def forward(self, x):
            return self.shared(x) + self.own(torch.ones(1, self.own.in_features))

    module = Partly(t.rank)
    module._ddp_params_and_buffers_to_ignore = ["own.weight", "own.bias", "own_buffer"]
    model = t.wrap(module)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        data = t.randn(4, 6, seed=step)
        local = local_gradients(module, lambda m, d=data: m(d).pow(2).mean())
        model(data).pow(2).mean().backward()
        t.same_bits([module.shared.weight.grad])
        means = t.means(local[:2])
        torch.testing.assert_close(module.shared.weight.grad, means[0])
        torch.testing.assert_close(module.own.weight.grad, local[2])


@trial(WRAPPER)
def functional_call_is_refused(t):
    """Parameters other than the wrapped ones would not be synchronized."""
    model = t.wrap(Mlp())
    other = {f"module.{k}": torch.randn_like(v) for k, v in Mlp().named_parameters()}
    with t.raises(RuntimeError, match="first.weight"):
        torch.func.functional_call(model, other, torch.ones(2, 6))


@trial(WRAPPER)
def statistics(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    assert model.last_step is None and model.statistics().steps == 0
    with t.raises(RuntimeError, match="norm"):
        _ = model.gradient_norm
    for step in range(3):
        model.zero_grad(set_to_none=True)
        squares(t, step)(model).backward()
        assert model.last_step.divisor == t.world_size
        assert model.last_step.live_ranks == t.world_size
    numbers = model.statistics()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert numbers.steps == 3 and numbers.buckets >= 2 and numbers.rebuilt
    assert numbers.bytes >= size
    assert 0 <= numbers.until_first_bucket <= numbers.backward
    assert numbers.exposed > 0


@trial(WRAPPER)
def buckets_follow_the_order_in_which_gradients_come(t):
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(6))

        def forward(self, x):
            for layer in reversed(self.layers):
                x = torch.tanh(layer(x))
            return x

    model = t.wrap(Backwards(), bucket_cap_mb=0.0001, first_bucket_cap_mb=0.0001)
    assert not model.statistics().rebuilt
    squares(t)(model).backward()
    squares(t)(model).backward()
    assert model.statistics().rebuilt and model.statistics().buckets == 6
    times = model.last_step.buckets
    # The first bucket is that of the first gradient, which is the first layer's.
    assert [b.ready_ns[t.rank] for b in times] == sorted(b.ready_ns[t.rank] for b in times)


@trial(WRAPPER)
def a_name_for_the_layout(t):
    model = t.wrap(Mlp(), name="critic")
    squares(t)(model).backward()
    with t.raises(RuntimeError, ValueError, match="critic"):
        t.wrap(Mlp(), name="critic")


@trial(WRAPPER)
def signed_zeros_are_broadcast(t):
    module = nn.Linear(2, 1, bias=False)
    nn.init.constant_(module.weight, -0.0 if t.rank else 0.0)
    model = t.wrap(module)
    t.same_bits(list(model.parameters()))


@trial(WRAPPER)
def a_scripted_module(t):
    model = t.wrap(torch.jit.script(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))))
    for step in range(2):
        model.zero_grad(set_to_none=True)
        model(t.randn(4, 2, seed=step)).sum().backward()
        t.same_bits([p.grad for p in model.parameters()])
    assert model.last_step.step == 2


@trial(WRAPPER)
def pytorchs_wrapper_around_ours_is_refused(t):
    """It would average the same gradients a second time."""
    ours = t.wrap(Mlp())
    for module in (ours, nn.Sequential(ours, nn.Linear(3, 3))):
        theirs = t.pytorch(module)
        with t.raises(TypeError, match=("again", "first.weight", "allreduce_hook")):
            theirs(t.randn(4, 6))


@trial(WRAPPER)
def pytorchs_wrapper_around_other_parameters(t):
    """PyTorch's wrapper may hold ours if it leaves our parameters out."""
    ours = t.wrap(Mlp())
    outer = nn.Sequential(ours, nn.Linear(3, 3))
    ignored = [name for name, _ in outer.named_parameters() if name.startswith("0.")]
    DDP = nn.parallel.DistributedDataParallel
    DDP._set_params_and_buffers_to_ignore_for_model(outer, ignored)
    theirs = t.pytorch(outer)
    theirs(t.randn(4, 6)).sum().backward()
    t.same_bits([p.grad for p in outer.parameters()], "gradients")


test = trials_test(__name__)
