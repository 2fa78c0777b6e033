#!/usr/bin/env python3
"""Measures gradsync beside other all-reduces; see --help."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import collective_report
import contest
import handoff_report
import lineup
from command_line import (
    WrongResults,
    add_shared_arguments,
    check_shared_arguments,
    count,
    names_of,
    parsed_by,
    run_bench,
    say,
    write_json,
)
from launcher import Failed
from machine import OthersShare, describe_machine, usable_cores
from progress import Progress
from source_tree import find_daemon
from stage import Stage
from units import format_byte_size, parse_byte_size

_HELP = """\
Measures what an all-reduce costs a trainer, and how close that is to what memory allows.

  gradsync-bench allreduce      averages buffers: gradsync beside other implementations
  gradsync-bench allgather      joins buffers, by process groups of PyTorch
  gradsync-bench reducescatter  adds buffers, and gives each rank a part, by the same groups
  gradsync-bench handoff        what a trainer pays to hand a bucket over

--device cuda measures on GPUs. COMMAND --help explains the rest.
"""
_ALLREDUCE = """\
Averages buffers over the ranks of this machine, each rank a process, with

  roofline     a loop that reads and writes every rank's buffer once, in place, by --threads
               threads: no all-reduce with separate results can be faster
  gradsync     gradsyncd, which the bench starts, and its client library
  gloo         Gloo by TCP: one ring of all ranks
  openmpi      MPI_Allreduce in place, where Open MPI is installed
 only if named:
  faulty       Gloo with one wrong element per rank, which the column #wrong must show
  gradsync_py  gradsync's Python package; like the next three, it sums float32
  gradsync_group
               torch.distributed.all_reduce after init_process_group("gradsync")
  gloo_py      torch.distributed.all_reduce on Gloo
  deepspeed    deepspeed.comm.inference_all_reduce, DeepSpeed's own in shared memory (see below)

and prints, as nccl-tests do, a row per size and implementation:

  time       from the last rank's call (MarkReady) until that rank has the average (its wait for the
             bucket returns), in microseconds: p10, p50, p99
  algbw      size / p50, in GB/s (10^9 bytes);  busbw = algbw * 2(n-1)/n for n ranks
  #wrong     elements that differ from the exact average. The first and the last turn check all,
             the others a sample; anything but 0 makes the exit status 1
  ratio      the roofline's time / this time, in pairs of the same iteration: p50, p10. 0.85 means
             85 % of the bandwidth that memory has. The memory of a virtual machine may be twice as
             slow from one second to the next: only pairs can be compared
  cpu        CPU seconds of one all-reduce, in all processes that take part

Implementations take turns of five iterations, in rotating order, while the processes of the others
sleep. A sixth one comes first, which wakes the processes and is not timed. Every rank rewrites its
buffer before each iteration, so that no implementation finds results of the one before in the
caches.

With --nodes N, N nodes of --ranks ranks each take part. Each is a network namespace with a link of
--rate and a gradsyncd of its own. roofline and openmpi cannot span nodes. The column ratio becomes

  wire       the share of the time for which the wire must be busy: any all-reduce sends 2(N-1)/N
             times the size over each node's link, each way. Headers of Ethernet, IP and TCP come on
             top, so a long transfer reaches 0.956. A short one can exceed it: a link that has
             rested passes 4 ms' worth of bytes at once

Without root or iproute2 nodes are loopback addresses with unlimited links; the head of the table
says so.

With --device cuda buffers lie on GPUs, rank r's on GPU r % g of --gpus g. The implementations are

  roofline   copies by the driver within GPU 0. They move as many bytes as the reduction of the
             buffers of its k ranks: k buffers read, k written; with several GPUs k+1 and k+1
  kernels    gradsync's kernels alone, on GPU 0. The ratio is their share of the copies' bandwidth,
             both by the GPU's own clock
  gradsync   as above, and over NCCL between GPUs, until the trainer's stream has the average
  nccl       NCCL in the trainers' own processes, if --ranks is --gpus. It adds; the division is
             not timed
"""
_OF_GROUPS = """\
Calls torch.distributed.{call} for float32 tensors of host memory, with

  gradsync_group  after init_process_group("gradsync")
  gloo_py         on Gloo

and prints a row per size and implementation. The size is the larger tensor's: what {larger}.
busbw = algbw * (n-1)/n for n ranks. All other columns are those of 'allreduce --help', and so is
the order of the turns. Each rank rewrites what it gives before each iteration.
"""
_DEEPSPEED = """\
DeepSpeed is no part of 'tools/setup'. In an environment of its own, with what the tree has:

  python3 -m venv /tmp/deepspeed
  (cd .venv/lib/python3*/site-packages && pwd) >/tmp/tree.pth
  cp /tmp/tree.pth /tmp/deepspeed/lib/python3*/site-packages/
  /tmp/deepspeed/bin/pip install deepspeed==0.19.8 ninja==1.13.2
  /tmp/deepspeed/bin/python tools/bench/gradsync_bench.py allreduce \\
      --impl gradsync_py,gloo_py,deepspeed -b 25M -e 100M

Its first run compiles its extension, which needs g++ and Python's headers (python3-dev).

"""
_EPILOG = """\
Needs 'bazel build //tools/bench:gradsync-bench'. Progress goes to standard error. Exit status: 0;
1 something was wrong or failed; 2 wrong usage; 130 interrupted.
"""
_HANDOFF = """\
Measures how long a trainer spends in MarkReady ("this bucket is ready"), and
how long a bucket takes from the last rank's MarkReady until that rank's wait
returns. The first row is of an empty bucket; on GPUs, of one with 8 bytes. The
last columns are the parts of that time (medians): to the daemon, in its queue,
being reduced, and back to the trainer.

With --device cuda the columns are what a trainer's host pays:

  MarkReady   until MarkReady returns
  enqueued    until the host may enqueue work that needs the average: until WaitOnStream returns
  in process  the same for an all-reduce of NCCL in the trainers' own processes. If ranks share a
              GPU, NCCL takes them for ranks of different machines, and uses sockets
  added       enqueued - in process, in pairs
  syncs       how often the host has waited for the GPU until then, in all iterations
  to done     until the stream has the average; then the same in process
  workers     CPU time of the workers for one bucket, mean: they look for the GPU's words while
              they wait
"""
_MOST_BYTES = 2 << 30
# Enough that the caches and the cores' sleep states are those of a trainer at work, and few enough
# that turns of two implementations are still of the same moment.
_HANDOFFS_AT_ONCE = 20
_ALL_REDUCES_AT_ONCE = 5


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    layout: dict[str, Any] = {
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }
    parser = argparse.ArgumentParser(prog="gradsync-bench", description=_HELP, **layout)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    allreduce = commands.add_parser(
        "allreduce", description=_ALLREDUCE, epilog=_DEEPSPEED + _EPILOG, **layout
    )
    allreduce.add_argument(
        "--dtype", choices=collective_report.ITEM_BYTES, default="float32", help="default float32"
    )
    allreduce.set_defaults(collective="all_reduce")
    allgather, reducescatter = (
        commands.add_parser(
            name, description=_OF_GROUPS.format(call=call, larger=larger), epilog=_EPILOG, **layout
        )
        for name, call, larger in (
            ("allgather", "all_gather_into_tensor", "a rank gets"),
            ("reducescatter", "reduce_scatter_tensor", "a rank gives"),
        )
    )
    allgather.set_defaults(collective="all_gather", dtype="float32")
    reducescatter.set_defaults(collective="reduce_scatter", dtype="float32")
    size = parsed_by(_size)
    for command in (allreduce, allgather, reducescatter):
        command.add_argument(
            *("-b", "--begin"), type=size, default=64 << 10, metavar="SIZE", help="default 64K"
        )
        command.add_argument(
            *("-e", "--end"),
            type=size,
            default=100 << 20,
            metavar="SIZE",
            help="smallest and largest buffer of a rank: bytes, or 64K, 25M, 1G (powers of two); "
            "default 100M",
        )
        command.add_argument(
            *("-f", "--factor"),
            type=count(2, _MOST_BYTES),
            default=4,
            metavar="N",
            help="from one size to the next, default 4; the size of -e is always measured",
        )
        command.set_defaults(run=_collective, parser=command, iterations=40, warmup=5)
    allreduce.add_argument(
        "--impl",
        type=names_of(lineup.IMPLEMENTATIONS),
        default=(),
        metavar="LIST",
        help="comma-separated, from the list above; default: all that this machine has",
    )
    for command in (allgather, reducescatter):
        command.add_argument(
            "--impl",
            type=names_of(lineup.GROUPS),
            default=lineup.GROUPS,
            metavar="LIST",
            help="comma-separated, from the list above; default: both",
        )
    handoff = commands.add_parser("handoff", description=_HANDOFF, epilog=_EPILOG, **layout)
    handoff.set_defaults(
        run=_handoff, parser=handoff, iterations=1000, warmup=50, dtype="float32", impl=()
    )
    handoff.set_defaults(collective="all_reduce")
    for command in (allreduce, allgather, reducescatter, handoff):
        iterations, warmup = command.get_default("iterations"), command.get_default("warmup")
        command.add_argument(
            *("-n", "--iterations"),
            type=count(1, 1000000),
            metavar="N",
            help=f"of each size, default {iterations}",
        )
        command.add_argument(
            *("-w", "--warmup"),
            type=count(0, 1000000),
            metavar="N",
            help=f"iterations before them, default {warmup}",
        )
        add_shared_arguments(command)
        command.add_argument(
            "--busy",
            action="store_true",
            help="a thread computes beside each rank, as a backward pass does",
        )
        command.add_argument(
            "--device", choices=("host", "cuda"), default="host", help="default host"
        )
        command.add_argument(
            "--gpus", type=count(1, 8), metavar="N", help="default 1; --ranks is a multiple of it"
        )
        for library in ("cuda", "nccl"):
            command.add_argument(
                f"--{library}_library",
                type=_library,
                default={"cuda": "libcuda.so.1", "nccl": "libnccl.so.2"}[library],
                metavar="LIB",
                help="name or path; default %(default)s",
            )
    options = parser.parse_args(words)
    _check(options)
    return options


def _check(options: argparse.Namespace) -> None:
    parser = options.parser
    options.gpus = (options.gpus or 1) if options.device == "cuda" else 0
    check_shared_arguments(parser, options)
    if options.gpus and options.nodes > 1:
        parser.error("--device cuda is of one node")
    if options.gpus and options.ranks % options.gpus:
        parser.error(f"--ranks {options.ranks} is no multiple of --gpus {options.gpus}")
    ranks = options.ranks * options.nodes
    for fault in lineup.faults(options.impl, options.nodes, ranks, options.gpus):
        parser.error(fault)
    if options.run is _collective:
        if options.begin > options.end:
            parser.error(f"-b {format_byte_size(options.begin)} is larger than -e")
        item = collective_report.ITEM_BYTES[options.dtype]
        for nbytes in (options.begin, options.end):
            if nbytes % item:
                parser.error(f"{nbytes} bytes are no whole number of {options.dtype}")
            if options.collective != "all_reduce" and nbytes // item % ranks:
                parser.error(f"{nbytes} bytes cannot be divided among {ranks} ranks")
        if set(options.impl) & set(lineup.PYTHON) and options.dtype != "float32":
            parser.error("implementations in Python take --dtype float32 alone")


def _size(text: str) -> int:
    size = parse_byte_size(text)
    if size > _MOST_BYTES:
        raise ValueError(f"'{text}' is more than 2G")
    return size


def _library(text: str) -> str:
    """Absolute if it is a path: the daemon takes no other."""
    return os.path.abspath(text) if "/" in text else text


def sizes(begin: int, end: int, factor: int) -> list[int]:
    """The sizes that allreduce measures, ascending."""
    result = []
    while begin < end:
        result.append(begin)
        begin *= factor
    return [*result, end]


class _Bench:
    """A run: its processes, and what both commands do with them."""

    def __init__(self, options: argparse.Namespace, names: Sequence[str]) -> None:
        """Args: names: of the implementations."""
        self._options = options
        self._names = names
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Bench:
        """Starts the daemons and the ranks."""
        options = self._options
        threads = options.threads or max(1, usable_cores() // options.nodes)
        daemon = find_daemon(options.daemon)
        with contextlib.ExitStack() as stack:
            stage = Stage(daemon, options.nodes, options.ranks, options.rate, threads)
            self.stage = stack.enter_context(stage)
            libraries = {
                "cuda_library": options.cuda_library,
                "nccl_library": options.nccl_library,
            }
            if any(name.startswith("gradsync") for name in self._names):
                flags = [f"--{name}={value}" for name, value in libraries.items()]
                stage.start_daemons(flags if options.gpus else [])
            rank_options = {
                "collective": options.collective,
                "dtype": options.dtype,
                "busy": options.busy,
                "threads": threads,
                "gpus": options.gpus,
                **libraries,
            }
            try:
                self.teams = [lineup.start(stage, name, rank_options) for name in self._names]
            except Failed as error:
                raise stage.with_daemon_logs(error) from None
            self._stack = stack.pop_all()
        where = f" on {options.gpus} GPUs" if options.gpus else ""
        where += f" on each of {options.nodes} nodes" if options.nodes > 1 else ""
        say(
            [
                f"gradsync-bench {options.parser.prog.split()[-1]}: {options.ranks} ranks{where}, "
                f"{options.dtype}, {'busy' if options.busy else 'idle'} trainers, "
                f"{threads} reduce threads",
                describe_machine(),
                *stage.notes,
            ]
        )
        self._others = OthersShare(stage.cpu_seconds())
        return self

    def __exit__(self, *error: Any) -> None:
        """Says how busy the machine was, and ends every process."""
        if error[0] is None:
            share = self._others.percent(self.stage.cpu_seconds())
            say([f"other processes used {share:.0f} % of the machine meanwhile"])
        self._stack.__exit__(*error)

    def run_size(self, nbytes: int, at_once: int) -> dict[str, contest.Score]:
        """Measures one size. Args: at_once: as of contest.run_size()."""
        options = self._options
        progress = Progress(options.warmup + options.iterations)
        name = format_byte_size(nbytes)
        scores = contest.run_size(
            self.stage,
            self.teams,
            nbytes,
            options.warmup,
            options.iterations,
            at_once,
            lambda done: progress.done(name, done),
        )
        progress.end()
        return scores


def _check_results(scores: Sequence[contest.Score]) -> None:
    wrong = sum(score.wrong for score in scores)
    if wrong:
        raise WrongResults(f"{wrong} elements were wrong")


def _collective(options: argparse.Namespace) -> None:
    ranks = options.ranks * options.nodes
    notes: list[str] = []
    names = options.impl
    if names:
        lineup.check_available(names)
    else:
        names, notes = lineup.default_names(options.nodes, ranks, options.gpus)
    rows: list[dict[str, Any]] = []
    all_scores: list[contest.Score] = []
    with lineup.no_deepspeed_memory(), _Bench(options, names) as bench:
        run = collective_report.Run(
            ranks,
            options.nodes,
            options.gpus,
            options.dtype,
            bench.stage.rate,
            options.collective,
        )
        say(notes)
        print(collective_report.table_head(run), flush=True)
        for nbytes in sizes(options.begin, options.end, options.factor):
            scores = bench.run_size(nbytes, _ALL_REDUCES_AT_ONCE)
            of_size = collective_report.rows_of(scores, nbytes, run)
            for row in of_size:
                print(collective_report.table_row(row), flush=True)
            say(collective_report.comparisons(scores, of_size))
            rows += of_size
            all_scores += scores.values()
    write_json(options.json, rows)
    _check_results(all_scores)


def _handoff(options: argparse.Namespace) -> None:
    on_gpus = options.gpus > 0
    buckets = handoff_report.GPU_BUCKETS if on_gpus else handoff_report.BUCKETS
    rows: list[dict[str, Any]] = []
    all_scores: list[contest.Score] = []
    with _Bench(options, ("gradsync", "nccl") if on_gpus else ("gradsync",)) as bench:
        print(handoff_report.table_head(on_gpus), flush=True)
        for nbytes in buckets:
            scores = bench.run_size(nbytes, _HANDOFFS_AT_ONCE)
            figures = handoff_report.figures(scores)
            print(handoff_report.table_row(nbytes, figures, on_gpus), flush=True)
            rows.append({**figures, "bytes": nbytes})
            all_scores.append(scores["gradsync"])
    # The smallest bucket's figures, and every size's.
    document = {key: value for key, value in rows[0].items() if key != "bytes"}
    document["ranks"] = options.ranks * options.nodes
    document["nodes"] = options.nodes
    document["busy"] = options.busy
    if on_gpus:
        document["gpus"] = options.gpus
    write_json(options.json, {**document, "buckets": rows})
    _check_results(all_scores)


def main(words: Sequence[str]) -> int:
    """Runs a command; returns the exit status."""
    options = _arguments(words)
    return run_bench("gradsync-bench", lambda: options.run(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
