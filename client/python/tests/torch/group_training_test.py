"""PyTorch's own parallel training on the process group "gradsync" ends as on Gloo."""

import contextlib
import copy
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import Mlp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from trial import GROUP, close, squares, trial
from trial_ranks import trials_test

BACKENDS = ("gradsync", "gloo")


def trained(t, wrap, make_optimizer=torch.optim.Adam, steps=6):
    """Whole parameters after training, for each backend."""
    t.process_group()
    results = []
    for backend in BACKENDS:
        torch.manual_seed(3)
        model = wrap(Mlp(), backend)
        optimizer = make_optimizer(model.parameters(), lr=0.01)
        for step in range(steps):
            optimizer.zero_grad()
            squares(t, step)(model).backward()
            optimizer.step()
        results.append([whole(p) for p in model.parameters()])
    return results


def whole(parameter):
    full = getattr(parameter, "full_tensor", None)
    return (full() if full is not None else parameter).detach().clone()


def same_as_on_gloo(t, ours, gloos):
    for one, other in zip(ours, gloos):
        close(one, other)
    t.same_bits(ours)


def groups(backend, *lists):
    """This rank's group of those with these ranks."""
    made = [dist.new_group(ranks, backend=backend) for ranks in lists]
    (mine,) = (g for g, ranks in zip(made, lists) if dist.get_rank() in ranks)
    return mine


def shard_all(module, **options):
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(module, **options)


@trial(GROUP)
def fully_sharded_without_a_mesh(t):
    """fully_shard makes a mesh of the default group by itself.

    The first trial: PyTorch caches meshes by their shape, with groups that were destroyed.
    """
    t.process_group()
    torch.manual_seed(3)
    module = Mlp()
    expected = [p.detach().clone() for p in module.parameters()]
    model = shard_all(module)
    close(whole(next(model.parameters())), expected[0])
    squares(t, 1)(model).backward()
    assert all(p.grad is not None for p in model.parameters())


@trial(GROUP)
def fully_sharded(t):
    def wrap(module, backend):
        group = dist.new_group(backend=backend)
        return shard_all(module, mesh=DeviceMesh.from_group(group, "cpu"))

    same_as_on_gloo(t, *trained(t, wrap))


@trial(GROUP, world_size=4)
def hybrid_sharded(t):
    """Shards within pairs, replicas between them: sub-groups all-reduce."""

    def wrap(module, backend):
        replicate = groups(backend, [0, 2], [1, 3])
        shard = groups(backend, [0, 1], [2, 3])
        mesh = DeviceMesh.from_group(
            [replicate, shard],
            "cpu",
            mesh=torch.tensor([[0, 1], [2, 3]]),
            mesh_dim_names=("replicate", "shard"),
        )
        return shard_all(module, mesh=mesh)

    same_as_on_gloo(t, *trained(t, wrap))


@trial(GROUP, world_size=4)
def hybrid_sharded_on_a_mesh_of_its_own(t):
    t.process_group()
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard_all(Mlp(), mesh=mesh)
    for step in range(3):
        squares(t, step)(model).backward()
    t.same_bits([whole(p.grad) for p in model.parameters()])


@trial(GROUP)
def sharded_optimizer_states(t):
    def wrap(module, backend):
        return DistributedDataParallel(module, process_group=dist.new_group(backend=backend))

    def make(parameters, lr):
        return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=lr)

    same_as_on_gloo(t, *trained(t, wrap, make))


@trial(GROUP)
def samplers(t):
    t.process_group()
    sampler = torch.utils.data.DistributedSampler(range(11), shuffle=True, seed=5)
    mine = list(sampler)
    everyone = t.gather(mine)
    assert len(mine) == 6 and set(range(11)) == set(everyone[0]) | set(everyone[1])


@trial(GROUP)
def checkpoints(t):
    """torch.distributed.checkpoint saves and loads a wrapped module."""
    t.process_group()
    folder = t.gather(tempfile.mkdtemp(prefix="checkpoint-"))[0]
    torch.manual_seed(t.rank)
    model = DistributedDataParallel(Mlp())
    saved = copy.deepcopy(get_model_state_dict(model))
    dcp.save({"model": saved}, checkpoint_id=folder)
    for parameter in model.parameters():
        parameter.data.zero_()
    loaded = {"model": get_model_state_dict(model)}
    dcp.load(loaded, checkpoint_id=folder)
    set_model_state_dict(model, loaded["model"])
    for name, value in get_model_state_dict(model).items():
        assert torch.equal(value, saved[name]), name


@trial(GROUP)
def hooks_of_pytorch(t):
    """Its compression and local hooks use the group."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    t.process_group()

    def compressed(model):
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)

    def low_rank(model):
        state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    for register in (compressed, low_rank):
        model = DistributedDataParallel(Mlp())
        register(model)
        for step in range(5):
            squares(t, step)(model).backward()
        t.same_bits([p.grad for p in model.parameters()])


@trial(GROUP)
def uneven_inputs_divided_by_live_ranks(t):
    """join() hands a work of Python to C++, which waits for it in the backward pass."""
    t.process_group()
    model = DistributedDataParallel(nn.Linear(5, 5, bias=False))
    with model.join(divide_by_initial_world_size=False):
        for step in range(3 if t.rank == 0 else 5):
            model.zero_grad(set_to_none=True)
            model(torch.full((1, 5), 50.0)).sum().backward()
            close(model.module.weight.grad, torch.full((5, 5), 50.0), f"step {step}")


@trial(GROUP)
def uneven_inputs(t):
    """PyTorch's join() shadows the all-reduces of ranks that have no data any more."""

    def wrap(module, backend):
        return DistributedDataParallel(module, process_group=dist.new_group(backend=backend))

    t.process_group()
    results = []
    for backend in BACKENDS:
        torch.manual_seed(3)
        model = wrap(Mlp(), backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for step in range(3 + 2 * t.rank):
                optimizer.zero_grad()
                squares(t, step)(model).backward()
                optimizer.step()
        results.append([whole(p) for p in model.parameters()])
    same_as_on_gloo(t, *results)


@trial(GROUP)
def functional_collectives(t):
    import torch.distributed._functional_collectives as functional

    t.process_group()
    reduced = functional.all_reduce(torch.full((5,), t.rank + 1.0), "sum", dist.group.WORLD)
    close(reduced + 0, torch.full((5,), 3.0))
    gathered = functional.all_gather_tensor(torch.full((2,), float(t.rank)), 0, dist.group.WORLD)
    close(gathered + 0, torch.tensor([0.0, 0.0, 1.0, 1.0]))
    scattered = functional.reduce_scatter_tensor(torch.ones(4), "sum", 0, dist.group.WORLD)
    close(scattered + 0, torch.full((2,), 2.0))


@trial(GROUP)
def a_wrapper_of_gradsync_beside_it(t):
    """The process group and gradsync's own wrapper share a process."""
    import gradsync.torch

    t.process_group()
    model = gradsync.torch.DistributedDataParallel(Mlp(), session=t.session())
    for step in range(3):
        t.train(model, squares(t, step))
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        close(tensor, torch.full((4,), 2.0))
    with contextlib.suppress(AttributeError):
        del model


test = trials_test(__name__)
