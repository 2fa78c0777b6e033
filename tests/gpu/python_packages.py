"""Prints what this Python has for PyTorch, as JSON. It also reads PyTorch's files for the first
time, which takes minutes on a cold disk, while the run does something else.
"""

import json
import sys
import time

description = {"python": sys.version.split()[0], "executable": sys.executable, "packages": {}}
try:
    from importlib import metadata

    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower()
        if name.startswith(("torch", "nvidia-", "triton", "cuda-", "numpy")):
            description["packages"][name] = distribution.version
except ImportError:
    pass
begin = time.monotonic()
try:
    import torch

    description["torch"] = torch.__version__
    description["torch_cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        description["torch_nccl"] = ".".join(str(number) for number in torch.cuda.nccl.version())
except Exception as error:  # whatever is wrong with it, the run goes on
    description["no_torch"] = str(error)
description["import_s"] = round(time.monotonic() - begin, 1)
print(json.dumps(description, indent=1))
