"""Runs fuzz targets with libFuzzer, one after the other, and prints a table: fuzz.py [options]
TARGET...

Each begins with its corpus in tests/fuzz/corpus. What it finds on the way is thrown away; with
--keep, what covers more code is added to the corpus. An input that ends a target in an error is
kept in --findings.

Exit status: 0 no target has failed, 1 one has.
"""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

CORPUS = pathlib.Path("tests/fuzz/corpus")
# libFuzzer's own limits: of one input, in seconds, and of the process.
LIMITS = ["-timeout=20", "-rss_limit_mb=2048", "-max_len=4096"]
# Choosing inputs by the rarity of what they cover takes twice as long as a whole job does.
SCHEDULE = ["-entropic=0"]


def run(target, seconds, executions, findings, keep):
    """Returns (executions, seconds, edges covered, why it failed or None)."""
    name = target.name
    corpus = CORPUS / name
    with tempfile.TemporaryDirectory() as folder:
        grown = pathlib.Path(folder, "grown")
        grown.mkdir()
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
                    *LIMITS,
                    *SCHEDULE,
                    grown,
                    corpus,
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        took = time.monotonic() - begun
        text = log.read_text(errors="replace")
        done = re.search(r"stat::number_of_executed_units: (\d+)", text)
        covered = re.findall(r"cov: (\d+)", text)
        if keep and ended.returncode == 0:
            merged = pathlib.Path(folder, "merged")
            merged.mkdir()
            subprocess.run(
                [target, "-merge=1", *LIMITS, merged, corpus, grown],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=True,
            )
            shutil.rmtree(corpus)
            shutil.copytree(merged, corpus)
    why = None
    if ended.returncode:
        found = re.search(r"Test unit written to (\S+)", text)
        why = f"{found[1]}: run {target} {found[1]}" if found else f"see {log}"
    return int(done[1]) if done else 0, took, int(covered[-1]) if covered else 0, why


def main(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=60, help="of each target; default 60")
    parser.add_argument("--executions", type=int, default=-1, help="of each target, at most")
    parser.add_argument("--findings", type=pathlib.Path, default=pathlib.Path("/tmp/gradsync-fuzz"))
    parser.add_argument("--keep", action="store_true", help="add to the corpus")
    parser.add_argument("targets", nargs="+", type=pathlib.Path, metavar="TARGET")
    options = parser.parse_args(arguments)
    options.findings.mkdir(parents=True, exist_ok=True)
    failed = False
    print(f"{'target':24} {'executions':>12} {'seconds':>8} {'per second':>11} {'edges':>7}")
    for target in options.targets:
        executions, took, edges, why = run(
            target.resolve(), options.seconds, options.executions, options.findings, options.keep
        )
        print(
            f"{target.name:24} {executions:>12,} {took:>8,.0f} {executions / took:>11,.0f} "
            f"{edges:>7,}  {f'FAILED: {why}' if why else ''}"
        )
        sys.stdout.flush()
        failed = failed or why is not None
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
