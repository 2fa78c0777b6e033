"""PyTorch's own tests of its collectives, on the process group "gradsync".

They are methods of `DistributedTest` in torch.testing of PyTorch 2.13, for Gloo and NCCL. Each
runs as a trial: in three ranks of the process group, with "gradsync" wherever it says "gloo".

Left out are the tests of the same subjects that

- need GPUs, here skipped by PyTorch itself: all of NCCL, most of DistributedDataParallel and of the
  averagers and optimizers, coalescing_manager, batch_isend_irecv_op_err, new_subgroups_*;
- PyTorch disables: broadcast_object_list, barrier_timeout_arg, new_subgroups;
- need another number of ranks: new_subgroups_with_group_param (4);
- fail on Gloo too: all_to_all with lists of different sizes;
- ask for the name "gloo": monitored_barrier_*, get_backend;
- wait for time-outs: barrier_timeout_*;
- use PyTorch's profiler: send_recv_*_profiler. They count events of Gloo's C++ class.

group_training_test.py trains with the group; group_failures_test.py has its errors.
"""

import importlib
import os
import tempfile
import unittest

import torch.distributed as dist
from trial import GROUP, Skipped, trial
from trial_ranks import trials_test

# By subject; `-` is the test named after the subject alone.
TESTS = {
    "all_reduce": (
        "sum sum_async sum_complex product min max complex_unsupported_ops group_sum "
        "group_product group_min group_max full_group_sum full_group_product full_group_min "
        "full_group_max coalesced_sum coalesced_product coalesced_min coalesced_max "
        "coalesced_max_complex_unsupported coalesced_group_sum coalesced_group_product "
        "coalesced_group_min coalesced_group_max coalesced_full_group_sum "
        "coalesced_full_group_product coalesced_full_group_min coalesced_full_group_max"
    ),
    "reduce": (
        "sum product min max sum_twice group_sum group_product group_min group_max "
        "full_group_sum full_group_product full_group_min full_group_max"
    ),
    "broadcast": "- group full_group",
    "all_gather": (
        "- complex group full_group coalesced_simple coalesced_complex coalesced_with_empty "
        "coalesced_group coalesced_full_group object_default_pg object_subgroup"
    ),
    "gather": "- group full_group checks object object_subgroup",
    "scatter": "- complex group full_group checks object_list",
    "all_to_all": (
        "single_equal_split single_equal_split_complex single_equal_split_group "
        "single_equal_split_full_group single_unequal_split single_unequal_split_complex "
        "single_unequal_split_group single_unequal_split_full_group"
    ),
    "barrier": "- group full_group",
    "send_recv": "- any_source with_tag",
    "batch_isend_irecv": "gloo gloo_tags op_list_err",
    "get": "rank rank_size_group rank_size_full_group future",
    "destroy": "group full_group",
    "isend": "-",
    "irecv": "-",
    "sparse_all_reduce": "sum",
    "accumulate_gradients_no_sync": "- grad_is_view allreduce_hook allreduce_with_then_hook",
    "grads_same_across_ranks_with_no_sync": "-",
    "static_graph": "api_cpu",
    "DistributedDataParallelCPU": "- grad_is_view",
    "ddp": "create_graph logging_data_cpu",
}


def _case(t):
    """An instance of PyTorch's class that lives in this rank."""
    folder = t.gather(tempfile.mkdtemp(prefix="pytorch-"))[0]
    os.environ.update(
        {"BACKEND": "gloo", "WORLD_SIZE": str(t.world_size), "TEMP_DIR": folder},
        BARRIER_DIR=folder,
    )
    if t.rank == 0:
        for name in ("barrier", "test_dir", "init_dir"):
            os.makedirs(os.path.join(folder, name))
    t.meet()
    # Its imports take a second, so only ranks import it.
    module = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    module.Barrier.barrier_id = 0

    class Case(module.TestDistBackend, module.DistributedTest._DistTestBase):
        rank = t.rank

    return Case


def _run(t, name):
    case = _case(t)
    t.process_group()
    new_group = dist.new_group

    def group_of_ours(*arguments, **options):
        if options.get("backend") == "gloo":
            options["backend"] = "gradsync"
        return new_group(*arguments, **options)

    dist.new_group = group_of_ours
    # Tests of sub-groups want 8 ranks, unless the backend is MPI. Three will do.
    os.environ["BACKEND"] = "mpi"
    try:
        test = case(name)
        test.rank = t.rank
        getattr(test, name)()
    except unittest.SkipTest as reason:
        raise Skipped(str(reason)) from None
    except SystemExit as skipped:
        raise Skipped(f"exit status {skipped.code}") from None
    finally:
        dist.new_group = new_group


def _trial(method):
    def run(t):
        _run(t, method)

    return trial(GROUP, world_size=3)(run)


for _subject, _names in TESTS.items():
    for _name in _names.split():
        _method = f"test_{_subject}" + ("" if _name == "-" else f"_{_name}")
        globals()[_method[5:]] = function = _trial(_method)
        function.__module__ = __name__
del function

test = trials_test(__name__)
