"""Makes a process group for `init_process_group` and `new_group`."""

from __future__ import annotations

from typing import Any

from gradsync.torch.process_group import _inner_group
from gradsync.torch.process_group._group import ProcessGroup


def create(options: Any, backend_options: Any = None) -> ProcessGroup:
    """A group of the ranks that call this.

    Args:
      options: PyTorch's `_DistributedBackendOptions`: store, rank, size, time-out.
      backend_options: `pg_options` of the caller; this backend has none.

    Raises:
      TypeError: there are `backend_options`.
      gradsync.Error: a rank did not come in time; no daemon answered, or it refused the job.
    """
    if backend_options is not None:
        raise TypeError(
            "gradsync: the process group takes no pg_options. Its time-out is that of "
            "init_process_group or new_group; the variables GRADSYNC_SOCKET, GRADSYNC_JOB_TOKEN "
            "and GRADSYNC_COORDINATOR set the rest"
        )
    inner = _inner_group.make(options)
    group = ProcessGroup(options, inner)
    # DTensor, FSDP and C++ callers ask the group for its backend of a device.
    for device, kind, backend in inner.backends:
        group._register_backend(device, kind, backend)
    group._set_default_backend(inner.backends[0][1])
    return group
