"""The logs of a run, and the archives in which they leave the machine."""

import pathlib
import re
import tarfile
import zlib

# What a machine may give back: files of 16 MiB each, two of them the report.
ARCHIVES = 6
ARCHIVE_BYTES = 15 << 20


class Logs:
    """A folder per part, with the output of its processes, its daemons' logs and NCCL's."""

    def __init__(self, folder, archive_bytes=ARCHIVE_BYTES):
        self.folder = folder
        self.archive_bytes = archive_bytes
        self.parts = 0
        self.packed_bytes = {}  # by path and size: the size when packed

    def start_part(self, name):
        """The folder of the next part."""
        self.parts += 1
        folder = self.folder / f"{self.parts:02}-{re.sub(r'[^A-Za-z0-9]+', '-', name)}"
        folder.mkdir(parents=True)
        return folder

    def pack(self, out):
        """Writes logs.tar.gz, logs-2.tar.gz, ... Returns the logs that did not fit."""
        archives, room, left_out = [[]], self.archive_bytes, []
        for path in sorted(self.folder.rglob("*")):
            if not path.is_file() or path.stat().st_size == 0:
                continue
            packed = self.packed(path)
            if room < packed <= self.archive_bytes and len(archives) < ARCHIVES:
                archives.append([])
                room = self.archive_bytes
            if packed > room:
                left_out.append(str(path.relative_to(self.folder)))
                continue
            archives[-1].append(path)
            room -= packed
        for number, paths in enumerate(archives, 1):
            name = f"logs-{number}.tar.gz" if number > 1 else "logs.tar.gz"
            write(out / name, paths, self.folder)
        return left_out

    def packed(self, path):
        key = (path, path.stat().st_size)
        if key not in self.packed_bytes:
            # A header, and about what gzip makes of it.
            self.packed_bytes[key] = 1024 + len(zlib.compress(path.read_bytes(), 1))
        return self.packed_bytes[key]


def write(archive, paths, folder):
    new = archive.with_name(archive.name + ".new")
    with tarfile.open(new, "w:gz") as packed:
        for path in paths:
            packed.add(path, pathlib.Path("logs") / path.relative_to(folder))
    new.replace(archive)
