"""Data-parallel training of PyTorch modules through a gradsync daemon.

`DistributedDataParallel` wraps a module; `allreduce_hook` brings the daemon to a module that
PyTorch's own wrapper has. PyTorch 1.13 and later; gradients in host memory or, tested against fakes
of the driver so far, on a GPU.
"""

from gradsync.torch._join import join
from gradsync.torch._session import default_session, init
from gradsync.torch.comm_hook import HookState, allreduce_hook
from gradsync.torch.distributed import DistributedDataParallel
from gradsync.torch.step_statistics import StepStatistics

__all__ = [
    "DistributedDataParallel",
    "HookState",
    "StepStatistics",
    "allreduce_hook",
    "default_session",
    "init",
    "join",
]
