"""The group inside of a group: Gloo for host tensors, NCCL for those on GPUs."""

from __future__ import annotations

import dataclasses
import os
import uuid
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from gradsync.torch.process_group import _meeting

_NONCE_BYTES = 16


@dataclasses.dataclass(frozen=True)
class InnerGroup:
    """PyTorch's own group of the same ranks.

    Attributes:
      group: takes every collective that does not go through the daemon.
      backends: device, type and backend of each of its backends; the host's first.
      gloo: the host's.
    """

    group: Any
    backends: list[tuple[torch.device, Any, Any]]
    gloo: Any

    def agree_on_job(self, group_id: str) -> str:
        """A job id that no other group has, the same on all ranks."""
        nonce = torch.frombuffer(bytearray(uuid.uuid4().bytes), dtype=torch.uint8)
        self.gloo.broadcast(nonce, 0).wait()
        return f"torch/{group_id[:64]}/{bytes(nonce.tolist()).hex()}"

    def on_one_node(self, socket: str) -> bool:
        """Whether the ranks all use one daemon: the same file of the same machine."""
        try:
            file = os.stat(socket)
            with open("/proc/sys/kernel/random/boot_id") as boot_id:
                mine = (hash_of(boot_id.read()), file.st_dev, file.st_ino)
        except OSError:
            mine = (-1, -1, self.group.rank())
        identity = torch.tensor(mine, dtype=torch.int64)
        everyone = [torch.empty_like(identity) for _ in range(self.group.size())]
        self.gloo.allgather([everyone], [identity]).wait()
        return all(torch.equal(everyone[0], other) for other in everyone)


def hash_of(text: str) -> int:
    """63 bits, the same in every process."""
    return uuid.uuid5(uuid.NAMESPACE_OID, text).int >> 65


def make(options: Any) -> InnerGroup:
    """Connects the ranks; returns when all of them have called this.

    Raises:
      gradsync.DeadlineExceededError: a rank has not called it within the group's time-out.
    """
    rank, size = options.group_rank, options.group_size
    # A store can outlive a group. Gloo must not find the addresses of the group before.
    number = options.store.add(f"groups/{rank}", 1)
    store = PrefixStore(f"{number}/", options.store)
    _meeting.meet(options, PrefixStore("meeting/", store))
    kinds = dist.ProcessGroup.BackendType
    group = dist.ProcessGroup(PrefixStore("inner/", store), rank, size)
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo/", store), rank, size, timeout=options.timeout)
    gloo._set_sequence_number_for_group()
    backends = [(torch.device("cpu"), kinds.GLOO, gloo)]
    if torch.cuda.is_available() and dist.is_nccl_available():
        backends.append((torch.device("cuda"), kinds.NCCL, _nccl(options, store, rank, size)))
    for device, kind, backend in backends:
        group._register_backend(device, kind, backend)
    group._set_default_backend(kinds.GLOO)
    return InnerGroup(group, backends, gloo)


def _nccl(options: Any, store: Any, rank: int, size: int) -> Any:
    chosen = dist.ProcessGroupNCCL.Options()
    chosen._timeout = options.timeout
    chosen.global_ranks_in_group = options.global_ranks_in_group
    chosen.group_name = options.group_id
    return dist.ProcessGroupNCCL(PrefixStore("nccl/", store), rank, size, chosen)
