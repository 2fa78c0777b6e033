"""The bundle's glibc, for a machine with an older one."""

import os
import re
import struct


def is_needed(version):
    """Whether this machine's is older than the bundle's."""
    return version_of(os.confstr("CS_GNU_LIBC_VERSION")) < version_of(version)


def version_of(text):
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def use(bundle, version):
    """Makes the bundle's programs run with the bundle's glibc."""
    if not (bundle / "glibc").exists():  # of an earlier run
        (bundle / f"glibc-{version}").rename(bundle / "glibc")
    loader = next((bundle / "glibc").glob("ld-linux*.so.*"))
    loader.chmod(0o755)
    for folder in ("bin", "tests", "experiments", "fakes"):
        for program in (bundle / folder).glob("*"):
            if ".so" not in program.name:
                set_interpreter(program, str(loader))


def set_interpreter(program, loader):
    """Writes another loader into PT_INTERP, where tools/gpu_bundle left room."""
    pt_interp = 3
    with open(program, "r+b") as file:
        header = file.read(64)
        (table,) = struct.unpack_from("<Q", header, 32)
        size, count = struct.unpack_from("<HH", header, 54)
        for index in range(count):
            file.seek(table + index * size)
            entry = file.read(size)
            if struct.unpack_from("<I", entry)[0] != pt_interp:
                continue
            (offset,) = struct.unpack_from("<Q", entry, 8)
            (room,) = struct.unpack_from("<Q", entry, 32)
            name = os.fsencode(loader) + b"\0"
            if len(name) > room:
                raise SystemExit(f"gpu_check: {loader} is too long a path; unpack elsewhere")
            file.seek(offset)
            file.write(name.ljust(room, b"\0"))
            return
