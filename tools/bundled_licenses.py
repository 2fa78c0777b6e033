"""Puts the licences of everything that a wheel bundles into it, for tools/wheel.

    bundled_licenses.py FOLDER

FOLDER is the unpacked wheel, after auditwheel. The licences of other people's code go to licenses/
of its dist-info, in bundled/: a folder for each Debian package, and the texts of Debian's
common-licenses that these refer to. METADATA lists them as PEP 639 says.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable

# Other people's code that the compiler puts into the programs; no library shows it. wheel_test.py
# compares this with what Bazel's targets depend on.
_COMPILED_IN = ("nlohmann-json3-dev",)
_COMPILED_IN_FROM_PYPI = ("googleapis-common-protos",)

_COMMON = re.compile(r"/usr/share/common-licenses/([A-Za-z0-9.+-]*[A-Za-z0-9])")
# Where Debian's packages put libraries. A search for */NAME takes 20 times as long.
_FOLDERS = ("/lib", "/usr/lib", "/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu")
# auditwheel puts the beginning of a file's SHA-256 into its name.
_LIBRARY = re.compile(r"(.+)-([0-9a-f]{8})(\.so.*)")


def _packages_of(libraries: Iterable[str]) -> set[str]:
    """The Debian packages whose files auditwheel has copied."""
    wanted = {}
    for library in libraries:
        match = _LIBRARY.fullmatch(library)
        if match is None:
            sys.exit(f"bundled_licenses.py: {library} is not named as auditwheel names libraries")
        begin, digest, end = match.groups()
        wanted[begin + end] = digest
    paths = [f"{folder}/{name}" for folder in _FOLDERS for name in wanted]
    # Says nothing on standard output of a path that no package has.
    found = subprocess.run(
        ["dpkg-query", "--search", *paths], capture_output=True, text=True, check=False
    )
    packages = set()
    for line in found.stdout.splitlines():
        package, _, path = line.partition(": ")
        content = pathlib.Path(path)
        digest = wanted.get(content.name, "")
        if digest and hashlib.sha256(content.read_bytes()).hexdigest().startswith(digest):
            packages.add(package.partition(":")[0])
            del wanted[content.name]
    if wanted:
        sys.exit(f"bundled_licenses.py: no installed Debian package has {', '.join(wanted)}")
    return packages


def _add_texts(libraries: Iterable[str], bundled: pathlib.Path) -> None:
    """Copies the texts."""
    common = set()
    for package in sorted({*_packages_of(libraries), *_COMPILED_IN}):
        text = pathlib.Path("/usr/share/doc", package, "copyright")
        (bundled / package).mkdir(parents=True)
        shutil.copyfile(text, bundled / package / "copyright")
        common |= set(_COMMON.findall(text.read_text(encoding="utf-8")))
    (bundled / "common-licenses").mkdir()
    for name in sorted(common):
        text = pathlib.Path("/usr/share/common-licenses", name)
        shutil.copyfile(text, bundled / "common-licenses" / name)
    for name in _COMPILED_IN_FROM_PYPI:
        distribution = importlib.metadata.distribution(name)
        (bundled / name).mkdir()
        for file in distribution.files or ():
            if file.match("*.dist-info/licenses/*"):
                shutil.copyfile(str(distribution.locate_file(file)), bundled / name / file.name)


def main(folder: pathlib.Path) -> None:
    """Changes the unpacked wheel."""
    (information,) = folder.glob("*.dist-info")
    (libraries,) = folder.glob("*.libs")
    licenses = information / "licenses"
    _add_texts((path.name for path in libraries.iterdir()), licenses / "bundled")
    added = sorted(path for path in (licenses / "bundled").rglob("*") if path.is_file())
    metadata = information / "METADATA"
    head, blank, body = metadata.read_text(encoding="utf-8").partition("\n\n")
    head += "".join(f"\nLicense-File: {path.relative_to(licenses)}" for path in added)
    metadata.write_text(head + blank + body, encoding="utf-8")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
