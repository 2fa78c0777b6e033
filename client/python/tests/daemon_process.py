"""A real gradsyncd, on a socket of its own."""

import os
import pathlib
import select
import shutil
import signal
import socket
import subprocess
import tempfile

_TREE = pathlib.Path(__file__).resolve().parents[3]

# Generous: a busy machine starts a daemon in a second.
_START_LIMIT_S = 60


class DaemonProcess:
    """A daemon that listens; close() kills it.

    The daemon writes its log to this process's stderr, which pytest shows with a failed test.

    Args:
      *flags: of gradsyncd.
      command_prefix: what stands before its command, as `ip netns exec NAME`.

    Raises:
      AssertionError: the daemon has ended instead of listening.
    """

    def __init__(self, *flags, command_prefix=()):
        binary = os.environ.get("GRADSYNC_DAEMON") or str(_TREE / "bazel-bin/daemon/gradsyncd")
        # A socket's path has at most 107 bytes, and Bazel's folder for temporary files is longer.
        # Not a TemporaryDirectory: it would vanish when a fork of this process ends.
        self._directory = tempfile.mkdtemp(prefix="gradsync-", dir="/tmp")
        self.socket = os.path.join(self._directory, "gradsyncd.sock")
        self._arguments = [*command_prefix, binary, f"--socket={self.socket}", *flags]
        # A worker that looks for GPUs costs as much as the daemon.
        if not any(flag.startswith("--cuda_library=") for flag in flags):
            self._arguments.append("--cuda_library=none")
        self._process = None
        try:
            self.start()
        except AssertionError:
            shutil.rmtree(self._directory)
            raise

    @property
    def pid(self):
        return self._process.pid

    def start(self):
        """Starts the daemon and waits until it listens, which it says as systemd wants it said."""
        path = os.path.join(self._directory, "notify.sock")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.bind(path)
            self._process = subprocess.Popen(
                self._arguments,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "NOTIFY_SOCKET": path},
            )
            ended = os.pidfd_open(self._process.pid)
            try:
                ready, _, _ = select.select([notify, ended], [], [], _START_LIMIT_S)
            finally:
                os.close(ended)
                os.unlink(path)
        if notify not in ready:
            self.kill()
            how = "has not listened in time" if not ready else "ended before it listened"
            raise AssertionError(
                f"gradsyncd {how} (exit status {self._process.returncode}): "
                f"{' '.join(self._arguments)}; its log is on stderr"
            )

    def kill(self):
        self._process.kill()
        self._process.wait()

    def stop(self):
        """Stops the daemon as Ctrl-Z does: it exists and does not answer."""
        self._process.send_signal(signal.SIGSTOP)

    def close(self):
        self.kill()
        shutil.rmtree(self._directory)
