"""Keeping torch.compile out of the wrapper itself."""

from __future__ import annotations

import sys


def keep_from_compiling(owner: type, method: str) -> None:
    """Keeps torch.compile from compiling `owner.method` itself; it compiles what the method calls.

    Does nothing while PyTorch's compiler is not loaded, because loading it takes seconds.
    """
    compiler = sys.modules.get("torch._dynamo")
    function = getattr(owner, method)
    if compiler is not None and not getattr(function, "_torchdynamo_disable", False):
        setattr(owner, method, compiler.disable(function, recursive=False))
