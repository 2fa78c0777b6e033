"""Verdicts that stay on the device as the `found_inf` of fused optimizers, with a stand-in GPU."""

import copy
import logging

import torch
import torch._dynamo  # noqa: F401  before the trials: it takes seconds
from models import SMALL_BUCKETS, Branching, Mlp
from stand_in_gpu import is_on_device, layout_of, stand_in_gpu
from trial import WRAPPER, local_gradients, squares, trial
from trial_ranks import trials_test


def wrap(t, module, **options):
    with stand_in_gpu():
        return t.wrap(module, device_verdict=True, **SMALL_BUCKETS, **options)


def state(model, optimizer):
    """Copies of everything that an optimizer's step changes."""
    states = [value for s in optimizer.state.values() for value in s.values()]
    tensors = [*model.parameters(), *(value for value in states if isinstance(value, torch.Tensor))]
    return [tensor.detach().clone() for tensor in tensors]


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


def optimizers(parameters):
    parameters = list(parameters)
    return [
        torch.optim.AdamW(parameters, lr=0.01, fused=True),
        torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
        torch.optim.Adagrad(parameters, lr=0.01, fused=True),
        torch.optim.Adam(parameters, lr=0.01, fused=True, amsgrad=True),
    ]


@trial(WRAPPER)
def updates_are_those_of_the_verdict_on_the_host(t):
    with stand_in_gpu():
        models = [
            t.wrap(copy.deepcopy(module), device_verdict=on_device, **SMALL_BUCKETS)
            for module in [Mlp()]
            for on_device in (True, False)
        ]
    for model, steppers in [(m, optimizers(m.parameters())) for m in models]:
        for step in range(8):
            optimizer = steppers[step % len(steppers)]
            optimizer.zero_grad(set_to_none=True)
            t.backward(model, squares(t, step), f"step {step}")
            optimizer.step()
            assert not hasattr(optimizer, "found_inf")
    assert same(*([p.detach() for p in model.parameters()] for model in models))
    t.same_bits(list(models[0].parameters()), "parameters")
    assert models[0].last_step.step == 8


@trial(WRAPPER)
def the_host_waits_for_the_step_before_the_last(t):
    model = wrap(t, Mlp())
    optimizer = optimizers(model.parameters())[0]

    def waited():
        return [step for step in layout_of(model).host_waits if step > 1]

    for step in range(1, 7):
        squares(t, step)(model).backward()
        # The first step teaches the order of the buckets.
        assert is_on_device(model) == (step > 1)
        if step > 1:
            assert waited() == list(range(2, step - 1))
        optimizer.step()
        optimizer.zero_grad()
    assert model.statistics().steps == 4  # steps that the host has not seen are not counted
    model.settle()
    assert model.statistics().steps == 6 and model.statistics().void == 0
    assert waited() == [2, 3, 4, 5, 6]


class Failing(Mlp):
    """Calls `action` between the backward passes of the second and the first layer."""

    action = None

    def forward(self, x):
        y = torch.tanh(self.first(x))
        if self.action is not None:
            y.register_hook(self.action)
        return self.third(torch.tanh(self.second(y)))


def told_to_fail(_):
    raise ValueError("told to fail")


def fail(t, model):
    """Begins a step and does not end it."""
    model.module.action = told_to_fail
    with t.raises(ValueError, match="told to fail"):
        squares(t)(model).backward()
    model.module.action = None


class Warnings(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def _a_void_step(t, which=0, rank_0=lambda t, model: squares(t)(model).backward(), rank_1=fail):
    """In the fourth step rank_0 and rank_1 run on their ranks, which makes the step void."""
    model = wrap(t, Failing())
    optimizer = optimizers(model.parameters())[which]
    heard = Warnings()
    logging.getLogger("gradsync").addHandler(heard)
    for step in range(1, 8):
        before = state(model, optimizer)
        if step == 4:
            (rank_0, rank_1)[t.rank](t, model)
        else:
            squares(t, step)(model).backward()
        optimizer.step()
        assert same(before, state(model, optimizer)) == (step == 4), step
        optimizer.zero_grad()
        t.same_bits(list(model.parameters()), f"parameters after step {step}")
    model.settle()
    logging.getLogger("gradsync").removeHandler(heard)
    if t.rank == 0:
        assert model.statistics().void == 1
        assert [("step 4" in m, "rank 1" in m) for m in heard.messages] == [(True, True)]
    assert model.statistics().steps == 6
    assert model.last_step.step == 7


@trial(WRAPPER)
def a_void_step_is_left_out_by_adamw(t):
    _a_void_step(t, 0)


@trial(WRAPPER)
def a_void_step_is_left_out_by_sgd(t):
    _a_void_step(t, 1)


@trial(WRAPPER)
def a_void_step_is_left_out_by_adagrad(t):
    _a_void_step(t, 2)


@trial(WRAPPER)
def a_void_step_is_left_out_by_adam_with_amsgrad(t):
    _a_void_step(t, 3)


@trial(WRAPPER)
def an_optimizer_whose_first_step_is_void(t):
    """If the GPU left it out, PyTorch's SGD would continue with a momentum without a value."""
    model = wrap(t, Failing())
    for step in range(1, 4):
        model.zero_grad()
        squares(t, step)(model).backward()
    optimizer = optimizers(model.parameters())[1]
    model.zero_grad()
    if t.rank == 1:
        fail(t, model)
    else:
        squares(t)(model).backward()
    before = state(model, optimizer)
    optimizer.step()
    assert same(before, state(model, optimizer))
    for step in range(5, 8):
        model.zero_grad()
        squares(t, step)(model).backward()
        optimizer.step()
    assert is_on_device(model)
    t.same_bits(state(model, optimizer), "parameters and momentum")


def _give_up(t, model):
    fail(t, model)
    squares(t)(model)  # abandons the step
    t.meet()


@trial(WRAPPER)
def a_step_that_is_void_before_this_rank_comes(t):
    def rank_0(t, model):
        t.meet()
        squares(t)(model).backward()

    _a_void_step(t, rank_0=rank_0, rank_1=_give_up)


@trial(WRAPPER)
def a_step_that_becomes_void_in_the_middle_of_this_ranks_pass(t):
    def rank_0(t, model):
        model.module.action = lambda _: t.meet()
        squares(t)(model).backward()
        model.module.action = None

    _a_void_step(t, rank_0=rank_0, rank_1=_give_up)


@trial(WRAPPER)
def a_module_is_wrapped_again_after_a_void_step(t):
    """Nobody updates with the worthless gradients, although the new wrapper has no such step."""
    model = wrap(t, Failing())
    optimizer = optimizers(model.parameters())[0]
    for step in range(1, 9):
        before = state(model, optimizer)
        if step == 4:
            if t.rank == 1:
                fail(t, model)
            else:
                squares(t)(model).backward()
            model = wrap(t, model.module)
        else:
            squares(t, step)(model).backward()
        optimizer.step()
        assert same(before, state(model, optimizer)) == (step == 4), step
        optimizer.zero_grad()
        t.same_bits(list(model.parameters()), f"parameters after step {step}")
    assert is_on_device(model)
    assert model.last_step.step == 8 and model.statistics().steps == 4


@trial(WRAPPER)
def the_norm_of_a_void_step_is_refused(t):
    """A verdict that the host asks for is the same as without device_verdict."""
    model = wrap(t, Failing())
    for step in range(1, 4):
        if step == 3 and t.rank == 1:
            fail(t, model)
            squares(t)(model)  # abandons the step
        else:
            squares(t, step)(model).backward()
            if step < 3:
                parameters = [p.grad.flatten() for p in model.parameters()]
                expected = torch.cat(parameters).norm().item()
                assert abs(model.gradient_norm - expected) < 1e-5 * expected
                assert not is_on_device(model)  # it was looked at
            else:
                with t.raises(RuntimeError, match=("rank 1", "step 3")):
                    model.clip_grad_norm_(1.0)
                assert all(p.grad is None for p in model.parameters())
    t.meet()


def before_waiting(layout, call):
    wait = layout.wait_on_stream

    def wait_on_stream(step, stream):
        call()
        wait(step, stream)

    layout.wait_on_stream = wait_on_stream


@trial(WRAPPER)
def a_lost_rank(t):
    """The survivor leaves out that step, and its next pass names the lost rank."""
    model = wrap(t, Failing())
    optimizer = optimizers(model.parameters())[0]
    for step in range(1, 4):
        before = state(model, optimizer)
        if step == 3 and t.rank == 1:
            t.meet()
            t.session().close()
            break
        if step == 3:
            before_waiting(layout_of(model), t.meet)  # it has ended the step
        squares(t, step)(model).backward()
        optimizer.step()
        assert same(before, state(model, optimizer)) == (step == 3), step
        optimizer.zero_grad()
    if t.rank == 0:
        with t.raises(RuntimeError, match="rank 1") as caught:
            squares(t)(model).backward()
        assert caught[0].reason == "RANK_LOST"
        assert all(p.grad is None for p in model.parameters())
    t.meet()


@trial(WRAPPER)
def gradient_scaling(t):
    """GradScaler's found_inf and the verdict each leave out an update."""
    model = wrap(t, Failing())
    optimizer = optimizers(model.parameters())[0]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
    scales = []
    for step in range(1, 6):
        before = state(model, optimizer)
        data = t.randn(4, 6, seed=step)
        if step == 3:
            data[0, 0] = float("inf")
        scaler.scale(model(data).pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert same(before, state(model, optimizer)) == (step == 3), step
        assert not hasattr(optimizer, "found_inf") and not hasattr(optimizer, "grad_scale")
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
    assert scales == [64.0, 64.0, 32.0, 32.0, 32.0]
    t.same_bits(list(model.parameters()), "parameters")


@trial(WRAPPER)
def a_void_step_that_gradient_scaling_has_counted(t):
    """The failed rank has not counted the step, so the scales differ: an error says so."""
    model = wrap(t, Failing())
    optimizer = optimizers(model.parameters())[0]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(1, 4):
        before = state(model, optimizer)
        if step == 3 and t.rank == 1:
            fail(t, model)
            squares(t)(model)  # abandons the step
            break
        scaler.scale(squares(t, step)(model)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert same(before, state(model, optimizer)) == (step == 3), step
    if t.rank == 0:
        with t.raises(RuntimeError, match=("step 3", "GradScaler", "checkpoint")):
            model.settle()
    t.meet()


@trial(WRAPPER)
def optimizers_that_take_no_found_inf(t):
    model = wrap(t, Mlp())
    parameters = list(model.parameters())
    mixed = torch.optim.AdamW(parameters[:1], fused=True)
    mixed.add_param_group({"params": parameters[1:], "fused": False})
    before = [p.detach().clone() for p in parameters]
    for optimizer, word in (
        (torch.optim.SGD(parameters, lr=1.0), "SGD takes no"),
        (torch.optim.AdamW(parameters, capturable=False, foreach=True), "AdamW takes no"),
        (torch.optim.RMSprop(parameters), "RMSprop takes no"),
        (mixed, "fused=False"),
    ):
        squares(t)(model).backward()
        with t.raises(TypeError, match=(word, "found_inf", "fused=True")):
            optimizer.step()
    assert same(before, [p.detach() for p in parameters])
    # An optimizer without parameters of the module is not checked.
    others = Mlp()
    squares(t)(others).backward()
    torch.optim.SGD(others.parameters(), lr=1.0).step()


@trial(WRAPPER)
def modules_whose_verdict_cannot_stay_on_a_gpu_are_refused(t):
    with t.raises(ValueError, match=("device_verdict", "GPU", "cpu")):
        t.wrap(Mlp(), device_verdict=True)
    module = Mlp()
    module.register_buffer("table", torch.zeros(2))
    with t.raises(ValueError, match=("'table'", "broadcast_buffers=False")):
        wrap(t, module)
    model = wrap(t, module, broadcast_buffers=False)
    squares(t)(model).backward()


@trial(WRAPPER)
def the_host_waits_if_parameters_are_unused(t):
    model = wrap(t, Branching())
    optimizer = optimizers(model.parameters())[0]
    for step in range(6):
        # In the second half only rank 0 uses the branch.
        branch = step < 3 or t.rank == 0
        module_loss = lambda module, b=branch, s=step: (  # noqa: E731
            module(t.randn(4, 6, seed=s), b).pow(2).mean()
        )
        optimizer.zero_grad(set_to_none=True)
        local = local_gradients(model.module, module_loss)
        module_loss(model).backward()
        assert is_on_device(model) == (step > 0 and branch)
        t.synchronized(model, local, f"step {step}")
        optimizer.step()
    t.same_bits(list(model.parameters()), "parameters")


@trial(WRAPPER)
def uneven_inputs(t):
    """The end of a join context waits for the open steps."""
    model = wrap(t, Mlp())
    optimizer = optimizers(model.parameters())[0]
    with model.join():
        for step in range(4 + t.rank):
            optimizer.zero_grad()
            squares(t, step)(model).backward()
            optimizer.step()
    assert not is_on_device(model)
    t.same_bits(list(model.parameters()), "parameters")


@trial(WRAPPER)
def the_end_of_the_process_waits_for_open_steps(t):
    from gradsync.torch import _session

    model = wrap(t, Mlp())
    for step in range(3):
        squares(t, step)(model).backward()
    assert is_on_device(model)
    for call in _session._before_finishing:
        call(t.session())
    assert not is_on_device(model)
    model.leave()


@trial(WRAPPER)
def accumulation(t):
    model = wrap(t, Mlp())
    optimizer = optimizers(model.parameters())[0]
    for step in range(4):
        local = local_gradients(model.module, squares(t, step), squares(t, 100 + step))
        with model.no_sync():
            squares(t, step)(model).backward()
        squares(t, 100 + step)(model).backward()
        t.synchronized(model, local, f"step {step}")
        optimizer.step()
        optimizer.zero_grad()
    t.same_bits(list(model.parameters()), "parameters")


test = trials_test(__name__)
