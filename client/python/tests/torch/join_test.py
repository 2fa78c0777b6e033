"""Ranks with different numbers of steps: no step waits for a finished rank."""

import contextlib

import torch
from models import SMALL_BUCKETS, Branching, Mlp
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from trial import HOOK, PYTORCH, WRAPPER, close, trial
from trial_ranks import trials_test


def wrap(t, module, divisor="live_ranks", **options):
    if t.wrapper == PYTORCH:
        return t.wrap(module, **options)
    return t.wrap(module, session=t.session(divisor=divisor), **options)


def joining(t, model, divisor="live_ranks"):
    return model.join(divide_by_initial_world_size=divisor == "world")


def _division_trial(divisor, of_session=None):
    def divided(t):
        model = wrap(t, nn.Linear(5, 5, bias=False), of_session or divisor)
        inputs = torch.full((1, 5), 50.0)
        with joining(t, model, divisor):
            for step in range(3 if t.rank == 0 else 5):
                model.zero_grad(set_to_none=True)
                model(inputs).sum().backward()
                live = t.world_size if step < 3 else t.world_size - 1
                expected = 50.0 * (live / t.world_size if divisor == "world" else 1)
                close(model.module.weight.grad, torch.full((5, 5), expected), f"step {step}")
                if t.ours:
                    assert model.last_step.divisor == (t.world_size if divisor == "world" else live)
                    close(torch.tensor(model.gradient_norm), model.module.weight.grad.norm())

    return divided


divides_by_live_ranks = trial(WRAPPER, PYTORCH)(_division_trial("live_ranks"))
divides_by_the_world = trial(WRAPPER, HOOK, PYTORCH)(_division_trial("world"))
three_divide_by_live_ranks = trial(WRAPPER, world_size=3)(_division_trial("live_ranks"))
three_divide_by_the_world = trial(WRAPPER, world_size=3)(_division_trial("world"))
divides_by_live_ranks_in_a_session_that_divides_by_the_world = trial(WRAPPER, world_size=3)(
    _division_trial("live_ranks", of_session="world")
)
divides_by_the_world_in_a_session_that_divides_by_live_ranks = trial(WRAPPER, world_size=3)(
    _division_trial("world", of_session="live_ranks")
)


@trial(WRAPPER, PYTORCH)
def averages_divide_by_the_world_if_nothing_else_is_said(t):
    model = t.wrap(nn.Linear(5, 5, bias=False))
    with model.join():
        for step in range(1 + 2 * t.rank):
            model.zero_grad(set_to_none=True)
            model(torch.full((1, 5), 50.0)).sum().backward()
            close(model.module.weight.grad, torch.full((5, 5), 50.0 if step < 1 else 25.0))
    # Outside of join() all ranks take part, and all count.
    model.zero_grad(set_to_none=True)
    model(torch.full((1, 5), 50.0)).sum().backward()
    close(model.module.weight.grad, torch.full((5, 5), 50.0))


def _counts_trial(counts, micro_batches=1, **options):
    """counts: steps of each rank."""

    def trained(t):
        model = wrap(t, Mlp(), **SMALL_BUCKETS, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        with joining(t, model):
            for step in range(counts[t.rank]):
                optimizer.zero_grad(set_to_none=True)
                for micro in range(micro_batches):
                    last = micro == micro_batches - 1
                    with contextlib.nullcontext() if last else model.no_sync():
                        data = t.randn(4, 6, seed=10 * step + micro)
                        model(data).pow(2).mean().backward()
                optimizer.step()
            mine = [p.detach().clone() for p in model.parameters()]
        t.same_bits(model.parameters(), "parameters after all have joined")
        last = max(range(t.world_size), key=lambda rank: counts[rank])
        for parameter, final in zip(model.parameters(), t.gather(mine)[last]):
            assert torch.equal(parameter, final), "not those of the last to join"

    return trained


first_done_early = trial(WRAPPER, PYTORCH)(_counts_trial((2, 5)))
second_done_early = trial(WRAPPER, PYTORCH)(_counts_trial((6, 1)))
one_has_no_data_at_all = trial(WRAPPER, PYTORCH)(_counts_trial((0, 4)))
one_step_and_none = trial(WRAPPER, PYTORCH)(_counts_trial((1, 0)))
all_even = trial(WRAPPER, HOOK, PYTORCH)(_counts_trial((3, 3)))
accumulating = trial(WRAPPER, PYTORCH)(_counts_trial((2, 5), micro_batches=3))
three_done_at_three_times = trial(WRAPPER, PYTORCH, world_size=3)(_counts_trial((1, 5, 3)))
two_of_three_without_data = trial(WRAPPER, PYTORCH, world_size=3)(_counts_trial((0, 4, 0)))
finding_unused = trial(WRAPPER, PYTORCH)(_counts_trial((2, 4), find_unused_parameters=True))
static_graph = trial(WRAPPER)(_counts_trial((2, 4), static_graph=True))


@trial(WRAPPER)
def training_goes_on_after_joining(t):
    model = wrap(t, Mlp(), **SMALL_BUCKETS)
    for epoch in range(3):
        with joining(t, model):
            for step in range(2 + (t.rank + epoch) % 2 * 3):
                model.zero_grad(set_to_none=True)
                model(t.randn(4, 6, seed=step)).pow(2).mean().backward()
        t.same_bits(model.parameters(), f"parameters after epoch {epoch}")
    model.zero_grad(set_to_none=True)
    data = t.randn(4, 6, seed=99)

    t.backward(model, lambda m: m(data).pow(2).mean())


@trial(WRAPPER)
def buffers_come_from_the_last_joiner(t):
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    model = wrap(t, module)
    with joining(t, model):
        for step in range(2 + 3 * t.rank):
            model(t.randn(4, 6, seed=step)).sum().backward()
        mine = {k: b.clone() for k, b in module.named_buffers()}
    t.same_bits(module.buffers(), "buffers")
    for key, value in t.gather(mine)[t.world_size - 1].items():
        assert torch.equal(dict(module.named_buffers())[key], value), key


@trial(WRAPPER)
def buffers_are_broadcast_among_the_remaining_ranks(t):
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    model = wrap(t, module)
    with joining(t, model):
        for step in range([1, 3, 3][t.rank] if t.world_size == 3 else 3 - 2 * t.rank):
            model(t.randn(4, 6, seed=step)).sum().backward()
    t.same_bits(module.buffers(), "buffers")


@trial(WRAPPER)
def a_gradient_that_no_remaining_rank_uses_is_untouched(t):
    model = wrap(t, Branching(), find_unused_parameters=True)
    branch = model.module.branch
    with joining(t, model):
        for step in range(1 if t.rank == 0 else 4):
            model.zero_grad(set_to_none=True)
            # Rank 0 used the branch, and left.
            use = step != 1
            model(t.randn(4, 6, seed=step), use).pow(2).mean().backward()
            if step == 1:
                assert branch.weight.grad is None
            elif step > 1:
                assert branch.weight.grad is not None


@trial(WRAPPER, PYTORCH)
def only_one_rank_uses_a_branch_and_the_other_leaves(t):
    model = wrap(t, Branching(), find_unused_parameters=True)
    with joining(t, model):
        for step in range(2 if t.rank == 0 else 4):
            model.zero_grad(set_to_none=True)
            model(t.randn(4, 6, seed=step), t.rank == 1).pow(2).mean().backward()
            assert model.module.branch.weight.grad is not None, f"step {step}"
    t.same_bits(model.parameters())


@trial(WRAPPER, HOOK, PYTORCH)
def disabled(t):
    model = wrap(t, nn.Linear(1, 1))
    with model.join(enable=False):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            model(torch.full((1, 1), float(t.rank))).sum().backward()
            close(model.module.weight.grad, torch.full((1, 1), (t.world_size - 1) / 2))
    t.same_bits(model.parameters())


@trial(WRAPPER)
def an_exception_passes_through(t):
    model = wrap(t, Mlp())
    with t.raises(ValueError, match="mine"):
        with joining(t, model):
            raise ValueError("mine")
    # It waited for no rank, and no rank for it.

    data = t.randn(4, 6)
    t.backward(model, lambda m: m(data).pow(2).mean())


def _early_end_trial(counts, join, group=False):
    """counts: steps of each rank."""

    def ended(t):
        if group:
            t.process_group()
        model = t.wrap(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
        done = 0
        shortest = min(counts)
        first = counts[t.rank] == shortest
        match = f"Rank {t.rank} exhausted all inputs" if first else "at least one rank"
        uneven = shortest < max(counts)
        with t.raises(RuntimeError, match=match) if uneven else contextlib.nullcontext():
            with join(model):
                for step in range(counts[t.rank]):
                    loss = model(t.randn(4, 6, seed=step)).sum()
                    model.zero_grad(set_to_none=True)
                    loss.backward()
                    done += 1
        assert done == shortest
        t.same_bits([p.grad for p in model.parameters()], "gradients of the last common step")
        if t.ours:  # PyTorch's wrapper goes on to ask after this; ours is as before
            data = t.randn(4, 6, seed=9)
            t.train(model, lambda m: m(data).pow(2).mean())

    return ended


def _throwing(model):
    return model.join(throw_on_early_termination=True)


an_early_end_ends_both = trial(WRAPPER, PYTORCH)(_early_end_trial((2, 4), _throwing))
an_early_end_ends_all_three = trial(WRAPPER, PYTORCH, world_size=3)(
    _early_end_trial((3, 1, 4), _throwing)
)
two_end_early = trial(WRAPPER, PYTORCH, world_size=3)(_early_end_trial((1, 3, 1), _throwing))
three_end_early_in_pytorchs_join = trial(WRAPPER, world_size=3)(
    _early_end_trial(
        (3, 1, 4), lambda model: Join([model], throw_on_early_termination=True), group=True
    )
)
no_early_end = trial(WRAPPER, PYTORCH)(_early_end_trial((3, 3), _throwing))


def _pytorchs_join_trial(counts, by_world):
    """Ours among the joinables of PyTorch's Join, with an optimizer of PyTorch's."""

    def joined(t):
        t.process_group()
        model = t.wrap(nn.Linear(5, 5, bias=False))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)
        with Join([model, optimizer], divide_by_initial_world_size=by_world):
            for step in range(counts[t.rank]):
                optimizer.zero_grad(set_to_none=True)
                model(torch.full((1, 5), 50.0)).sum().backward()
                live = sum(count > step for count in counts)
                expected = 50.0 * (live / t.world_size if by_world else 1)
                close(model.module.weight.grad, torch.full((5, 5), expected), f"step {step}")
                optimizer.step()
        t.same_bits(model.parameters(), "parameters after all have joined")
        model.zero_grad(set_to_none=True)
        model(torch.full((1, 5), 50.0)).sum().backward()
        close(model.module.weight.grad, torch.full((5, 5), 50.0))

    return joined


pytorchs_join = trial(WRAPPER, PYTORCH)(_pytorchs_join_trial((2, 5), by_world=True))
pytorchs_join_by_live_ranks = trial(WRAPPER, PYTORCH)(_pytorchs_join_trial((4, 1), by_world=False))
pytorchs_join_of_three = trial(WRAPPER, PYTORCH, world_size=3)(
    _pytorchs_join_trial((3, 0, 5), by_world=True)
)
pytorchs_join_of_even_inputs = trial(WRAPPER, PYTORCH)(_pytorchs_join_trial((3, 3), by_world=True))


def train_unevenly(t, models):
    """Two steps on rank 0, and two more on each rank than on the one before."""
    for step in range(2 + 2 * t.rank):
        for model in models:
            model.zero_grad(set_to_none=True)
            model(t.randn(4, 6, seed=step)).pow(2).mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad


@trial(WRAPPER)
def pytorchs_join_of_two_modules(t):
    t.process_group()
    models = [t.wrap(Mlp(), **SMALL_BUCKETS) for _ in range(2)]
    for _ in range(2):  # and once more
        with Join(models):
            train_unevenly(t, models)
        for model in models:
            t.same_bits(model.parameters())


@trial(WRAPPER)
def pytorchs_join_needs_a_process_group(t):
    model = t.wrap(Mlp())
    with t.raises(RuntimeError, match=("process group", "model.join()")):
        Join([model])


@trial(WRAPPER)
def two_modules_join_together(t):
    import gradsync.torch

    session = t.session(divisor="world")
    models = [t.wrap(Mlp(), session=session, **SMALL_BUCKETS) for _ in range(2)]
    with gradsync.torch.join(models):
        train_unevenly(t, models)
    for model in models:
        t.same_bits(model.parameters())


@trial(WRAPPER, world_size=3)
def leaving_for_good(t):
    """After `leave` the other ranks continue without this rank."""
    model = wrap(t, Mlp(), **SMALL_BUCKETS)
    for step in range(2):
        model.zero_grad(set_to_none=True)
        model(t.randn(4, 6, seed=step)).pow(2).mean().backward()
    t.meet()
    if t.rank == 0:
        model.leave()
        t.meet()
    else:
        t.meet()
        for step in range(2, 5):
            model.zero_grad(set_to_none=True)
            model(t.randn(4, 6, seed=step)).pow(2).mean().backward()
            assert model.last_step.live_ranks == 2, model.last_step
    gathered = t.gather([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gathered[1:]))


test = trials_test(__name__)
