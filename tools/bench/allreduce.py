"""What an all-reduce costs with gradsync, Gloo and DeepSpeed, from Python; see --help."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence

import allreduce_figures
from allreduce_figures import Score, SizeResult
from command_line import (
    count,
    format_byte_size,
    names_of,
    output_file,
    parse_byte_size,
    terminable,
)
from daemon_process import DaemonFailed
from machine_state import OthersShare, describe_machine, usable_cores
from progress import Progress
from rank_team import RankFailed
from source_tree import NotBuilt, find_daemon, make_importable
from stage import Stage, stage

_HELP = """\
Sums buffers of float32 over the ranks of this machine, each rank a process, with

  gradsync    the Python package: one bucket, in memory that it shares with gradsyncd, which the
              script starts in a temporary directory: mark_ready to wait_bucket, as
              gradsync-bench times it; the step's commit follows untimed
  gloo        torch.distributed.all_reduce on Gloo
  deepspeed   deepspeed.comm.inference_all_reduce, which is DeepSpeed's own in shared memory, where
              this Python has DeepSpeed (see below)

and prints a row per size and implementation, as gradsync-bench and nccl-tests do:

  time         from the last rank's call until that rank has the sum, in microseconds
  algbw        size / p50, in GB/s (10^9 bytes);  busbw = algbw * 2(n-1)/n for n ranks
  #wrong       elements that are not the exact sum, of all, in the first and the last iteration
  / gradsync   how many times as long as gradsync's, in pairs of the same iteration: p50, p10
  cpu          CPU seconds of one all-reduce: all ranks and the daemon

In each iteration every implementation takes one turn, in rotating order, and every rank rewrites
its buffer before each turn: results of the last one in the caches flatter nobody. Compute threads:
one per core, shared evenly by the ranks (Gloo, DeepSpeed), or in gradsyncd.
"""
_EPILOG = """\
DeepSpeed is no part of 'tools/setup'. In an environment of its own, with what the tree has:

  python3 -m venv /tmp/deepspeed
  (cd .venv/lib/python3*/site-packages && pwd) >/tmp/tree.pth
  cp /tmp/tree.pth /tmp/deepspeed/lib/python3*/site-packages/
  /tmp/deepspeed/bin/pip install deepspeed==0.19.8 ninja==1.13.2
  /tmp/deepspeed/bin/python tools/bench/allreduce.py

Its first run compiles its extension, which needs g++ and Python's headers (python3-dev) and takes
a minute.

Needs 'tools/setup --test' and 'bazel build //daemon:gradsyncd //client:libgradsync.so'. Progress
goes to standard error. Exit status: 0; 1 something was wrong or failed; 2 wrong usage;
130 interrupted.
"""

_IMPLEMENTATIONS = ("gradsync", "gloo", "deepspeed")
_SIZES = "64K,1M,25M,100M"
_QUICK_SIZES = "4K,64K"
_MOST_BYTES = 1 << 30


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(parse_byte_size(size) for size in text.split(","))
    for size in sizes:
        if size % 4 or size > _MOST_BYTES:
            raise argparse.ArgumentTypeError(f"{size} is no size of float32 up to 1G")
    return sizes


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="allreduce.py",
        description=_HELP,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--sizes",
        type=_sizes,
        metavar="LIST",
        help=f"of each rank's buffer, comma-separated; default {_SIZES}",
    )
    parser.add_argument(
        "--impl",
        type=names_of(_IMPLEMENTATIONS),
        metavar="LIST",
        help="comma-separated, from the list above; default: all that this Python has",
    )
    parser.add_argument("--ranks", type=count(2, 8), default=2, metavar="N", help="2 to 8")
    parser.add_argument(
        "-n",
        "--rounds",
        type=count(1, 1000000),
        metavar="N",
        help="iterations of each size; default 40; 4 with --quick",
    )
    parser.add_argument(
        "-w",
        "--warmup",
        type=count(0, 1000000),
        default=5,
        metavar="N",
        help="iterations before them; default 5",
    )
    parser.add_argument(
        "--threads",
        type=count(1, 256),
        default=usable_cores(),
        metavar="N",
        help="reduce threads of gradsyncd; default: one per core",
    )
    parser.add_argument(
        "--daemon", metavar="PATH", help="gradsyncd; default: the one that Bazel has built"
    )
    parser.add_argument(
        "--svg",
        type=output_file,
        default="allreduce.svg",
        metavar="FILE",
        help="the picture; default: allreduce.svg, here",
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="the rows as JSON")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, few iterations: tries the script"
    )
    options = parser.parse_args(words)
    options.has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    if options.impl is None:
        options.impl = _IMPLEMENTATIONS if options.has_deepspeed else _IMPLEMENTATIONS[:-1]
    elif "deepspeed" in options.impl and not options.has_deepspeed:
        parser.error(f"--impl deepspeed: {sys.executable} has no DeepSpeed (see --help)")
    options.sizes = options.sizes or _sizes(_QUICK_SIZES if options.quick else _SIZES)
    options.rounds = options.rounds or (4 if options.quick else 40)
    return options


def _work(nbytes: int) -> int:
    """How long an iteration takes, in some unit: commands to the ranks weigh as much as 1 MiB."""
    return nbytes + (1 << 20)


def _run_size(
    options: argparse.Namespace, on: Stage, nbytes: int, progress: Progress
) -> SizeResult:
    on.team.call("set_up", nbytes, options.impl)
    scores = {name: Score() for name in options.impl}
    total = options.warmup + options.rounds
    for iteration in range(total):
        first = iteration % len(options.impl)
        check = iteration in (0, total - 1)
        for name in options.impl[first:] + options.impl[:first]:
            before = on.daemon_cpu_seconds()
            turns = on.team.call("turn", name, iteration, check)
            cpu = on.daemon_cpu_seconds() - before + sum(turn[2] for turn in turns)
            score = scores[name]
            score.wrong += sum(turn[3] for turn in turns)
            if iteration >= options.warmup:
                start, end = max(turns)[:2]  # the rank that called last
                score.times_us.append((end - start) / 1e3)
                score.cpu_seconds.append(cpu)
        progress.done(format_byte_size(nbytes), _work(nbytes))
    return SizeResult(nbytes, options.ranks, scores)


def _measure(options: argparse.Namespace, program: str) -> list[SizeResult]:
    """Runs everything and prints the table."""
    from allreduce_rank import AllReduceRank  # imports PyTorch

    machine = describe_machine()
    threads = max(1, usable_cores() // options.ranks)
    print(
        f"# allreduce.py: {options.ranks} ranks of {threads} threads, gradsyncd with "
        f"{options.threads}"
    )
    if not options.has_deepspeed:
        print(f"# without deepspeed: {sys.executable} does not have it (see --help)")
    print(f"# {machine}, load {os.getloadavg()[0]:.2f}", flush=True)
    progress = Progress(sum(map(_work, options.sizes)) * (options.warmup + options.rounds))
    progress.say("starting gradsyncd and the ranks")
    results = []
    with stage(
        AllReduceRank,
        ranks=options.ranks,
        threads=threads,
        program=program,
        reduce_threads=options.threads,
        options={"implementations": options.impl},
        environment=_environment(options.ranks),
    ) as on:
        for leftover in _deepspeed_memory():
            leftover.unlink(missing_ok=True)  # all ranks have mapped it
        print(allreduce_figures.table_head(), flush=True)
        others = OthersShare()
        own = on.cpu_seconds()
        for nbytes in options.sizes:
            result = _run_size(options, on, nbytes, progress)
            results.append(result)
            progress.end()
            print(allreduce_figures.table_rows(result), flush=True)
        share = others.percent(on.cpu_seconds() - own)
    for line in allreduce_figures.verdicts(results):
        print(f"# {line} (median over pairs of the same iteration)")
    print(f"# other processes used {share:.0f} % of the machine meanwhile")
    options.svg.write_text(allreduce_figures.picture(results, machine), encoding="utf-8")
    print(f"# picture: {options.svg.resolve()}")
    if options.json:
        rows = [row for result in results for row in allreduce_figures.to_json(result)]
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return results


# What DeepSpeed calls a port is a part of the name of its shared memory, and nothing else here.
_ADDRESS, _PORT = "127.0.0.1", str(os.getpid())


def _environment(ranks: int) -> dict[str, str]:
    return {
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": _ADDRESS,
        "MASTER_PORT": _PORT,
        # Where pip puts ninja.
        "PATH": os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", ""),
    }


def _deepspeed_memory() -> Iterator[pathlib.Path]:
    """The files that DeepSpeed's ranks meet in, and leave behind."""
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{_ADDRESS}_{_PORT}_*"
    return pathlib.Path("/dev/shm").glob(name)


def main(words: Sequence[str]) -> int:
    """Runs it; returns the exit status."""
    options = _arguments(words)
    try:
        program = find_daemon(options.daemon)
        make_importable()
    except NotBuilt as error:
        print(f"allreduce.py: {error}", file=sys.stderr)
        return 2
    try:
        with terminable():
            results = _measure(options, program)
    except KeyboardInterrupt:
        print("allreduce.py: interrupted", file=sys.stderr)
        return 130
    except (DaemonFailed, RankFailed, OSError) as error:
        print(f"allreduce.py: {error}", file=sys.stderr)
        return 1
    finally:
        for leftover in _deepspeed_memory():
            leftover.unlink(missing_ok=True)
    wrong = sum(score.wrong for result in results for score in result.scores.values())
    if wrong:
        print(f"allreduce.py: {wrong} elements were wrong", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
