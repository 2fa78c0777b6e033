"""What a rank gets: torchrun's variables, and the daemon's socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from gradsync.run.command_line import Options


def environments(options: Options, daemon: str) -> list[Mapping[str, str]]:
    """The environment of each rank on this node, without TORCHELASTIC_RESTART_COUNT.

    Args:
      options: what to start.
      daemon: path of the daemon's socket.
    """
    world_size = str(options.ranks * options.nodes)
    shared = {
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(options.ranks),
        "GROUP_RANK": str(options.node_rank),
        "GROUP_WORLD_SIZE": str(options.nodes),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": str(options.master_port or _free_port()),
        "TORCHELASTIC_RUN_ID": options.run_id,
        "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "GRADSYNC_SOCKET": daemon,
    }
    defaults = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if options.ranks > 1:
        # Else each rank would start a thread for every CPU.
        defaults["OMP_NUM_THREADS"] = "1"
    return [
        {
            **defaults,
            **os.environ,
            **shared,
            "RANK": str(rank),
            "ROLE_RANK": str(rank),
            "LOCAL_RANK": str(rank - options.node_rank * options.ranks),
        }
        for rank in numbers(options)
    ]


def numbers(options: Options) -> range:
    """The ranks on this node."""
    first = options.node_rank * options.ranks
    return range(first, first + options.ranks)


# Bound, but not listening. While this process lives, the kernel picks none of their ports for
# somebody else. Rank 0 can still listen there, because both sockets allow address reuse.
_held: list[socket.socket] = []


def _free_port() -> int:
    """A TCP port that stays free for rank 0."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    _held.append(holder)
    port: int = holder.getsockname()[1]
    return port
