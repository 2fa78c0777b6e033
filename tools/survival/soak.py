"""Attacks a daemon for a long time beside innocent jobs; see --help."""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, Optional

# The launcher and the search for programs are those of the benches.
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1] / "bench"))

from command_line import count, output_file, write_json
from neighbours import Attacker, InnocentJob, JobEnded, Steps, attacks_of
from process_footprint import Footprint, grown
from progress_line import ProgressLine
from source_tree import NotBuilt, find_daemon, find_program
from stranger_daemon import StrangerDaemon

_DESCRIPTION = """\
Runs a gradsyncd for N minutes under every attack of tests/attack, one after the other, beside jobs
of other users, and looks whether anything grows or suffers.

Two innocent jobs run steps all the time, one with small buckets, one with large ones. A third job
is killed at random moments and begins again. Attackers run at the lowest priority: the daemon
cannot keep them from using a CPU that the kernel gives them.
"""
_EPILOG = """\
In each round one attack runs. The innocent jobs' steps are measured before it and under it:

  median    under attack at most 3 times as long
  p99       under attack at most 5 times as long
  sums      every one is right

After each round, and once everything that the attacker made has ended, the daemon's open files,
threads, mappings and memory are counted. Between the first time that every attack has run and the
end, none may grow.

Run it as root: attackers and jobs have users of their own. Exit status: 0 all held; 1 something
did not, or a job failed; 2 wrong usage, or gradsync is not built; 130 interrupted.
"""

_ATTACKER = 12345
_MORTAL = 34567
_JOBS = {
    "small": (23456, ("--buckets=8", "--count=16384")),
    "large": (23457, ("--buckets=2", "--count=1048576")),
}
_STEPS = 200
_MEDIAN_TIMES = 3.0
_P99_TIMES = 5.0
# A step below this is not worth a ratio: the machine's own noise is larger.
_LEAST_US = 1000


@dataclasses.dataclass(frozen=True)
class Round:
    """One attack.

    Attributes:
      attack: its name.
      idle: each job's steps before it.
      attacked: each job's steps under it.
      footprint: of the daemon after it.
    """

    attack: str
    idle: dict[str, Steps]
    attacked: dict[str, Steps]
    footprint: Footprint


def faults_of(one: Round) -> list[str]:
    """What did not hold in a round, as sentences."""
    faults = []
    for name, steps in one.attacked.items():
        idle = one.idle[name]
        if steps.wrong or idle.wrong:
            faults.append(f"{one.attack}: job {name} has {steps.wrong + idle.wrong} wrong sums")
        for kind, times in (("p50_us", _MEDIAN_TIMES), ("p99_us", _P99_TIMES)):
            before, under = getattr(idle, kind), getattr(steps, kind)
            if under > times * max(before, _LEAST_US):
                faults.append(
                    f"{one.attack}: job {name}: {kind} {under}, {before} without it; at most "
                    f"{times:g} times as long"
                )
    return faults


class Soak:
    """One run. It owns the daemon and every process."""

    def __init__(self, daemon: StrangerDaemon, programs: dict[str, str], seed: int) -> None:
        self._daemon = daemon
        self._programs = programs
        self._random = random.Random(seed)
        self._progress = ProgressLine()
        self.attacks = attacks_of(
            programs["attacker"], programs["memory_attacker"], daemon.socket, _ATTACKER
        )
        self._jobs = {
            name: InnocentJob(programs["innocent"], daemon.socket, uid, name, flags)
            for name, (uid, flags) in _JOBS.items()
        }
        self._mortal: Optional[InnocentJob] = None
        self.deaths = 0

    def close(self) -> None:
        """Ends every process but the daemon."""
        for job in [*self._jobs.values(), self._mortal]:
            if job is not None:
                job.kill()

    def run_round(self, attack: str) -> Round:
        """Runs one attack."""
        self._progress.show(f"{attack}: idle")
        idle = self._steps()
        attacker = Attacker(attack, self.attacks[attack])
        try:
            self._progress.show(attack)
            self._lose_someone()
            attacked = self._steps()
        finally:
            attacker.end()
        return Round(attack, idle, attacked, self._daemon.settled())

    def _steps(self) -> dict[str, Steps]:
        # At the same time: the daemon has to serve both.
        for job in self._jobs.values():
            job.begin(_STEPS)
        return {name: job.result() for name, job in self._jobs.items()}

    def _lose_someone(self) -> None:
        """Kills the job that dies, in some step, and begins it again."""
        if self._mortal is not None:
            time.sleep(self._random.uniform(0, 0.2))
            self._mortal.kill()
            self.deaths += 1
        self._mortal = InnocentJob(
            self._programs["innocent"],
            self._daemon.socket,
            _MORTAL,
            "mortal",
            ("--ranks=3", "--count=4096"),
        )
        self._mortal.begin(10**9)


def line_of(one: Round, seconds: float) -> str:
    """A round as a line of the table."""
    words = [f"{seconds:7.0f}  {one.attack:22}"]
    for name, steps in one.attacked.items():
        idle = one.idle[name]
        words.append(f"{steps.p50_us:7} {steps.p50_us / max(1, idle.p50_us):5.2f}")
        words.append(f"{steps.p99_us:7} {steps.p99_us / max(1, idle.p99_us):5.2f}")
    now = one.footprint
    words.append(f"{now.memory_kib / 1024:8.1f} {now.files:6} {now.threads:8} {now.mappings:9}")
    return " ".join(words)


_HEAD = (
    f"{'seconds':>7}  {'attack':22} "
    + " ".join(f"{name + ' p50':>7} {'x':>5} {'p99':>7} {'x':>5}" for name in _JOBS)
    + f" {'MiB':>8} {'files':>6} {'threads':>8} {'mappings':>9}"
)


def run(options: argparse.Namespace) -> int:
    """Runs the rounds. Returns the exit status."""
    programs = {
        "attacker": find_program("tests/attack/attacker"),
        "memory_attacker": find_program("tests/fault/memory_attacker"),
        "innocent": find_program("tests/attack/innocent"),
    }
    began = time.monotonic()
    rounds: list[Round] = []
    faults: list[str] = []
    settled_after: Optional[int] = None  # rounds until every attack has run once
    with tempfile.TemporaryDirectory(prefix="gradsync-soak-") as folder:
        os.chmod(folder, 0o755)
        with StrangerDaemon(find_daemon(options.daemon), pathlib.Path(folder)) as daemon:
            soak = Soak(daemon, programs, options.seed)
            attacks = options.attacks or list(soak.attacks)
            print(_HEAD)
            try:
                while True:
                    over = time.monotonic() - began > options.minutes * 60
                    if over and len(rounds) >= len(attacks):
                        break
                    one = soak.run_round(attacks[len(rounds) % len(attacks)])
                    rounds.append(one)
                    print(line_of(one, time.monotonic() - began), flush=True)
                    faults += faults_of(one)
                    if len(rounds) == len(attacks):
                        settled_after = len(rounds)
            except JobEnded as ended:
                faults.append(str(ended))
            finally:
                soak.close()
            if settled_after is not None and len(rounds) > settled_after:
                first, last = rounds[settled_after - 1].footprint, rounds[-1].footprint
                faults += grown(first, last)
    for fault in faults:
        print(f"DID NOT HOLD: {fault}")
    print(
        f"{len(rounds)} rounds of {len(attacks)} attacks, {soak.deaths} deaths, "
        f"{len(faults)} faults in {(time.monotonic() - began) / 60:.0f} min"
    )
    write_json(options.json, content_of(rounds, faults))
    return 1 if faults else 0


def content_of(rounds: Sequence[Round], faults: Sequence[str]) -> Any:
    """The run for programs."""
    return {"rounds": [dataclasses.asdict(one) for one in rounds], "faults": list(faults)}


def main(words: Sequence[str]) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="tools/soak",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--minutes", type=count(0, 10**6), default=5, metavar="N", help="default 5; every attack")
    add("--seed", type=count(0, 2**31 - 1), default=1, metavar="N", help="of the deaths; default 1")
    add("--attacks", type=lambda text: text.split(","), metavar="NAME,...", help="default: all")
    add("--daemon", metavar="FILE", help="gradsyncd; default: the one that Bazel has built")
    add("--json", type=output_file, metavar="FILE", help="also writes the rounds there")
    options = parser.parse_args(words)
    if os.geteuid() != 0:
        print("tools/soak: only root can become other users", file=sys.stderr)
        return 2
    try:
        return run(options)
    except NotBuilt as error:
        print(f"tools/soak: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
