"""What the machine is, and whether it was quiet while something was measured on it."""

from __future__ import annotations

import os
import time

from cpu_clock import busy_seconds


def describe_machine() -> str:
    """Processor, cores, kernel and time of day, as gradsync-bench says it."""
    model = "unknown processor"
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    system = os.uname()
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return f"{model}, {usable_cores()} cores, {system.sysname} {system.release}, {now}"


def usable_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


class OthersShare:
    """How much of the machine everybody else used since this was made."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._busy = busy_seconds()

    def percent(self, own_cpu_seconds: float) -> float:
        """Of all cores; `own_cpu_seconds` is what the measurement itself has used since."""
        elapsed = time.monotonic() - self._start
        others = busy_seconds() - self._busy - own_cpu_seconds
        return max(0.0, 100 * others / (elapsed * (os.cpu_count() or 1)))
