"""Programs of tools/bench as a test runs them."""

import contextlib
import os
import pathlib
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

_TREE = pathlib.Path(__file__).resolve().parents[2]
# A run that hangs shall fail, and not the test's own time limit.
_LIMIT_S = 240
# Longest that a process may outlive the script that started it.
_END_LIMIT_S = 10


class Script:
    """A program of tools/bench, with a folder for its temporary files that must end up empty."""

    def __init__(self, name):
        self._program = str(_TREE / "tools" / "bench" / name)
        # Short: sockets lie in it.
        self.temporary = tempfile.mkdtemp(prefix="bench-", dir="/tmp")

    def run(self, *arguments, cwd):
        """Returns the finished process, with its standard output and error."""
        return subprocess.run(
            self._command(arguments),
            cwd=cwd,
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
        )

    def start(self, *arguments, cwd):
        """Starts it; its output can be read line by line."""
        return subprocess.Popen(
            self._command(arguments),
            cwd=cwd,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def left_behind(self):
        """Files in the folder for temporary ones, and processes that know it."""
        processes = []
        for process in self._processes():
            with contextlib.suppress(OSError):
                processes.append((process / "cmdline").read_text())
        return sorted(os.listdir(self.temporary)) + processes

    def await_processes(self):
        """Waits for processes that end just after the script, as Python's resource tracker."""
        deadline = time.monotonic() + _END_LIMIT_S
        for process in self._processes():
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(int(process.name))
                select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))
                os.close(pidfd)

    def close(self):
        shutil.rmtree(self.temporary)

    def _processes(self):
        own = f"TMPDIR={self.temporary}".encode()
        for process in pathlib.Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if process.name.isdecimal() and own in (process / "environ").read_bytes():
                    yield process

    def _command(self, arguments):
        return [sys.executable, self._program, *map(str, arguments)]

    def _environment(self):
        return {**os.environ, "TMPDIR": self.temporary}


def check_usage(script, tmp_path):
    """--help teaches; wrong usage exits with 2 before anything is started."""
    shown = script.run("--help", cwd=tmp_path)
    assert shown.returncode == 0
    assert "Exit status" in shown.stdout
    for wrong in (
        ["--no-such-flag"],
        ["--ranks", "1"],
        ["--ranks", "two"],
        ["--impl", "nothing"],
        ["--json", tmp_path / "no-such-folder" / "file"],
        ["--json", tmp_path],
        ["--daemon", tmp_path / "no-such-daemon"],
        ["left over"],
    ):
        refused = script.run(*wrong, cwd=tmp_path)
        assert refused.returncode == 2, refused
        assert not refused.stdout
        assert str(wrong[-1]) in refused.stderr
    assert not script.left_behind()
    assert not os.listdir(tmp_path)


def check_interrupted(script, tmp_path, *arguments):
    """Ctrl-C in the middle: 130, and no process and no file is left."""
    process = script.start(*arguments, cwd=tmp_path)
    with process:
        lines = iter(process.stdout.readline, "")
        # The table begins when all processes are there.
        assert any(re.match(r"# +model ", line) for line in lines)
        assert script.left_behind()
        process.send_signal(signal.SIGINT)
        assert process.wait(_LIMIT_S) == 130
    script.await_processes()
    assert not script.left_behind()
