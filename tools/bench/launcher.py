"""Starts daemons and ranks on this machine, reads what they print, and ends them all."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import json
import os
import pathlib
import select
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

_DAEMON_START_S = 30.0
_STOP_S = 10.0
# How long to wait at most, after one process failed, for what the others say. They do so within
# milliseconds, but a busy machine may not let them.
_LAST_WORDS_S = 10.0
_LINES_KEPT = 12
_LONGEST_SOCKET_PATH = 107
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
# Loaded here, since little may be called between fork and exec.
_libc = ctypes.CDLL(None)


class Failed(Exception):
    """A process failed or did not start. The text names it and shows its last lines."""


class Interrupted(Exception):
    """SIGINT, SIGTERM or SIGHUP came."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.strsignal(number)}")
        self.number = number


@dataclasses.dataclass
class Node:
    """A node of the virtual network, or this machine.

    Attributes:
      address: where other nodes reach it; "" if there are none.
      command_prefix: what stands before a command to run it there.
      interface: that the address belongs to; "" if there are no other nodes.
    """

    address: str = ""
    command_prefix: Sequence[str] = ()
    interface: str = ""


@dataclasses.dataclass
class Network:
    """Nodes on one machine.

    Attributes:
      description: for people; says it if links are loopback, unlimited.
      limited: whether links keep their rate.
    """

    description: str
    nodes: list[Node]
    limited: bool


class Child:
    """A process that the launcher started.

    Attributes:
      name: for people, such as "rank 0".
      pid: of the process.
      reports: what it printed to standard output as lines of JSON.
      on_report: hears each of them.
      may_end: whether its end is expected.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.pid = process.pid
        self.process = process
        self.reports: list[dict[str, Any]] = []
        self.on_report: Optional[Callable[[dict[str, Any]], None]] = None
        self.may_end = False
        self.said: collections.deque[str] = collections.deque(maxlen=_LINES_KEPT)

    @property
    def ended(self) -> bool:
        return self.process.returncode is not None

    @property
    def failed(self) -> bool:
        return self.ended and (self.process.returncode != 0 or not self.may_end)

    def describe(self) -> str:
        """Which process, how it ended, and its last lines."""
        code = self.process.returncode
        if code is None:
            how = "is running"
        elif code < 0:
            how = f"was killed by signal {-code} ({signal.strsignal(-code)})"
        else:
            how = f"exited with code {code}"
        return "\n    ".join([f"{self.name} (pid {self.pid}) {how}", *self.said])


class Launcher:
    """Runs processes in a directory of their own: for the quick start and the benches.

    A context manager.

    Its end stops every process and removes the directory. Inside, SIGINT, SIGTERM and SIGHUP raise
    Interrupted; a process that fails raises Failed from any method that waits. One thread.

    Attributes:
      directory: for sockets and results.
    """

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._network: Optional[subprocess.Popen[bytes]] = None
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Launcher:
        self._handlers = {number: signal.signal(number, _interrupt) for number in _SIGNALS}
        directory = tempfile.mkdtemp(prefix="gradsync-")
        if len(directory) + len("/gradsyncd-9-fd.sock") > _LONGEST_SOCKET_PATH:
            os.rmdir(directory)
            directory = tempfile.mkdtemp(prefix="gradsync-", dir="/tmp")
        self.directory = pathlib.Path(directory)
        return self

    def __exit__(self, *_: object) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        # Trainers first: a daemon whose trainers are there would report their loss.
        for child in reversed(self._children):
            _stop(child.process)
        if self._network is not None:
            _stop(self._network)
        self._selector.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def make_network(self, program: str, count: int, rate: Optional[str]) -> Network:
        """Makes several nodes on this machine, with links between them.

        Args:
          program: path of virtual-network.
          count: of nodes.
          rate: of every link, each way, such as "1gbit"; none: as fast as memory.
        """
        command = [program, f"--nodes={count}", *([f"--rate={rate}"] if rate else [])]
        self._network = _popen("virtual-network", command, os.environ, subprocess.PIPE)
        answer = self._network.stdout.readline()
        try:
            network = json.loads(answer)
        except ValueError:
            said = self._network.stderr.read().decode(errors="replace")
            raise Failed(f"virtual-network made no nodes: {said.strip()}") from None
        real = network["kind"] == "namespaces"
        nodes = [
            Node(node["address"], node["command_prefix"], "eth0" if real else "lo")
            for node in network["nodes"]
        ]
        return Network(network["description"], nodes, bool(rate) and real)

    def start_daemon(
        self, program: str, node: Node, number: Optional[int], flags: Sequence[str] = ()
    ) -> tuple[Child, str]:
        """Starts a daemon and waits until it is ready; returns it and the path of its socket.

        Args:
          program: path of gradsyncd.
          node: where it runs.
          number: of the node; None if there is only one.
          flags: further flags of gradsyncd.
        """
        suffix = "" if not number else f"-{number}"
        path = str(self.directory / f"gradsyncd{suffix}.sock")
        notify = str(self.directory / f"notify{suffix}.sock")
        command = [program, f"--socket={path}", *flags]
        if number is not None:
            command += [f"--peer_listen={node.address}:0", f"--node_name=node-{number}"]
            command.append("--peer_plain_text=true")  # nobody else is in the nodes' network
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
            ready.bind(notify)
            ready.setblocking(False)
            name = "gradsyncd" if number is None else f"gradsyncd of node {number}"
            child = self.start(name, node, command, {"NOTIFY_SOCKET": notify})
            said = b""

            def is_ready() -> bool:
                nonlocal said
                try:
                    said += ready.recv(4096) + b"\n"
                except BlockingIOError:
                    pass
                return b"READY=1" in said

            if not self._pump(is_ready, _DAEMON_START_S, [ready]):
                raise Failed(f"not ready after {_DAEMON_START_S:g} s: {child.describe()}")
        return child, path

    def start(
        self, name: str, node: Node, command: Sequence[str], environment: Mapping[str, str]
    ) -> Child:
        """Starts a process on the node; returns at once. close_input() may end it."""
        process = _popen(
            name, [*node.command_prefix, *command], {**os.environ, **environment}, subprocess.PIPE
        )
        child = Child(name, process)
        self._children.append(child)
        for stream, is_output in ((process.stdout, True), (process.stderr, False)):
            lines = _Lines(child, is_output)
            self._selector.register(stream, selectors.EVENT_READ, lines)
        return child

    def close_input(self, child: Child) -> None:
        """Ends the process's standard input, after which its end is expected."""
        child.may_end = True
        child.process.stdin.close()

    def wait_for(
        self, done: Callable[[], bool], limit_s: Optional[float] = None, wake_on: Sequence[Any] = ()
    ) -> bool:
        """Reads what processes print until `done`, which is asked after each line.

        Args:
          done: what is waited for.
          limit_s: how long at most.
          wake_on: `done` is also asked when one of these can be read.

        Returns:
          Whether it is done.

        Raises:
          Failed: a process failed before.
        """
        return self._pump(done, limit_s, wake_on)

    def wait_for_inputs(self, files: Sequence[Any], limit_s: Optional[float]) -> list[Any]:
        """Waits until a file can be read, or has ended; else as wait_for. Returns those files."""
        ready: list[Any] = []

        def look() -> bool:
            ready[:] = select.select(files, [], [], 0)[0]
            return bool(ready)

        self._pump(look, limit_s, files)
        return ready

    def wait_for_enter(self, prompt: str) -> None:
        """Prints the prompt; returns after a line on standard input, or a signal."""
        try:
            print(prompt)  # in here: its reader may send a signal at once
            if os.isatty(0):
                self.wait_for_inputs([0], None)
            else:  # only a signal ends the wait
                self._pump(lambda: False, None)
        except Interrupted:
            pass

    def _pump(
        self, done: Callable[[], bool], limit_s: Optional[float], wake_on: Sequence[Any] = ()
    ) -> bool:
        deadline = None if limit_s is None else time.monotonic() + limit_s
        for file in wake_on:
            self._selector.register(file, selectors.EVENT_READ, None)
        try:
            # A process's last words tell more than its end: done() comes first.
            while not done():
                if any(child.failed for child in self._children):
                    self._explain()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._read(left)
            return True
        finally:
            for file in wake_on:
                self._selector.unregister(file)

    def _read(self, limit_s: Optional[float]) -> None:
        """Waits for output, once; notices which processes have ended."""
        for key, _ in self._selector.select(limit_s):
            lines = key.data
            if lines is None:
                continue
            data = os.read(key.fd, 1 << 16)
            lines.add(data)
            if not data:
                self._selector.unregister(key.fileobj)
                others = [key.data for key in self._selector.get_map().values()]
                if all(other is None or other.child is not lines.child for other in others):
                    # Both streams are closed: it has ended, or is about to.
                    lines.child.process.wait(_STOP_S)

    def _explain(self) -> None:
        """Raises Failed for the process that is to blame, and shows what the others say."""
        deadline = time.monotonic() + _LAST_WORDS_S
        ranks = [child for child in self._children if "gradsyncd" not in child.name]
        while time.monotonic() < deadline and not all(c.ended or c.may_end for c in ranks):
            self._read(max(0.0, deadline - time.monotonic()))
        failed = [child for child in self._children if child.failed]
        # One that was killed explains those that exited by themselves.
        failed.sort(key=lambda child: child.process.returncode >= 0)
        raise Failed("\n".join(child.describe() for child in failed))


class _Lines:
    """Cuts one stream of a child into lines."""

    def __init__(self, child: Child, is_output: bool) -> None:
        self.child = child
        self._is_output = is_output
        self._rest = b""

    def add(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data and self._rest:  # the end, without a line feed
            lines, self._rest = [self._rest], b""
        for line in lines:
            text = line.decode(errors="replace")
            if self._is_output and text.startswith("{"):
                self.child.reports.append(json.loads(text))
                if self.child.on_report is not None:
                    self.child.on_report(self.child.reports[-1])
            else:
                self.child.said.append(text)


def _interrupt(number: int, _: object) -> None:
    raise Interrupted(number)


def end_with_parent() -> None:
    """This process gets SIGTERM when its parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _popen(name: str, command: Sequence[str], environment: Any, stdin: int) -> Any:
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C is for the launcher, which ends the others in order.
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    except OSError as error:
        raise Failed(f"{name}: cannot run {command[0]}: {error.strerror}") from None
    return process


def _stop(process: Any) -> None:
    """Ends it, if need be by force."""
    process.stdin.close()
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    process.stdout.close()
    process.stderr.close()
