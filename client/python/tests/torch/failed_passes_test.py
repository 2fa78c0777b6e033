"""Backward passes that fail: the step is void on every rank, or complete on every rank."""

import time

import torch
from bad_input import (
    SHORT,
    SLACK,
    Trapped,
    no_gradient_is_left,
    steps_are_right,
    told_to_fail,
    voided,
)
from models import SMALL_BUCKETS, Mlp
from trial import WRAPPER, local_gradients, squares, trial
from trial_ranks import trials_test


@trial(WRAPPER, world_size=3)
def an_exception_in_one_backward(t):
    """That rank's next forward pass abandons the step; the other ranks' error names the rank."""
    model = t.wrap(Trapped(), session=t.session(), **SMALL_BUCKETS)
    steps_are_right(t, model)
    late = []
    for attempt in range(5):
        model.zero_grad(set_to_none=True)
        loss = squares(t)(model)
        if t.rank == 1:
            model.module.action = told_to_fail
            with t.raises(ValueError, match="told to fail"):
                loss.backward()
            model.module.action = lambda: None
            t.meet()
            gave_up = time.monotonic()
            squares(t)(model)
            t.gather(gave_up)
        else:
            # In the step, when rank 1 abandons it.
            model.module.action = t.meet
            error, came = voided(t, model, loss, "rank 1")
            model.module.action = lambda: None
            assert error.rank == 1 and error.reason == "STEP_ABANDONED", vars(error)
            assert error.step == 3 + attempt
            late.append(came - t.gather(None)[1])
    # On a busy machine a rank can wait for a core, but not every time.
    if t.rank != 1:
        assert min(late) < 1 and max(late) < SLACK, late
    steps_are_right(t, model, 60)


@trial(WRAPPER)
def an_exception_in_one_backward_and_another_backward(t):
    """Here that rank's next pass is a backward pass, through an earlier forward pass."""
    model = t.wrap(Trapped(), session=t.session(), **SMALL_BUCKETS)
    if t.rank == 1:
        first, second = squares(t)(model), squares(t, 7)(model)
        model.module.action = told_to_fail
        with t.raises(ValueError, match="told to fail"):
            first.backward()
        model.module.action = lambda: None
        t.meet()
        model.zero_grad(set_to_none=True)
        local = local_gradients(model.module, squares(t, 7))
        second.backward()
    else:
        model.module.action = t.meet
        error, _ = voided(t, model, squares(t)(model), "rank 1")
        model.module.action = lambda: None
        assert error.rank == 1, vars(error)
        model.zero_grad(set_to_none=True)
        local = local_gradients(model.module, squares(t, 7))
        squares(t, 7)(model).backward()
    t.synchronized(model, local)


@trial(WRAPPER)
def an_exception_in_one_backward_and_nothing_more(t):
    """That rank does not come back: the other ranks get an error at the deadline."""
    model = t.wrap(Trapped(), session=t.session(**SHORT), **SMALL_BUCKETS)
    loss = squares(t)(model)
    if t.rank == 1:
        model.module.action = told_to_fail
        with t.raises(ValueError, match="told to fail"):
            loss.backward()
        t.meet()
        model.module.action = lambda: None
    else:
        start = time.monotonic()
        error, came = voided(t, model, loss, "rank 1")
        assert error.reason == "STEP_TIMEOUT", vars(error)
        assert 0.5 < came - start < SHORT["step_timeout"] + SLACK
        t.meet()
    steps_are_right(t, model)


class Interrupted:
    """A layout whose next wait raises an exception instead of giving the verdict."""

    def __init__(self, layout, exception):
        self.layout = layout
        self.exception = exception
        self.pending = True

    def __getattr__(self, name):
        return getattr(self.layout, name)

    def wait_step(self, step):
        if self.pending:
            self.pending = False
            raise self.exception
        return self.layout.wait_step(step)


def _misses_a_verdict(t, exception):
    """The step is complete on the other rank: this rank must not continue without it."""
    model = t.wrap(Mlp(), session=t.session(), **SMALL_BUCKETS)
    steps_are_right(t, model)
    if t.rank == 1:
        buckets = model._synchronizer.buckets
        buckets.layout = Interrupted(buckets.layout, exception)
        with t.raises(type(exception)):
            squares(t)(model).backward()
        no_gradient_is_left(model)
        for _ in range(2):
            with t.raises(RuntimeError, match=("step 3", "interrupted", "again")):
                squares(t)(model).backward()
    else:
        squares(t)(model).backward()
        assert model.last_step.step == 3
    t.meet()


@trial(WRAPPER)
def an_interrupted_wait(t):
    _misses_a_verdict(t, KeyboardInterrupt())


@trial(WRAPPER)
def a_silent_daemon(t):
    import gradsync

    _misses_a_verdict(t, gradsync.UnavailableError("not heard for 60 s", reason="DAEMON_SILENT"))


class EndsBadly(Mlp):
    """Another library's callback at the end of the backward pass fails, once."""

    fails = False

    def forward(self, data):
        hidden = torch.tanh(self.first(data))
        if self.fails:
            # The pass is here after it has begun the step, so that callback is the later one.
            hidden.register_hook(self._queue)
        return self.third(torch.tanh(self.second(hidden)))

    def _queue(self, _):
        self.fails = False
        torch.autograd.Variable._execution_engine.queue_callback(lambda: 1 / 0)


def _ends_badly(t, go_on):
    """The step is complete on every rank, although this rank's backward pass raised."""
    model = t.wrap(EndsBadly(), **SMALL_BUCKETS)
    steps_are_right(t, model)
    model.zero_grad(set_to_none=True)
    loss = squares(t)
    local = local_gradients(model.module, loss)
    if t.rank == 1:
        model.module.fails = True
        with t.raises(ZeroDivisionError):
            loss(model).backward()
        go_on(t, model)
    else:
        loss(model).backward()
    t.synchronized(model, local)
    assert model.last_step.step == 3
    steps_are_right(t, model)


def _update(_, model):
    torch.optim.SGD(model.parameters(), lr=0.0).step()


def _go_on_without_an_update(t, model):
    with t.raises(RuntimeError, match=("step 3", "complete on every rank", "optimizer.step()")):
        squares(t)(model)


a_callback_of_others_fails = trial(WRAPPER)(lambda t: _ends_badly(t, _update))
a_callback_of_others_fails_and_no_update_follows = trial(WRAPPER)(
    lambda t: _ends_badly(t, _go_on_without_an_update)
)


class DecidedMeanwhile:
    """A layout whose open step is decided after next_step is read and before it is abandoned."""

    def __init__(self, layout, step):
        self.layout = layout
        self.next_step = step

    def __getattr__(self, name):
        return getattr(self.layout, name)

    def abandon_step(self, step, reason):
        self.layout.wait_step(step)
        self.layout.abandon_step(step, reason)


def _go_on_after_the_verdict(t, model):
    outcomes, buckets = model._synchronizer.outcomes, model._synchronizer.buckets
    layout = buckets.layout
    buckets.layout = DecidedMeanwhile(layout, outcomes.step.number)
    _go_on_without_an_update(t, model)
    buckets.layout = layout


a_callback_of_others_fails_and_the_verdict_comes_while_the_step_is_abandoned = trial(WRAPPER)(
    lambda t: _ends_badly(t, _go_on_after_the_verdict)
)


@trial(WRAPPER)
def an_optimizer_step_after_an_exception_has_no_effect(t):
    """An optimizer's step directly after an exception has no effect."""
    model = t.wrap(Trapped(), session=t.session(), **SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    if t.rank == 1:
        loss = squares(t)(model)
        model.module.action = told_to_fail
        with t.raises(ValueError, match="told to fail"):
            loss.backward()
        optimizer.step()
        no_gradient_is_left(model)
    else:
        error, _ = voided(t, model, squares(t)(model), "rank 1")
        assert error.reason == "STEP_ABANDONED", vars(error)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


test = trials_test(__name__)
