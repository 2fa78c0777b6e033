"""Kills trainers at every place of a step, and compares what they learn; see --help."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
import sys
import time
from collections.abc import Sequence
from typing import NoReturn, Optional

# The launcher and the quantiles are those of the benches.
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1] / "bench"))

from chain import Link
from command_line import count, names_of, output_file, write_json
from faults import (
    FAULTS_PER_ROUND,
    FIRST_STEP,
    KILL,
    LEAVE,
    NAMES,
    PHASES,
    REDUCED,
    Fault,
    Round,
    least_faults,
    plan,
)
from launcher import Failed, Interrupted, Launcher, Node
from nursery import TrainingFailed
from one_training import OneTraining
from outcome import Outcome, assess
from progress_line import ProgressLine
from report import Report
from settings import STEPS_OF_EPOCH, Settings
from source_tree import NotBuilt, find_daemon, find_program, make_importable

# A rank on a busy machine must not count as stopped.
_LEASE = "4s"
_SMALL_MIB = 32
_BREAK_NAMES = ("unseeded", "buffers", "late", "dropped")

_DESCRIPTION = """\
Proves that a training in which ranks die learns the same bits as one in which nobody dies.

It starts a gradsyncd and N trainers. They train a module with dropout, BatchNorm, Adam and a
scheduler through gradsync.torch.Training. Trainers die by SIGKILL at chosen places of a step. Some
die at the same moment, some while they get the state of the model, some while they give it. One in
five raises an exception instead, which ends its process with status 1. Some are stopped: the daemon
finds them by their lease, and kills them. Each is started again and takes its old place. After
every step each rank writes down the SHA-256 of the averages and of its whole state. This chain must
equal that of a training without hold and without faults, link by link. A parameter with gradients
coded in integers shows which rank's contribution is missing or doubled.

The same --seed, --faults, --ranks, --phases, --no-stops and --no-exceptions end the same ranks at
the same places in the same way.
"""
_EPILOG = f"""\
Phases, with the place where a trainer dies:
  before     before it marks the first bucket of the step
  marked     it has marked a bucket, which is not reduced yet
  reduced    one bucket is reduced, the others wait for it
  flight     a bucket is being reduced
  ended      it has ended the step (EndStep), and others have not
  committed  the step is complete, but it does not know that yet
  fetch      a replacement, while the state of the model comes
  load       a replacement, when the state has come
  confirm    a replacement, while it compares its state with the others'
  copy       a replacement, after it has marked a bucket that was reduced before
  source     a rank, while it sends its state to a replacement; never by an exception
  leave      at the end: every other rank waits in leave(), and it has not called leave() yet

Breaks, for --break:
  unseeded   a replacement's random generators are not seeded
  buffers    a replacement has the buffers of a new model
  late       a replacement has the state of one step before
  dropped    a replacement adds its own gradients to an average that was there before

Examples:
  tools/chaos                                  25 faults in one training, some seconds
  tools/chaos --faults 1000 --state-mib 100    40 trainings with 100 MiB of state
  tools/chaos --phases fetch,source --faults 8
  tools/chaos --controls                       25 faults, then the four breaks: each must be seen

One training has at most {FAULTS_PER_ROUND} faults. Exit status: 0 the chains are equal, and every
phase and every planned kind of death had a fault; 1 they differ (the first difference and the fault
before it are named), or something failed; 2 wrong usage, or gradsync is not built; 130 interrupted.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # "argument --ranks: takes a number" -> "--ranks takes a number".
        message = re.sub(r"^argument ([^:]*): ", r"\1 ", message)
        print(f"tools/chaos: {message}\nTry 'tools/chaos --help'.", file=sys.stderr)
        sys.exit(2)


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="tools/chaos",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--seed",
        type=count(0, 2**31 - 1),
        default=1,
        metavar="N",
        help="chooses ranks and places; default 1",
    )
    add(
        "--faults",
        type=count(0, 1_000_000),
        metavar="N",
        help="how many; default 25, with --phases as few as these need",
    )
    add("--ranks", type=count(3, 8), default=4, metavar="N", help="trainers, 3 to 8; default 4")
    add(
        "--state-mib",
        type=count(1, 4096),
        default=12,
        metavar="N",
        help="MiB of state that a replacement gets, about; default 12",
    )
    add(
        "--phases",
        type=names_of(tuple(NAMES)),
        default=tuple(NAMES),
        metavar="LIST",
        help="of phases (below), as fetch,source; default: all",
    )
    add("--no-stops", action="store_true", help="no rank is stopped")
    add("--no-exceptions", action="store_true", help="no rank raises an exception")
    add(
        "--controls",
        action="store_true",
        help="afterwards breaks each part of healing on purpose: the chain must differ",
    )
    add(
        "--break",
        dest="broken",
        choices=_BREAK_NAMES,
        metavar="NAME",
        help="breaks one part of healing on purpose (below): the exit status must be 1",
    )
    add(
        "--launcher",
        choices=("fork", "run"),
        default="fork",
        help="fork: trainers are forks of one process, ready within milliseconds (default); "
        "run: python -m gradsync.run starts and restarts them",
    )
    add("--lease", default=_LEASE, metavar="TIME", help=f"of the daemon; default {_LEASE}")
    add("--plan", action="store_true", help="prints the plan, and runs nothing")
    add("--keep", metavar="DIR", help="keeps the files of all trainings in DIR, a new folder")
    add("--daemon", metavar="PATH", help="gradsyncd; default: the one that Bazel has built")
    add("--json", type=output_file, metavar="FILE", help="the figures as JSON")
    given = parser.parse_args(words)
    given.phases = tuple(NAMES[name] for name in given.phases)
    least = least_faults(given.phases)
    if given.faults is None:
        given.faults = max(least, FAULTS_PER_ROUND) if given.phases == PHASES else least
    if given.faults and given.faults < least:
        parser.error(f"--faults {given.faults}: these phases need {least} faults or more")
    if not given.faults and not given.controls:
        parser.error("--faults 0 leaves nothing to do; add --controls")
    if given.keep and os.path.exists(given.keep):
        parser.error(f"--keep {given.keep}: it exists; name a new folder")
    return given


class Chaos:
    """One run of the tool, in the order of its methods."""

    def __init__(self, given: argparse.Namespace, launcher: Launcher) -> None:
        self._given = given
        self._launcher = launcher
        self._rounds: list[Round] = []
        if given.faults:
            self._rounds = _plan(given)
        control = _control_round()
        steps = _whole_epochs(max([control.steps, *(r.steps for r in self._rounds)]))
        # All have the same length, so that one training without faults is enough.
        self._rounds = [Round(r.number, steps, _moved(r, steps)) for r in self._rounds]
        self._control = control
        self._steps = steps
        self._started = time.monotonic()
        self._done = 0  # trainings
        self._socket = ""
        self._daemon_log = pathlib.Path()
        self._folder = pathlib.Path()
        kinds = sorted({fault.how for planned in self._rounds for fault in planned.faults})
        self.report = Report(given.phases, kinds, quotas=bool(given.faults))
        self._progress = ProgressLine()

    def run(self) -> None:
        """Runs everything; `report` has the result."""
        self._start_daemon()
        self._started = time.monotonic()
        wanted = self._train("without-faults", self._settings(False, self._steps)).chain()
        for planned in self._rounds:
            name = f"training {planned.number + 1} of {len(self._rounds)}"
            outcome = self._faulty(name, planned, wanted, self._given.broken)
            if outcome is not None:
                self.report.add(name, outcome)
        if self._given.controls:
            for broken in _BREAK_NAMES:
                self._check_break(broken, wanted)

    def _start_daemon(self) -> None:
        self._folder = self._launcher.directory / "trainings"
        if self._given.keep:
            self._folder = pathlib.Path(self._given.keep).absolute()
        self._folder.mkdir(parents=True)
        # PyTorch makes a folder there as soon as an optimizer is used.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self._launcher.directory / "torch")
        self._daemon_log = self._folder / "daemon.jsonl"
        flags = [f"--log_file={self._daemon_log}", "--log_format=json", "--cuda_library=none"]
        flags += [f"--lease={self._given.lease}"]
        if self._given.state_mib < _SMALL_MIB:
            flags.append("--staging_bytes=1MiB")  # the transfer still has several chunks
        _, self._socket = self._launcher.start_daemon(
            find_daemon(self._given.daemon), Node(), None, flags
        )

    def _settings(
        self,
        hold: bool,
        steps: int,
        faults: tuple[Fault, ...] = (),
        broken: Optional[str] = None,
    ) -> Settings:
        return Settings(
            seed=self._given.seed,
            ranks=self._given.ranks,
            steps=steps,
            state_mib=self._given.state_mib,
            hold=hold,
            broken=broken,
            faults=faults,
            gradsyncctl=find_program("tools/gradsyncctl/gradsyncctl"),
        )

    def _train(self, name: str, settings: Settings) -> OneTraining:
        folder = self._folder / name.replace(" ", "-")
        job = f"chaos-{os.getpid()}-{folder.name}"
        training = OneTraining(folder, job, settings, self._socket, self._daemon_log)

        def show() -> None:
            self._progress.show(f"{self._time_left()}{name}: {training.progress()}")

        training.run(self._given.launcher, show)
        self._progress.clear()
        self._done += 1
        return training

    def _time_left(self) -> str:
        """Before the progress of a training: how long all of them will take."""
        if not self._done:
            return ""
        each = (time.monotonic() - self._started) / self._done
        trainings = 1 + len(self._rounds) + (len(_BREAK_NAMES) if self._given.controls else 0)
        return f"{each * (trainings - self._done):.0f} s left; "

    def _faulty(
        self, name: str, planned: Round, wanted: Sequence[Link], broken: Optional[str]
    ) -> Optional[Outcome]:
        """Trains with faults; None, and a failure in the report: it did not come to its end."""
        settings = self._settings(True, planned.steps, planned.faults, broken)
        try:
            training = self._train(name, settings)
        except TrainingFailed as failed:
            self.report.fail(f"{name}: {failed}")
            return None
        found = training.chain()
        if planned.steps < self._steps:  # both as far as the shorter one goes, without its end
            wanted = [link for link in wanted if link.step <= planned.steps]
            found = [link for link in found if link.step <= planned.steps]
        outcome = assess(planned, wanted, found, training.lines(), training.ends())
        if not self._given.keep and outcome.difference is None:
            shutil.rmtree(training.folder)
        return outcome

    def _check_break(self, broken: str, wanted: Sequence[Link]) -> None:
        name = f"break {broken}"
        outcome = self._faulty(name, self._control, wanted, broken)
        if outcome is None:
            return
        if outcome.difference is None:
            self.report.fail(f"{name}: the chain is equal, so it does not see this break")
        else:
            self.report.see(broken, str(outcome.difference))


def _plan(given: argparse.Namespace) -> list[Round]:
    return plan(
        given.seed,
        given.faults,
        given.ranks,
        given.phases,
        not given.no_stops,
        not given.no_exceptions,
    )


def _control_round() -> Round:
    """A death of rank 0, whose buffers are everybody's, with a reduced bucket.

    One alone: at a second one the package itself would see that the ranks differ.
    """
    return Round(0, _whole_epochs(FIRST_STEP), (Fault(0, 0, FIRST_STEP, REDUCED, KILL),))


def _whole_epochs(steps: int) -> int:
    return -(-steps // STEPS_OF_EPOCH) * STEPS_OF_EPOCH


def _moved(planned: Round, steps: int) -> tuple[Fault, ...]:
    """The faults of a longer training: those at its end move to the new end."""
    return tuple(
        dataclasses.replace(fault, step=steps) if fault.phase == LEAVE else fault
        for fault in planned.faults
    )


def main(words: Sequence[str]) -> int:
    """Returns the exit status."""
    given = _arguments(words)
    sys.stdout.reconfigure(line_buffering=True)
    if given.plan:
        for planned in _plan(given):
            print(f"training {planned.number + 1}, {planned.steps} steps")
            for fault in planned.faults:
                print(f"  {fault}")
        return 0
    try:
        make_importable()
        find_daemon(given.daemon)
        with Launcher() as launcher:
            chaos = Chaos(given, launcher)
            chaos.run()
    except (Interrupted, KeyboardInterrupt):
        print("tools/chaos: interrupted; everything is cleaned up", file=sys.stderr)
        return 130
    except NotBuilt as error:
        print(f"tools/chaos: {error}", file=sys.stderr)
        return 2
    except (Failed, TrainingFailed, OSError) as error:
        print(f"tools/chaos: {error}", file=sys.stderr)
        return 1
    for line in chaos.report.table():
        print(line)
    with contextlib.suppress(BrokenPipeError):
        write_json(given.json, {"seed": given.seed, **chaos.report.json()})
    failures = chaos.report.failures()
    for failure in failures:
        print(f"tools/chaos: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
