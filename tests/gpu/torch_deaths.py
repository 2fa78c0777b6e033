"""Experiment (h): what do PyTorch's ranks see if a rank, the worker or the daemon is killed in the
middle of a backward pass on a GPU? torch_deaths.py BUNDLE [cpu]

Two ranks of gradsync.torch are both in the backward pass of step 3, with one layer's gradients
handed over and the other's not, when the victim gets SIGKILL. Then two new ranks join the same job.

holds: each survivor gets an error with a reason of that loss, the daemon keeps no byte of an arena,
and the new ranks train. Exit status: 0 holds, 1 does not hold, 77 not available.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

STEP_OF_DEATH = 3
STEPS = 6
PATIENCE_S = 60
REASONS = {
    "rank": {"RANK_LOST"},
    "worker": {"WORKER_LOST", "STEP_IN_DOUBT"},
    "daemon": {"DAEMON_LOST", "STEP_IN_DOUBT"},
}

# ---- a rank


def say(**message):
    print(json.dumps({**message, "s": time.monotonic()}), flush=True)


def listen():
    if not sys.stdin.readline():
        os._exit(3)


def train(bundle, device):
    sys.path.insert(0, str(bundle / "python"))
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        say(at="without a GPU")
        return
    import gradsync.torch

    say(at="imported")
    listen()
    first, second = torch.nn.Linear(512, 1024).to(device), torch.nn.Linear(1024, 512).to(device)
    module = torch.nn.Sequential(first, torch.nn.ReLU(), second)
    dies = os.environ["DEATH"] == "1"
    step = 0

    def in_the_middle(_):
        if dies and step == STEP_OF_DEATH:
            say(at="backward")
            listen()

    def after_first(_module, _inputs, output):
        output.register_hook(in_the_middle)

    first.register_forward_hook(after_first)
    try:
        wrapped = gradsync.torch.DistributedDataParallel(module, bucket_cap_mb=1)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
        for step in range(1, STEPS + 1):  # noqa: B007  (the hook reads it)
            optimizer.zero_grad()
            wrapped(torch.ones(8, 512, device=device)).square().mean().backward()
            optimizer.step()
            if device == "cuda":
                torch.cuda.synchronize()
        say(at="end")
        listen()  # an early end would be a loss for the other rank
    except gradsync.Error as error:
        say(at="error", reason=error.reason, text=str(error)[:300])
    os._exit(0)  # without Leave, as a trainer that fails


# ---- the first process


class Rank:
    def __init__(self, number, dies, socket, bundle, device):
        self.process = subprocess.Popen(
            [sys.executable, os.path.realpath(__file__), str(bundle), device],
            env={
                **os.environ,
                "RANK": str(number),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29500",
                "GRADSYNC_SOCKET": socket,
                "DEATH": "1" if dies else "0",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def go(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def hear(self):
        """The next message; {} if the process ends without one. The part's limit bounds this."""
        line = self.process.stdout.readline()
        return json.loads(line) if line else {}

    def end(self):
        self.process.kill()
        self.process.wait()


class DaemonFailed(Exception):
    """The daemon does not start, or has ended by itself."""


class Daemon:
    def __init__(self, bundle, socket):
        self.bundle, self.socket = bundle, socket
        self.start()

    def start(self):
        self.process = subprocess.Popen([self.bundle / "bin/gradsyncd", f"--socket={self.socket}"])
        if self.await_status(lambda status: True) is None:
            self.kill()
            raise DaemonFailed(f"gradsyncd does not answer in {PATIENCE_S} s; its log is on stderr")

    def await_status(self, condition):
        """Polls until the condition holds. Returns the seconds, or None if it takes too long.

        Raises:
          DaemonFailed: the daemon has ended.
        """
        begin = time.monotonic()
        while time.monotonic() - begin < PATIENCE_S:
            asked = subprocess.run(
                [self.bundle / "bin/gradsyncctl", "status", "--json", "--socket", self.socket],
                capture_output=True,
                text=True,
                check=False,
            )
            if asked.stdout.startswith("{") and condition(json.loads(asked.stdout)):
                return time.monotonic() - begin
            if self.process.poll() is not None:
                code = self.process.returncode
                raise DaemonFailed(f"gradsyncd has ended with {code}; its log is on stderr")
            time.sleep(0.02)  # gradsyncctl answers once: it cannot wait for a change
        return None

    def workers(self):
        """Pids of its running workers."""
        pids = []

        def running(status):
            for worker in status["cuda"]["workers"]:
                if worker["state"] == "WORKER_STATE_RUNNING":
                    pids.append(int(worker["pid"]))
            return True

        self.await_status(running)
        return pids

    def kill(self):
        self.process.kill()
        self.process.wait()


def arena_bytes(status):
    return int(status["arena_bytes"]) + int(status["cuda"]["arena_bytes"])


def fact(facts, name, value):
    facts[name] = value
    print(f"{name}: {json.dumps(value)}", flush=True)


def lose(victim, daemon, ranks, again, facts):
    """One death. Returns what was wrong."""
    for rank in ranks:
        rank.go()
    for number, rank in enumerate(ranks):
        said = rank.hear()
        if said.get("at") != "backward":
            return f"rank {number} does not come to the backward pass: {said}"
    workers = daemon.workers()
    used = []
    daemon.await_status(lambda status: used.append(arena_bytes(status)) or True)
    fact(facts, f"{victim}_killed_arena_bytes_before", used[-1])
    killed = time.monotonic()
    if victim == "rank":
        ranks[1].end()
    elif victim == "daemon":
        daemon.kill()
    else:
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
    survivors = ranks[:1] if victim == "rank" else ranks
    for rank in survivors:
        rank.go()
    for number, rank in enumerate(survivors):
        said = rank.hear()
        fact(facts, f"{victim}_killed_rank{number}", said.get("reason", said))
        if said.get("at") != "error" or said["reason"] not in REASONS[victim]:
            return f"rank {number} hears of the killed {victim}: {said}"
        fact(facts, f"{victim}_killed_rank{number}_ms", round((said["s"] - killed) * 1e3, 1))
    for rank in ranks:
        rank.process.wait(PATIENCE_S)
    if victim == "daemon":
        daemon.start()
    freed_s = daemon.await_status(lambda status: arena_bytes(status) == 0)
    fact(facts, f"{victim}_killed_arenas_freed_s", freed_s)
    if freed_s is None:
        return f"after the {victim} was killed the daemon keeps arenas"
    begin = time.monotonic()
    for rank in again:
        rank.go()
    for rank in again:
        said = rank.hear()
        if said.get("at") != "end":
            return f"after the {victim} was killed new ranks do not train: {said}"
    for rank in again:
        rank.end()
    fact(facts, f"{victim}_killed_join_again_s", round(time.monotonic() - begin, 2))
    return ""


def ask(bundle, device):
    facts = {}
    victims = [victim for victim in REASONS if device == "cuda" or victim != "worker"]
    with tempfile.TemporaryDirectory() as folder:
        socket = os.path.join(folder, "gradsyncd.sock")
        ranks = {
            (victim, dies): [Rank(number, dies, socket, bundle, device) for number in range(2)]
            for victim in victims
            for dies in (True, False)
        }
        everyone = [rank for pair in ranks.values() for rank in pair]
        daemon = None
        try:
            # All import PyTorch at once.
            for rank in everyone:
                said = rank.hear()
                if said.get("at") != "imported":
                    return 77, said.get("at", "no PyTorch"), facts
            daemon = Daemon(bundle, socket)
            wrong = []
            for victim in victims:
                why = lose(victim, daemon, ranks[victim, True], ranks[victim, False], facts)
                wrong += [why] if why else []
            return (1 if wrong else 0), "; ".join(wrong), facts
        except DaemonFailed as error:
            return 1, str(error), facts
        finally:
            for rank in everyone:
                rank.end()
            if daemon is not None:
                daemon.kill()


def main(bundle, device):
    if "RANK" in os.environ:
        train(bundle, device)
        return 0
    status, why, facts = ask(bundle, device)
    answer = {0: "holds", 1: "does not hold", 77: "not available"}[status]
    print(json.dumps({"answer": answer, "why": why, "facts": facts}))
    return status


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "cuda"))
