"""A Debian with Python and nothing to build with, in which an ordinary user runs commands."""

import importlib.metadata
import os
import pathlib
import re
import subprocess
import zipfile

import pytest

_USER = 1000
_HOME = "/home/user"
_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
# What pip and Python need, and the C++ library, which every Debian has because of apt.
_PACKAGES = ("python3-venv", "libstdc++6")
_NOT_COPIED = re.compile(r"/usr/share/(doc|locale|man|lintian|bug)/|.*\.pyc$")


class BareSystem:
    """A root directory. Its user has no rights outside of /home/user and /tmp. Needs root.

    Attributes:
      root: path of the directory.
      home: path of the user's home in it.
    """

    def __init__(self, root):
        self.root = root
        self.home = root / _HOME[1:]
        root.chmod(0o755)
        for folder in ("dev", "proc", "tmp", _HOME[1:]):
            (root / folder).mkdir(parents=True, exist_ok=True)
        (root / "tmp").chmod(0o1777)
        os.chown(self.home, _USER, _USER)

    def run(self, *command):
        """Runs a command in the user's home; returns its subprocess.CompletedProcess."""
        enter = (
            'mount --rbind /dev "$0/dev" && mount -t proc proc "$0/proc" && '
            f'exec chroot --userspec={_USER}:{_USER} --groups={_USER} "$0" "$@"'
        )
        go_home = ["/usr/bin/env", f"--chdir={_HOME}"]
        return subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", enter]
            + [self.root, *go_home, *command],
            # pip would compile all of NumPy, which takes longer than to install it.
            env={"PATH": _PATH, "HOME": _HOME, "PIP_NO_COMPILE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )


def require_root():
    """Skips the test for other users."""
    if os.geteuid() != 0:
        pytest.skip("only root can change the root directory")


def copy_of_this_system(root):
    """Copies the packages of Python, as Debian has installed them on this machine."""
    require_root()
    for folder in ("bin", "lib", "lib64", "sbin"):
        (root / "usr" / folder).mkdir(parents=True)
        (root / folder).symlink_to(f"usr/{folder}")
    listed = _dpkg("-L", *_closure((*_PACKAGES, "coreutils", "dash"))).splitlines()
    files = [name for name in listed if os.path.isfile(name) or os.path.islink(name)]
    files = [name[1:] for name in files if not _NOT_COPIED.match(name)]
    packed = subprocess.Popen(
        ["tar", "--create", "--directory=/", "--null", "--files-from=-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    unpacked = subprocess.Popen(
        ["tar", "--extract", f"--directory={root}", "--keep-directory-symlink"],
        stdin=packed.stdout,
    )
    packed.stdin.write("\0".join(files).encode())
    packed.stdin.close()
    assert packed.wait(60) == 0 and unpacked.wait(60) == 0
    return BareSystem(root)


def new_debian(root):
    """Installs a minimal Debian 12, by debootstrap."""
    require_root()
    program = "/usr/sbin/debootstrap"
    assert os.path.exists(program), "install Debian's package debootstrap"
    subprocess.run(
        [program, "--variant=minbase", f"--include={','.join(_PACKAGES)}", "bookworm", root],
        check=True,
        env={**os.environ, "PATH": _PATH},
        stdin=subprocess.DEVNULL,
        timeout=800,
    )
    return BareSystem(root)


def wheel_of_installed(name, folder):
    """Makes a wheel of a package that is installed here: pip's index cannot be asked."""
    distribution = importlib.metadata.distribution(name)
    information = pathlib.Path(str(distribution._path))
    tag = re.search(r"^Tag: (.*)$", (information / "WHEEL").read_text(), re.MULTILINE).group(1)
    wheel = folder / f"{name}-{distribution.version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in distribution.files:
            if ".." not in file.parts and file.suffix != ".pyc":
                archive.write(distribution.locate_file(file), str(file))
    return wheel


def _closure(names):
    """Installed packages: these, and what they depend on."""
    depends, provider = {}, {}
    fields = r"${db:Status-Abbrev}\t${Package}\t${Provides}\t${Pre-Depends}, ${Depends}\n"
    for line in _dpkg("--show", f"--showformat={fields}").splitlines():
        status, package, provides, needs = line.split("\t")
        if not status.startswith("ii"):
            continue
        depends[package] = [
            [_name(other) for other in one.split("|")] for one in needs.split(",") if one.strip()
        ]
        for virtual in filter(None, [package, *map(_name, provides.split(","))]):
            provider.setdefault(virtual, package)
        provider[package] = package
    found, left = set(), list(names)
    while left:
        package = provider[left.pop()]
        if package not in found:
            found.add(package)
            left += [next(o for o in choice if o in provider) for choice in depends[package]]
    return sorted(found)


def _name(words):
    match = re.match(r"\s*([a-z0-9][a-z0-9+.-]*)", words)
    return match.group(1) if match else ""


def _dpkg(*words):
    return subprocess.run(
        ["dpkg-query", *words], check=True, capture_output=True, text=True, timeout=60
    ).stdout
