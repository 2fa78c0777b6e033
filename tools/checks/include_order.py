"""Checks that includes point downward through the rooms, and that foreign APIs stay in theirs.

Prints `file:line: what is wrong`, one line each; exit status 1 if there is any.
"""

import pathlib
import re
import subprocess
import sys

# From top to bottom: a room includes itself and rooms below it. All may include proto/.
DAEMON_ROOMS = [
    "app",
    "config",
    "peer",
    "rpc",
    "session",
    "job",
    "worker",
    "engine",
    "reduce",
    "arena",
    "telemetry",
    "cuda",
    "base",
]

GRPC_ROOMS = (
    "client/",
    "daemon/app/",
    "daemon/peer/",
    "daemon/rpc/",
    "tests/",
    "tools/",
)

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')


def daemon_room(path):
    """Depth of a file below daemon/: main.cc is 0. None if it is in no room of the list."""
    parts = path.split("/")
    if len(parts) == 2:
        return 0
    return 1 + DAEMON_ROOMS.index(parts[1]) if parts[1] in DAEMON_ROOMS else None


def fault(path, include):
    """What is wrong with one include, or None."""
    name = path.rsplit("/", 1)[-1].lower()
    free = path.startswith(("tests/", "tools/"))

    if include.startswith(("grpc/", "grpcpp/", "grpc++/")) or include.endswith(".grpc.pb.h"):
        if not path.startswith(GRPC_ROOMS):
            return "gRPC belongs to " + ", ".join(GRPC_ROOMS)
    if include.startswith("gloo/") and "gloo" not in name:
        return "Gloo belongs to files named *gloo*"
    if re.search(r"(^|/)nccl[^/]*\.h$", include) and "/" not in include and "nccl" not in name:
        return "NCCL belongs to files named *nccl*"
    if re.match(r"cuda[^/]*\.h$", include) and "cuda" not in name and "nccl" not in name:
        return "CUDA belongs to files named *cuda*"
    if free:
        return None

    client_include = include.startswith("client/") or (
        include.startswith("gradsync/") and pathlib.Path("client/include", include).exists()
    )
    if path.startswith("proto/"):
        if include.startswith(("client/", "daemon/", "tests/", "tools/")) or client_include:
            return "proto/ stands on its own"
    elif path.startswith("client/"):
        if path.startswith("client/examples/") and include.startswith("tools/virtual_network/"):
            return None  # programs, not the library
        if include.startswith(("daemon/", "tests/", "tools/")):
            return "the client knows proto/ only"
    elif path.startswith("daemon/"):
        if client_include or include.startswith(("tests/", "tools/")):
            return "the daemon shares only proto/ with the rest"
        if include.startswith("daemon/"):
            here, there = daemon_room(path), daemon_room(include)
            if here is None or there is None:
                return "a room that the list in this check does not have"
            if there < here:
                return "this room is above"
    return None


def main():
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        + ["--", "*.cc", "*.h", "*.c", "*.cu", "*.cuh"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    faults = []
    for path in filter(None, listed.split("\0")):
        file = pathlib.Path(path)
        if not file.is_file():
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            match = INCLUDE.match(line)
            wrong = match and fault(path, match[1])
            if wrong:
                faults.append(f"{path}:{number}: {match[1]}: {wrong}")
    if faults:
        print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
