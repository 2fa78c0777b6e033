"""Runs fuzz targets with libFuzzer and prints a table: fuzz.py [options] TARGET...

Each begins with its corpus in tests/fuzz/corpus. It throws away the inputs that it finds on the
way; with --keep, those that cover more code are added to the corpus. An input that ends a target in
an error is kept in --findings.

With --until, a target runs until it has been executed that often at this commit. Earlier runs
count: --findings keeps a file with the numbers, and the inputs that the targets have found on the
way. So runs can be interrupted and add up:

  fuzz.py --until 10000000 --jobs 2 --seconds 3600 TARGET...    # an hour of each, or less

A target that is not executed even once has failed.

Exit status: 0 no target has failed, 1 one has, 2 wrong usage, 3 none has failed but --until is not
reached, 130 interrupted.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

CORPUS = pathlib.Path("tests/fuzz/corpus")
# libFuzzer's own limits: of one input, in seconds, and of the process.
LIMITS = ["-timeout=20", "-rss_limit_mb=2048"]
# Bytes of an input.
MAX_LEN = 4096
# A configuration file's fields are parsed one by one, and each looks for its place from the
# beginning of its line: 4096 bytes on one line take 64 times as long as 512, and say no more.
MAX_LEN_OF = {"config_fuzz": 512}
SCHEDULE = [
    # Choosing inputs by the rarity of what they cover takes twice as long as a whole job does.
    "-entropic=0",
    # While it runs, up to 1,000 looks for leaks would each stop the process and run the input
    # again. There is one look, at the end of the process.
    "-detect_leaks=0",
    # No other process adds inputs. To look for them once a second takes an eighth of the time when
    # there are thousands.
    "-reload=0",
]
ENVIRONMENT = {
    # An execution allocates far less than 16 MiB, so a use after free in it is still seen. With the
    # default of 256 MiB each allocation is of memory that no cache holds.
    "ASAN_OPTIONS": "detect_leaks=1:quarantine_size_mb=16:malloc_context_size=8",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
}
# With --until, the numbers are saved so often.
SLICE_S = 300


@dataclasses.dataclass
class Run:
    """What a target has done.

    Attributes:
      executions: how often it was executed.
      seconds: that this took.
      edges: covered at the end.
      why: it has failed; None: it has not.
    """

    executions: int = 0
    seconds: float = 0.0
    edges: int = 0
    why: str = None

    def add(self, later):
        self.executions += later.executions
        self.seconds += later.seconds
        self.edges = max(self.edges, later.edges)
        self.why = later.why


class Totals:
    """Executions of each target at each commit, in a file. Thread-safe."""

    def __init__(self, path, commit):
        self._path = path
        self._commit = commit
        self._lock = threading.Lock()
        self._all = json.loads(path.read_text()) if path.exists() else {}

    def of(self, name):
        with self._lock:
            return self._all.get(self._commit, {}).get(name, 0)

    def add(self, name, executions):
        with self._lock:
            mine = self._all.setdefault(self._commit, {})
            mine[name] = mine.get(name, 0) + executions
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(self._all, indent=2) + "\n")
            new.replace(self._path)


def max_len(name):
    return f"-max_len={MAX_LEN_OF.get(name, MAX_LEN)}"


def fuzz(target, seconds, executions, findings, grown):
    """Runs a target once. `grown`: a folder for what it finds on the way."""
    name = target.name
    log = findings / f"{name}.log"
    begun = time.monotonic()
    with log.open("wb") as output:
        ended = subprocess.run(
            [
                target,
                f"-max_total_time={seconds}",
                f"-runs={executions}",
                f"-artifact_prefix={findings}/{name}-",
                "-print_final_stats=1",
                max_len(name),
                *LIMITS,
                *SCHEDULE,
                grown,
                CORPUS / name,
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
            env={**ENVIRONMENT, **os.environ},
        )
    took = time.monotonic() - begun
    text = log.read_text(errors="replace")
    done = re.search(r"stat::number_of_executed_units: (\d+)", text)
    covered = re.findall(r"cov: (\d+)", text)
    why = None
    if ended.returncode:
        found = re.search(r"Test unit written to (\S+)", text)
        if found:
            why = f"{found[1]}: run {target} {found[1]}"
        elif "LeakSanitizer: detected" in text:
            why = f"a leak, see {log}; to find the input: {target} -detect_leaks=1 {grown}"
            shutil.copytree(grown, findings / f"{name}-leak", dirs_exist_ok=True)
        else:
            why = f"exit status {ended.returncode}, see {log}"
    count = int(done[1]) if done else 0
    if count == 0 and why is None:
        why = f"it was not executed, see {log}"
    return Run(count, took, int(covered[-1]) if covered else 0, why)


def merge(target, grown):
    """Adds to the corpus what covers more code."""
    corpus = CORPUS / target.name
    with tempfile.TemporaryDirectory() as folder:
        merged = pathlib.Path(folder, "merged")
        merged.mkdir()
        subprocess.run(
            [target, "-merge=1", max_len(target.name), *LIMITS, merged, corpus, grown],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        shutil.rmtree(corpus)
        shutil.copytree(merged, corpus)


def run_target(target, options, totals):
    """Runs a target as the options say. Returns what it has done now."""
    now = Run()
    with tempfile.TemporaryDirectory() as folder:
        grown = pathlib.Path(folder, "grown")
        if options.until is not None:
            grown = options.findings / "grown" / target.name
        grown.mkdir(parents=True, exist_ok=True)
        if options.until is None:
            now = fuzz(target, options.seconds, options.executions, options.findings, grown)
        else:
            add_up(target, options, totals, grown, now)
        if options.keep and now.why is None:
            merge(target, grown)
    return now


def add_up(target, options, totals, grown, now):
    """Runs slices until the total or the time is reached. Adds them to `now`."""
    name = target.name
    while now.why is None:
        missing = options.until - totals.of(name)
        left_s = math.inf if options.seconds is None else options.seconds - now.seconds
        if missing <= 0 or left_s < 1:
            return
        one = fuzz(target, int(min(SLICE_S, left_s)), missing, options.findings, grown)
        totals.add(name, one.executions)
        now.add(one)
        total = totals.of(name)
        rate = max(1, now.executions) / now.seconds
        minutes = max(0, options.until - total) / rate / 60
        print(
            f"{name}: {total:,} of {options.until:,}, {rate:,.0f} per second, "
            f"{minutes:,.0f} min to go",
            file=sys.stderr,
            flush=True,
        )


def commit_of_tree():
    """The commit, and whether the tree differs from it."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"],
        capture_output=True,
        text=True,
        check=True,
    )
    return described.stdout.strip()


def row(name, now, total, until):
    text = f"{name:24} {now.executions:>12,} "
    if until is not None:
        text += f"{total:>12,} "
    rate = now.executions / now.seconds if now.seconds else 0
    text += f"{now.seconds:>8,.0f} {rate:>11,.0f} {now.edges:>7,}"
    return f"{text}  FAILED: {now.why}" if now.why else text


def main(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seconds", type=int, help="of each target, at most; default 60, with --until no limit")
    add("--executions", type=int, default=-1, help="of each target, at most")
    add("--until", type=int, metavar="N", help="executions of each target at this commit, in all")
    add("--jobs", type=int, default=1, metavar="N", help="targets that run at a time; default 1")
    add("--findings", type=pathlib.Path, default=pathlib.Path("/tmp/gradsync-fuzz"))
    add("--keep", action="store_true", help="add to the corpus")
    add("targets", nargs="+", type=pathlib.Path, metavar="TARGET")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error("--jobs takes a number from 1")
    if options.until is None and options.seconds is None:
        options.seconds = 60
    if options.until is not None and options.executions >= 0:
        parser.error("give --executions or --until, not both")
    if options.until is not None and options.until < 1:
        parser.error("--until takes a number from 1")
    options.findings = options.findings.absolute()
    options.findings.mkdir(parents=True, exist_ok=True)
    totals = None
    until = f"{'in all':>12} "
    if options.until is None:
        until = ""
    else:
        totals = Totals(options.findings / "executions.json", commit_of_tree())
    print(f"{'target':24} {'executions':>12} {until}{'seconds':>8} {'per second':>11} {'edges':>7}")
    status = 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        running = {
            pool.submit(run_target, target.resolve(), options, totals): target.name
            for target in options.targets
        }
        try:
            for done in concurrent.futures.as_completed(running):
                name, now = running[done], done.result()
                total = totals.of(name) if totals else now.executions
                print(row(name, now, total, options.until), flush=True)
                if now.why is not None:
                    status = 1
                elif options.until is not None and total < options.until and status == 0:
                    status = 3
        except KeyboardInterrupt:  # the targets get the signal, too, and end
            pool.shutdown(cancel_futures=True)
            return 130
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
