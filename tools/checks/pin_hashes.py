"""Writes the hashes of the pinned Python packages into tools/requirements*.txt.

    .venv/bin/python tools/checks/pin_hashes.py

Run it after a version has changed. It asks PyPI for each `name==version`, and takes the SHA-256 of
the wheels that fit this machine, or of the source archive if none fits. A line whose hashes are
right stays as it is, and keeps hashes that PyPI does not know. Exit status: 0 written, 1 PyPI does
not have a package.
"""

import json
import re
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.tags import sys_tags
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

# A pin, also behind `# grpcurl: `, with the hashes that follow it.
PIN = re.compile(r"^(# \w+: )?([\w.-]+)==([^\s;]+)((?:(?: \\\n   )? --hash=sha256:\w+)*)$", re.M)
TAGS = frozenset(sys_tags())


def hashes(name: str, version: Version, source: bool) -> list[str]:
    """Those of the files that pip would choose among."""
    request = urllib.request.Request(
        f"https://pypi.org/simple/{name.lower()}/",
        headers={"Accept": "application/vnd.pypi.simple.v1+json"},
    )
    with urllib.request.urlopen(request) as answer:
        files = {file["filename"]: file["hashes"]["sha256"] for file in json.load(answer)["files"]}
    wheels, archives = [], []
    for file, digest in files.items():
        try:
            _, of, _, tags = parse_wheel_filename(file)
            if of == version and tags & TAGS:
                wheels.append(digest)
        except InvalidWheelFilename:
            try:
                if parse_sdist_filename(file)[1] == version:
                    archives.append(digest)
            except InvalidSdistFilename:
                pass  # an installer of old
    return archives if source or not wheels else wheels


def pinned(pin: re.Match[str]) -> str:
    mark, name, version, present = pin.groups(default="")
    known = re.findall(r"sha256:(\w+)", present)
    found = hashes(name, Version(version), source=bool(mark))
    if not found:
        sys.exit(f"PyPI has no file of {name} {version} for this machine")
    if not set(known) >= set(found):
        known = found
    between = " " if mark else " \\\n    "
    return f"{mark}{name}=={version}" + "".join(f"{between}--hash=sha256:{one}" for one in known)


def with_hashes(text: str) -> str:
    with ThreadPoolExecutor(8) as pool:
        lines = pool.map(pinned, PIN.finditer(text))
        return PIN.sub(lambda _: next(lines), text)


def main() -> None:
    for path in sorted(Path(__file__).parents[1].glob("requirements*.txt")):
        path.write_text(with_hashes(path.read_text()))


if __name__ == "__main__":
    main()
