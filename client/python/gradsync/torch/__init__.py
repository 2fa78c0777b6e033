"""Data-parallel training of PyTorch modules through a gradsync daemon.

`DistributedDataParallel` wraps a module. `Training` lets lost ranks be replaced. `allreduce_hook`
makes PyTorch's own wrapper average through the daemon.
`torch.distributed.init_process_group("gradsync")` makes a process group, also without an import of
this package. Needs PyTorch 2.1 or later. Gradients are in host memory or on a GPU. Training on a
GPU has run on one H100; otherwise GPUs are tested against fakes of the driver.
"""

# The check stands before the imports below, which an old PyTorch would fail with other errors.
# ruff: noqa: E402
import torch as _torch

from gradsync.torch._pytorch_version import check_pytorch

check_pytorch(_torch.__version__)

import gradsync_torch_backend

from gradsync.torch._session import default_session, init
from gradsync.torch.comm_hook import HookState, allreduce_hook
from gradsync.torch.distributed import DistributedDataParallel, join
from gradsync.torch.step_statistics import StepStatistics
from gradsync.torch.training import Training

gradsync_torch_backend.register()

__all__ = [
    "DistributedDataParallel",
    "HookState",
    "StepStatistics",
    "Training",
    "allreduce_hook",
    "default_session",
    "init",
    "join",
]
