"""Ranks that do not come to a step: the others get an error that names them, at the deadline."""

import time

import torch
from bad_input import SHORT, SLACK, steps_are_right, voided
from models import SMALL_BUCKETS, Mlp
from trial import HOOK, WRAPPER, local_gradients, squares, trial
from trial_ranks import trials_test


def _absent_trial(absent):
    """Rank 1 does not run the backward pass that rank 0 runs."""

    def waited_for(t):
        model = t.wrap(Mlp(), session=t.session(**SHORT), **SMALL_BUCKETS)
        steps_are_right(t, model)
        if t.rank == 1:
            absent(t, model)
            t.meet()
            # This rank gets the error of the void step, too, so all ranks count the same steps.
            error, _ = voided(t, model, squares(t)(model), "rank 1")
            assert error.reason == "STEP_TIMEOUT" and error.step == 3, vars(error)
        else:
            start = time.monotonic()
            error, came = voided(t, model, squares(t)(model), "rank 1")
            assert error.reason == "STEP_TIMEOUT" and isinstance(error, TimeoutError)
            assert error.rank in (None, 1) and error.step == 3, vars(error)
            assert 0.5 < came - start < SHORT["step_timeout"] + SLACK
            t.meet()
        steps_are_right(t, model, 60)

    return waited_for


def _accumulates(t, model):
    with model.no_sync():
        squares(t)(model).backward()


a_forward_on_one_rank_only = trial(WRAPPER)(_absent_trial(lambda t, model: None))
a_backward_that_never_comes = trial(WRAPPER)(
    _absent_trial(lambda t, model: squares(t)(model) and None)
)
one_rank_accumulates = trial(WRAPPER)(_absent_trial(_accumulates))


@trial(WRAPPER)
def one_rank_stays_away_after_the_first_step(t):
    """The step in which buckets are cut anew has a deadline, too."""
    model = t.wrap(Mlp(), session=t.session(**SHORT), **SMALL_BUCKETS)
    squares(t)(model).backward()
    if t.rank == 0:
        start = time.monotonic()
        with t.raises(RuntimeError, match="rank 1"):
            squares(t)(model).backward()
        assert time.monotonic() - start < SHORT["step_timeout"] + SLACK
    t.meet()


@trial(WRAPPER)
def two_modules_in_different_orders(t):
    session = t.session(**SHORT)
    models = [t.wrap(Mlp(), session=session, **SMALL_BUCKETS) for _ in range(2)]
    first, second = models[:: 1 if t.rank == 0 else -1]
    with t.raises(RuntimeError, match="rank"):
        squares(t, 1)(first).backward()
        squares(t, 2)(second).backward()
    t.meet()


@trial(WRAPPER)
def one_rank_wraps_nothing(t):
    session = t.session()
    if t.rank == 0:
        start = time.monotonic()
        with t.raises(TimeoutError, match="rank 1"):
            t.wrap(Mlp(), session=session, timeout=0.5)
        assert time.monotonic() - start < 0.5 + SLACK
    t.meet()


@trial(WRAPPER)
def more_steps_than_the_others_without_join(t):
    model = t.wrap(Mlp(), session=t.session(**SHORT), **SMALL_BUCKETS)
    for step in range(2):
        squares(t, step)(model).backward()
    if t.rank == 0:
        voided(t, model, squares(t, 3)(model), "rank 1")
    t.meet()


@trial(WRAPPER)
def a_rank_that_left_for_good_without_the_others(t):
    """The other ranks continue after a leave, and average what is left."""
    model = t.wrap(Mlp(), session=t.session(), **SMALL_BUCKETS)
    squares(t)(model).backward()
    t.meet()
    if t.rank == 1:
        model.leave()
        with t.raises(RuntimeError, match="left"):
            squares(t)(model).backward()
        t.meet()
        return
    t.meet()
    model.zero_grad(set_to_none=True)
    local = local_gradients(model.module, squares(t, 2))
    squares(t, 2)(model).backward()
    for parameter, gradient in zip(model.parameters(), local):
        torch.testing.assert_close(parameter.grad, gradient)


@trial(HOOK)
def the_hook_and_a_backward_that_never_comes(t):
    import gradsync.torch

    state = gradsync.torch.HookState(t.session(**SHORT))
    model = t.pytorch(Mlp(), broadcast_buffers=False)
    model.register_comm_hook(state, gradsync.torch.allreduce_hook)
    for step in range(3):
        squares(t, step)(model).backward()
    if t.rank == 0:
        with t.raises(RuntimeError, match="rank 1"):
            squares(t)(model).backward()
    t.meet()


test = trials_test(__name__)
