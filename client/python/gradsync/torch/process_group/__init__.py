"""PyTorch's process group on gradsync: `torch.distributed.init_process_group("gradsync")`.

Reductions of host tensors go through the daemon, everything else through Gloo.
docs/process-group.md says what goes where.
"""

from gradsync.torch.process_group._creation import create
from gradsync.torch.process_group._group import ProcessGroup

__all__ = ["ProcessGroup", "create"]
