"""Which PyTorch the package needs."""

from __future__ import annotations

import re

# The first release with Tensor.register_post_accumulate_grad_hook().
OLDEST = (2, 1)


def check_pytorch(version: str) -> None:
    """Checks `torch.__version__`.

    Raises:
      ImportError: it is too old.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and tuple(map(int, numbers.groups())) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(
            f"gradsync.torch needs PyTorch {oldest} or later, and this is {version}; upgrade it: "
            f"pip install 'torch>={oldest}'"
        )
