"""A wrapper is one of PyTorch's: its class, arguments, attributes, and what libraries call."""

import inspect
import warnings

import gradsync.torch
import pytest
import torch
from gradsync.torch._devices import check_devices
from models import SMALL_BUCKETS, Mlp
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel
from trial import PYTORCH, WRAPPER, local_gradients, squares, trial
from trial_ranks import trials_test


def test_the_class():
    assert issubclass(gradsync.torch.DistributedDataParallel, DistributedDataParallel)
    assert issubclass(gradsync.torch.DistributedDataParallel, Joinable)
    assert gradsync.torch.DistributedDataParallel.__name__ == "DistributedDataParallel"


def _parameters(function):
    return list(inspect.signature(function).parameters.values())


def test_the_constructor_takes_every_argument_at_the_same_place_with_the_same_default():
    theirs = _parameters(DistributedDataParallel.__init__)
    ours = _parameters(gradsync.torch.DistributedDataParallel.__init__)
    for own, expected in zip(ours, theirs):
        assert (own.name, own.kind, own.default) == (
            expected.name,
            expected.kind,
            expected.default,
        )
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in ours[len(theirs) :])


@pytest.mark.parametrize(
    "name", ["join", "join_hook", "no_sync", "scatter", "gather", "to_kwargs", "train"]
)
def test_methods_take_every_argument_at_the_same_place_with_the_same_default(name):
    theirs = _parameters(getattr(DistributedDataParallel, name))
    ours = _parameters(getattr(gradsync.torch.DistributedDataParallel, name))
    assert [(p.name, p.kind, p.default) for p in ours[: len(theirs)]] == [
        (p.name, p.kind, p.default) for p in theirs
    ]


@trial(WRAPPER)
def every_attribute_of_pytorchs_is_there(t):
    for module in (Mlp(), nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))):
        theirs, ours = t.pytorch(module), t.wrap(module)
        assert isinstance(ours, DistributedDataParallel)
        differ = {
            "_bucket_config",  # a class of its own; bucket_bytes_cap* say the same
            "_lazy_init_ran",  # nothing is done at the first forward pass
            "logger",
            "reducer",
        }
        for name, value in theirs.__dict__.items():
            if name in differ:
                continue
            mine = getattr(ours, name)
            if isinstance(value, (bool, int, float, str, torch.device, type(None), set)):
                assert mine == value, (name, mine, value)
            elif name in ("_module_parameters", "modules_buffers"):
                assert list(map(id, mine)) == list(map(id, value)), name
            elif name not in nn.Module().__dict__:
                assert type(mine) is type(value), (name, mine, value)
        assert ours.process_group is torch.distributed.group.WORLD
        assert ours.broadcast_buffers and ours.will_sync_module_buffers() == (
            theirs.will_sync_module_buffers()
        )
        assert ours._distributed_rank == theirs._distributed_rank == t.rank


@trial(WRAPPER)
def there_need_be_no_process_group(t):
    assert not torch.distributed.is_initialized()
    model = t.wrap(Mlp())
    assert model.process_group is None and model._distributed_rank == t.rank
    t.train(model, squares(t))
    with t.raises(ValueError, match=("process_group", "session=")):
        t.wrap(Mlp(), process_group=object())


@trial(WRAPPER)
def the_default_process_group_is_as_good_as_none(t):
    t.process_group()
    model = t.wrap(Mlp(), process_group=torch.distributed.group.WORLD)
    t.train(model, squares(t))
    other = torch.distributed.new_group([0])
    with t.raises(ValueError, match=("process_group", "session=")):
        t.wrap(Mlp(), process_group=other)
    alone = t.session(rank=0, world_size=1, job_id=f"{t.name}/{t.rank}")
    with t.raises(ValueError, match=("2 ranks", "has 1")):
        t.wrap(Mlp(), process_group=torch.distributed.group.WORLD, session=alone)
    swapped = t.session(rank=1 - t.rank, world_size=2, job_id=f"{t.name}/swapped")
    with t.raises(ValueError, match=(f"rank {t.rank} of process_group", f"rank {1 - t.rank} of")):
        t.wrap(Mlp(), process_group=torch.distributed.group.WORLD, session=swapped)


@trial(WRAPPER)
def arguments_without_effect(t):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = t.wrap(
            Mlp(),
            device_ids=[],
            dim=1,
            find_unused_parameters=True,
            check_reduction=True,
            gradient_as_bucket_view=False,
            skip_all_reduce_unused_params=True,
            batched_grad_copy=True,
        )
    assert model.find_unused_parameters and model.dim == 1
    assert model.gradient_as_bucket_view  # what is in force
    t.train(model, squares(t))


@trial(WRAPPER)
def refused_arguments(t):
    parameter = nn.Parameter(torch.ones(1))
    for argument, value, word in (
        ("device_mesh", object(), "session="),
        ("mixed_precision", object(), "autocast"),
        ("delay_all_reduce_named_params", [("a", parameter)], "_ddp_params_and_buffers_to_ignore"),
        ("param_to_hook_all_reduce", parameter, "delay_all_reduce_named_params"),
        ("bucket_cap_mb_list", [1, 25], "last_bucket_cap_mb"),
    ):
        with t.raises(ValueError, match=(argument, word)):
            t.wrap(Mlp(), **{argument: value})


@trial(WRAPPER)
def refused_methods(t):
    model = t.wrap(Mlp())
    for name, word in (
        ("register_comm_hook", "torch.nn.parallel.DistributedDataParallel"),
        ("_register_builtin_comm_hook", "torch.nn.parallel.DistributedDataParallel"),
        ("_register_buffer_comm_hook", "forward_sync_buffers=False"),
        ("_register_fused_optim", "_apply_optimizer_in_backward"),
        ("_set_sparse_metadata", "sparse=False"),
        ("_update_process_group", "wrap the module again"),
        ("_remove_autograd_hooks", "delete the wrapper"),
    ):
        with t.raises(NotImplementedError, match=(name, word)):
            getattr(model, name)(None, None)
    # Whatever else needs the reducer.
    assert not hasattr(model.reducer, "_push_all_rebuilt_params")
    with t.raises(AttributeError, match=("reducer._autograd_hook", "allreduce_hook")):
        model.reducer._autograd_hook(0)
    t.train(model, squares(t))


# What PyTorch's methods do right without reducer and process group.
_INHERITED = {
    "_assign_modules_buffers",
    "_build_debug_param_to_name_mapping",
    "_check_comm_hook",
    "_check_sync_bufs_post_fwd",
    "_check_sync_bufs_pre_fwd",
    "_get_active_ddp_module",
    "_get_data_parallel_params",
    "_get_parameters",
    "_inside_ddp_forward",
    "_log_and_throw",
    "_passing_sync_batchnorm_handle",
    "_set_ddp_sink_clone",
    "_set_params_and_buffers_to_ignore_for_model",
    "gather",
    "no_sync",
    "scatter",
    "to_kwargs",
    "train",
    "will_sync_module_buffers",
}


def _pytorchs_methods():
    kinds = (property, staticmethod, classmethod)
    named = vars(DistributedDataParallel).items()
    return {n for n, method in named if inspect.isroutine(method) or isinstance(method, kinds)}


def test_no_other_method_is_inherited():
    ours = gradsync.torch.DistributedDataParallel.__mro__
    ours = ours[: ours.index(DistributedDataParallel)]
    own = {name for each in ours for name in vars(each)}
    assert _pytorchs_methods() - own == _INHERITED & _pytorchs_methods()


@pytest.mark.parametrize(
    "name", ["_sync_module_buffers", "_distributed_broadcast_coalesced", "_pre_forward"]
)
def test_a_method_of_pytorchs_own_steps_is_refused(name):
    """With PyTorch's, a process without a group dies, or trains without averages."""
    wrapper = gradsync.torch.DistributedDataParallel
    with pytest.raises(NotImplementedError, match=f"this wrapper has no {name}"):
        getattr(wrapper, name)(wrapper.__new__(wrapper), [], 1)


@trial(WRAPPER, PYTORCH)
def buffers_are_synchronized_on_demand(t):
    module = nn.Linear(6, 6)
    module.register_buffer("own", torch.zeros(2))
    model = t.wrap(module, broadcast_buffers=False)
    module.own = torch.full((2,), 5.0 + t.rank)  # another tensor than at the start
    model._sync_buffers()
    assert module.own.tolist() == [5, 5] and model.modules_buffers[0] is module.own


# ---- Devices


@pytest.mark.parametrize("name", [1, "cuda:1", torch.device("cuda", 1)])
def test_the_modules_own_gpu(name):
    own = {torch.device("cuda", 1)}
    assert check_devices([name], None, own) == ([1], 1)
    assert check_devices([name], name, own) == ([1], 1)
    assert check_devices(None, None, own) == check_devices([], None, own) == (None, None)


@pytest.mark.parametrize(
    "device_ids, output_device, devices, words",
    [
        ([0], None, ["cuda:1"], ["device_ids is cuda:0", "on cuda:1"]),
        ([1], 0, ["cuda:1"], ["output_device is cuda:0", "on cuda:1"]),
        (None, 1, ["cuda:1"], ["go together", "on cuda:1"]),
        ([0, 1], None, ["cuda:1"], ["2 devices", "one process"]),
        ([0], None, ["cuda:0", "cuda:1"], ["cuda:0, cuda:1"]),
        ([0], None, ["cpu"], ["on cpu"]),
        (None, 0, ["cpu"], ["on cpu"]),
    ],
)
def test_another_device_is_refused(device_ids, output_device, devices, words):
    with pytest.raises(ValueError) as error:
        check_devices(device_ids, output_device, dict.fromkeys(map(torch.device, devices)))
    assert all(word in str(error.value) for word in words), error.value


@trial(WRAPPER, PYTORCH)
def device_ids_of_a_module_in_host_memory_are_refused(t):
    for options in ({"device_ids": [0]}, {"device_ids": ["cpu"]}, {"output_device": 1}):
        with t.raises(ValueError, match=("device_ids", "output_device", "cpu")):
            t.wrap(Mlp(), **options)
    t.train(t.wrap(Mlp(), device_ids=[]), squares(t))


@trial(WRAPPER, PYTORCH)
def inputs_move_to_the_device(t):
    """A stand-in for a GPU: the device `meta` has no memory."""

    class Places(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, *inputs, **kwargs):
            self.places = [
                inputs[0].device.type,
                inputs[1]["nested"][0].device.type,
                kwargs["mask"].device.type,
            ]
            assert inputs[2] == "text" and kwargs["flag"] is True
            return self.scale * 1

    model = t.wrap(Places())
    x = torch.ones(2)
    for device_ids, place in ((None, "cpu"), ([0], "meta")):
        model.device_ids, model.device_type = device_ids, "meta"
        model(x, {"nested": [x]}, "text", mask=x, flag=True).sum().backward()
        assert model.module.places == [place] * 3


@trial(WRAPPER)
def a_forward_pass_without_inputs_on_a_device(t):
    """PyTorch's wrapper raises an IndexError."""

    class NoInput(nn.Module):
        def __init__(self):
            super().__init__()
            self.value = nn.Parameter(torch.ones(1))

        def forward(self):
            return self.value * 2

    model = t.wrap(NoInput())
    model.device_ids, model.device_type = [0], "meta"
    model().sum().backward()
    assert model.module.value.grad.item() == 2


# ---- What scripts and libraries do with a wrapper


@trial()
def a_script_sets_require_backward_grad_sync(t):
    """Instead of no_sync(): before the forward pass of each micro-batch, as nanoGPT does."""
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    for step in range(3):
        losses = [squares(t, 3 * step + micro) for micro in range(3)]
        local = local_gradients(model.module, *losses)
        model.zero_grad(set_to_none=True)
        for micro, loss in enumerate(losses):
            model.require_backward_grad_sync = micro == 2
            loss(model).backward()
        t.synchronized(model, local, f"in step {step}")


@trial(WRAPPER, PYTORCH)
def a_library_prepares_the_reducer(t):
    """As Lightning's manual optimization, which keeps forward() from preparing it."""
    model = t.wrap(Mlp(), **SMALL_BUCKETS)
    inner = model.module.forward

    def forward(*inputs):
        model.require_backward_grad_sync = False
        return inner(*inputs)

    model.module.forward = forward
    for step in range(3):
        data = t.randn(4, 6, seed=step)
        local = local_gradients(_plain(model.module), lambda m, d=data: m(d).pow(2).mean())
        model.zero_grad(set_to_none=True)
        model.require_backward_grad_sync = True
        loss = model(data).pow(2).mean()
        model.require_backward_grad_sync = True
        model.require_forward_param_sync = True
        model.reducer._rebuild_buckets()
        model.reducer.prepare_for_backward([])
        loss.backward()
        t.synchronized(model, local, f"in step {step}")


def _plain(module):
    plain = Mlp()
    plain.load_state_dict(module.state_dict())
    return plain


@trial(WRAPPER)
def a_library_prepares_the_reducer_after_a_local_forward_pass(t):
    """As PyTorch's pipelines do; the gradients would stay local."""
    model = t.wrap(Mlp())
    with model.no_sync():
        loss = squares(t)(model)
    with t.raises(RuntimeError, match=("prepare_for_backward", "no_sync")):
        model.reducer.prepare_for_backward([loss])


@trial(WRAPPER)
def logging_data(t):
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    options = {"bucket_cap_mb": 5, "broadcast_buffers": False}
    theirs, ours = t.pytorch(module, **options), t.wrap(module, **options)
    data, expected = ours._get_ddp_logging_data(), theirs._get_ddp_logging_data()
    same = data.keys() & expected.keys() - {"backend_name", "bucket_sizes", "dtypes"}
    assert len(same) >= 12, same
    for key in same:
        assert data[key] == expected[key], key
    assert data["backend_name"] == "gradsync" and data["iteration"] == 0
    assert data.get("can_set_static_graph") == 0
    for step in range(3):
        t.train(ours, squares(t, step))
    data = ours._get_ddp_logging_data()
    assert data["iteration"] == 3 and data["has_rebuilt_buckets"] == 1
    assert data["avg_backward_compute_time"] > 0
    assert int(data["bucket_sizes"]) >= data["total_parameter_size_bytes"]
    ours._set_ddp_runtime_logging_sample_rate(3)
    with t.raises(ValueError, match="sample_rate"):
        ours._set_ddp_runtime_logging_sample_rate(0)


@trial(WRAPPER)
def a_graph_becomes_static_before_the_first_step(t):
    class Shared(nn.Module):
        """Two reentrant checkpoints use one parameter: only a static graph can have that."""

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            for _ in range(2):
                x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True)
            return x

    model = t.wrap(Shared())
    assert not model.static_graph
    model._set_static_graph()
    assert model.static_graph and model._get_ddp_logging_data()["static_graph"] == 1
    for step in range(3):
        data = t.randn(4, 6, seed=step).requires_grad_()
        t.train(model, lambda m, d=data: m(d).pow(2).mean())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model._set_static_graph()
    assert "already" in str(said[0].message)
    late = t.wrap(Mlp())
    t.train(late, squares(t))
    with t.raises(RuntimeError, match="static_graph=True"):
        late._set_static_graph()


@trial(WRAPPER)
def an_open_step_is_not_finalized(t):
    model = t.wrap(Mlp())
    t.train(model, squares(t))
    model._check_reducer_finalized()
    handle = model.module.first.weight.register_hook(lambda _: 1 / 0)
    with t.raises(ZeroDivisionError):
        squares(t)(model).backward()
    handle.remove()
    with t.raises(RuntimeError, match="step 2"):
        model._check_reducer_finalized()


@trial(WRAPPER, PYTORCH)
def buffers_of_the_start(t):
    """Only broadcast_buffers=False leaves each rank its own; and so does the end of a join."""
    for options, synchronized in (
        ({"broadcast_buffers": False}, False),
        ({"forward_sync_buffers": False}, True),
        ({}, True),
    ):
        module = nn.Linear(6, 6)
        module.register_buffer("own", torch.tensor(float(t.rank)))
        model = t.wrap(module, **options)
        assert module.own.item() == (0 if synchronized else t.rank), options
        assert model.forward_sync_buffers == (options == {})
        module.own.fill_(t.rank)
        with model.join():
            t.train(model, squares(t))
        assert module.own.item() == (t.rank if options else module.own.item()), options
    t.same_bits([module.own])


@trial(WRAPPER)
def buffers_that_differ_in_shape(t):
    module = nn.Linear(6, 6)
    module.register_buffer("own", torch.zeros(1 + t.rank))
    with t.raises(ValueError, match="'own'"):
        t.wrap(module)
    t.train(t.wrap(module, broadcast_buffers=False), squares(t))


@trial(WRAPPER, PYTORCH)
def buffers_can_be_left_alone_later(t):
    module = nn.Linear(6, 6)
    module.register_buffer("own", torch.zeros(1))
    model = t.wrap(module)
    for broadcast in (True, False, True):
        model.broadcast_buffers = broadcast
        module.own.fill_(t.rank)
        for _ in range(2):  # PyTorch's wrapper synchronizes before a forward pass
            t.train(model, squares(t))
        assert module.own.item() == (0 if broadcast else t.rank)


@trial(WRAPPER)
def forward_sync_buffers_wins(t):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = t.wrap(Mlp(), broadcast_buffers=True, forward_sync_buffers=False)
    assert not model.broadcast_buffers
    assert any("forward_sync_buffers" in str(w.message) for w in said)


test = trials_test(__name__)
