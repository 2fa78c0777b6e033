"""Attacks a daemon for a long time beside innocent jobs; see --help."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
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
from mortal_job import MortalJob
from neighbours import Attacker, InnocentJob, JobEnded, Steps, attacks_of
from process_footprint import Footprint, grown, least_of, typical
from progress_line import ProgressLine
from source_tree import NotBuilt, find_daemon, find_program
from stranger_daemon import StrangerDaemon

# How much longer a step may take under attack than without one.
_MEDIAN_TIMES = 3.0
_P99_TIMES = 5.0
# That much longer it may always take: a delay that the kernel alone can cause on a busy machine.
_MORE_US = 1000
# No step may take longer, as in tests/attack/harmful_connections_test.cc. It is many turns of the
# threads of all these programs on two cores.
_LONGEST_US = 1_000_000
# In so many rounds, every engine that a round can leave behind is seen.
_LEAST_ROUNDS = 8

_DESCRIPTION = """\
Runs a gradsyncd for N minutes under every attack of tests/attack and of
tests/fault/memory_attacker.cc, one after the other, beside jobs of other users, and looks whether
anything grows or suffers.

Three innocent jobs run steps all the time: one with small buckets, one with large ones, and one
whose second rank is on another node, a second gradsyncd. A fourth job has three ranks, each a
process of its own, in some rounds on both nodes. Under each attack one of them is killed at a
random moment, and the job begins anew. Attackers run at the lowest priority: the daemon cannot keep
them from using a CPU that the kernel gives them. Those of the peer port run as root, from an
address of their own, as another machine would.

It starts daemons of its own. Do not run it on a node in use: it slows other programs down.
"""
_EPILOG = f"""\
In each round one attack runs. The innocent jobs' steps are measured before it, and again while it
is at its full strength:

  median    at most {_MEDIAN_TIMES:g} times as long, or {_MORE_US} us longer if that is more
  p99       at most {_P99_TIMES:g} times as long, or {_MORE_US} us longer if that is more
  longest   at most {_LONGEST_US} us
  sums      every one is right
  loss      within 1 s the survivors know which rank is lost; then the job can begin anew
  attacker  says that it has begun, attacks until soak stops it, and exits with 0

After each round, and once everything that the attacker made has ended, the processes, open files,
threads, mappings and memory of each daemon and its engines are counted. From the second and third
time of all attacks to the last, none of these may grow, beyond what gRPC's pools and malloc vary
by; the less of the two counts. This is known once all attacks have run three times; fewer than
eight attacks run more often. For all attacks it takes some 50 minutes on 2 cores.

Run it as root: attackers and jobs have users of their own. Exit status: 0 all held; 1 something
did not, or a job failed; 2 wrong usage, or gradsync is not built; 130 interrupted.
"""

_ATTACKER = 12345
# The job that loses a rank, at which some attacks aim: its user and its name.
_MORTAL = 34567
_MORTAL_NAME = "mortal"


class WrongAttack(Exception):
    """There is no attack of that name; the text says which there are."""


@dataclasses.dataclass(frozen=True)
class _JobPlan:
    """An innocent job.

    Attributes:
      uid: its user.
      flags: of innocent.cc.
      steps: that are measured: 2000 or 500, so twenty or five of them are slower than p99. A fast
        job runs more, so that all jobs take about equally long: seconds. An attacker's sessions end
        after 40 s.
      across: whether its second rank is on the other node.
    """

    uid: int
    flags: tuple[str, ...]
    steps: int
    across: bool = False


_JOBS = {
    "small": _JobPlan(23456, ("--buckets=8", "--count=16384"), 2000),
    "large": _JobPlan(23457, ("--buckets=2", "--count=1048576"), 500),
    "across": _JobPlan(23458, ("--buckets=4", "--count=16384"), 500, across=True),
}

# The nodes on which the ranks of the job that loses one are.
_MORTAL_NODES = (("attacked",) * 3, ("attacked", "attacked", "other"))

# Name and address of each node's daemon. All loopback addresses belong to this machine.
_NODES = {"attacked": "127.0.0.1", "other": "127.0.0.2"}


@dataclasses.dataclass(frozen=True)
class Round:
    """One attack.

    Attributes:
      attack: its name.
      idle: each job's steps before it.
      attacked: each job's steps under it.
      footprints: of each node's daemon and its engines after it, by the node's name.
      failures: what was wrong with the attacker or the job that loses a rank, as sentences.
    """

    attack: str
    idle: dict[str, Steps]
    attacked: dict[str, Steps]
    footprints: dict[str, Footprint]
    failures: tuple[str, ...] = ()


def most_us(idle_us: int, times: float) -> float:
    """How long a step may take under attack."""
    return max(times * idle_us, idle_us + _MORE_US)


def faults_of(one: Round) -> list[str]:
    """What did not hold in a round, as sentences."""
    faults = list(one.failures)
    for name, steps in one.attacked.items():
        idle = one.idle[name]
        if steps.wrong or idle.wrong:
            faults.append(f"{one.attack}: job {name} has {steps.wrong + idle.wrong} wrong sums")
        for kind, times in (("p50_us", _MEDIAN_TIMES), ("p99_us", _P99_TIMES)):
            before, under = getattr(idle, kind), getattr(steps, kind)
            most = most_us(before, times)
            if under > most:
                faults.append(
                    f"{one.attack}: job {name}: {kind} {under}, {before} without it; "
                    f"at most {most:g}"
                )
        if steps.max_us > _LONGEST_US:
            faults.append(
                f"{one.attack}: job {name}: max_us {steps.max_us}, {idle.max_us} without it; "
                f"at most {_LONGEST_US}"
            )
    return faults


class Soak:
    """One run. It owns the processes besides the daemons."""

    def __init__(
        self,
        nodes: dict[str, StrangerDaemon],
        programs: dict[str, str],
        seed: int,
    ) -> None:
        self._nodes = nodes
        daemon, other = nodes["attacked"], nodes["other"]
        self._socket = daemon.socket
        self._innocent = programs["innocent"]
        self._trainer = programs["scripted_trainer"]
        self._random = random.Random(seed)
        self._progress = ProgressLine()
        victim = (
            f"--victim_user={_MORTAL}",
            f"--victim_job={_MORTAL_NAME}",
            f"--victim_ranks={len(_MORTAL_NODES[0])}",
        )
        self.attacks = attacks_of(
            programs, daemon.socket, daemon.peer, other.socket, _ATTACKER, victim
        )
        elsewhere = (f"--other_socket={other.socket}", f"--coordinator={daemon.peer}")
        self._jobs = {
            name: self._job(plan.uid, name, plan.flags + (elsewhere if plan.across else ()))
            for name, plan in _JOBS.items()
        }
        self._mortal: Optional[MortalJob] = None
        self.deaths = 0

    def close(self) -> None:
        """Ends every process but the daemons."""
        for job in [*self._jobs.values(), self._mortal]:
            if job is not None:
                job.kill()

    def run_round(self, attack: str) -> Round:
        """Runs one attack."""
        self._progress.show(f"{attack}: idle")
        mortal = self._begin_mortal()
        idle = self._steps()
        # After the first fault the job runs no steps, so there is nothing more to look for.
        faults = mortal.faults()
        attacker = Attacker(attack, self.attacks[attack])
        try:
            self._progress.show(attack)
            faults = faults or self._lose_a_rank(mortal)
            attacked = self._steps()
            faults = faults or mortal.faults()
        finally:
            failures = [*attacker.end(), *(f"{attack}: {fault}" for fault in faults)]
            mortal.kill()
        footprints = {name: daemon.settled() for name, daemon in self._nodes.items()}
        return Round(attack, idle, attacked, footprints, tuple(failures))

    def _job(self, uid: int, name: str, flags: tuple[str, ...]) -> InnocentJob:
        return InnocentJob(self._innocent, self._socket, uid, name, flags)

    def _steps(self) -> dict[str, Steps]:
        # At the same time: the daemon has to serve all.
        for name, job in self._jobs.items():
            job.begin(_JOBS[name].steps)
        return {name: job.result() for name, job in self._jobs.items()}

    def _begin_mortal(self) -> MortalJob:
        places = self._random.choice(_MORTAL_NODES)
        across = len(set(places)) > 1
        self._mortal = MortalJob(
            self._trainer,
            _MORTAL,
            _MORTAL_NAME,
            [self._nodes[name].socket for name in places],
            self._nodes["attacked"].peer if across else "",
        )
        self._mortal.begin()
        return self._mortal

    def _lose_a_rank(self, mortal: MortalJob) -> list[str]:
        """Kills a rank, in some step, and begins the job anew. Returns what was wrong."""
        time.sleep(self._random.uniform(0, 0.2))
        self.deaths += 1
        faults = mortal.lose(self._random.randrange(len(_MORTAL_NODES[0])))
        try:
            mortal.begin()
        except JobEnded as ended:
            faults.append(f"the job does not begin anew: {ended}")
        return faults


def line_of(one: Round, seconds: float) -> str:
    """A round as a line of the table."""
    words = [f"{seconds:7.0f}  {one.attack:22}"]
    for name, steps in one.attacked.items():
        idle = one.idle[name]
        words.append(f"{steps.p50_us:10} {steps.p50_us / max(1, idle.p50_us):5.2f}")
        words.append(f"{steps.p99_us:7} {steps.p99_us / max(1, idle.p99_us):5.2f}")
        words.append(f"{steps.max_us:7}")
    for now in one.footprints.values():
        words.append(f"{now.memory_kib / 1024:12.1f} {now.processes:6} {now.files:6}")
        words.append(f"{now.threads:8} {now.mappings:9}")
    return " ".join(words)


_LEGEND = f"""\
Each job's steps under attack, in us. x: how many times as long as without it, at most
{_MEDIAN_TIMES:g} (p50) and {_P99_TIMES:g} (p99), or {_MORE_US} us longer if that is more.
max: the longest step, at most {_LONGEST_US}. Then each daemon and its engines after the attack."""
_HEAD = (
    f"{'seconds':>7}  {'attack':22} "
    + " ".join(f"{name + ' p50':>10} {'x':>5} {'p99':>7} {'x':>5} {'max':>7}" for name in _JOBS)
    + "".join(
        f" {name + ' MiB':>12} {'procs':>6} {'files':>6} {'threads':>8} {'mappings':>9}"
        for name in _NODES
    )
)


def run(options: argparse.Namespace) -> int:
    """Runs the rounds. Returns the exit status."""
    programs = {
        "attacker": find_program("tests/attack/attacker"),
        "memory_attacker": find_program("tests/fault/memory_attacker"),
        "innocent": find_program("tests/attack/innocent"),
        "scripted_trainer": find_program("tests/fault/scripted_trainer"),
    }
    program = find_daemon(options.daemon)
    began = time.monotonic()
    rounds: list[Round] = []
    faults: list[str] = []
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradsync-")))
        folder.chmod(0o755)
        nodes = {
            name: stack.enter_context(StrangerDaemon(program, folder, name, address))
            for name, address in _NODES.items()
        }
        soak = Soak(nodes, programs, options.seed)
        stack.callback(soak.close)
        attacks = options.attacks or list(soak.attacks)
        unknown = [name for name in attacks if name not in soak.attacks]
        if unknown:
            raise WrongAttack(f"no attack {unknown[0]}; there are {', '.join(soak.attacks)}")
        print(f"{_LEGEND}\n{_HEAD}", flush=True)
        try:
            while len(rounds) < len(attacks) or time.monotonic() - began < options.minutes * 60:
                one = soak.run_round(attacks[len(rounds) % len(attacks)])
                rounds.append(one)
                print(line_of(one, time.monotonic() - began), flush=True)
                faults += faults_of(one)
        except (JobEnded, OSError) as ended:  # OSError: there is no daemon to count
            faults.append(str(ended))
        faults += filter(None, (daemon.end() for daemon in nodes.values()))
    growth = growth_of(rounds, len(attacks))
    faults += growth or []
    for fault in faults:
        print(f"DID NOT HOLD: {fault}")
    if growth is None:
        print("Too few rounds: nothing is known about growth. Give it more --minutes.")
    print(
        f"{len(rounds)} rounds of {len(attacks)} attacks, {soak.deaths} deaths, "
        f"{len(faults)} faults in {(time.monotonic() - began) / 60:.0f} min"
    )
    write_json(options.json, content_of(rounds, faults))
    return 1 if faults else 0


def growth_of(rounds: Sequence[Round], attacks: int) -> Optional[list[str]]:
    """What has grown from the second and third time of all attacks to the last, as sentences.

    Before, pools fill up. The smaller of the two counts: otherwise a peak in one would hide a leak.
    Single rounds differ: engines of jobs that have ended stay for up to ten minutes.

    Returns:
      None if there are too few rounds to know.
    """
    span = attacks * math.ceil(_LEAST_ROUNDS / attacks)
    if len(rounds) < 3 * span:
        return None
    second, third, last = rounds[span : 2 * span], rounds[2 * span : 3 * span], rounds[-span:]

    def of(name: str, cycle: Sequence[Round]) -> Footprint:
        return typical([one.footprints[name] for one in cycle])

    return [
        f"node {name}: {fault}"
        for name in rounds[0].footprints
        for fault in grown(least_of(of(name, second), of(name, third)), of(name, last))
    ]


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
    add(
        "--minutes",
        type=count(0, 10**6),
        default=5,
        metavar="N",
        help="default 5; longer if not every attack has run once by then",
    )
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
    except (NotBuilt, WrongAttack) as error:
        print(f"tools/soak: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
