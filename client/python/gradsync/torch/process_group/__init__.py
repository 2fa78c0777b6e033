"""PyTorch's process group on gradsync: `torch.distributed.init_process_group("gradsync")`.

Most all-reduces of host tensors go through the daemon, and so do large reduce-scatters and
all-gathers. The rest goes through Gloo, and tensors on GPUs through NCCL.
docs/process-group.md says what goes where.
"""

from gradsync.torch.process_group._creation import create
from gradsync.torch.process_group._group import ProcessGroup

__all__ = ["ProcessGroup", "create"]
