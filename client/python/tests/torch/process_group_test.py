"""torch.distributed.init_process_group("gradsync"): its collectives do as Gloo's."""

import copy

import torch
import torch.distributed as dist
from models import Mlp
from torch import nn
from trial import GROUP, close, squares, trial
from trial_ranks import trials_test

# Sizes of every path: a slot of one bucket, of several, and one that does not divide.
SIZES = (1, 7, 1000, 600_001)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)


def groups(t):
    """The trial's group, and Gloo with the same ranks."""
    t.process_group()
    return dist.group.WORLD, dist.new_group(backend="gloo")


def average(tensor):
    return tensor.double().div(dist.get_world_size()).to(tensor.dtype)


def all_reduced(tensor, op, group, asynchronous):
    work = dist.all_reduce(tensor, op=op, group=group, async_op=asynchronous)
    if asynchronous:
        assert work.wait()
        assert work.is_completed() and work.is_success() and work.exception() is None
    else:
        assert work is None
    return tensor


@trial(GROUP)
def all_reduce_is_gloos(t):
    """Two ranks: the same bits, also where both paths of a tensor's first occurrences are new."""
    ours, gloo = groups(t)
    for dtype in FLOATS:
        for size in SIZES:
            for repeat in range(6):
                tensor = t.randn(size, seed=repeat, dtype=dtype)
                expected = tensor.clone()
                dist.all_reduce(expected, group=gloo)
                case = f"{dtype}, {size} elements, repeat {repeat}"
                for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                    for asynchronous in (False, True):
                        got = all_reduced(tensor.clone(), op, ours, asynchronous)
                        wanted = expected if op == dist.ReduceOp.SUM else average(expected)
                        assert torch.equal(got, wanted), f"{case}, {op}, async {asynchronous}"


@trial(GROUP, world_size=3)
def three_ranks_add_in_rank_order(t):
    ours, _ = groups(t)
    for repeat in range(4):
        tensor = t.randn(1000, seed=repeat)
        parts = t.gather(tensor)
        dist.all_reduce(tensor, group=ours)
        assert torch.equal(tensor, parts[0] + parts[1] + parts[2])


@trial(GROUP)
def plain_ddp_has_gloos_bits(t):
    """PyTorch's wrapper, unchanged: two ranks end with the same bits on either group."""
    trained = []
    for group in groups(t):
        torch.manual_seed(3)
        model = nn.parallel.DistributedDataParallel(Mlp(), process_group=group, bucket_cap_mb=0.002)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(8):
            optimizer.zero_grad()
            squares(t, step)(model).backward()
            optimizer.step()
        trained.append(copy.deepcopy(list(model.parameters())))
    for one, other in zip(*trained):
        assert torch.equal(one, other)
    t.same_bits(trained[0])


@trial(GROUP)
def destroy_and_init_again(t):
    for repeat in range(3):
        t.process_group()
        tensor = torch.ones(3) * (t.rank + repeat)
        dist.all_reduce(tensor)
        close(tensor, torch.full((3,), 2.0 * repeat + 1))
        dist.destroy_process_group()


test = trials_test(__name__)
