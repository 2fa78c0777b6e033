"""Buffers in steps, and the state that ranks get when a module is wrapped."""

import torch
from models import SMALL_BUCKETS, Mlp
from stand_in_gpu import GpuMemory
from torch import nn
from trial import PYTORCH, WRAPPER, local_gradients, trial
from trial_ranks import trials_test


class Buffered(nn.Module):
    def __init__(self, rank=0):
        super().__init__()
        self.mlp = Mlp()
        self.register_buffer("scale", torch.full((3,), 1.0 + rank))
        self.register_buffer("count", torch.tensor(rank))
        self.register_buffer("mask", torch.tensor([rank == 0, True]))
        self.register_buffer("phase", torch.full((2,), complex(rank, 1)))
        self.register_buffer("hidden", torch.full((2, 2), float(rank)), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x):
        return self.mlp(x) * self.scale


def same(t, module):
    t.same_bits([b for b in module.buffers() if not b.is_complex()], "buffers")
    t.same_bits([torch.view_as_real(b) for b in module.buffers() if b.is_complex()], "buffers")


@trial()
def ranks_start_as_rank_0(t):
    torch.manual_seed(t.rank)
    module = Buffered(t.rank)
    mine = {key: value.clone() for key, value in module.state_dict().items()}
    model = t.wrap(module)
    for key, value in t.gather(mine)[0].items():
        assert torch.equal(module.state_dict()[key], value), key
    assert module.hidden.eq(0).all()
    same(t, module)
    t.same_bits(model.parameters(), "parameters")


@trial()
def ranks_start_as_they_are_without_init_sync(t):
    module = Buffered(t.rank)
    t.wrap(module, init_sync=False)
    assert module.count.item() == t.rank and module.scale[0] == 1 + t.rank


@trial()
def each_step_brings_the_buffers_of_the_lowest_rank(t):
    module = Buffered()
    model = t.wrap(module)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            module.scale += 1 + t.rank  # in place
            module.count = module.count + 10 * (1 + t.rank)  # another tensor
        model(t.randn(4, 6, seed=step)).sum().backward()
        # PyTorch's wrapper synchronizes before a forward pass, ours after the backward pass.
        if not t.ours:
            with torch.no_grad():
                model(t.randn(4, 6))
        same(t, module)
        assert module.count.item() == 10 * (step + 1), module.count


@trial()
def buffers_that_are_not_broadcast_differ(t):
    module = Buffered()
    model = t.wrap(module, broadcast_buffers=False)
    for step in range(2):
        module.count += 1 + t.rank
        data = t.randn(4, 6, seed=step)
        t.train(model, lambda m, d=data: m(d).pow(2).mean())
    assert module.count.item() == 2 * (1 + t.rank)


@trial(WRAPPER)
def buffers_on_a_gpu_cross_once_each_way(t):
    """However many there are: the host waits for the GPU at every crossing."""
    module = Mlp()
    for i in range(40):
        module.register_buffer(f"mean_{i}", torch.full((1 + i, 3), 1.0))
        module.register_buffer(f"count_{i}", torch.tensor(i))
        module.register_buffer(f"mask_{i}", torch.tensor([True, False, True]))
    model = t.wrap(module)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for i in range(1, 40, 2):
                getattr(module, f"mean_{i}").add_(t.rank)
                getattr(module, f"count_{i}").add_(1 + t.rank)
        with GpuMemory(*module.buffers()) as gpu:
            model(t.randn(4, 6, seed=step)).sum().backward()
        # Rank 0 gets back the values that it has.
        assert len(gpu.crossings) == 1 + t.rank, gpu.crossings
        same(t, module)
        assert module.count_3.item() == 3 + step + 1


def _norm():
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


@trial()
def batch_normalization(t):
    module = _norm()
    model = t.wrap(module, **SMALL_BUCKETS)
    for step in range(4):
        model.zero_grad(set_to_none=True)
        data = t.randn(8, 6, seed=step)
        t.backward(model, lambda m, d=data: m(d).pow(2).mean(), f"in step {step}")
    if t.ours:
        same(t, module)
        assert module[1].num_batches_tracked.item() == 4


@trial(WRAPPER)
def batch_normalization_twice_in_one_backward(t):
    """In the second forward pass PyTorch's wrapper overwrites what the first backward needs."""
    module = _norm()
    model = t.wrap(module)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        first, second = t.randn(8, 6, seed=step), t.randn(8, 6, seed=step + 20)
        local = local_gradients(module, lambda m, a=first, b=second: (m(a) + m(b)).pow(2).mean())
        (model(first) + model(second)).pow(2).mean().backward()
        t.synchronized(model, local, f"in step {step}")
        same(t, module)


@trial(WRAPPER)
def accumulation_leaves_buffers_to_the_rank(t):
    module = _norm()
    model = t.wrap(module)
    model.train()
    with model.no_sync():
        model(t.randn(8, 6, seed=1)).sum().backward()
    means = t.gather(module[1].running_mean.clone())
    assert not torch.equal(means[0], means[1]), "nothing was broadcast yet"
    model(t.randn(8, 6, seed=2)).sum().backward()
    same(t, module)


@trial(WRAPPER)
def evaluating_alone_with_buffers(t):
    """A forward pass without a backward pass synchronizes nothing."""
    module = _norm()
    model = t.wrap(module)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        model(t.randn(8, 6, seed=step)).sum().backward()
        if t.rank == 0:
            model.eval()
            with torch.no_grad():
                model(t.randn(8, 6, seed=7))
            model.train()
    same(t, module)


@trial(PYTORCH, WRAPPER)
def synchronized_batch_normalization_of_a_process_group(t):
    """PyTorch's SyncBatchNorm uses Gloo; gradients go through gradsync."""
    if not hasattr(torch.distributed, "is_initialized"):
        return  # this PyTorch was built without process groups
    t.process_group()
    module = nn.Sequential(nn.Linear(6, 4), nn.SyncBatchNorm(4), nn.Linear(4, 2))
    if not _on_host():
        from trial import Skipped

        raise Skipped("this PyTorch's SyncBatchNorm is for GPUs only")
    model = t.wrap(module)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        model(t.randn(8, 6, seed=step)).pow(2).mean().backward()
    t.same_bits([p.grad for p in model.parameters()])


def _on_host():
    try:
        nn.SyncBatchNorm(2)(torch.randn(3, 2))
    except (ValueError, RuntimeError):
        return False
    return True


test = trials_test(__name__)
