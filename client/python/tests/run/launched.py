"""gradsync.run as a user starts it."""

import os
import pathlib
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import time

import gradsync

_LIMIT_S = 100
_PACKAGE = str(pathlib.Path(gradsync.__file__).parents[1])

# A script of ranks that average their numbers.
TRAINER = """
import gradsync
with gradsync.Session.join() as session:
    layout = session.register_layout(parameters=[gradsync.Parameter("weight", (3,))])
    layout.gradient(0).numpy()[:] = session.rank
    layout.finish_step(1)
    layout.wait_step(1)
    print(session.world_size, layout.gradient(0).numpy())
"""


class Launched:
    """A running launcher; a context manager that leaves nothing behind.

    Args:
      *words: of its command line.
      script: what every rank runs, with imports before it; it is written into the folder and stands
        behind the words. On a busy machine ranks may wait for each other; they do not say so.
      folder: of this test.
      environment: further variables; None removes one.
      stdout: where its standard output goes; default: a pipe for read().
    """

    def __init__(self, *words, script=None, folder=None, environment=None, stdout=subprocess.PIPE):
        variables = {**os.environ, "PYTHONPATH": _PACKAGE, **(environment or {})}
        if script is not None:
            file = folder / "train.py"
            file.write_text(
                "import logging, os, signal, sys, time; "
                "logging.getLogger('gradsync').setLevel(logging.ERROR)\n" + script
            )
            words = (*words, file)
        self._deadline = time.monotonic() + _LIMIT_S
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gradsync.run", *map(str, words)],
            env={name: value for name, value in variables.items() if value is not None},
            stdout=stdout,
            stderr=subprocess.PIPE,
        )
        self._said = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def read(self, pattern, count):
        """Reads standard output until it has `count` matches of the pattern; returns these."""
        while len(found := re.findall(pattern, self._said.decode(), re.MULTILINE)) < count:
            ready, _, _ = select.select(
                [self.process.stdout], [], [], self._deadline - time.monotonic()
            )
            assert ready, f"no {pattern} in time: {self._said}"
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            assert data, f"ended without {pattern}: {self._said} {self.process.stderr.read()}"
            self._said += data
        return found

    def end(self):
        """Waits for its end; returns the exit status and all that it printed on both streams."""
        out, err = self.process.communicate(timeout=self._deadline - time.monotonic())
        return self.process.returncode, (self._said + (out or b"")).decode(), err.decode()


class Watched:
    """A process that this test did not start, by its number. close() forgets it."""

    def __init__(self, pid):
        self._pidfd = os.pidfd_open(int(pid))

    def kill(self):
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def has_ended(self, limit_s=_LIMIT_S):
        """Whether it ends in time."""
        return bool(select.select([self._pidfd], [], [], limit_s)[0])

    def close(self):
        os.close(self._pidfd)


def daemon_of(path):
    """The number of the process that listens on a socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("iii", credentials)[0]
