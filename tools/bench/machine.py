"""The machine and its CPU time."""

from __future__ import annotations

import contextlib
import glob
import os
import time


def process_cpu_seconds(pid: int) -> float:
    """User and system time of a process, all its threads, to the nanosecond; 0 if it has ended.

    /proc/PID/stat, which says the same, counts in ticks of 10 ms. The clock's number is what
    clock_getcpuclockid() makes of a process ID.
    """
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def children_of(pid: int) -> list[int]:
    """The processes that a process has started and that still run."""
    children: list[int] = []
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
            children += map(int, file.read().split())
    return children


def describe_machine() -> str:
    """Processor, cores, kernel, load and time of day."""
    model = "unknown processor"
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    system = os.uname()
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return (
        f"{model}, {usable_cores()} cores, {system.sysname} {system.release}, {now}, "
        f"load {os.getloadavg()[0]:.2f}"
    )


def usable_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


class OthersShare:
    """How much of the machine all other processes used since this object was made."""

    def __init__(self, own_cpu_seconds: float) -> None:
        """Args: own_cpu_seconds: CPU time of the measurement so far."""
        self._start = time.monotonic()
        self._others = _busy_seconds() - own_cpu_seconds

    def percent(self, own_cpu_seconds: float) -> float:
        """Share of all cores. Args: own_cpu_seconds: CPU time of the measurement so far."""
        elapsed = time.monotonic() - self._start
        others = _busy_seconds() - own_cpu_seconds - self._others
        return max(0.0, 100 * others / (elapsed * (os.cpu_count() or 1)))


def _busy_seconds() -> float:
    """CPU time that the machine has spent on anything since its start."""
    with open("/proc/stat", encoding="ascii") as file:
        # user nice system idle iowait irq softirq steal
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
