"""Checks that includes and forward declarations point downward through the rooms, and that each
foreign API is used only in its rooms.

Prints a line `file:line: what is wrong` per fault. The exit status is 1 if there is a fault.
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
    "worker",
    "job",
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
# Matches "class Job;" and "class Job final {" without indentation, as in a namespace.
CLASS = re.compile(r"^(?:class|struct|enum(?: class| struct)?) (?:[A-Z_]+(?:\(.*?\))? )?(\w+)(.*)")
FRIEND = re.compile(r"^\s+friend (?:class|struct) (?:\w+::)*(\w+);")


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


def classes(lines):
    """Yields (line number, name, whether it is defined here) for each class of a file."""
    for number, line in enumerate(lines, 1):
        friend = FRIEND.match(line)
        if friend:
            yield number, friend[1], False
        match = CLASS.match(line)
        if match:
            yield number, match[1], not match[2].rstrip().endswith(";") or "{" in match[2]


def main():
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        + ["--", "*.cc", "*.h", "*.c", "*.cu", "*.cuh"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    files = {
        path: pathlib.Path(path).read_text(encoding="utf-8").splitlines()
        for path in filter(None, listed.split("\0"))
        if pathlib.Path(path).is_file()
    }
    definers = {}  # by class: the files that define one of this name
    for path, lines in files.items():
        for _, name, defined in classes(lines):
            if defined:
                definers.setdefault(name, []).append(path)
    faults = []
    for path, lines in files.items():
        for number, line in enumerate(lines, 1):
            match = INCLUDE.match(line)
            wrong = match and fault(path, match[1])
            if wrong:
                faults.append(f"{path}:{number}: {match[1]}: {wrong}")
        for number, name, defined in classes(lines):
            # A forward declaration counts as an include of the file that defines the class. Of
            # several classes of that name, the one in the same top folder is meant.
            found = definers.get(name, [])
            near = [file for file in found if file.split("/")[0] == path.split("/")[0]]
            wrong = [fault(path, definer) for definer in near or found]
            if not defined and wrong and all(wrong):
                faults.append(f"{path}:{number}: class {name}: {wrong[0]}")
    if faults:
        print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
