"""The command line of gradsync.run: torchrun's words, as far as they make sense here."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import re
import sys
import uuid
from collections.abc import Sequence
from typing import Any, Callable, NoReturn, Optional

_MOST_RANKS = 256  # a user's sessions, by default
_MOST_NODES = 256  # a job cannot span more: kMaxEngineNodes of the daemon
_MOST_RESTARTS = 1_000_000
_TORCHRUNS_PORT = 29500

_DESCRIPTION = """\
Starts the ranks of a training job on this node, as torchrun does, and lets them use gradsyncd:

  python -m gradsync.run --nproc-per-node 2 train.py --epochs 3

Each rank runs train.py with torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...).
It finds the daemon by GRADSYNC_SOCKET. If no daemon answers there, or at
/run/gradsync/gradsyncd.sock without that variable, the launcher starts a private one. That needs no
root, serves this user only, and ends with the job.

Every line that a rank prints is shown with its rank in front. If a rank fails, the launcher ends
the others, and shows which rank failed first, how, and its last lines.

With --max-restarts the launcher starts that rank again instead, and leaves the others alone. They
wait for it if the script joins with on_rank_loss="hold". Otherwise they fail too, and are started
again as well.
"""
_EPILOG = """\
A rank is restarted at once, then after 1 s, 2 s, 4 s, up to 30 s. If it has run for more than 30 s,
this begins anew. TORCHELASTIC_RESTART_COUNT tells it how often. If it was killed after it had left
the job, so that it cannot join again (LEFT), it has come to a good end.

SIGINT (Ctrl-C), SIGTERM, SIGHUP and SIGQUIT are passed on to every rank. Ranks that are still there
after --shutdown-timeout are killed; a second signal kills them at once. SIGUSR1 and SIGUSR2 are
passed on too, and the launcher goes on. If the launcher itself is killed, the ranks and the private
daemon die with it. When a rank ends, the launcher kills the processes that are left in its process
group.

OMP_NUM_THREADS is 1 for several ranks, unless it is set. The ranks' standard input is empty. A
progress bar, which overwrites its line, shows as a new line every 5 s at most. The ranks are
coloured on a terminal, unless NO_COLOR is set.

Several nodes: run this on each, where a gradsyncd with --peer_listen runs already:

  python -m gradsync.run --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --nproc-per-node 2 train.py

Exit status: 0 if every rank exits with 0. Else that of the rank that failed first, or 128 + N if
signal N killed it. 128 + N if signal N stopped the launcher, unless every rank exits with 0. 1 if
the launcher failed first: no daemon, a rank that does not start, output that cannot be written. 2
for wrong usage.
"""

# Options of torchrun that change nothing on one node.
_RENDEZVOUS = ("--rdzv-backend", "--rdzv-conf", "--rdzv-endpoint")
# Options of torchrun that gradsync.run refuses by name, and whether they have a value.
_TORCHRUNS_OWN = {
    **dict.fromkeys(
        [
            "--duplicate-stderr-filters",
            "--duplicate-stdout-filters",
            "--event-log-handler",
            "--local-addr",
            "--local-ranks-filter",
            "--log-dir",
            "--logs-specs",
            "--monitor-interval",
            "--numa-binding",
            "--redirects",
            "--role",
            "--signals-to-handle",
            "--start-method",
            "--tee",
            "-r",
            "-t",
        ],
        True,
    ),
    **dict.fromkeys(["--run-path", "--virtual-local-rank"], False),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to start.

    Attributes:
      command: of every rank.
      ranks: on this node.
      nodes: of the job.
      node_rank: this node's number.
      master_addr: where rank 0 is.
      master_port: for its store; 0: a free one.
      run_id: the same on every node.
      max_restarts: of each rank.
      shutdown_timeout: seconds from a signal until ranks are killed.
    """

    command: Sequence[str]
    ranks: int
    nodes: int
    node_rank: int
    master_addr: str
    master_port: int
    run_id: str
    max_restarts: int
    shutdown_timeout: float


def parse(words: Sequence[str]) -> Options:
    """Reads the command line. Wrong usage ends the program with 2."""
    parser = _make_parser()
    given = parser.parse_args(words)
    if given.nnodes == 1:
        if given.node_rank:
            parser.error(
                f"--node-rank {given.node_rank} needs --nnodes {given.node_rank + 1} or more"
            )
    elif given.standalone:
        parser.error(
            f"--standalone is a job on one node, but --nnodes is {given.nnodes}; leave one out"
        )
    elif given.node_rank is None or given.master_addr is None:
        parser.error(
            f"--nnodes {given.nnodes} needs --node-rank (0 to {given.nnodes - 1}, another on each "
            "node) and --master-addr (where node 0 is, the same on each node)"
        )
    elif given.node_rank >= given.nnodes:
        parser.error(f"--node-rank takes a number below --nnodes, which is {given.nnodes}")
    several = given.nnodes > 1
    if several and given.rendezvous:
        parser.error(_not_ours(given.rendezvous))
    return Options(
        command=_command(parser, given),
        ranks=given.nproc_per_node,
        nodes=given.nnodes,
        node_rank=given.node_rank or 0,
        master_addr=given.master_addr or "127.0.0.1",
        master_port=given.master_port or (_TORCHRUNS_PORT if several else 0),
        run_id=given.rdzv_id or ("none" if several else uuid.uuid4().hex),
        max_restarts=given.max_restarts,
        shutdown_timeout=given.shutdown_timeout,
    )


def _command(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Sequence[str]:
    if given.no_python:
        if given.module:
            parser.error("--no-python and --module do not go together")
        return [given.script, *given.arguments]
    # -u: a line is shown when it is printed.
    python = [sys.executable, "-u"]
    if given.module:
        return [*python, "-m", given.script, *given.arguments]
    if not os.path.exists(given.script):
        parser.error(f"there is no script '{given.script}'; for a module, use -m")
    return [*python, given.script, *given.arguments]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # "argument --nnodes: takes a number" -> "--nnodes takes a number".
        message = re.sub(r"^argument (?:-m/)?(\S*): ", r"\1 ", message)
        self.exit(2, f"gradsync.run: {message}\nTry 'python -m gradsync.run --help'.\n")


class _Refuse(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, _: Any, __: Any, name: Any = None) -> None:
        parser.error(_not_ours(name))


class _Remember(argparse.Action):
    def __call__(self, _: Any, given: argparse.Namespace, __: Any, name: Any = None) -> None:
        setattr(given, self.dest, name)


def _not_ours(name: str) -> str:
    return (
        f"{name} is torchrun's, and gradsync.run does not have it. Start gradsyncd, name its "
        "socket in GRADSYNC_SOCKET, and use torchrun"
    )


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m gradsync.run",
        usage="python -m gradsync.run [OPTION]... [-m] SCRIPT [ARGUMENT]...",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=functools.partial(
            argparse.RawDescriptionHelpFormatter, max_help_position=30, width=100
        ),
        allow_abbrev=False,
    )
    add = functools.partial(_add, parser)
    add("--nproc-per-node", "ranks on this node; default 1", _ranks, "N", 1)
    add("--nnodes", "nodes of the job; default 1", _nodes, "N", 1)
    add("--node-rank", "this node's number, from 0", _count(0, _MOST_NODES), "N")
    add("--master-addr", "node 0; default for one node: 127.0.0.1", str, "HOST")
    add(
        "--master-port",
        f"of node 0; default: a free one, for several nodes {_TORCHRUNS_PORT}",
        _count(1, 65535),
        "PORT",
    )
    add("--rdzv-id", "the job's name; default: a new one, for several nodes 'none'", str, "NAME")
    add("--max-restarts", "of each rank that fails; default 0", _count(0, _MOST_RESTARTS), "N", 0)
    add("--shutdown-timeout", "seconds until ranks are killed; default 30", _seconds, "S", 30.0)
    add("--standalone", "one node, which is the default")
    add("--no-python", "SCRIPT is a program; run it without Python")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a Python module")
    for name, has_value in _TORCHRUNS_OWN.items():
        nargs = None if has_value else 0
        _add_hidden(parser, name, action=_Refuse, nargs=nargs)
    for name in _RENDEZVOUS:
        _add_hidden(parser, name, action=_Remember, dest="rendezvous")
    parser.add_argument("script", metavar="SCRIPT", help="what every rank runs")
    rest = parser.add_argument(
        "arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="of the script"
    )
    rest.required = False  # a message about a missing script does not name it
    return parser


def _add_hidden(parser: argparse.ArgumentParser, name: str, **settings: Any) -> None:
    for spelling in sorted({name, _with_underscores(name)}):
        parser.add_argument(spelling, help=argparse.SUPPRESS, **settings)


def _add(
    parser: argparse.ArgumentParser,
    name: str,
    what: str,
    parse: Optional[Callable[[str], Any]] = None,
    metavar: str = "",
    default: Any = None,
) -> None:
    """Adds an option, without `parse` a switch. torchrun takes --nproc_per_node as well."""
    settings: dict[str, Any] = {"action": "store_true"}
    if parse is not None:
        settings = {"type": parse, "metavar": metavar}
    parser.add_argument(name, default=default, help=what, **settings)
    if _with_underscores(name) != name:
        parser.add_argument(
            _with_underscores(name), default=argparse.SUPPRESS, help=argparse.SUPPRESS, **settings
        )


def _with_underscores(name: str) -> str:
    return name[:2] + name[2:].replace("-", "_")


def _count(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"takes a number from {least} to {most}, not '{text}'")
        return int(text)

    return parse


def _ranks(text: str) -> int:
    remedies = {"gpu": "$(nvidia-smi --list-gpus | wc -l)", "cpu": "$(nproc)"}
    remedies["auto"] = " or ".join(remedies.values())
    try:
        return _count(1, _MOST_RANKS)(text)
    except argparse.ArgumentTypeError as error:
        remedy = f"; in a shell give {remedies[text]}" if text in remedies else ""
        raise argparse.ArgumentTypeError(f"{error}{remedy}") from None


def _nodes(text: str) -> int:
    least, colon, most = text.partition(":")
    try:
        return _count(1, _MOST_NODES)(least if least == most else text)
    except argparse.ArgumentTypeError as error:
        remedy = "; the number of nodes is fixed: give the largest" if colon else ""
        raise argparse.ArgumentTypeError(f"{error}{remedy}") from None


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text) or float(text) > 86400:
        raise argparse.ArgumentTypeError(f"takes seconds from 0 to 86400, not '{text}'")
    return float(text)
