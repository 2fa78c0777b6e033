"""The rank's side of RankTeam, for ranks that are Python programs.

    python RANK.py SOCKET RANK

with `serve(Servant)` as the program: `Servant(configuration)` joins the other ranks, and its
methods are what the bench calls.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from typing import Any, Callable

from launcher import end_with_parent


def serve(make: Callable[[dict[str, Any]], Any]) -> None:
    """Does what the bench asks for until it closes the connection."""
    end_with_parent()
    path, rank = sys.argv[1:]
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    lines = connection.makefile("r", encoding="utf-8")

    def send(message: dict[str, Any]) -> None:
        connection.sendall(json.dumps(message).encode() + b"\n")

    send({"rank": int(rank), "pid": os.getpid()})
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
