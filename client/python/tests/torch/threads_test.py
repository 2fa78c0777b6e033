"""Several threads in a rank: each backward pass is its own, and what cannot be right is refused."""

import threading

import torch
from gradsync.torch import _endings
from models import SMALL_BUCKETS, Mlp
from torch import nn
from trial import WRAPPER, local_gradients, trial
from trial_ranks import trials_test

# Seconds after which a thread of a test that has not ended has failed.
LIMIT = 60


def loss_of(data):
    return lambda module: module(data).pow(2).mean()


def together(*calls):
    """Runs `calls` in a thread each; raises the first exception of one."""
    errors = []

    def run(call):
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[call], daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


class Pause(torch.autograd.Function):
    """Its backward pass lets another thread do something first."""

    @staticmethod
    def forward(ctx, tensor, reached, go_on):
        ctx.reached, ctx.go_on = reached, go_on
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        ctx.reached.set()
        assert ctx.go_on.wait(LIMIT)
        return gradient, None, None


class Paused(nn.Module):
    """A module whose backward pass pauses in its middle."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.reached, self.go_on = threading.Event(), threading.Event()

    def forward(self, data):
        data = Pause.apply(self.first(data), self.reached, self.go_on)
        return self.second(data)

    def __deepcopy__(self, _):
        copied = Paused()
        copied.load_state_dict(self.state_dict())
        copied.go_on.set()
        return copied


@trial(WRAPPER)
def another_threads_optimizer_leaves_a_pass_alone(t):
    model = t.wrap(Paused(), **SMALL_BUCKETS)
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    loss = loss_of(t.randn(4, 6))
    local = local_gradients(model.module, loss)

    def update():
        assert model.module.reached.wait(LIMIT)
        other(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        model.module.go_on.set()

    together(lambda: loss(model).backward(), update)
    t.synchronized(model, local)


@trial(WRAPPER)
def a_pass_in_another_thread_that_failed_is_abandoned(t):
    """Its optimizer runs in this thread, and must not see gradients that are partly averaged."""
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]

    def fail():
        loss = loss_of(t.randn(4, 6))(model)
        handle = model.module.first.weight.register_hook(lambda _: 1 / 0)
        try:
            loss.backward()
        except ZeroDivisionError:
            handle.remove()

    together(fail)
    t.meet()  # else the other rank's pass is void before it fails
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before))
    loss = loss_of(t.randn(4, 6))
    t.backward(model, loss, "afterwards")


@trial(WRAPPER)
def modules_of_one_session_in_two_threads_are_refused(t):
    """Ranks would run the session's operations in different orders."""
    models = [t.wrap(Paused(), name="one"), t.wrap(Mlp(), name="two")]
    loss = loss_of(t.randn(4, 6))
    local = local_gradients(models[0].module, loss)

    def second():
        assert models[0].module.reached.wait(LIMIT)
        with t.raises(RuntimeError, match=("'one'", "'two'", "thread", "session=")):
            loss(models[1]).backward()
        models[0].module.go_on.set()

    together(lambda: loss(models[0]).backward(), second)
    t.synchronized(models[0], local)


@trial(WRAPPER)
def modules_of_two_sessions_in_two_threads(t):
    models = [t.wrap(Mlp(), session=t.session(step_timeout=60.0), name=f"m{i}") for i in range(2)]
    data = [[t.randn(4, 6, seed=10 * step + i) for i in range(2)] for step in range(20)]

    def train(i):
        for step in range(20):
            models[i].zero_grad(set_to_none=True)
            loss_of(data[step][i])(models[i]).backward()

    together(lambda: train(0), lambda: train(1))
    for i, model in enumerate(models):
        local = local_gradients(model.module, loss_of(data[-1][i]))
        t.synchronized(model, local, f"module {i}")


@trial(WRAPPER)
def a_modules_pass_within_that_of_another(t):
    outer, inner = t.wrap(Mlp(), name="outer"), t.wrap(Mlp(), name="inner")
    for step in range(3):
        for model in (outer, inner):
            model.zero_grad(set_to_none=True)
        losses = [loss_of(t.randn(4, 6, seed=2 * step + i)) for i in range(2)]
        local = [local_gradients(m.module, f) for m, f in zip((outer, inner), losses)]
        ran = []

        def run_inner(gradient, loss=losses[1], ran=ran):
            if not ran:
                ran.append(True)
                with torch.enable_grad():
                    loss(inner).backward()
            return gradient

        handle = outer.module.second.weight.register_hook(run_inner)
        losses[0](outer).backward()
        handle.remove()
        assert ran
        t.synchronized(outer, local[0], f"outer, step {step}")
        t.synchronized(inner, local[1], f"inner, step {step}")


class Ends(torch.autograd.Function):
    """A wrapped module's part in a backward pass: at its end, `finish` is called."""

    @staticmethod
    def forward(ctx, tensor, finish):
        ctx.finish = finish
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        _endings.add(0, ctx.finish)
        return gradient, None


def test_a_pass_finishes_only_its_own_modules():
    """Pass "one" has registered its ending when all of pass "another" runs on another thread."""
    registered, ended = threading.Event(), threading.Event()
    finished = []

    def finish(name):
        return lambda: finished.append((name, threading.current_thread()))

    def one():
        leaf = torch.ones(1, requires_grad=True)
        Ends.apply(Pause.apply(leaf, registered, ended), finish("one")).backward()
        assert finished[1:] == [("one", threading.current_thread())]

    def another():
        assert registered.wait(LIMIT)
        try:
            Ends.apply(torch.ones(1, requires_grad=True), finish("another")).backward()
            assert finished == [("another", threading.current_thread())]
        finally:
            ended.set()

    together(one, another)


test = trials_test(__name__)
