"""Ranks as processes of their own.

A server (multiprocessing's "forkserver") forks them. It has imported NumPy, so a rank starts in
milliseconds. The server itself never joins a job.

Ranks with PyTorch are forks of pytest's own process: another import would take seconds. That
process starts no thread that a rank could miss: tests with PyTorch join jobs only in ranks.
"""

import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import time
import traceback
import uuid

import pytest


class RankFailed(AssertionError):
    """A rank raised an exception, ended early or did not return in time."""


def run_ranks(function, world_size, *args, timeout=120, environment=None):
    """Runs function(*args) in `world_size` processes and returns what they return, in rank order.

    Each has RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT (free), TORCHELASTIC_RUN_ID (a job of its
    own) and GRADSYNC_SOCKET (as this process, which the fixture `daemon` sets) in its environment:
    what gradsync.Session.join() needs.

    Args:
      function: must be at the top level of a module: ranks may import it anew.
      world_size: how many ranks.
      *args: for the function; pickled.
      timeout: seconds; ranks that take longer print their stacks and are killed.
      environment: further variables for every rank; a callable gets the rank.

    Raises:
      RankFailed: with the traceback of the first rank that failed; the others are killed.
    """
    return Ranks(function, world_size, *args, timeout=timeout, environment=environment).results()


class Ranks:
    """Running ranks, for tests that do something to them."""

    def __init__(self, function, world_size, *args, timeout=120, environment=None):
        if "torch" in sys.modules:
            self._context = multiprocessing.get_context("fork")
        else:
            self._context = multiprocessing.get_context("forkserver")
            self._context.set_forkserver_preload(["numpy", "pytest"])
        self._deadline = time.monotonic() + timeout
        self._timeout = timeout
        self._function = function
        self._args = args
        self._environment = environment
        self._shared = {
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        }
        for name in ("GRADSYNC_SOCKET", "GRADSYNC_LIBRARY"):
            if name in os.environ:
                self._shared[name] = os.environ[name]
        self.processes, self._channels = map(list, zip(*map(self._start, range(world_size))))

    def _start(self, rank):
        more = self._environment(rank) if callable(self._environment) else self._environment
        variables = {**self._shared, "RANK": str(rank), **(more or {})}
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_run_rank, args=(theirs, variables, self._timeout, self._function, self._args)
        )
        process.start()
        theirs.close()
        return process, ours

    def replace_dead(self, rank):
        """Waits until the rank's process has ended, and starts another one in its place."""
        self.processes[rank].join(max(0, self._deadline - time.monotonic()))
        if self.processes[rank].exitcode is None:
            raise RankFailed(f"rank {rank} did not end in {self._timeout} s")
        self._channels[rank].close()
        self.processes[rank], self._channels[rank] = self._start(rank)

    def pid(self, rank):
        return self.processes[rank].pid

    def results(self, ranks=None):
        """Returns what the ranks (None: all) return. Then, or after a failure, kills all ranks."""
        waited_for = range(len(self.processes)) if ranks is None else ranks
        try:
            results = self._gather(set(waited_for))
        finally:
            self.kill()
        return [results[rank] for rank in waited_for]

    def kill(self):
        """Kills every rank and the processes that it has started."""
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                process.kill()  # it has no process group of its own yet
        for process, channel in zip(self.processes, self._channels):
            process.join()
            channel.close()

    def _gather(self, missing):
        results = {}
        while missing:
            ready = multiprocessing.connection.wait(
                [self._channels[rank] for rank in missing],
                max(0, self._deadline - time.monotonic()),
            )
            if not ready:
                raise RankFailed(f"ranks {sorted(missing)} did not return in {self._timeout} s")
            for rank in [rank for rank in missing if self._channels[rank] in ready]:
                results[rank] = self._receive(rank)
                missing.discard(rank)
        return results

    def _receive(self, rank):
        try:
            kind, value = self._channels[rank].recv()
        except EOFError:
            self.processes[rank].join()
            code = self.processes[rank].exitcode
            raise RankFailed(f"rank {rank} died with exit code {code}") from None
        if kind == "skipped":
            pytest.skip(value)
        if kind == "failed":
            raise RankFailed(f"rank {rank}:\n{value}")
        return value


def _run_rank(channel, variables, timeout, function, args):
    # The collector would look at all that was imported before the fork, and so copy its pages.
    gc.freeze()
    # A process group of its own: kill() then ends what the rank has started, too.
    os.setpgid(0, 0)
    os.environ.update(variables)
    faulthandler.dump_traceback_later(0.9 * timeout, file=sys.__stderr__)
    try:
        channel.send(("result", function(*args)))
    except pytest.skip.Exception as skipped:
        channel.send(("skipped", str(skipped)))
    except BaseException:
        channel.send(("failed", traceback.format_exc()))
    finally:
        faulthandler.cancel_dump_traceback_later()
        channel.close()


# See gradsync/run/ranks.py.
_held = []


def free_port():
    """A TCP port that stays free for whoever listens there with SO_REUSEADDR.

    It is held on all addresses: otherwise the kernel gives it to a listener on 127.0.0.2, and
    PyTorch's store, which listens on all addresses, fails.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    _held.append(holder)
    return holder.getsockname()[1]
