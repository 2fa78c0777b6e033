"""Bad input: every rank gets a clear exception, and none hangs or takes a wrong average."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from models import SMALL_BUCKETS, Cnn, Mlp
from ranks import Ranks, run_ranks
from torch import nn
from trial import HOOK, WRAPPER, local_gradients, squares, trial
from trial_ranks import trials_test

# Seconds after which a step is void if a rank never ends it.
SHORT = {"step_timeout": 1.0}
# Seconds by which a busy machine can be late.
SLACK = 2.0


def steps_are_right(t, model, seed=50):
    """Steps are right again: the error has left nothing behind."""
    for step in range(2):
        t.train(model, squares(t, seed + step), f"afterwards, in step {step}")


def no_gradient_is_left(model):
    assert all(p.grad is None for p in model.parameters())


# ---- Modules that differ -------------------------------------------------------------------------


def _different_trial(make, *words, options=None):
    """`make(rank)` differs between the ranks; each rank's error says what differs."""

    def refused(t):
        session = t.session()
        with t.raises(ValueError, RuntimeError, match=(*words, "rank 0", "rank 1")):
            t.wrap(make(t.rank), session=session, **(options(t.rank) if options else {}))
        steps_are_right(t, t.wrap(Mlp(), session=session))

    return refused


def _with_buffer(rank):
    module = Mlp()
    module.register_buffer("table", torch.zeros(2 + rank))
    return module


def _reordered(rank):
    class Reordered(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("a", "b")[:: 1 if rank == 0 else -1]:
                setattr(self, name, nn.Linear(6, 6))

    return Reordered()


def _partly_frozen(rank):
    module = Mlp()
    module.second.weight.requires_grad_(rank == 0)
    return module


another_shape = trial(WRAPPER)(_different_trial(lambda rank: Mlp(hidden=8 + rank), "first.weight"))
another_dtype = trial(WRAPPER)(
    _different_trial(lambda rank: Mlp().to([torch.float32, torch.float64][rank]), "float64")
)
another_name = trial(WRAPPER)(
    _different_trial(lambda rank: nn.ModuleDict({"ab"[rank]: nn.Linear(3, 3)}), "'a.weight'", "'b")
)
another_order = trial(WRAPPER)(_different_trial(_reordered, "'a.weight'", "'b.weight'"))
one_more_parameter = trial(WRAPPER)(
    _different_trial(
        lambda rank: nn.Sequential(*[nn.Linear(3, 3)] * 1, *[nn.Linear(3, 3)] * rank), "1.weight"
    )
)
another_buffer = trial(WRAPPER)(_different_trial(_with_buffer, "table"))
frozen_on_one_rank = trial(WRAPPER)(_different_trial(_partly_frozen, "second.weight", "frozen"))
another_bucket_size = trial(WRAPPER)(
    _different_trial(lambda rank: Mlp(), options=lambda rank: {"bucket_cap_mb": 0.001 + rank})
)
buffers_broadcast_by_one_rank = trial(WRAPPER)(
    _different_trial(
        lambda rank: Mlp(),
        "broadcast_buffers",
        options=lambda rank: {"broadcast_buffers": rank == 0},
    )
)
another_name_of_the_layout = trial(WRAPPER)(
    _different_trial(
        lambda rank: Mlp(), options=lambda rank: {"name": f"layout{rank}", "timeout": 2.0}
    )
)
another_shape_without_init_sync = trial(WRAPPER)(
    _different_trial(
        lambda rank: Mlp(hidden=8 + rank), "first.weight", options=lambda rank: {"init_sync": False}
    )
)


@trial(WRAPPER)
def another_memory_format(t):
    """Elements lie in another order: either refused, or averaged one by one all the same."""
    module = Cnn()
    if t.rank == 0:
        module.to(memory_format=torch.contiguous_format)
    try:
        model = t.wrap(module)
    except (ValueError, RuntimeError) as error:
        assert "strides" in str(error) or "format" in str(error), error
        assert t.gather(True) == [True] * t.world_size
        return
    t.gather(False)
    data = t.randn(4, 3, 8, 8)
    local = local_gradients(module, lambda m: m(data).pow(2).mean())
    model(data).pow(2).mean().backward()
    for parameter, mean in zip(model.parameters(), t.means(local)):
        torch.testing.assert_close(parameter.grad, mean, rtol=1e-4, atol=1e-6)


# ---- Modules that change -------------------------------------------------------------------------


def _changed_trial(change, *words, on_ranks=(0, 1)):
    def refused(t):
        model = t.wrap(Mlp(), session=t.session(**SHORT), **SMALL_BUCKETS)
        steps_are_right(t, model)
        if t.rank in on_ranks:
            change(model.module)
            with t.raises(RuntimeError, match=words):
                squares(t)(model)
            with torch.no_grad(), contextlib.suppress(RuntimeError):
                squares(t)(model)  # evaluation may go on
        else:
            with t.raises(RuntimeError, match="rank 1"):
                squares(t)(model).backward()
            no_gradient_is_left(model)
        t.meet()

    return refused


def _assign(module):
    module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}, assign=True)


def _replace(module):
    module.second = nn.Linear(24, 24)


def _replace_parameter(module):
    module.second.weight = nn.Parameter(torch.ones(24, 24))


def _add(module):
    module.extra = nn.Parameter(torch.ones(2))


def _delete(module):
    del module.second.bias
    module.second.register_parameter("bias", None)


def _thaw(module):
    module.first.weight.requires_grad_(False)
    module.first.weight = nn.Parameter(module.first.weight.data)


assigned = trial(WRAPPER)(_changed_trial(_assign, "first.weight"))
converted = trial(WRAPPER)(
    _changed_trial(lambda module: module.double(), "first.weight", "float64")
)
a_layer_replaced = trial(WRAPPER)(_changed_trial(_replace, "second.weight"))
a_parameter_replaced = trial(WRAPPER)(_changed_trial(_replace_parameter, "second.weight"))
a_parameter_added = trial(WRAPPER)(_changed_trial(_add))
a_parameter_deleted = trial(WRAPPER)(_changed_trial(_delete, "second.bias"))
a_parameter_frozen_and_replaced = trial(WRAPPER)(_changed_trial(_thaw, "first.weight"))
converted_on_one_rank = trial(WRAPPER)(
    _changed_trial(lambda module: module.double(), "first.weight", on_ranks=(1,))
)


@trial(WRAPPER)
def thawed_after_wrapping(t):
    module = Mlp()
    module.first.requires_grad_(False)
    model = t.wrap(module)
    squares(t)(model).backward()
    module.first.requires_grad_(True)
    with t.raises(RuntimeError, match="first.weight"):
        squares(t)(model)


@trial(WRAPPER)
def converted_between_forward_and_backward(t):
    model = t.wrap(Mlp(), session=t.session(**SHORT))
    loss = squares(t)(model)
    with torch.no_grad():
        model.module.third.bias.data = model.module.third.bias.data.double()
    with t.raises(RuntimeError):
        loss.backward()


class Widened(torch.autograd.Function):
    """A product whose weight gets a gradient of float64."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, (gradient.t() @ x).double()


@trial(WRAPPER)
def a_gradient_of_another_dtype(t):
    class Wide(Mlp):
        def forward(self, x):
            return Widened.apply(super().forward(x), self.wide)

    module = Wide()
    module.wide = nn.Parameter(torch.randn(3, 3))
    model = t.wrap(module, session=t.session(**SHORT))
    module.wide.grad_dtype = None  # any
    with t.raises(RuntimeError, match=("wide", "float64")):
        squares(t)(model).backward()
    no_gradient_is_left(model)


# ---- Passes that fail or never come --------------------------------------------------------------


class Trap(torch.autograd.Function):
    """The identity; its backward pass calls an action."""

    @staticmethod
    def forward(ctx, x, action):
        ctx.action = action
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.action()
        return gradient, None


class Trapped(Mlp):
    """Calls `action` between the backward passes of the second and the first layer."""

    def __init__(self):
        super().__init__()
        self.action = lambda: None

    def forward(self, x):
        x = Trap.apply(torch.tanh(self.first(x)), lambda: self.action())
        return self.third(torch.tanh(self.second(x)))


def told_to_fail():
    raise ValueError("told to fail")


def voided(t, model, loss, match):
    """Runs a backward pass that another rank voids; returns the error and its time."""
    with t.raises(RuntimeError, match=match) as caught:
        loss.backward()
    came = time.monotonic()
    no_gradient_is_left(model)
    return caught[0], came


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
        assert min(late) < 0.1 and max(late) < 0.1 + SLACK, late
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


# ---- Processes that are killed -------------------------------------------------------------------


def train_until_killed(victim, wrapper_options):
    """Returns (code, reason, rank, seconds since the kill, whether gradients are dropped, more)."""
    import gradsync.torch

    torch.set_num_threads(1)
    session = gradsync.torch.init(step_timeout=20.0)
    module = Trapped()
    model = gradsync.torch.DistributedDataParallel(module, **wrapper_options)
    data = torch.ones(4, 6)
    model(data).sum().backward()
    session.barrier()
    if session.rank == victim:
        module.action = lambda: os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            model(data).sum().backward()
    except gradsync.Error as error:
        took = time.monotonic() - start
        no_gradients = all(p.grad is None for p in model.parameters())
        ends = []
        # Every later pass raises the same error at once.
        with contextlib.suppress(AttributeError):
            try:
                model(data).sum().backward()
            except gradsync.Error as again:
                ends.append(again.code)
        return error.code, error.reason, error.rank, took, no_gradients, ends
    return None


@pytest.mark.parametrize("options", [SMALL_BUCKETS, {}], ids=["buckets", "one-bucket"])
def test_a_trainer_killed_in_backward_is_named_to_the_others(daemon, options):
    ends = Ranks(train_until_killed, 3, 1, options, timeout=60).results(ranks=[0, 2])
    for code, reason, rank, took, no_gradients, again in ends:
        assert (code, reason, rank) == ("ABORTED", "RANK_LOST", 1)
        assert took < SLACK and no_gradients and again == ["ABORTED"]


def train_until_the_daemon_dies(pid):
    import gradsync.torch

    torch.set_num_threads(1)
    session = gradsync.torch.init(step_timeout=20.0)
    module = Trapped()
    model = gradsync.torch.DistributedDataParallel(module, **SMALL_BUCKETS)
    data = torch.ones(4, 6)
    model(data).sum().backward()
    session.barrier()
    if session.rank == 1:
        module.action = lambda: os.kill(pid, signal.SIGKILL)
    start = time.monotonic()
    try:
        model.zero_grad(set_to_none=True)
        model(data).sum().backward()
    except gradsync.Error as error:
        no_gradients = all(p.grad is None for p in model.parameters())
        return error.code, error.reason, time.monotonic() - start, no_gradients
    return None


def test_a_daemon_killed_in_backward_is_an_error(own_daemon):
    for end in run_ranks(train_until_the_daemon_dies, 2, own_daemon.pid, timeout=60):
        code, reason, took, no_gradients = end
        assert code == "UNAVAILABLE" and reason in ("DAEMON_LOST", "STEP_IN_DOUBT")
        assert took < SLACK and no_gradients


def init_without_variables():
    import gradsync.torch

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    with pytest.raises(gradsync.InvalidArgumentError) as raised:
        gradsync.torch.init()
    session = gradsync.torch.init(rank=0, world_size=1, job_id=f"given-{os.getpid()}")
    return str(raised.value), session.rank, session.world_size


def test_init_names_a_missing_rank_and_needs_no_variable_if_all_is_given(daemon):
    ((message, rank, world_size),) = run_ranks(init_without_variables, 1)
    assert "RANK is not set" in message and "torchrun --nproc_per_node=" in message
    assert (rank, world_size) == (0, 1)


def wrap_without_a_daemon():
    import gradsync.torch

    with pytest.raises(gradsync.UnavailableError) as raised:
        gradsync.torch.init(connect_timeout=0.1)
    return str(raised.value)


def test_a_missing_daemon_is_named_by_its_socket():
    nowhere = f"/tmp/gradsync-nowhere-{os.getpid()}.sock"  # a socket's path must be short
    (text,) = run_ranks(wrap_without_a_daemon, 1, environment={"GRADSYNC_SOCKET": nowhere})
    assert nowhere in text


def wrap_without_torchrun():
    import gradsync.torch

    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    with pytest.raises(gradsync.InvalidArgumentError) as raised:
        gradsync.torch.DistributedDataParallel(nn.Linear(2, 2))
    return str(raised.value)


def test_a_missing_launcher_is_named_by_its_variable(daemon):
    (text,) = run_ranks(wrap_without_torchrun, 1)
    assert "RANK" in text or "WORLD_SIZE" in text


def run_script(script):
    """The exit status and the errors of a script in a process of its own."""
    end = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    return end.returncode, end.stderr


def end_by_an_exception():
    """A training script that fails: it prints a traceback, and the interpreter ends."""
    script = (
        "import gradsync.torch, torch\n"
        "model = gradsync.torch.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "raise SystemError('mine')\n"
    )
    if os.environ["RANK"] == "1":
        return run_script(script)
    import gradsync.torch

    model = gradsync.torch.DistributedDataParallel(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(gradsync.AbortedError) as raised:
        model(torch.ones(1, 2)).sum().backward()
    return raised.value.reason, raised.value.rank


def test_a_script_that_fails_is_a_loss(daemon):
    (reason, rank), (code, text) = run_ranks(end_by_an_exception, 2)
    assert (reason, rank) == ("RANK_LOST", 1)
    assert code == 1 and "SystemError: mine" in text


def end_by_a_good_end():
    script = (
        "import gradsync.torch, torch\n"
        "model = gradsync.torch.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
    )
    return run_script(script)


def test_a_script_that_ends_leaves_the_job(daemon):
    assert run_ranks(end_by_a_good_end, 2) == [(0, "")] * 2
