"""Optimizers, autocast, gradient scaling, clipping, compiled modules."""

import contextlib
import copy
import math
import os
import subprocess
import sys

import torch
from models import SMALL_BUCKETS, Mlp
from ranks import run_ranks
from torch import nn
from trial import WRAPPER, close, local_gradients, squares, trial
from trial_ranks import trials_test


def _optimizer_trial(make):
    """Trains two copies, one with gradients that were averaged by hand."""

    def trained(t):
        plain = Mlp()
        model = t.wrap(copy.deepcopy(plain), **SMALL_BUCKETS)
        optimizers = make(plain.parameters()), make(model.parameters())
        for step in range(5):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            for parameter, gradient in zip(
                plain.parameters(), t.means(local_gradients(plain, squares(t, step)))
            ):
                parameter.grad = gradient
            squares(t, step)(model).backward()
            for optimizer in optimizers:
                optimizer.step()
        t.same_bits(model.parameters())
        for one, other in zip(plain.parameters(), model.parameters()):
            close(other, one.detach(), rtol=1e-4, atol=1e-5)

    return trained


sgd_foreach = trial()(
    _optimizer_trial(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True))
)
sgd_one_by_one = trial()(_optimizer_trial(lambda p: torch.optim.SGD(p, lr=0.1, foreach=False)))
adam = trial()(_optimizer_trial(lambda p: torch.optim.Adam(p, lr=0.01)))
adam_foreach = trial()(_optimizer_trial(lambda p: torch.optim.Adam(p, lr=0.01, foreach=True)))
adamw_fused = trial()(_optimizer_trial(lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)))
sgd_fused = trial()(
    _optimizer_trial(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True))
)


@trial()
def autocast(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)

    def loss(module, step):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return squares(t, step)(module)

    for step in range(3):
        t.train(model, lambda m, s=step: loss(m, s), f"in step {step}")
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@trial()
def gradient_scaling(t):
    """An overflow on one rank skips the step on every rank."""
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)
    for step in range(5):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad(set_to_none=True)
        local = local_gradients(model.module, squares(t, step))
        loss = squares(t, step)(model)
        overflow = step == 2
        if overflow and t.rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if not overflow:
            t.synchronized(model, local, f"in step {step}")
        scaler.step(optimizer)
        scaler.update()
        unchanged = all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
        assert unchanged == overflow, f"step {step}"
        assert scaler.get_scale() == (128.0 if step >= 2 else 256.0)
    t.same_bits(model.parameters())


@trial()
def clipping_as_pytorch_does(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        means = t.means(local_gradients(model.module, squares(t, step)))
        norm = math.sqrt(sum(g.double().pow(2).sum().item() for g in means))
        squares(t, step)(model).backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), norm / 2)
        assert math.isclose(total, norm, rel_tol=1e-4)
        for parameter, mean in zip(model.parameters(), means):
            close(parameter.grad, mean / 2, rtol=1e-3, atol=1e-6)


@trial(WRAPPER)
def clipping_by_the_norm_that_the_daemon_computed(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        means = t.means(local_gradients(model.module, squares(t, step)))
        norm = math.sqrt(sum(g.double().pow(2).sum().item() for g in means))
        squares(t, step)(model).backward()
        assert math.isclose(model.gradient_norm, norm, rel_tol=1e-5)
        assert math.isclose(model.clip_grad_norm_(2 * norm), norm, rel_tol=1e-5)
        for parameter, mean in zip(model.parameters(), means):
            close(parameter.grad, mean)
        assert math.isclose(model.clip_grad_norm_(norm / 2), norm, rel_tol=1e-5)
        for parameter, mean in zip(model.parameters(), means):
            close(parameter.grad, mean / 2, rtol=1e-4, atol=1e-6)
        t.same_bits([p.grad for p in model.parameters()])


@trial(WRAPPER)
def clipping_inside_of_a_fused_optimizer(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    plain = copy.deepcopy(model.module)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, fused=True) for m in (plain, model)]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        for parameter, mean in zip(
            plain.parameters(), t.means(local_gradients(plain, squares(t, step)))
        ):
            parameter.grad = mean
        limit = 0.05 if step % 2 == 0 else 1e9
        nn.utils.clip_grad_norm_(plain.parameters(), limit)
        squares(t, step)(model).backward()
        # Every other step is not clipped: the optimizer must have forgotten the earlier scale.
        model.clip_grad_norm_(limit, optimizers[1])
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(plain.parameters(), model.parameters()):
        close(other, one.detach(), rtol=1e-4, atol=1e-5)


@trial(WRAPPER)
def a_scale_holds_for_one_step(t):
    """The last of two clips counts. After a step that was left out the next one is not scaled."""
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)

    def moved(clip, step):
        before = [p.detach().clone() for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        squares(t)(model).backward()
        clip()
        if step:
            optimizer.step()
        change = sum((a - b).pow(2).sum() for a, b in zip(before, model.parameters())).sqrt()
        return change.item(), model.gradient_norm

    def twice():
        model.clip_grad_norm_(1e-6, optimizer)
        model.clip_grad_norm_(1e-3, optimizer)

    change, norm = moved(twice, True)
    assert norm > 1e-2 and math.isclose(change, 1e-3, rel_tol=1e-3), (change, norm)
    assert moved(lambda: model.clip_grad_norm_(1e-6, optimizer), False)[0] == 0
    change, norm = moved(lambda: None, True)
    assert math.isclose(change, norm, rel_tol=1e-3), (change, norm)


@trial(WRAPPER)
def an_optimizer_of_other_parameters_gets_no_scale(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    other = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), other], lr=1.0, fused=True)
    squares(t)(model).backward()
    other.grad = torch.ones(2)
    model.clip_grad_norm_(1e-3, optimizer)
    optimizer.step()
    assert torch.equal(other.detach(), torch.zeros(2))
    norm = sum(p.grad.pow(2).sum() for p in model.parameters()).sqrt().item()
    assert math.isclose(norm, 1e-3, rel_tol=1e-3), norm


@trial(WRAPPER)
def a_scale_beside_a_scaler_is_refused(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(squares(t)(model)).backward()
    model.clip_grad_norm_(1e-3, optimizer)
    with t.raises(RuntimeError, match="scaler.unscale_"):
        scaler.step(optimizer)


@trial(WRAPPER)
def clipping_does_not_repair_gradients_that_are_not_finite(t):
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    (squares(t)(model) * float("inf")).backward()
    assert not math.isfinite(model.clip_grad_norm_(1.0, optimizer))
    optimizer.step()
    assert not all(torch.isfinite(p).all() for p in model.parameters())


@trial(WRAPPER)
def clipping_of_an_infinite_norm(t):
    model = t.wrap(Mlp())
    loss = squares(t)(model)
    (loss * float("inf") if t.rank == 1 else loss).backward()
    assert not math.isfinite(model.gradient_norm)


def _compiled_trial(compiled):
    def trained(t):
        torch._dynamo.reset()
        module = Mlp()
        model = compiled(t, module)
        for step in range(4):
            model.zero_grad(set_to_none=True)
            local = local_gradients(module, squares(t, step))
            squares(t, step)(model).backward()
            t.synchronized(module, local, f"in step {step}")

    return trained


def _compile_blocks(t, module):
    module.first, module.second = (
        torch.compile(m, backend="aot_eager") for m in (module.first, module.second)
    )
    return t.wrap(module, **SMALL_BUCKETS)


# This backend needs no C++ compiler: the cuts between graphs matter, not their code.
compiled_blocks = trial(WRAPPER)(_compiled_trial(_compile_blocks))
compiled_before_wrapping = trial(WRAPPER)(
    _compiled_trial(lambda t, m: t.wrap(torch.compile(m, backend="aot_eager"), **SMALL_BUCKETS))
)
compiled_after_wrapping = trial(WRAPPER)(
    _compiled_trial(lambda t, m: torch.compile(t.wrap(m, **SMALL_BUCKETS), backend="aot_eager"))
)


@trial(WRAPPER)
def compiled_in_place(t):
    torch._dynamo.reset()
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    model.module.compile(backend="aot_eager")
    for step in range(4):
        model.zero_grad(set_to_none=True)
        local = local_gradients(model.module, squares(t, step))
        with model.no_sync() if step == 2 else contextlib.nullcontext():
            squares(t, step)(model).backward()
        if step == 2:
            for parameter, gradient in zip(model.parameters(), local):
                close(parameter.grad, gradient)
        else:
            t.synchronized(model, local, f"in step {step}")


test = trials_test(__name__)


_COMPILE_AFTER_WRAPPING = """
import logging
import sys
import torch
import gradsync.torch

# On a busy machine one rank may wait for the other, and say so.
logging.getLogger("gradsync").setLevel(logging.ERROR)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, data):
        return self.layer(data)

model = gradsync.torch.DistributedDataParallel(Model())
assert "torch._dynamo" not in sys.modules
graphs = []
compiled = torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph)
for _ in range(3):
    model.zero_grad(set_to_none=True)
    compiled(torch.ones(1, 2) * (1 + gradsync.torch.default_session().rank)).sum().backward()
assert type(model).forward._torchdynamo_disable
assert len(graphs) == 1, len(graphs)
assert model.module.layer.weight.grad.eq(1.5).all(), model.module.layer.weight.grad
"""


def compile_after_wrapping():
    # A process of its own: this one has loaded the compiler.
    end = subprocess.run(
        [sys.executable, "-c", _COMPILE_AFTER_WRAPPING],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    return end.returncode, end.stderr


def test_the_compiler_is_loaded_after_wrapping(daemon):
    """It leaves the wrapper alone, and compiles the module."""
    assert run_ranks(compile_after_wrapping, 2) == [(0, "")] * 2
