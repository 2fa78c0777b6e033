"""Works that live as long as C++ may use them."""

from __future__ import annotations

import collections

import torch.distributed as dist


class KeptWork(dist.Work):
    """A work written in Python, of which C++ can hold the only reference.

    PyTorch's wrapper hands works to C++ and forgets them (`_set_forward_pass_work_handle`, for
    join()). The C++ object lives on, but without its Python part it has no wait() any more: the
    inherited one would never return. So the last works that Python has dropped without a wait are
    kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waited = False

    def __del__(self) -> None:
        """Comes to life again, once, unless somebody has waited for it."""
        if not self._waited:
            _dropped.append(self)


# C++ keeps one at a time.
_dropped: collections.deque[KeptWork] = collections.deque(maxlen=16)
