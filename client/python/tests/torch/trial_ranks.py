"""Runs the trials of a module in rank processes, and gives pytest one case for each.

`run_trials` is a rank's side; `trials_test` is pytest's.
"""

import collections
import contextlib
import faulthandler
import importlib
import os
import pickle
import signal
import sys
import time
import traceback

# Seconds after which a trial prints where it hangs.
HANG_S = 90


def run_trials(directory, module_name, selected, shared):
    """In a rank: runs [(trial, wrapper)] in order.

    Their outcomes, "passed", "failed" or "skipped", go into `shared`, a folder of all ranks.
    """
    sys.path.insert(0, directory)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    import trial

    module = importlib.import_module(module_name)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = meeting_point(dist, os.path.join(shared, "port"), rank, world_size)
    with open(os.path.join(shared, f"outcomes{rank}"), "ab", buffering=0) as file:
        for name, wrapper in selected:
            faulthandler.dump_traceback_later(HANG_S, file=sys.__stderr__)
            start = time.monotonic()
            outcome = run_one(trial, getattr(module, name), name, wrapper, store, rank, world_size)
            file.write(pickle.dumps(((name, wrapper), (*outcome, time.monotonic() - start))))
            faulthandler.cancel_dump_traceback_later()
            # No rank starts the next trial before all ranks have ended this one.
            key = f"ended/{wrapper}/{name}"
            store.set(f"{key}/{rank}", b"")
            store.wait([f"{key}/{r}" for r in range(world_size)], trial.LIMIT)
    # Rank 0 has the store, so it ends last.
    if rank == 0:
        store.wait([f"left/{r}" for r in range(1, world_size)], trial.LIMIT)
    else:
        store.set(f"left/{rank}", b"")


def read_outcomes(shared, rank):
    """{(trial, wrapper): (outcome, text, seconds)} of the trials that a rank has ended."""
    outcomes = {}
    with contextlib.suppress(FileNotFoundError, EOFError, pickle.UnpicklingError):
        with open(os.path.join(shared, f"outcomes{rank}"), "rb") as file:
            while True:
                outcomes.update([pickle.load(file)])
    return outcomes


def meeting_point(dist, path, rank, world_size):
    """A store of rank 0 that all ranks use, at a port that the system chose."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, True, wait_for_workers=False)
        with open(path + ".new", "w") as file:
            file.write(str(store.port))
        os.rename(path + ".new", path)
    else:
        deadline = time.monotonic() + HANG_S
        while not os.path.exists(path):
            assert time.monotonic() < deadline, "rank 0 did not start"
            os.sched_yield()
        with open(path) as file:
            port = int(file.read())
        store = dist.TCPStore("127.0.0.1", port, world_size, False, wait_for_workers=False)
    return store


def run_one(trial, function, name, wrapper, store, rank, world_size):
    this = trial.Trial(name, wrapper, store, rank, world_size)
    # Signals interrupt gradsync's waits, so these end before PyTorch's time-outs.
    signal.signal(signal.SIGALRM, hangs)
    signal.alarm(int(trial.LIMIT.total_seconds()) - 10)
    try:
        function(this)
        this.end(failed=False)
        return "passed", ""
    except trial.Skipped as reason:
        this.end(failed=False)
        return "skipped", str(reason)
    except BaseException:
        text = traceback.format_exc()
        this.end(failed=True)
        return "failed", text
    finally:
        signal.alarm(0)


def hangs(*_):
    raise TimeoutError("this trial hangs")


# ---- pytest's side -------------------------------------------------------------------------------


def trials_test(module_name):
    """The test function of a module of trials: one case per trial and wrapper."""
    import pytest

    module = sys.modules[module_name]
    cases = [
        (name, wrapper)
        for name, function in vars(module).items()
        if hasattr(function, "wrappers") and function.__module__ == module_name
        for wrapper in function.wrappers
    ]

    @pytest.mark.parametrize("wrapper, name", [(w, n) for n, w in cases])
    def test(wrapper, name, outcomes):
        ranks = outcomes(module, name, wrapper)
        failed = [f"rank {rank}:\n{r[1]}" for rank, r in enumerate(ranks) if r[0] == "failed"]
        if failed:
            pytest.fail("\n".join(failed), pytrace=False)
        if any(r[0] == "skipped" for r in ranks):
            pytest.skip(ranks[0][1])

    return test


class Outcomes:
    """Runs all selected trials of a module when the outcome of one is first needed."""

    def __init__(self, selected, spawn):
        # {(module, world size): [(trial, wrapper)]}
        self._selected = collections.defaultdict(list)
        for module, name, wrapper in selected:
            world_size = getattr(module, name).world_size
            self._selected[module, world_size].append((name, wrapper))
        # (module name, world size, trials) -> {(trial, wrapper): [outcome of each rank]}, of some.
        self._spawn = spawn
        self._outcomes = {}

    def __call__(self, module, name, wrapper):
        world_size = getattr(module, name).world_size
        selected = self._selected.pop((module, world_size), ())
        while selected:
            outcomes = self._spawn(module.__name__, world_size, selected)
            for trial, ranks in outcomes.items():
                self._outcomes[module, trial] = ranks
            selected = [trial for trial in selected if trial not in outcomes]
        return self._outcomes[module, (name, wrapper)]
