"""Wrapping modules: which are accepted or refused, and how wrappers are saved and copied."""

import contextlib
import copy
import functools
import gc
import io
import pickle
import weakref
from unittest import mock

import gradsync
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
        ({"dim": 1}, "dim"),
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
def dropped_wrappers_do_not_disturb_the_next_one(t):
    """Wrapping and dropping many modules does not disturb the next one."""
    import gc

    for index in range(8):
        model = t.wrap(Mlp(), **SMALL_BUCKETS)
        t.backward(model, squares(t, index))
        del model
        gc.collect()


@trial()
def a_state_dict_in_the_middle_of_training(t):
    def train(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad(set_to_none=True)
            squares(t, step)(model).backward()
            optimizer.step()

    def start():
        torch.manual_seed(3)
        model = t.wrap(Mlp(), **SMALL_BUCKETS)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    straight, optimizer = start()
    train(straight, optimizer, range(6))

    model, optimizer = start()
    train(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    saved = torch.load(io.BytesIO(file.getvalue()))
    fresh, optimizer = start()
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    fresh.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train(fresh, optimizer, range(3, 6))
    for one, other in zip(straight.parameters(), fresh.parameters()):
        assert torch.equal(one, other)


@trial(WRAPPER)
def state_dicts_are_the_modules_own(t):
    model = t.wrap(Mlp())
    assert list(model.state_dict()) == list(Mlp().state_dict())
    # Files that PyTorch's wrapper has written can be loaded, too.
    other = Mlp()
    model.load_state_dict({f"module.{k}": v for k, v in other.state_dict().items()})
    for one, two in zip(model.parameters(), other.parameters()):
        assert torch.equal(one, two)
    with t.raises(RuntimeError, match="first.weight"):
        model.load_state_dict({})
    t.backward(model, squares(t))


def _copies_trial(make):
    def copied(t):
        model = t.wrap(Mlp(), **SMALL_BUCKETS)
        squares(t)(model).backward()
        other = make(model)
        for one, two in zip(model.parameters(), other.parameters()):
            assert torch.equal(one, two) and one is not two
        # The copy computes, and is in no job.
        with torch.no_grad():
            assert torch.equal(other(torch.ones(2, 6)), model(torch.ones(2, 6)))
        with t.raises(RuntimeError, match=("copy", "wrap")):
            squares(t)(other)
        # The original continues to train, and so does the copy's module when it is wrapped.
        again = t.wrap(other.module, **SMALL_BUCKETS)
        for trained in (model, again):
            t.train(trained, squares(t, 2))

    return copied


def _saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


deep_copies = trial(WRAPPER)(_copies_trial(copy.deepcopy))
pickled_copies = trial(WRAPPER)(_copies_trial(lambda model: pickle.loads(pickle.dumps(model))))
copies_saved_by_torch = trial(WRAPPER)(_copies_trial(_saved))


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
def state_within_another_module(t):
    outer = nn.ModuleDict({"inner": t.wrap(nn.Linear(3, 2)), "plain": nn.Linear(2, 2)})
    state = outer.state_dict()
    assert set(state) == {"inner.weight", "inner.bias", "plain.weight", "plain.bias"}
    assert str(outer.load_state_dict(state)) == "<All keys matched successfully>"


@trial(WRAPPER)
def a_parameter_of_two_wrappers_is_refused(t):
    shared = nn.Linear(2, 2)
    first = t.wrap(nn.Sequential(shared, nn.Linear(2, 1)))
    with t.raises(TypeError, match=("0.weight", "already")):
        t.wrap(nn.Sequential(shared, nn.Linear(2, 1)))
    del first
    squares_of = t.wrap(nn.Sequential(shared, nn.Linear(2, 1)))
    squares_of(torch.ones(1, 2)).sum().backward()
    t.same_bits([p.grad for p in squares_of.parameters()])


@trial(WRAPPER)
def a_cell_that_wraps_runs_again(t):
    """The old wrapper lives until the new one is built; it frees the daemon's memory."""
    for options in ({}, {"name": "mine"}, {"init_sync": False}):
        module = Mlp()
        averages = []
        module.first.weight.register_post_accumulate_grad_hook(
            lambda p, averages=averages: averages.append(p.grad.clone())
        )
        for run in range(3):
            model = t.wrap(module, **SMALL_BUCKETS, **options)
            for step in range(3):
                t.train(model, squares(t, step))
            assert model.statistics().steps == 3
            assert model.last_step.step == 3 * (run + 1)  # of one layout, which was replaced
            assert len(averages) == 3 * (run + 1)
            t.same_bits(averages)


@trial(WRAPPER)
def a_module_is_wrapped_again_in_the_default_session(t):
    import gradsync.torch
    from gradsync.torch import _session

    module = Mlp()
    with mock.patch.object(_session, "_default", t.session()):
        for _ in range(2):
            model = gradsync.torch.DistributedDataParallel(module)
            t.train(model, squares(t))


@trial(WRAPPER)
def the_old_wrapper_of_a_module_refuses_to_train(t):
    module = Mlp()
    old = t.wrap(module)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    t.train(old, squares(t))
    old.clip_grad_norm_(1e-6, optimizer)
    assert hasattr(optimizer, "grad_scale")
    loss = squares(t)(old)
    new = t.wrap(module)
    assert not hasattr(optimizer, "grad_scale")  # it would scale gradients of the new wrapper
    for use in (
        functools.partial(squares(t), old),
        loss.backward,
        old.leave,
        old.statistics,
        functools.partial(getattr, old, "last_step"),
        functools.partial(old.clip_grad_norm_, 1.0),
    ):
        with t.raises(RuntimeError, match=("'ddp0'", "wrapped again", "new wrapper")):
            use()
    with torch.no_grad():
        squares(t)(old)
    t.train(new, squares(t))
    freed = weakref.ref(old)
    del old, loss, use
    gc.collect()
    assert freed() is None
    t.train(new, squares(t))


@trial(WRAPPER)
def a_module_is_wrapped_again_after_its_backward_pass_failed(t):
    module = Mlp()
    model = t.wrap(module, **SMALL_BUCKETS)
    t.train(model, squares(t))
    if t.rank == 1:
        handle = module.first.weight.register_hook(lambda _: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            squares(t)(model).backward()
        handle.remove()
    else:
        with t.raises(gradsync.AbortedError, match=("rank 1", "wrapped again")):
            squares(t)(model).backward()
    model = t.wrap(module, **SMALL_BUCKETS)
    assert all(p.grad is None for p in module.parameters())
    t.train(model, squares(t))


@trial(WRAPPER)
def a_wrapper_stays_in_use_if_wrapping_again_fails(t):
    module = Mlp()
    model = t.wrap(module, **SMALL_BUCKETS)
    with t.raises(ValueError, match="static_graph"):
        t.wrap(module, static_graph=t.rank == 1)
    with t.raises(gradsync.FailedPreconditionError, match="ddp2"):
        t.wrap(module, bucket_cap_mb=1 + t.rank, init_sync=False)
    # Another session's ranks may be others.
    with t.raises(TypeError, match=("first.weight", "ddp0", "already")):
        t.wrap(module, session=t.session(divisor="world"))

    def wrap_again(gradient):
        with t.raises(RuntimeError, match=("ddp0", "in a backward pass")):
            t.wrap(module)

    module.first.weight.register_hook(wrap_again)
    for _ in range(3):
        t.train(model, squares(t))


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


@trial(WRAPPER)
def a_wrapper_is_freed_without_the_garbage_collector(t):
    for failing in (False, True):
        model = t.wrap(Mlp(), name=f"freed{failing}")
        loss = model(t.randn(4, 6)).sum()
        if failing:
            handle = model.module.first.weight.register_hook(lambda _: 1 / 0)
            with contextlib.suppress(ZeroDivisionError):
                loss.backward()
            handle.remove()
        else:
            loss.backward()
        gc.collect()
        gc.disable()
        try:
            freed = weakref.ref(model._synchronizer)
            del model, loss
            assert freed() is None
        finally:
            gc.enable()


@trial(WRAPPER)
def a_wrapper_is_freed_after_a_void_step(t):
    """The error that backward() raised does not keep the module, wherever it was raised."""
    for heard in ("at any time", "before the pass", "in the pass"):
        model = t.wrap(Mlp(), name=f"void {heard}", **SMALL_BUCKETS)
        loss = model(t.randn(4, 6)).sum()
        gc.collect()
        gc.disable()
        try:
            # Trial.raises() would make a cycle of its own.
            if t.rank == 0:
                if heard == "in the pass":
                    t.meet()  # rank 1 is in its pass
                fail_and_abandon(t, model, loss)
                if heard != "at any time":
                    t.meet()
            else:
                if heard == "before the pass":
                    learn_that_it_is_void(t, model)
                elif heard == "in the pass":
                    # Of the bucket that is ready first: the daemon was told nothing yet.
                    model.module.third.weight.register_hook(
                        functools.partial(meet_and_learn, t, weakref.proxy(model))
                    )
                reason = ""
                try:
                    loss.backward()
                except gradsync.AbortedError as error:
                    reason = error.reason
                assert reason == gradsync.Reason.STEP_ABANDONED, (heard, reason)
            freed = weakref.ref(model._synchronizer)
            del model, loss
            assert freed() is None, heard
        finally:
            gc.enable()


def fail_and_abandon(t, model, loss):
    model.module.first.weight.register_hook(lambda _: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        loss.backward()
    model(t.randn(4, 6))  # abandons the step


def meet_and_learn(t, model, _):
    t.meet()  # rank 0 fails after this
    learn_that_it_is_void(t, model)


def learn_that_it_is_void(t, model):
    """Returns when rank 0 has abandoned step 1, and this rank's library has heard of it."""
    t.meet()
    with contextlib.suppress(gradsync.AbortedError):
        model._synchronizer.buckets.layout.wait_step(1)


def train_and_lose_rank_0(t):
    """Three steps; then a module and an optimizer that are new on rank 0, as after its loss."""
    module = Mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model = t.wrap(module)
    for step in range(3):
        t.train(model, squares(t, step))
        optimizer.step()
    model.leave()
    if t.rank == 0:
        module = Mlp()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return module, optimizer


@trial(WRAPPER)
def a_rank_that_has_trained_gives_its_state_when_rank_0_is_new(t):
    module, _ = train_and_lose_rank_0(t)
    trained = t.gather([p.detach().clone() for p in module.parameters()])[1]
    again = t.wrap(module, session=t.session(step_timeout=120.0))
    for parameter, expected in zip(again.parameters(), trained):
        assert torch.equal(parameter, expected)


@trial(WRAPPER)
def an_optimizer_whose_state_one_rank_lacks_is_refused_by_name(t):
    module, optimizer = train_and_lose_rank_0(t)
    again = t.wrap(module, session=t.session(step_timeout=120.0))
    t.train(again, squares(t, 3))
    before = [p.detach().clone() for p in again.parameters()]
    for _ in range(2):  # the second try, too
        with t.raises(
            ValueError,
            match=("optimizers differ", "rank 0 has no state of 'first.weight'", "momentum_buffer"),
        ):
            optimizer.step()
    for parameter, expected in zip(again.parameters(), before):
        assert torch.equal(parameter, expected)


@trial(WRAPPER)
def an_optimizer_whose_state_every_rank_has_goes_on(t):
    module, optimizer = train_and_lose_rank_0(t)
    optimizer.load_state_dict(t.gather(optimizer.state_dict())[1])
    again = t.wrap(module, session=t.session(step_timeout=120.0))
    for step in range(3, 6):
        t.train(again, squares(t, step))
        optimizer.step()
    t.same_bits(list(again.parameters()))


test = trials_test(__name__)
