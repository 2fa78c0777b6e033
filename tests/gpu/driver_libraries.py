"""Finds the machine's driver and NCCL."""

import os
import pathlib
import subprocess
import sys


class DriverLibraries:
    """Paths of libcuda.so.1 and libnccl.so.2; None for a missing one."""

    def __init__(self, cuda, nccl):
        self.cuda = cuda
        self.nccl = nccl

    @classmethod
    def of_this_machine(cls):
        return cls(mapped_path("libcuda.so.1"), find_nccl())

    def folders(self):
        return ":".join(str(pathlib.Path(path).parent) for path in (self.cuda, self.nccl) if path)


def find_nccl():
    """NCCL of PyTorch's wheels, else the loader's; None if neither can be loaded."""
    script = (
        "import importlib.util as u, pathlib as p\n"
        "spec = u.find_spec('nvidia')\n"
        "roots = list(spec.submodule_search_locations) if spec else []\n"
        "found = [f for r in roots for f in sorted(p.Path(r).glob('*/lib/libnccl.so.2'))]\n"
        "print(found[0] if found else '')"
    )
    for python in ("python3", sys.executable):
        try:
            path = subprocess.run(
                [python, "-c", script], capture_output=True, text=True, timeout=60, check=False
            ).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            continue
        if path:
            return path
    return mapped_path("libnccl.so.2")


def mapped_path(name):
    """The file that the loader finds for `name`, as a new process sees it."""
    script = (
        "import ctypes, sys\n"
        "ctypes.CDLL(sys.argv[1])\n"
        "print(*{l.split()[-1] for l in open('/proc/self/maps') if sys.argv[1][:-2] in l})"
    )
    found = subprocess.run(
        [sys.executable, "-c", script, name], capture_output=True, text=True, check=False
    ).stdout.split()
    return os.path.join(os.path.dirname(found[0]), name) if found else None
