"""The daemon of a job: one that runs already, or a private one."""

from __future__ import annotations

import errno
import fcntl
import os
import pathlib
import shutil
import socket
import stat
import tempfile
from typing import Optional

from gradsync import _programs
from gradsync.options import SessionOptions
from gradsync.run.process import Process

_LONGEST_SOCKET_PATH = 103  # with "-fd" it still fits
_SOCKET = "gradsyncd.sock"
_NOTIFY_SOCKET = "notify.sock"
# No other program uses this prefix, so a launcher may remove the directory of an ended one.
_PREFIX = "gradsync-run-"
_CONNECT_S = 5.0
# systemd's variables. They are meant for the launcher's own service.
_OTHERS_VARIABLES = ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "WATCHDOG_USEC", "WATCHDOG_PID")


def usual_socket() -> str:
    """The socket of the daemon that this job uses if one answers."""
    return os.environ.get("GRADSYNC_SOCKET") or SessionOptions.socket


def why_silent(path: str) -> Optional[str]:
    """Says that no daemon answers at `path`, or refuses this user, and why; None: one answers."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_CONNECT_S)
        try:
            connection.connect(path)
        except BlockingIOError:  # its queue is full: it has a lot to do
            return None
        except OSError as error:
            if error.errno == errno.EACCES:
                return (
                    f"you may not connect to {path}: join its group (gradsyncctl doctor --socket "
                    f"{path} says which)"
                )
            why = error.strerror or str(error)
            if error.errno == errno.ENOENT:
                why = "there is no such socket"
            return f"no daemon answers at {path} ({why})"
    return None


class PrivateDaemon:
    """A gradsyncd in a directory that only this user can enter. One thread.

    close() removes the directory, after the process has ended. A launcher that is killed leaves it
    behind; this user's next one removes it.

    Attributes:
      socket: path of its socket.
      process: the daemon.
      ready: can be read when is_ready() may have changed.
    """

    def __init__(self) -> None:
        """Starts it.

        Raises:
          OSError: there is no gradsyncd, or no directory for it.
        """
        self._directory, self._lock = _make_directory()
        self.ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._said = b""
        try:
            self.socket = os.path.join(self._directory, _SOCKET)
            notify = os.path.join(self._directory, _NOTIFY_SOCKET)
            self.ready.bind(notify)
            program = os.environ.get("GRADSYNC_DAEMON") or _programs.find("gradsyncd")
            environment = {**os.environ, "NOTIFY_SOCKET": notify}
            for name in _OTHERS_VARIABLES:
                environment.pop(name, None)
            command = [program, f"--socket={self.socket}", "--socket_mode=0600"]
            self.process = Process("gradsyncd", command, environment)
        except BaseException:
            self.close()
            raise

    def is_ready(self) -> bool:
        """Whether it has said so."""
        try:
            while True:
                self._said += self.ready.recv(4096) + b"\n"
        except BlockingIOError:
            pass
        return b"READY=1" in self._said

    def close(self) -> None:
        """Removes what it used."""
        self.ready.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        os.close(self._lock)


def _make_directory() -> tuple[str, int]:
    """A new directory of mode 0700, whose path is short enough for sockets.

    Returns:
      Its path, and a descriptor that keeps it locked while the launcher lives.
    """
    for base in (_runtime_directory(), tempfile.gettempdir(), "/tmp"):
        if base and len(os.path.join(base, _PREFIX + 8 * "x", _SOCKET)) <= _LONGEST_SOCKET_PATH:
            _remove_left_behind(base)
            directory = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            # No other launcher locks it: there is no socket in it yet.
            fcntl.flock(lock, fcntl.LOCK_EX)
            return directory, lock
    raise AssertionError("/tmp is short enough")


def _remove_left_behind(base: str) -> None:
    """Removes this user's directories in `base` whose launchers and daemons have ended."""
    for directory in pathlib.Path(base).glob(_PREFIX + 8 * "?"):
        try:
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # another user's, or no directory
            continue
        try:
            if os.fstat(lock).st_uid != os.getuid() or not (directory / _NOTIFY_SOCKET).exists():
                continue
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if why_silent(str(directory / _SOCKET)) is not None:
                shutil.rmtree(directory, ignore_errors=True)
        except OSError:  # its launcher lives
            continue
        finally:
            os.close(lock)


def _runtime_directory() -> Optional[str]:
    """$XDG_RUNTIME_DIR, if it is this user's and can be used."""
    name = os.environ.get("XDG_RUNTIME_DIR")
    if not name or not os.path.isabs(name):
        return None
    try:
        found = pathlib.Path(name).stat()
    except OSError:
        return None
    usable = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return name if usable and os.access(name, os.W_OK | os.X_OK) else None
