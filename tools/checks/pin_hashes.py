"""Writes the hashes of the pinned Python packages into tools/requirements*.txt.

    .venv/bin/python tools/checks/pin_hashes.py

Run it after a version has changed. It lets pip download every package, 1 GB in all, and takes the
SHA-256 of what pip would install here. Exit status: 0 written, 1 pip cannot download a package.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

# A pin, also behind `# grpcurl: `, with the hashes that follow it.
PIN = re.compile(r"^(# \w+: )?([\w.-]+==[^\s;]+)((?:(?: \\\n   )? --hash=sha256:\w+)*)$", re.M)


def sha256_of(requirement: str, *options: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *options]
        if subprocess.run([*command, "-d", folder, requirement]).returncode:
            sys.exit(1)
        (file,) = Path(folder).iterdir()
        return hashlib.sha256(file.read_bytes()).hexdigest()


def with_hash(pin: re.Match[str]) -> str:
    mark, requirement, _ = pin.groups(default="")
    if mark:  # tools/setup unpacks the source archive itself
        return f"{mark}{requirement} --hash=sha256:{sha256_of(requirement, '--no-binary=:all:')}"
    return f"{requirement} \\\n    --hash=sha256:{sha256_of(requirement)}"


def main() -> None:
    for path in sorted(Path(__file__).parents[1].glob("requirements*.txt")):
        print(path.name)
        path.write_text(PIN.sub(with_hash, path.read_text()))


if __name__ == "__main__":
    main()
