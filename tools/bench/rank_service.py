"""The rank's side of RankTeam, for ranks that are Python programs.

    python RANK.py SOCKET RANK   # one rank
    python RANK.py SOCKET        # WORLD_SIZE ranks

with `serve(Servant)` as the program: `Servant(configuration)` joins the other ranks, and its
methods are what the bench calls. In the second form the process forks the ranks, so that they
import PyTorch once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from typing import Any, Callable, NoReturn

from launcher import end_with_parent


def serve(make: Callable[[dict[str, Any]], Any]) -> None:
    """Does what the bench asks for until it closes the connection."""
    end_with_parent()
    path, *given = sys.argv[1:]
    rank = int(given[0]) if given else _fork_ranks(int(os.environ["WORLD_SIZE"]))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    lines = connection.makefile("r", encoding="utf-8")

    def send(message: dict[str, Any]) -> None:
        connection.sendall(json.dumps(message).encode() + b"\n")

    send({"rank": rank, "pid": os.getpid()})
    try:
        servant = make(json.loads(lines.readline()))
        send({"answer": None})
        for line in lines:
            command = json.loads(line)
            send({"answer": getattr(servant, command.pop("call"))(**command)})
        servant.close()
    except BaseException:
        # The bench may have ended.
        try:
            send({"error": traceback.format_exc()})
        except OSError:
            pass
    finally:
        # Without the libraries' own ends, some of which wait for other ranks.
        sys.stderr.flush()
        os._exit(0)


def _fork_ranks(count: int) -> int:
    """Forks the ranks; returns in each of them, with its number."""
    ranks: dict[int, int] = {}
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            end_with_parent()
            return rank
        ranks[pid] = rank
    _await_ranks(ranks)


def _await_ranks(ranks: dict[int, int]) -> NoReturn:
    """Ends this process after all ranks, or when one of them is killed. Args: ranks: by pid."""

    def end_ranks(*_: object) -> None:
        for pid in ranks:
            os.kill(pid, signal.SIGTERM)

    ended = 0  # status of the first rank that was killed
    signal.signal(signal.SIGTERM, end_ranks)
    while ranks:
        pid, status = os.wait()
        rank = ranks.pop(pid)
        if status != 0 and ended == 0 and os.waitstatus_to_exitcode(status) != -signal.SIGTERM:
            ended = 1
            print(f"rank {rank} (pid {pid}) ended: status {status}", file=sys.stderr)
            end_ranks()
    sys.stderr.flush()
    os._exit(ended)
