"""What a training step costs with gradsync, and with PyTorch's own wrapper; see --help."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

import step_report
from command_line import (
    WrongResults,
    add_shared_arguments,
    check_shared_arguments,
    count,
    names_of,
    run_bench,
    say,
    write_json,
)
from launcher import Failed
from machine import OthersShare, describe_machine
from progress import Progress
from rank_team import RankTeam
from source_tree import find_daemon, make_importable
from stage import Stage
from step_report import Measured, ModelResult, ModelSize

_HELP = """\
Trains the same model in several ways at once, and compares what one step costs.

  bare            the module alone: every rank trains a copy of its own
  ddp_noop        PyTorch's DistributedDataParallel with a hook that communicates nothing
  gradsync        gradsync.torch.DistributedDataParallel
  gradsync_hold   the same with on_rank_loss="hold", and a gradsync.torch.Training; on one node,
                  and only beside bare and gradsync: hold refuses PyTorch's process groups
  gradsync_hook   PyTorch's wrapper with gradsync.torch.allreduce_hook
  ddp_group       PyTorch's wrapper on the process group "gradsync"
  ddp_gloo        PyTorch's wrapper with its own all-reduce, Gloo

The script starts gradsyncd in a temporary directory and N ranks, each a process with one thread
that computes; with --nodes, on each of several nodes, which are network namespaces of this machine
with links of --rate. Every rank has a copy of the model for each implementation: the same seed,
data, optimizer (SGD with momentum). After a warm-up, in which wrappers settle their buckets,
all ranks take turns of a few steps with each implementation, in rotating order: when the machine
becomes faster or slower, it does so for all of them. Afterwards the parameters of
gradsync, gradsync_hold, gradsync_hook, ddp_group and ddp_gloo must be the same.

  step p50   zero_grad, forward, backward and optimizer.step of one batch: the median of a round's
             steps on the slowest rank; then the median over the rounds
  p10, p90   of all steps of all ranks
  of gloo    step time as a share of ddp_gloo's, median of the rounds' ratios
  > bare     step time beyond bare's, and beyond ddp_noop's: what communication adds
  cpu        CPU seconds of 100 steps: all ranks and the daemon together

Below the table are

  - what gradsync adds as a share of what ddp_gloo adds. Targets beyond ddp_noop, with 2 ranks and
    communication_heavy: wrapper 0.20, hook 0.50
  - what hold costs while no rank is lost: gradsync_hold's step as a share of gradsync's, median of
    the rounds' ratios. Target: at most 1.02
  - with --rate, a step as a share of its limit: the larger of the computation (bare's step, in the
    same round) and the wire's time (the gradients' bytes at --rate, times 2(n-1)/n for n nodes,
    without headers). Target: at most 1.15
  - with --rate, the least that this share can be: nothing overlaps the part of bare's step outside
    its backward pass, and headers take time on the wire

Without root or iproute2 nodes are loopback addresses with unlimited links; the head of the table
says so.
"""
_EPILOG = """\
examples:
  .venv/bin/python tools/bench/step.py
  .venv/bin/python tools/bench/step.py --model communication_heavy --json step.json
  .venv/bin/python tools/bench/step.py --nodes 2 --rate 1gbit --model balanced
  .venv/bin/python tools/bench/step.py --impl gradsync,gradsync_hold --rounds 20
  .venv/bin/python tools/bench/step.py --quick        # does it work? Figures mean nothing

Needs 'tools/setup --test' and 'bazel build //daemon:gradsyncd //client:libgradsync.so'; for --nodes
also 'bazel build //tools/gradsyncctl //tools/virtual_network:virtual-network'. Progress goes to
standard error. Exit status: 0; 1 something failed or results differ; 2 wrong usage;
130 interrupted.
"""

_MODELS = ("communication_heavy", "balanced", "offloaded", "compute_heavy")
_DEFAULT_MODELS = ("communication_heavy", "compute_heavy")
_DEFAULT_IMPLEMENTATIONS = (
    "bare",
    "ddp_noop",
    "gradsync",
    "gradsync_hook",
    "ddp_group",
    "ddp_gloo",
)
# They need a process group of PyTorch.
_GROUPS = {"ddp_noop", "gradsync_hook", "ddp_group", "ddp_gloo"}
_IMPLEMENTATIONS = (*_DEFAULT_IMPLEMENTATIONS, "gradsync_hold")
# How far apart parameters may be after some hundred steps that add in another order.
_TOLERANCE = 1e-3
# Steps of a wrapper until its buckets are settled, and some more.
_WARM_UP = 6


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="step.py",
        description=_HELP,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model",
        action="append",
        choices=_MODELS,
        help=f"may be given several times; default: {' and '.join(_DEFAULT_MODELS)}",
    )
    parser.add_argument(
        "--impl",
        type=names_of(_IMPLEMENTATIONS),
        default=_DEFAULT_IMPLEMENTATIONS,
        metavar="LIST",
        help="comma-separated, from the list above; default: all but gradsync_hold",
    )
    add_shared_arguments(parser)
    parser.add_argument(
        "--rounds", type=count(1, 1000), metavar="N", help="default 5; 2 with --quick"
    )
    parser.add_argument(
        "--steps",
        type=count(1, 100000),
        metavar="N",
        help="of each implementation in a round; default 20; 4 with --quick",
    )
    parser.add_argument(
        "--turn", type=count(1, 100000), default=5, metavar="N", help="steps at a time; default 5"
    )
    parser.add_argument(
        "--bucket-view",
        action="store_true",
        help="PyTorch's wrappers with gradient_as_bucket_view=True, which saves them a copy; its "
        "default is False",
    )
    parser.add_argument(
        "--bucket-mb",
        type=count(1, 1024),
        default=25,
        metavar="MIB",
        help="largest bucket of every wrapper; default 25, PyTorch's. Nothing hides the last "
        "bucket's time on the wire: take less where links are slow (tools/simulate says how much)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny models, few steps: tries the script"
    )
    options = parser.parse_args(words)
    options.model = tuple(name for name in _MODELS if name in (options.model or _DEFAULT_MODELS))
    check_shared_arguments(parser, options)
    if "gradsync_hold" in options.impl:
        if options.nodes > 1:
            parser.error("gradsync_hold needs every rank on one node: leave out --nodes")
        if not _GROUPS.isdisjoint(options.impl):
            parser.error(
                "hold refuses PyTorch's process groups: --impl bare,gradsync,gradsync_hold"
            )
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.steps = options.steps or (4 if options.quick else 20)
    return options


@dataclasses.dataclass
class _Turns:
    """One implementation's steps in a round.

    Attributes:
      steps_ms: each rank's.
      outside_ms: each rank's: of each step, what is not its backward pass.
      cpu: seconds of all ranks and the daemons.
    """

    steps_ms: list[list[float]]
    outside_ms: list[list[float]]
    cpu: float

    @classmethod
    def of(cls, ranks: int) -> _Turns:
        return cls([[] for _ in range(ranks)], [[] for _ in range(ranks)], 0.0)


class _Contest:
    """The turns of a run."""

    def __init__(
        self, options: argparse.Namespace, stage: Stage, team: RankTeam, progress: Progress
    ) -> None:
        self._options = options
        self._stage = stage
        self._team = team
        self._progress = progress
        self._turns = 0

    def run(self, model_name: str) -> ModelResult:
        """Measures one model."""
        options = self._options
        self._progress.say(f"{model_name}: setting up")
        size = self._team.call("set_up", model_name=model_name, implementations=options.impl)[0]
        self._round(model_name, _WARM_UP)
        measured = {name: Measured() for name in options.impl}
        for _ in range(options.rounds):
            for name, turns in self._round(model_name, options.steps).items():
                measured[name].add_round(turns.steps_ms, turns.outside_ms, turns.cpu)
        return ModelResult(
            model=model_name,
            size=ModelSize(**size),
            ranks=self._stage.ranks,
            measured=measured,
            difference=max(self._team.call("greatest_difference")),
            nodes=options.nodes,
            rate=self._stage.rate,
        )

    def _round(self, what: str, steps: int) -> dict[str, _Turns]:
        """By implementation."""
        options = self._options
        figures = {name: _Turns.of(self._stage.ranks) for name in options.impl}
        left = steps
        while left > 0:
            now = min(left, options.turn)
            left -= now
            first = self._turns % len(options.impl)
            self._turns += 1
            for name in options.impl[first:] + options.impl[:first]:
                turns = figures[name]
                before = self._stage.daemon_cpu_seconds()
                for rank, (steps_ms, outside_ms, seconds) in enumerate(
                    self._team.call("turn", implementation=name, steps=now)
                ):
                    turns.steps_ms[rank].extend(steps_ms)
                    turns.outside_ms[rank].extend(outside_ms)
                    turns.cpu += seconds
                turns.cpu += self._stage.daemon_cpu_seconds() - before
                self._progress.done(what, now)
        return figures


def _measure(options: argparse.Namespace) -> None:
    """Runs everything and prints the table."""
    make_importable()
    program = find_daemon(options.daemon)
    say(
        [
            f"step.py: {options.ranks} ranks{' on each node' if options.nodes > 1 else ''}, "
            f"{options.rounds} rounds of {options.steps} steps, "
            f"{'the small models of --quick, ' if options.quick else ''}"
            f"buckets of {options.bucket_mb} MiB, gradient_as_bucket_view={options.bucket_view}",
            describe_machine(),
        ]
    )
    progress = Progress(
        len(options.model) * len(options.impl) * (_WARM_UP + options.rounds * options.steps)
    )
    progress.say("starting gradsyncd and the ranks")
    results = []
    with Stage(program, options.nodes, options.ranks, options.rate, options.threads) as stage:
        say(stage.notes)
        stage.start_daemons()
        names = ("quick", "bucket_view", "bucket_mb")
        rank_options = {name: getattr(options, name) for name in names}
        rank_options["group"] = not _GROUPS.isdisjoint(options.impl)
        try:
            team = stage.start_python_team("step", "step_rank.py", rank_options, 1, {})
            contest = _Contest(options, stage, team, progress)
            print(step_report.table_head(), flush=True)
            others = OthersShare(stage.cpu_seconds())
            for model_name in options.model:
                results.append(contest.run(model_name))
                progress.end()
                print(step_report.table_rows(results[-1]), flush=True)
            share = others.percent(stage.cpu_seconds())
        except Failed as error:
            raise stage.with_daemon_logs(error) from None
    for result in results:
        say(step_report.verdicts(result))
        say([f"{result.model}: parameters differ by at most {result.difference:.1e}"])
    say([f"other processes used {share:.0f} % of the machine meanwhile"])
    write_json(options.json, [row for result in results for row in step_report.to_json(result)])
    wrong = [result.model for result in results if not result.difference <= _TOLERANCE]
    if wrong:
        raise WrongResults(f"parameters differ after training: {', '.join(wrong)}")


def main(words: Sequence[str]) -> int:
    """Runs it; returns the exit status."""
    options = _arguments(words)
    return run_bench("step.py", lambda: _measure(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
