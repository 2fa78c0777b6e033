"""Trains with a daemon, proves the result and shows what was measured; see --help."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
from typing import Any, NoReturn

# The launcher is that of the benches.
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1] / "bench"))

from command_line import count, output_file, rate, write_json
from figures import (
    LARGEST_WHOLE_DIFFERENCE,
    LEAST_ACCURACY,
    Figures,
    largest_difference,
    overlap,
    typical_step,
    what_overlap_gains,
)
from kill import PROGRAMS as PROGRAMS_OF_KILL
from kill import STEPS as STEPS_OF_KILL
from kill import Kill
from launcher import Child, Failed, Interrupted, Launcher, Node
from text_style import Progress, TextStyle
from units import bits_per_second

_ROOT = pathlib.Path(__file__).absolute().parents[2]
_TARGETS = {
    "daemon": "daemon/gradsyncd",
    "trainer": "client/examples/digits_trainer",
    "reference": "client/examples/digits_reference",
    "gradsyncctl": "tools/gradsyncctl/gradsyncctl",
    "network": "tools/virtual_network/virtual-network",
}
_DATA = "client/examples/data/digits.csv.gz"
_JOB = "digits"
# At most: enough for two medians.
_COMPARISON_STEPS = 120
_STEPS_KEPT = 64  # by the daemon
_BATCH = 128  # of digits_trainer
_LARGEST_BATCH = 1024
# Samples of the backward pass that a few cores compute in 1 ms, about.
_SAMPLES_PER_MS = 25
_MOST_RANKS = 8

_DESCRIPTION = """\
Shows gradsync at work on this machine, from a bare Debian 12 on. It installs what a build needs (as
root; it says what and why), builds the daemon and an example, and runs the example. When everything
is built, this takes seconds.

The example starts gradsyncd in a temporary directory, and N trainers. They learn handwritten digits
together: each computes gradients for its share of every batch and writes them into memory that it
shares with the daemon. The daemon averages them bucket by bucket, while the backward pass still
runs. Then one process does the same alone, twice. If it computes the same shares one by one, every
bit of the result must be the same; if it computes whole batches, numbers may differ by 1e-5. A
picture shows one step, bucket by bucket.

With several nodes, each node has its own daemon and trainers. For root, a node is a network
namespace with a virtual cable to the others. Otherwise it is a loopback address, and the output
says so. Over a slow link a step takes less time when averaging overlaps with the backward pass:
--nodes 2 --rate 1gbit shows how much.

With --kill, four trainers learn the same with PyTorch. It is then installed too (200 MB). SIGKILL
ends ranks while they train; each is started again and takes its old place. A picture shows which
rank was lost and when, and how long the others waited. The same training without kills must end
with the same bits.
"""
_EPILOG = """\
No process, socket, file or shared memory is left behind, also after Ctrl-C.

Exit status: 0 the result is right; 1 it is wrong, or something failed (it says what); 2 wrong
usage; 128 + N stopped by signal N.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # "argument --ranks: takes a number" -> "--ranks takes a number".
        message = re.sub(r"^argument ([^:]*): ", r"\1 ", message)
        print(f"tools/quickstart: {message}", file=sys.stderr)
        print("Try 'tools/quickstart --help'.", file=sys.stderr)
        sys.exit(2)


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="tools/quickstart",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--nodes", type=count(1, 4), default=1, metavar="N", help="nodes, 1 to 4; default 1"
    )
    parser.add_argument(
        "--ranks",
        type=count(1, _MOST_RANKS),
        metavar="N",
        help="trainers on each node; at most 8 on all nodes together; default 2, with --kill 4",
    )
    parser.add_argument(
        "--rate",
        type=rate,
        metavar="RATE",
        help="of each node's link, each way: 1gbit, 100mbit; default: as fast as memory",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="the daemon and the trainers stay until you press Enter, so that you can ask them; "
        "the output shows how",
    )
    parser.add_argument(
        "--kill", action="store_true", help="kills ranks while they train, and compares the models"
    )
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="also writes the figures to FILE"
    )
    parser.add_argument(
        "--steps",
        type=count(1, 1_000_000),
        metavar="N",
        help=f"trains longer or shorter; default 240, with --kill {STEPS_OF_KILL}",
    )
    parser.add_argument(
        "--programs",
        metavar="DIR",
        help="uses the programs in DIR and builds nothing; default: builds, then uses bazel-bin",
    )
    arguments = parser.parse_args(words)
    if arguments.kill and (arguments.nodes > 1 or arguments.keep):
        parser.error("--kill runs on one node, and keeps nothing: leave out --nodes and --keep")
    if arguments.kill and arguments.ranks == 1:
        parser.error("--kill needs --ranks 2 or more: another rank has the state of a lost one")
    arguments.ranks = arguments.ranks or (4 if arguments.kill else 2)
    arguments.steps = arguments.steps or (STEPS_OF_KILL if arguments.kill else 240)
    ranks = arguments.nodes * arguments.ranks
    if ranks > _MOST_RANKS:
        parser.error(f"--nodes times --ranks is {ranks}, more than {_MOST_RANKS}")
    if arguments.rate and arguments.nodes == 1:
        parser.error("--rate needs --nodes 2 or more: one node has no link")
    return arguments


def _build(kill: bool) -> pathlib.Path:
    """Makes the machine ready and builds, for --kill or not; returns where the programs are."""
    programs = _ROOT / "bazel-bin"
    # A terminal shows progress by itself; a log gets a line now and then.
    quiet = ["--color=no", "--curses=no", "--show_progress_rate_limit=20"]
    paths = (PROGRAMS_OF_KILL if kill else _TARGETS).values()
    targets = ["//" + ":".join(path.rsplit("/", 1)) for path in paths]
    # PyTorch comes with what the tests need.
    if subprocess.run([_ROOT / "tools/setup", *(["--test"] if kill else [])]).returncode != 0:
        raise Failed("this machine is not ready (see above)")
    if not all((programs / path).exists() for path in paths):
        print("tools/quickstart: building the daemon and the example, some minutes the first time")
    command = ["bazel", "build", "--noshow_loading_progress", "--ui_event_filters=-info"]
    command += [*([] if sys.stdout.isatty() else quiet), *targets]
    if subprocess.run(command, cwd=_ROOT).returncode != 0:
        raise Failed("the build failed (see above)")
    return programs


class QuickStart:
    """One run, in the order of its methods."""

    def __init__(
        self, arguments: argparse.Namespace, programs: pathlib.Path, launcher: Launcher
    ) -> None:
        self._arguments = arguments
        self._programs = {name: str(programs / path) for name, path in _TARGETS.items()}
        self._launcher = launcher
        self._style = TextStyle()
        self._one_node = arguments.nodes == 1
        self._nodes = [Node()]
        self._sockets: list[str] = []
        self._coordinator = ""
        self._limited = False
        self._buckets: list[dict[str, Any]] = []
        self._timeline: list[dict[str, Any]] = []
        self._picture = ""
        self._batch = _BATCH
        self._link_ms = 0.0  # what a link needs for the gradients of a step; 0: no limit
        ranks = arguments.nodes * arguments.ranks
        self.figures = Figures(arguments.nodes, ranks, arguments.rate or "")

    def run(self) -> None:
        """Raises Failed if something does not work; `figures` says whether the result is right."""
        self._start_daemons()
        ranks = self._train()
        self._compare_overlap()
        self._compare_with_references()
        self._print_summary()
        self._print_step()
        self._print_how_to_ask()
        write_json(self._arguments.json, self.figures.json())
        if self._arguments.keep:
            self._launcher.wait_for_enter(
                "\n  Press Enter or Ctrl-C to end the daemon and the trainers."
            )
        else:
            self._end_job(ranks)

    def failures(self) -> list[str]:
        """What is wrong with the result, in words."""
        return self.figures.failures()

    def _start_daemons(self) -> None:
        nodes, ranks = self._arguments.nodes, self._arguments.ranks
        trainers = f"{ranks} trainer{'s' if ranks > 1 else ''}"
        who = (
            f"{trainers}, one daemon"
            if self._one_node
            else f"{nodes} nodes, {trainers} and a daemon on each"
        )
        print(self._style.bold(f"gradsync quick start: {who}, handwritten digits") + "\n")
        if not self._one_node:
            network = self._launcher.make_network(
                self._programs["network"], nodes, self.figures.rate
            )
            self._nodes, self._limited = network.nodes, network.limited
            print(f"  {'network':10} {network.description}")
        for number, node in enumerate(self._nodes):
            child, path = self._launcher.start_daemon(
                self._programs["daemon"], node, None if self._one_node else number
            )
            self._sockets.append(path)
            print(f"  {'gradsyncd':10} pid {child.pid}   {path}{self._on_node(number)}")
        if not self._one_node:
            self._coordinator = json.loads(self._ask("status", "--json"))["peer_address"]

    def _on_node(self, number: int) -> str:
        return "" if self._one_node else f"   on node {number}, {self._nodes[number].address}"

    def _ask(self, *words: str) -> str:
        """What gradsyncctl prints about the daemon of node 0, which coordinates the job."""
        command = [self._programs["gradsyncctl"], *words, "--socket", self._sockets[0]]
        asked = subprocess.run(command, capture_output=True, text=True)
        if asked.returncode > 1:  # 1: the daemon warns, here of a peer port without TLS
            raise Failed(f"gradsyncctl {words[0]}: {asked.stderr or asked.stdout}")
        return asked.stdout

    def _start_job(self, name: str, steps: int, *flags: str) -> list[Child]:
        ranks = []
        for rank in range(self.figures.ranks):
            number = rank // self._arguments.ranks
            command = [self._programs["trainer"], f"--data={_ROOT / _DATA}", f"--steps={steps}"]
            command += ["--hold", f"--save={self._result(name, rank)}", *flags]
            # As torchrun would set them.
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.figures.ranks),
                "TORCHELASTIC_RUN_ID": name,
                "MASTER_ADDR": self._nodes[0].address or "localhost",
                "MASTER_PORT": "29500",
                "GRADSYNC_JOB_TOKEN": "",
                "GRADSYNC_COORDINATOR": self._coordinator,
                "GRADSYNC_SOCKET": self._sockets[number],
            }
            ranks.append(
                self._launcher.start(f"rank {rank}", self._nodes[number], command, environment)
            )
        return ranks

    def _result(self, name: str, rank: int = 0) -> pathlib.Path:
        return self._launcher.directory / f"{name}-{rank}.f32"

    def _await_results(self, ranks: list[Child]) -> list[dict[str, Any]]:
        """The last report of every rank; they stay in the job."""

        def finished() -> bool:
            return all(rank.reports and "step_ms" in rank.reports[-1] for rank in ranks)

        self._launcher.wait_for(finished)
        return [rank.reports[-1] for rank in ranks]

    def _end_job(self, ranks: list[Child]) -> None:
        for rank in ranks:
            self._launcher.close_input(rank)
        self._launcher.wait_for(lambda: all(rank.ended for rank in ranks))

    def _train(self) -> list[Child]:
        ranks = self._start_job(_JOB, self._arguments.steps)
        for rank, child in enumerate(ranks):
            print(f"  rank {rank:<5} pid {child.pid}{self._on_node(rank // self._arguments.ranks)}")
        print()
        progress = Progress(self._arguments.steps, self._style)
        ranks[0].on_report = progress.show
        results = self._await_results(ranks)

        self.figures.test_accuracy = results[0]["accuracy"]
        self._buckets = results[0]["buckets"]
        mine = self._result(_JOB).read_bytes()
        self.figures.unequal_ranks = [
            rank for rank in range(len(ranks)) if self._result(_JOB, rank).read_bytes() != mine
        ]
        layout = json.loads(self._ask("stats", "--json"))["jobs"][0]["layouts"][0]
        self.figures.steps = int(layout["steps_complete"])
        self.figures.bytes_reduced = int(layout["bytes_reduced"])
        self.figures.reduce_gbps = float(layout["reduce_gbps"])
        timeline = self._ask("timeline", "--steps", str(_STEPS_KEPT), "--json")
        steps = json.loads(timeline)["steps"]
        self.figures.overlap_percent = 100 * statistics.median(map(overlap, steps))
        self._picture = self._ask("timeline", "--step", typical_step(steps)["step"])
        return ranks

    def _compare_overlap(self) -> None:
        """Steps with and without overlap in turn: a machine's speed changes within seconds."""
        flags = ["--overlap=alternate"]
        if self._limited:
            # The backward pass takes about as long as the link: where one of them is much longer
            # than the other, there is little to gain.
            # The part of a sum over all nodes that each node sends and receives.
            share = 2 * (self.figures.nodes - 1) / self.figures.nodes
            bits = 8 * sum(bucket["bytes"] for bucket in self._buckets)
            self._link_ms = bits * share / bits_per_second(self.figures.rate) * 1e3
            self._batch = min(_LARGEST_BATCH, max(_BATCH, _SAMPLES_PER_MS * int(self._link_ms)))
            flags.append(f"--batch={self._batch}")
        larger = f"batches of {self._batch}, " if self._batch != _BATCH else ""
        print(self._style.dim(f"  ... the same with {larger}overlap on and off in turn"))
        steps = min(_COMPARISON_STEPS, self._arguments.steps)
        ranks = self._start_job(f"{_JOB}-overlap", steps, *flags)
        results = self._await_results(ranks)
        # The first step is with overlap. A single step has no other to compare it with.
        times = [[ms for r in results for ms in r["step_ms"][first::2]] for first in (0, 1)]
        self.figures.step_ms = statistics.median(times[0])
        self.figures.step_ms_without_overlap = statistics.median(times[1] or times[0])
        self._end_job(ranks)

    def _compare_with_references(self) -> None:
        print(self._style.dim("  ... the same in one process, without gradsync"))
        children = []
        for name, flags in (("sharded", []), ("whole", ["--whole"])):
            command = [self._programs["reference"], f"--data={_ROOT / _DATA}"]
            command += [f"--save={self._result(name)}", f"--steps={self._arguments.steps}"]
            command += [f"--ranks={self.figures.ranks}", f"--nodes={self.figures.nodes}", *flags]
            children.append(self._launcher.start("the reference run", Node(), command, {}))
            self._launcher.close_input(children[-1])
        self._launcher.wait_for(lambda: all(child.ended for child in children))
        trained = self._result(_JOB)
        self.figures.max_difference_sharded = largest_difference(trained, self._result("sharded"))
        self.figures.max_difference_whole = largest_difference(trained, self._result("whole"))

    def _print_summary(self) -> None:
        f, style = self.figures, self._style
        where = "" if self._one_node else " (added by node, then over nodes)"
        reducing = (
            "while the daemon reduces"
            if self._one_node
            else "while the daemons reduce, over the network"
        )
        batch = f", batches of {self._batch}" if self._batch != _BATCH else ""
        checks = [
            (
                "test accuracy",
                f"{f.test_accuracy:.2f} %",
                f.test_accuracy >= LEAST_ACCURACY,
                f"at least {LEAST_ACCURACY:g} %, on 360 held-out digits",
            ),
            (
                "against one process, same shards",
                f"{f.max_difference_sharded:g}",
                f.max_difference_sharded == 0,
                f"largest difference: exactly 0{where}",
            ),
            (
                "against one process, whole batches",
                f"{f.max_difference_whole:.1e}",
                f.max_difference_whole <= LARGEST_WHOLE_DIFFERENCE,
                f"largest difference: at most {LARGEST_WHOLE_DIFFERENCE:g}",
            ),
            (
                "parameters on every rank",
                "DIFFER" if f.unequal_ranks else "equal",
                not f.unequal_ranks,
                "bit by bit",
            ),
        ]
        measured = [
            ("steps", str(f.steps), f"in {len(self._buckets)} buckets each"),
            ("gradients averaged", f"{f.bytes_reduced / 1e6:.1f} MB", "per rank"),
            ("reduce bandwidth", f"{f.reduce_gbps:.2g} GB/s", reducing),
            (
                "overlap",
                f"{f.overlap_percent:.0f} %",
                "of the synchronization, hidden behind the backward pass",
            ),
            (
                "step time",
                f"{f.step_ms:.2f} ms",
                f"median; {f.step_ms_without_overlap:.2f} ms with overlap off{batch}",
            ),
        ]
        print(f"\n{style.bold('What came out')}\n")
        for name, value, good, wanted in checks:
            print(f"  {name:34} {value:>12}   {style.mark(good)}  {style.dim(wanted)}")
        for name, value, note in measured:
            print(f"  {name:34} {value:>12}   {style.dim(note)}")
        cpus = len(os.sched_getaffinity(0))
        print("\n  " + what_overlap_gains(f, self._link_ms, cpus).replace("\n", "\n  "))

    def _print_step(self) -> None:
        print(f"\n{self._style.bold('One step as it happened')} (gradsyncctl timeline)\n")
        for line in self._picture.splitlines():
            print(f"  {line}" if line else "")
        parts = [
            f"{i} {' '.join(bucket['parameters'])} {bucket['bytes'] / 1024:.0f} KiB"
            for i, bucket in enumerate(self._buckets)
        ]
        print(f"  layers of the buckets: {', '.join(parts)}")

    def _print_how_to_ask(self) -> None:
        keep, one = self._arguments.keep, self._one_node
        path = self._sockets[0] if keep else "SOCKET"
        program = os.path.relpath(self._programs["gradsyncctl"])
        title = f"How to ask the daemon{'' if one else 's'} more"
        print(f"\n{self._style.bold(title)}\n")
        if keep and one:
            print("  It still runs. In another terminal:\n")
        elif keep:
            print("  They still run; node 0's daemon coordinates the job. In another terminal:\n")
        else:
            print("  With --keep they stay, and SOCKET is named here. Then:\n")
        for command in ("status", "stats", "timeline", "health"):
            print(f"    {program} {command} --socket {path}")
        for question in ("list", "gradsync.v1.Introspection/GetStatus"):
            print(f"    grpcurl -plaintext -unix {path} {question}")


def main(words: list[str]) -> int:
    """Returns the exit status."""
    arguments = _arguments(words)
    sys.stdout.reconfigure(line_buffering=True)
    try:
        given = arguments.programs
        programs = (pathlib.Path(given) if given else _build(arguments.kill)).absolute()
        with Launcher() as launcher:
            run = (Kill if arguments.kill else QuickStart)(arguments, programs, launcher)
            run.run()
    except Interrupted as interrupted:
        print(f"\ntools/quickstart: {interrupted}; everything is cleaned up", file=sys.stderr)
        return 128 + interrupted.number
    except KeyboardInterrupt:  # while it builds
        return 130
    except Failed as failed:
        print(f"\ntools/quickstart: {failed}", file=sys.stderr)
        return 1
    failures = run.failures()
    for failure in failures:
        print(f"\ntools/quickstart: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
