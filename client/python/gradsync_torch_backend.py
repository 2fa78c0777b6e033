"""Makes `torch.distributed.init_process_group("gradsync")` known to PyTorch.

`import torch` calls register(), because the wheel names it as an entry point of the group
`torch.backends`. So register() imports nothing of gradsync. _create() does, for the first group.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Registers the backend. A second call changes nothing."""
    import torch.distributed as dist

    if dist.is_available():
        dist.Backend.register_backend(
            "gradsync", _create, extended_api=True, devices=["cpu", "cuda"]
        )


def _create(options: Any, backend_options: Any) -> Any:
    from gradsync.torch import process_group

    return process_group.create(options, backend_options)
