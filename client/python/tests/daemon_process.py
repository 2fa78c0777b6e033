"""A real gradsyncd, on a socket of its own."""

import os
import pathlib
import signal
import subprocess
import tempfile

_TREE = pathlib.Path(__file__).resolve().parents[3]


class DaemonProcess:
    """Killed by close(). Nobody waits until it listens: Session.join() does that.

    `command_prefix` stands before its command: where it runs.
    """

    def __init__(self, *flags, command_prefix=()):
        binary = os.environ.get("GRADSYNC_DAEMON") or str(_TREE / "bazel-bin/daemon/gradsyncd")
        # A socket's path has at most 107 bytes, and Bazel's folder for temporary files is longer.
        self._directory = tempfile.TemporaryDirectory(prefix="gradsync-", dir="/tmp")
        self.socket = os.path.join(self._directory.name, "gradsyncd.sock")
        self._arguments = [*command_prefix, binary, f"--socket={self.socket}", *flags]
        self._process = None
        self.start()

    @property
    def pid(self):
        return self._process.pid

    def start(self):
        self._process = subprocess.Popen(self._arguments, stdin=subprocess.DEVNULL)

    def kill(self):
        self._process.kill()
        self._process.wait()

    def stop(self):
        """As Ctrl-Z: it is there and does not answer."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self):
        self._process.send_signal(signal.SIGCONT)

    def close(self):
        self.kill()
        self._directory.cleanup()
