"""Wrapping again: old wrappers make way or are freed, and which rank's state counts."""

import contextlib
import functools
import gc
import sys
import weakref
from unittest import mock

import gradsync
import torch
from models import SMALL_BUCKETS, Mlp
from torch import nn
from trial import WRAPPER, squares, trial
from trial_ranks import trials_test


@trial()
def dropped_wrappers_do_not_disturb_the_next_one(t):
    """Wrapping and dropping many modules does not disturb the next one."""
    for index in range(8):
        model = t.wrap(Mlp(), **SMALL_BUCKETS)
        t.backward(model, squares(t, index))
        del model
        gc.collect()


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
def a_wrapper_that_only_a_notebooks_last_exception_holds_is_not_in_the_way(t):
    shared = nn.Linear(6, 6)

    def cell(run):
        model = t.wrap(nn.Sequential(shared, nn.Linear(6, 1)))
        t.train(model, squares(t, run))
        try:
            raise KeyError("in a library")
        except KeyError:
            raise ValueError("a cell fails") from None

    with mock.patch.object(sys, "last_value", None, create=True):
        for run in range(3):
            try:
                cell(run)
            except ValueError as error:
                sys.last_value = error  # as IPython does
        model = t.wrap(nn.Sequential(shared, nn.Linear(6, 1)))
        with t.raises(TypeError, match=("0.weight", "already")):
            t.wrap(nn.Sequential(shared, nn.Linear(6, 1)))
    t.train(model, squares(t))


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
def seventy_runs_of_a_cell_that_wraps_a_new_module(t):
    """The daemon allows 64 layouts. The ranks drop their wrappers at different times."""

    def cell(run):
        model = t.wrap(nn.Linear(2, 1))
        t.train(model, squares(t, run, inputs=2))
        if run % 3 == t.rank:
            raise ValueError("a cell fails")

    with mock.patch.object(sys, "last_value", None, create=True):
        for run in range(70):
            try:
                cell(run)
            except ValueError as error:
                sys.last_value = error  # as IPython does: the traceback holds the wrapper
        del cell


@trial(WRAPPER)
def a_deleted_wrapper_is_freed_without_the_garbage_collector(t):
    gc.disable()
    try:
        for _ in range(3):
            model = t.wrap(Mlp(), name="critic", **SMALL_BUCKETS)
            for step in range(3):
                t.train(model, squares(t, step))
            freed = weakref.ref(model)
            del model
            assert freed() is None
    finally:
        gc.enable()


@trial(WRAPPER)
def a_deleted_wrapper_is_named_to_the_ranks_that_still_train(t):
    model = t.wrap(Mlp())
    t.train(model, squares(t))
    if t.rank == 1:
        del model
        t.meet()
    else:
        t.meet()
        with t.raises(gradsync.FailedPreconditionError, match=("rank 1", "released")) as caught:
            squares(t)(model).backward()
        assert caught[0].reason == gradsync.Reason.LAYOUT_RELEASED and caught[0].rank == 1
        assert all(p.grad is None for p in model.parameters())
        caught.clear()
    model = t.wrap(Mlp())
    t.train(model, squares(t))


@trial(WRAPPER)
def one_rank_has_deleted_the_wrapper_that_the_other_wraps_again(t):
    module = Mlp()
    model = t.wrap(module, **SMALL_BUCKETS)
    for step in range(3):
        t.train(model, squares(t, step))
    if t.rank == 1:
        del model
    model = t.wrap(module, **SMALL_BUCKETS)
    for step in range(3):
        t.train(model, squares(t, step))
    assert model.last_step.step == 6  # of one layout


@trial(WRAPPER)
def a_rank_that_leaves_and_wraps_again_does_not_end_the_others(t):
    module = Mlp()
    first = t.session()
    model = t.wrap(module)
    t.train(model, squares(t))
    if t.rank == 0:
        model.leave()
        second = t.join_again(first)
        t.meet()
    else:
        t.meet()
        squares(t)(model).backward()
        assert model.last_step.live_ranks == 1
        model.leave()
        second = t.join_again(first)
    model = t.wrap(module, session=second)
    t.train(model, squares(t))
    assert model.last_step.live_ranks == 2


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
                    # A parameter of the first bucket that is ready: no mark has been sent.
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
