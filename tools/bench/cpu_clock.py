"""CPU time of other processes, and of the machine."""

from __future__ import annotations

import os
import time


def process_cpu_seconds(pid: int) -> float:
    """User and system time of a process, all its threads, to the nanosecond.

    /proc/PID/stat, which says the same, counts in ticks of 10 ms. The clock's number is what
    clock_getcpuclockid() makes of a process ID.

    Raises:
      OSError: there is no such process.
    """
    return time.clock_gettime((~pid << 3) | 2)


def busy_seconds() -> float:
    """CPU time that the machine has spent on anything, since it was started."""
    with open("/proc/stat", encoding="ascii") as file:
        # user nice system idle iowait irq softirq steal
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
