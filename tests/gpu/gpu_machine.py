"""Describes the machine: its GPUs, driver, NCCL and processor.

By itself (gpu_machine.py LIBCUDA [LIBNCCL]) it asks the driver, in a process with which CUDA's
state ends, and prints JSON.
"""

import ctypes
import json
import os
import pathlib
import re
import subprocess
import sys


def describe(libraries, on_machine):
    """The report's `machine`. `on_machine`: turns a command into one for the (fake) machine."""
    machine = {
        "cpu": first_line("/proc/cpuinfo", r"model name\s*:\s*(.*)"),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": os.uname().release,
        "glibc": os.confstr("CS_GNU_LIBC_VERSION").split()[-1],
        "driver": first_line("/proc/driver/nvidia/version", r"Kernel Module(?: for \S+)?\s+(\S+)"),
        "libcuda": libraries.cuda,
        "libnccl": libraries.nccl,
        "gpus": [],
        "nccl": None,
    }
    if libraries.cuda is None:
        return {**machine, "error": "no libcuda.so.1"}
    command = [sys.executable, os.path.realpath(__file__), libraries.cuda]
    if libraries.nccl:
        command.append(libraries.nccl)
    try:
        asked = subprocess.run(
            on_machine(command), capture_output=True, text=True, timeout=60, check=False
        )
        return {**machine, **json.loads(asked.stdout)}
    except subprocess.TimeoutExpired:
        return {**machine, "error": "the driver does not answer"}
    except ValueError:
        return {**machine, "error": asked.stderr.strip()[-500:] or "the driver does not answer"}


def ask(cuda, nccl):
    """What the driver and NCCL report."""
    driver = ctypes.CDLL(cuda)
    version, count = ctypes.c_int(), ctypes.c_int()
    description = {"gpus": [], "nccl": None}
    result = driver.cuInit(0)
    if result != 0:
        return {**description, "error": f"cuInit: error {result}"}
    driver.cuDriverGetVersion(ctypes.byref(version))
    driver.cuDeviceGetCount(ctypes.byref(count))
    description["driver_cuda"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
    for ordinal in range(count.value):
        device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        name, memory = ctypes.create_string_buffer(128), ctypes.c_size_t()
        driver.cuDeviceGet(ctypes.byref(device), ordinal)
        driver.cuDeviceGetName(name, 128, device)
        driver.cuDeviceGetUuid_v2(uuid, device)
        driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        digits = bytes(uuid).hex()
        groups = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
        description["gpus"].append(
            {
                "name": name.value.decode(),
                "uuid": "GPU-" + "-".join(groups),
                "memory_gib": round(memory.value / 2**30, 1),
            }
        )
    if nccl:
        code = ctypes.c_int()
        if ctypes.CDLL(nccl).ncclGetVersion(ctypes.byref(code)) == 0:
            description["nccl"] = (
                f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100}"
            )
    return description


def first_line(path, pattern):
    try:
        for line in pathlib.Path(path).read_text(errors="replace").splitlines():
            match = re.search(pattern, line)
            if match:
                return match[1].strip()
    except OSError:
        pass
    return None


if __name__ == "__main__":
    print(json.dumps(ask(*(sys.argv[1:] + [None])[:2])))
